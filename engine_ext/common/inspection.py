"""A snapshot of a worker half for operators: leases, quarantine, peers and transfers.

The fields have the names that `/disagg/leases` shows. Request ids are complete here, and the page
hashes them (`engine_ext.http.leases`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

LIMIT = 1000
"""The most entries of each kind."""

T = TypeVar("T")


class ReaderSeen(NamedTuple):
    agent: str
    seconds_left: float
    """Until the reader's horizon."""


class LeaseSeen(NamedTuple):
    request_id: str
    state: str
    age_seconds: float | None
    """Since the grant, or None before it."""
    seconds_left: float | None
    """Seconds until it ends without a renewal, or None before the grant."""
    readers: tuple[ReaderSeen, ...]
    """Readers that have a horizon and have not confirmed."""


class QuarantineSeen(NamedTuple):
    """Blocks that an abandoned transfer of ours may still touch."""

    request_id: str
    engine_id: str
    num_blocks: int
    overdue_seconds: float
    """Past the time by which it should have ended."""


class PeerSeen(NamedTuple):
    engine_id: str
    host: str
    port: int
    rank: int
    connected_seconds: float
    in_use: bool


class TransferSeen(NamedTuple):
    """One successful READ or WRITE of ours."""

    what: str
    """READ, WRITE, or LOAN: a READ of a loan."""
    request_id: str
    engine_id: str
    """The engine at the other end."""
    blocks: int
    bytes: int
    seconds: float
    age_seconds: float
    """Since its end."""


class MovedSeen(NamedTuple):
    """Totals of our READs from an engine, or WRITEs to it, since we know it."""

    what: str
    engine_id: str
    transfers: int
    bytes: int
    seconds: float
    """The durations of all of them, added up."""
    busy_seconds: float
    """The time in which at least one of them ran: `bytes` by this is the rate of the pair."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """For each kind, the first LIMIT entries that were asked for and the number of all entries. The
    transfers are the latest ones."""

    tp_rank: int
    leases: tuple[LeaseSeen, ...] = ()
    num_leases: int = 0
    quarantined: tuple[QuarantineSeen, ...] = ()
    num_quarantined: int = 0
    peers: tuple[PeerSeen, ...] = ()
    num_peers: int = 0
    engine_id: str = ""
    """The id of this engine."""
    transfers: tuple[TransferSeen, ...] = ()
    moved: tuple[MovedSeen, ...] = ()


class _OfRequest(Protocol):
    @property
    def request_id(self) -> str: ...


R = TypeVar("R", bound=_OfRequest)


def first(seen: Iterable[T]) -> tuple[T, ...]:
    return tuple(islice(seen, LIMIT))


def first_of(asked: str | None, seen: Iterable[R]) -> tuple[R, ...]:
    """Return the first entries of the request, or of all requests for None."""
    return first(one for one in seen if asked in (None, one.request_id))
