from engine_ext.common.types import EMPTY_STEP, ORDER_FIELDS, LeaseGrant, StepMetadata
from engine_ext.scheduler.orders import Orders
from tests.unit.engine_ext.scheduler.fakes import source


def test_every_order_makes_a_step_and_is_handed_over_once() -> None:
    for name in ORDER_FIELDS:
        orders = Orders()
        assert not orders
        getattr(orders, name).append("something")
        assert orders
        step = orders.take()
        assert step
        assert getattr(step, name) == ("something",)
        assert not orders
        assert orders.take() is EMPTY_STEP


def test_an_empty_step_is_false_however_it_was_made() -> None:
    assert not StepMetadata()
    assert not EMPTY_STEP
    assert StepMetadata(grants=(LeaseGrant("p-1", 30),))


def test_orders_are_carried_out_in_the_order_in_which_they_were_decided() -> None:
    orders = Orders()
    orders.untracks.append("d-1")
    orders.fences.append("d-1")
    orders.revokes += ["p-1", "p-2"]
    orders.untracks.append("d-2")
    orders.declines.append(source())
    decided = [
        ("untracks", "d-1"),
        ("fences", "d-1"),
        ("revokes", "p-1"),
        ("revokes", "p-2"),
        ("untracks", "d-2"),
        ("declines", source()),
    ]
    step = orders.take()
    assert list(step.in_order()) == decided
    assert list(step.without_loads().in_order()) == decided
