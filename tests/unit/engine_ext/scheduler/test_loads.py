from itertools import product

import pytest

from engine_ext.common.config import ConnectorConfig, LoadFailurePolicy
from engine_ext.common.orders import Decline, FailLoad, Fence, PullOrder, Untrack
from engine_ext.common.states import IllegalEventError
from engine_ext.common.types import CacheGeometry, LoadProblem
from engine_ext.scheduler.block_pressure import EarlyBlockLimit
from engine_ext.scheduler.loads import KVLoad, LoadEvent, Loads, LoadState
from engine_ext.scheduler.orders import Orders
from engine_ext.scheduler.params import TransferRole
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import Request, source

LEGAL = {
    (LoadState.OFFERED, LoadEvent.LOAD),
    (LoadState.OFFERED, LoadEvent.DECLINE),
    (LoadState.LOADING, LoadEvent.REPORT),
    (LoadState.LOADING, LoadEvent.FAIL),
}
BLOCKS = (tuple(range(7)),)


@pytest.mark.parametrize(
    ("state", "event"), sorted({*product(LoadState, LoadEvent)} - LEGAL, key=str)
)
def test_an_event_that_cannot_happen_in_a_state_is_an_error_and_changes_nothing(
    state: LoadState, event: LoadEvent
) -> None:
    load = KVLoad(source(), TransferRole.DECODE, 100, state=state)
    with pytest.raises(IllegalEventError):
        load.on(event)
    assert load.state is state


def loads(orders: Orders) -> Loads:
    """One, of a request d-1, that is loading."""
    made = Loads(
        orders, CacheGeometry(16, 32), ConnectorConfig(engine_id="d", load_failure_policy="fail")
    )
    made.offer("d-1", source(), TransferRole.DECODE, 100, is_proven=True)
    made.allocated(Request("d-1"), BLOCKS, 100)
    orders.take()
    return made


def test_a_report_of_a_load_that_has_not_begun_leaves_the_offer() -> None:
    """It is of an earlier request of the same name."""
    made = Loads(Orders(), CacheGeometry(16, 32), ConnectorConfig(engine_id="d"))
    made.offer("d-1", source(), TransferRole.DECODE, 100, is_proven=True)
    made.reported("d-1", failed=False)
    assert made.missing("d-1", 0) == 100


@pytest.mark.parametrize("failed", [False, True])
def test_a_request_that_ends_while_it_loads_is_fenced_and_its_report_changes_nothing(
    failed: bool,
) -> None:
    orders = Orders()
    made = loads(orders)
    assert made.finish("d-1")
    meta = orders.take()
    assert (ordered(meta, Untrack), ordered(meta, Fence)) == (("d-1",), ("d-1",))
    made.reported("d-1", failed=failed)
    assert made.is_fenced("d-1")
    made.fence_answered("d-1")
    assert not made.is_fenced("d-1")
    assert not orders


def test_a_request_whose_load_failed_is_fenced_when_it_ends() -> None:
    orders = Orders()
    made = loads(orders)
    made.reported("d-1", failed=True)
    assert made.finish("d-1")
    assert ordered(orders.take(), Fence) == ("d-1",)


@pytest.mark.parametrize(
    ("role", "policy", "host_chooses"),
    [
        (TransferRole.DECODE, "recompute", True),
        (TransferRole.PREFILL, "recompute", False),
    ],
)
def test_a_load_that_is_computed_when_it_fails_is_reported_when_nothing_writes_any_more(
    role: TransferRole, policy: LoadFailurePolicy, host_chooses: bool
) -> None:
    orders = Orders()
    early = EarlyBlockLimit(16, host_takes_back=host_chooses)
    made = Loads(
        orders,
        CacheGeometry(16, 32),
        ConnectorConfig(engine_id="d", load_failure_policy=policy),
        early,
    )
    made.offer("d-1", source(), role, 100, is_proven=True)
    made.allocated(Request("d-1"), BLOCKS, 100)
    assert [(order.recomputes, order.timeout) for order in ordered(orders.take(), PullOrder)] == [
        (True, None)
    ]
    made.reported("d-1", failed=True)
    assert not made.finish("d-1")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("in_quarantine", [False, True])
def test_a_prefill_is_computed_unless_a_read_may_still_write_into_its_blocks(
    policy: LoadFailurePolicy, in_quarantine: bool
) -> None:
    orders = Orders()
    config = ConnectorConfig(engine_id="p", load_failure_policy=policy, prefill_load_timeout=0.5)
    made = Loads(orders, CacheGeometry(16, 32), config)
    made.offer("p-1", source(), TransferRole.PREFILL, 100, is_proven=True)
    made.allocated(Request("p-1"), BLOCKS, 100)
    assert [(order.recomputes, order.timeout) for order in ordered(orders.take(), PullOrder)] == [
        (False, 0.5)
    ]
    problem = LoadProblem("why", is_of_pair=True, in_quarantine=in_quarantine)
    made.note_problem("p-1", problem)
    expected = "fail" if in_quarantine else "recompute"
    assert made.failure_policy("p-1") == expected, "vLLM asks before it reports"
    made.reported("p-1", failed=True, problem=problem)
    assert made.failure_policy("p-1") == expected
    assert made.finish("p-1") == in_quarantine


def test_a_load_that_went_well_needs_no_fence() -> None:
    orders = Orders()
    made = loads(orders)
    made.reported("d-1", failed=False)
    assert not made.finish("d-1")
    assert ordered(orders.take(), Fence) == ()


def test_a_load_that_could_not_be_ordered_waits_for_its_lease_no_more_when_the_holder_is_told() -> (
    None
):
    """Else the holder is not told: a request that waits for the lease speaks for it."""
    orders = Orders()
    made = Loads(orders, CacheGeometry(16, 32), ConnectorConfig(engine_id="d"))
    made.offer("d-1", source(), TransferRole.DECODE, 100, is_proven=True)
    orders.take()
    made.fail("d-1")
    meta = orders.take()
    assert (ordered(meta, Untrack), ordered(meta, Decline), ordered(meta, FailLoad)) == (
        ("d-1",),
        (source(),),
        ("d-1",),
    )
