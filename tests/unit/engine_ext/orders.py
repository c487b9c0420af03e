"""The orders of a step, by kind."""

from dataclasses import fields
from typing import Any

from engine_ext.common.orders import StepMetadata


def ordered(step: StepMetadata, kind: type[Any]) -> tuple[Any, ...]:
    """Return the orders of exactly this kind, or what they name where that is all they have."""
    found = [order for order in step.orders if type(order) is kind]
    if len(fields(kind)) > 1:
        return tuple(found)
    (only,) = fields(kind)
    return tuple(getattr(order, only.name) for order in found)
