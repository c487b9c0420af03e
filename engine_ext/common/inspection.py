"""What a worker half holds and waits for at one moment, for people to look at: plain records.

Request ids are as they are: who shows these must not show those, see engine_ext.http.leases.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

LIMIT = 1000
"""Most entries of each kind."""

T = TypeVar("T")


class ReaderSeen(NamedTuple):
    agent: str
    seconds_left: float
    """Until its horizon has passed."""


class LeaseSeen(NamedTuple):
    request_id: str
    state: str
    age: float | None
    """Seconds since its grant; None before it."""
    seconds_left: float | None
    """Until it ends, if nothing else happens; None before its grant."""
    readers: tuple[ReaderSeen, ...]
    """Who was granted a horizon and has not confirmed."""


class QuarantineSeen(NamedTuple):
    """Blocks that a transfer of ours may still touch although nobody waits for it any more."""

    request_id: str
    engine_id: str
    num_blocks: int
    overdue: float
    """Seconds past the time by which it should have ended."""


class PeerSeen(NamedTuple):
    engine_id: str
    host: str
    port: int
    rank: int
    age: float
    """Seconds since we connected."""
    is_in_use: bool


class TransferSeen(NamedTuple):
    """One READ or WRITE of ours that ended well."""

    what: str
    request_id: str
    engine_id: str
    """The other side."""
    num_blocks: int
    num_bytes: int
    seconds: float
    age: float
    """Seconds since it ended."""


class MovedSeen(NamedTuple):
    """What we have read from an engine, or written to it, since we know it."""

    what: str
    engine_id: str
    num_transfers: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Of each kind the first LIMIT that were asked for, and how many there are in all; of transfers
    the latest."""

    tp_rank: int
    leases: tuple[LeaseSeen, ...] = ()
    num_leases: int = 0
    quarantined: tuple[QuarantineSeen, ...] = ()
    num_quarantined: int = 0
    peers: tuple[PeerSeen, ...] = ()
    num_peers: int = 0
    engine_id: str = ""
    """Ours."""
    transfers: tuple[TransferSeen, ...] = ()
    moved: tuple[MovedSeen, ...] = ()


class _OfRequest(Protocol):
    @property
    def request_id(self) -> str: ...


R = TypeVar("R", bound=_OfRequest)


def first(seen: Iterable[T]) -> tuple[T, ...]:
    return tuple(islice(seen, LIMIT))


def first_of(asked: str | None, seen: Iterable[R]) -> tuple[R, ...]:
    """None: of every request."""
    return first(one for one in seen if asked in (None, one.request_id))
