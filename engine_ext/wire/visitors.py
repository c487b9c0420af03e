"""The connections to a listener: how many there are, who makes room for whom, and for how long."""

import math
import resource
from collections.abc import Iterator

from engine_ext.wire.channel import Channel
from engine_ext.wire.secret_handshake import Asker

MAX_VISITORS = 512
"""One that faces 64 ranks dials with 64 at once, and is done with each in milliseconds."""

QUESTION_SECONDS = 5.0
"""From coming to asking, and from asking until the answer is taken."""
IDLE_SECONDS = 30.0
"""Between an answer and the next question. Nobody of ours asks more than twice."""


class Visitor:
    """Its deadline moves with questions and answers, and with nothing else that it may send."""

    def __init__(self, channel: Channel, asker: Asker, now: float) -> None:
        self.channel = channel
        self.asker = asker
        self.deadline = now + QUESTION_SECONDS
        self._is_owed = False

    def ask(self, now: float) -> None:
        self.deadline = now + QUESTION_SECONDS
        self._is_owed = True

    def has_taken_all(self, now: float) -> None:
        """What it was answered, if it has asked."""
        if self._is_owed:
            self.deadline = now + IDLE_SECONDS
            self._is_owed = False


class Visitors:
    """Where there is no room, the address with the most connections loses its oldest one: who
    floods the door keeps out himself, and a newcomer from elsewhere has its answer long before it
    is the oldest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._number = 0
        self._by_address: dict[str, dict[Visitor, None]] = {}
        """Each address's in the order in which they came."""

    def __len__(self) -> int:
        return self._number

    def __contains__(self, visitor: Visitor | None) -> bool:
        return visitor is not None and visitor in self._by_address.get(visitor.asker.address, {})

    def __iter__(self) -> Iterator[Visitor]:
        return iter([one for ones in self._by_address.values() for one in ones])

    @property
    def is_full(self) -> bool:
        return self._number >= self.most

    def add(self, visitor: Visitor) -> None:
        self._by_address.setdefault(visitor.asker.address, {})[visitor] = None
        self._number += 1

    def remove(self, visitor: Visitor) -> None:
        ones = self._by_address[visitor.asker.address]
        del ones[visitor]
        self._number -= 1
        if not ones:
            del self._by_address[visitor.asker.address]

    def first_to_go(self) -> Visitor | None:
        """None where there is nobody."""
        crowd = max(self._by_address.values(), key=len, default=None)
        return None if crowd is None else next(iter(crowd))

    def overdue(self, now: float) -> list[Visitor]:
        return [visitor for visitor in self if visitor.deadline <= now]


def most_visitors() -> int:
    """At most a quarter of the files that the process may open: an engine needs the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = math.inf if soft == resource.RLIM_INFINITY else soft
    return int(min(MAX_VISITORS, max(files // 4, 1)))
