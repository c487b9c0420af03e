"""Finished turns whose blocks wait for the next turn, within a share of the cache."""

from collections import OrderedDict


class RetainedTurns:
    """Counts blocks, oldest turn first. What does not fit makes the oldest give way, but for those
    that are firm: they go when their time is over."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._yielding: OrderedDict[str, int] = OrderedDict()
        self._firm: dict[str, int] = {}
        self._num_yielding = 0
        self._num_firm = 0

    def __len__(self) -> int:
        return len(self._yielding) + len(self._firm)

    @property
    def num_blocks(self) -> int:
        return self._num_yielding + self._num_firm

    def is_firm(self, request_id: str) -> bool:
        return request_id in self._firm

    def fits(self, num_blocks: int) -> bool:
        """If all give way that may."""
        return self._num_firm + num_blocks <= self._max_blocks

    def add(self, request_id: str, num_blocks: int, is_firm: bool = False) -> list[str]:
        """One that fits. Returns the turns that must go, oldest first; they no longer count."""
        if is_firm:
            self._firm[request_id] = num_blocks
            self._num_firm += num_blocks
        else:
            self._yielding[request_id] = num_blocks
            self._num_yielding += num_blocks
        leaving = []
        while self._yielding and self.num_blocks > self._max_blocks:
            oldest = next(iter(self._yielding))
            self.remove(oldest)
            leaving.append(oldest)
        return leaving

    def remove_oldest(self) -> str | None:
        """It must go, and no longer counts; None where none may."""
        oldest = next(iter(self._yielding), None)
        if oldest is not None:
            self.remove(oldest)
        return oldest

    def clear(self) -> list[str]:
        """All turns that are not firm must go, oldest first; they no longer count."""
        leaving = list(self._yielding)
        self._yielding.clear()
        self._num_yielding = 0
        return leaving

    def remove(self, request_id: str) -> None:
        self._num_yielding -= self._yielding.pop(request_id, 0)
        self._num_firm -= self._firm.pop(request_id, 0)
