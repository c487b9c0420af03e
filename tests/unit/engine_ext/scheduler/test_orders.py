from dataclasses import fields

from engine_ext.common.types import EMPTY_STEP, LeaseGrant, StepMetadata
from engine_ext.scheduler.orders import Orders


def test_orders_have_the_fields_of_a_step_in_its_order() -> None:
    assert [field.name for field in fields(Orders)] == [f.name for f in fields(StepMetadata)]


def test_every_order_makes_a_step_and_is_handed_over_once() -> None:
    for field in fields(Orders):
        orders = Orders()
        assert not orders
        getattr(orders, field.name).append("something")
        assert orders
        step = orders.take()
        assert step
        assert getattr(step, field.name) == ("something",)
        assert not orders
        assert orders.take() is EMPTY_STEP


def test_an_empty_step_is_false_however_it_was_made() -> None:
    assert not StepMetadata()
    assert not EMPTY_STEP
    assert StepMetadata(grants=(LeaseGrant("p-1", 30),))
