from engine_ext.common.orders import (
    EMPTY_STEP,
    Decline,
    Fence,
    LeaseGrant,
    Revoke,
    StepMetadata,
    Untrack,
)
from engine_ext.scheduler.orders import Orders
from tests.unit.engine_ext.scheduler.fakes import source


def test_orders_are_handed_over_once() -> None:
    orders = Orders()
    assert orders.take() is EMPTY_STEP
    orders.append(Fence("d-1"))
    assert orders.take() == StepMetadata((Fence("d-1"),))
    assert orders.take() is EMPTY_STEP


def test_an_empty_step_is_false_however_it_was_made() -> None:
    assert not StepMetadata()
    assert not EMPTY_STEP
    assert StepMetadata((LeaseGrant("p-1", 30),))


def test_orders_are_carried_out_in_the_order_in_which_they_were_decided() -> None:
    orders = Orders()
    decided = (
        Untrack("d-1"),
        Fence("d-1"),
        Revoke("p-1"),
        Revoke("p-2"),
        Untrack("d-2"),
        Decline(source()),
    )
    orders.extend(decided)
    step = orders.take()
    assert step.orders == decided
    assert step.without_loads().orders == decided
