"""Finished turns whose blocks wait for the next turn, within a share of the cache."""

from collections import OrderedDict


class RetainedTurns:
    """Counts blocks, oldest turn first. What does not fit makes the oldest give way."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[str, int] = OrderedDict()
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def fits(self, num_blocks: int) -> bool:
        return num_blocks <= self._max_blocks

    def add(self, request_id: str, num_blocks: int) -> list[str]:
        """Returns the turns that must go, oldest first; they no longer count."""
        self._blocks[request_id] = num_blocks
        self._num_blocks += num_blocks
        leaving = []
        while self._num_blocks > self._max_blocks:
            oldest = next(iter(self._blocks))
            self.remove(oldest)
            leaving.append(oldest)
        return leaving

    def clear(self) -> list[str]:
        """All turns must go, oldest first; none counts any more."""
        leaving = list(self._blocks)
        self._blocks.clear()
        self._num_blocks = 0
        return leaving

    def remove(self, request_id: str) -> None:
        self._num_blocks -= self._blocks.pop(request_id, 0)
