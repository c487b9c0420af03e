"""Orders that the scheduler half has decided on and the worker half has not received yet."""

from engine_ext.common.orders import EMPTY_STEP, Order, StepMetadata


class Orders(list[Order]):
    """The orders of the next step, in the sequence in which they are decided."""

    def take(self) -> StepMetadata:
        """Return all orders for the next step, and empty this object."""
        if not self:
            return EMPTY_STEP
        step = StepMetadata(tuple(self))
        self.clear()
        return step
