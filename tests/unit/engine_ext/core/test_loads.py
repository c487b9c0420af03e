from itertools import product

import pytest

from engine_ext.core.loads import IllegalEventError, Load, LoadEvent, Loads, LoadState
from engine_ext.core.orders import Orders
from engine_ext.core.params import Role
from tests.unit.engine_ext.core.fakes import Request, source

LEGAL = {
    (LoadState.OFFERED, LoadEvent.LOAD),
    (LoadState.OFFERED, LoadEvent.DECLINE),
    (LoadState.LOADING, LoadEvent.REPORT),
}
BLOCKS = (tuple(range(7)),)


@pytest.mark.parametrize(
    ("state", "event"), sorted({*product(LoadState, LoadEvent)} - LEGAL, key=str)
)
def test_an_event_that_cannot_happen_in_a_state_is_an_error_and_changes_nothing(
    state: LoadState, event: LoadEvent
) -> None:
    load = Load(source(), Role.DECODE, 100, state=state)
    with pytest.raises(IllegalEventError):
        load.on(event)
    assert load.state is state


def test_a_report_of_a_load_that_has_not_begun_leaves_the_offer() -> None:
    """It is of an earlier request of the same name."""
    loads = Loads(Orders(), 16, 64)
    loads.offer("d-1", source(), Role.DECODE, 100, is_proven=True)
    loads.reported("d-1")
    assert loads.missing("d-1", 0) == 100


def test_a_load_is_reported_after_its_request_has_ended_without_a_trace() -> None:
    orders = Orders()
    loads = Loads(orders, 16, 64)
    loads.offer("d-1", source(), Role.DECODE, 100, is_proven=True)
    loads.allocated(Request("d-1"), BLOCKS, 100)
    loads.finish("d-1")
    assert orders.take().untracks == ("d-1",)
    loads.reported("d-1")
    assert not orders
