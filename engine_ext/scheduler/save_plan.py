"""Which blocks to copy to host buffers after a step (see `engine_ext.worker.staging`)."""

from typing import NamedTuple

from engine_ext.common.orders import SaveOrder
from engine_ext.common.types import BlockIds
from engine_ext.layout.plan import NULL_BLOCK


class Saved(NamedTuple):
    """The part of a request that was copied to host memory."""

    num_tokens: int
    block_ids: BlockIds

    def is_continued(self, block_ids: BlockIds, num_computed: int) -> bool:
        """Return True if these are the same blocks, except those that a window has left."""
        return self.num_tokens == num_computed and all(
            ids[: len(saved)] == saved or all(map(_is_same_or_hole, ids, saved))
            for ids, saved in zip(block_ids, self.block_ids, strict=True)
        )


def _is_same_or_hole(block_id: int, saved: int) -> bool:
    return block_id in (saved, NULL_BLOCK)


class SavePlanner:
    """Decides which blocks of a request a step has to save."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._saved: dict[str, Saved] = {}

    def plan(
        self, request_id: str, block_ids: BlockIds, num_computed: int, num_new: int
    ) -> SaveOrder:
        """Return what to save after a step that adds the KV of `num_new` tokens to that of
        `num_computed`. A request's first step, and its first after a preemption, saves cached and
        loaded blocks as well.
        """
        saved = self._saved.get(request_id)
        goes_on = saved is not None and saved.is_continued(block_ids, num_computed)
        first = num_computed // self._block_size if goes_on else 0
        end = -(-(num_computed + num_new) // self._block_size)
        in_mirror = tuple(ids[:end] for ids in block_ids)
        self._saved[request_id] = Saved(num_computed + num_new, in_mirror)
        return SaveOrder(request_id, tuple(ids[first:] for ids in in_mirror))

    def forget(self, request_id: str) -> None:
        self._saved.pop(request_id, None)
