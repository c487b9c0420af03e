"""What a policy has worked out for a tuple of candidates, found again by the tuple's identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from router.routing.candidate import Candidate

T = TypeVar("T")

MOST_SEATS = 16


class CandidateCache(Generic[T]):
    """A tuple stays what it is, and is kept as long as what belongs to it, so that its id stays its
    own; a list is looked at each time."""

    def __init__(self, work_out: Callable[[Sequence[Candidate]], T]) -> None:
        self._work_out = work_out
        self._known: dict[int, tuple[Sequence[Candidate], T]] = {}

    def get(self, candidates: Sequence[Candidate]) -> T:
        known = self._known.get(id(candidates))
        if known is not None:
            return known[1]
        found = self._work_out(candidates)
        if isinstance(candidates, tuple):
            if len(self._known) >= MOST_SEATS:
                del self._known[next(iter(self._known))]
            self._known[id(candidates)] = (candidates, found)
        return found

    def clear(self) -> None:
        self._known.clear()
