"""World time: what is to happen, in order. Nothing else moves the clock."""

import heapq
from collections.abc import Callable
from hashlib import blake2b

Action = Callable[[], None]


class Violation(AssertionError):  # noqa: N818 - reads as what it is
    """Something that no fault may break was broken."""


class Timeline:
    """`check` is called after each event, outside of everything that could swallow what it raises:
    an event may itself let time pass (a process frozen inside a call), and then it is not asked."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.check: Action = lambda: None
        self._events: list[tuple[float, str, int, Action]] = []
        self._count = 0
        self._depth = 0
        self.num_pending = 0
        """Events besides those that come again and again."""

    def at(self, time: float, action: Action, key: str = "") -> None:
        """What falls on the same moment happens in the order of `key`, then of this call."""
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), key, self._count, action))

    def run_until(self, end: float) -> None:
        self._depth += 1
        events = self._events
        try:
            while events and events[0][0] <= end:
                time, _, _, action = heapq.heappop(events)
                if time > self.now:
                    self.now = time
                action()
                if self._depth == 1:
                    self.check()
        finally:
            self._depth -= 1
        self.now = max(self.now, end)


class Dice:
    """Chance that depends on what it is asked for, not on who asked before: the order in which a
    set is gone through changes nothing."""

    def __init__(self, seed: int) -> None:
        self._seed = seed.to_bytes(8, "big", signed=True)
        self._asked: dict[str, int] = {}

    def roll(self, key: str, count: int) -> tuple[float, ...]:
        """So many numbers in [0, 1), others each time the same key is asked for; 8 at most."""
        number = self._asked.get(key, 0)
        self._asked[key] = number + 1
        digest = blake2b(f"{key} {number}".encode(), key=self._seed, digest_size=4 * count).digest()
        return tuple(
            int.from_bytes(digest[i : i + 4], "big") / 4294967296 for i in range(0, 4 * count, 4)
        )
