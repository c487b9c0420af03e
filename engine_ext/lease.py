"""Leases, both ends of them. No clock in here: `now` is passed in, in seconds, monotonic.

On P, `LeaseTable` says how long a finished request's blocks are held:

    expect -> EXPECTED -- cancel --> (gone)
                 | grant
                 v
              GRANTED -- read by all readers, or released --> finished
                 |  ^ renew: max(deadline, now + extension)
                 +--- deadline passed --> finished, counted as expired

A read can be announced before `grant` arrives, because the answer that lets D read and the order
that starts the lease leave the scheduler together: an EXPECTED lease remembers it.

On D, `HeartbeatTracker` says which ids to renew on which engine, and when.
Source of the rules: vLLM's NIXL lease design (lease 30 s, beat every sixth, extension two thirds).
"""

import enum
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_ext.types import RemoteSource


class LeaseState(enum.Enum):
    EXPECTED = "expected"
    GRANTED = "granted"


@dataclass(slots=True)
class Lease:
    state: LeaseState = LeaseState.EXPECTED
    deadline: float = 0.0
    reads: int = 0
    readers: int = 1

    @property
    def is_read(self) -> bool:
        return self.reads >= self.readers


class LeaseTable:
    """Which finished requests' blocks are held for a remote reader, and until when.

    `release` and `expire` return the ids that ended; each id that was granted ends exactly once.
    """

    def __init__(self, duration: float, extension: float) -> None:
        self._duration = duration
        self._extension = extension
        self._leases: dict[str, Lease] = {}
        # One entry per granted lease, at its deadline when last looked at; renewals only move the
        # lease, `expire` puts the entry back where it belongs.
        self._by_deadline: list[tuple[float, str]] = []
        self._num_granted = 0

    @property
    def num_granted(self) -> int:
        return self._num_granted

    def __len__(self) -> int:
        return len(self._leases)

    def expect(self, request_id: str) -> None:
        self._leases.setdefault(request_id, Lease())

    def cancel(self, request_id: str) -> None:
        lease = self._leases.get(request_id)
        if lease is not None and lease.state is LeaseState.EXPECTED:
            del self._leases[request_id]

    def grant(self, request_id: str, now: float) -> bool:
        """Starts the lease. False: it was read already, so it has ended by this very call."""
        lease = self._leases.setdefault(request_id, Lease())
        if lease.state is LeaseState.GRANTED:
            return True
        if lease.is_read:
            del self._leases[request_id]
            return False
        lease.state = LeaseState.GRANTED
        lease.deadline = now + self._duration
        self._num_granted += 1
        heapq.heappush(self._by_deadline, (lease.deadline, request_id))
        return True

    def renew(self, request_ids: Iterable[str], now: float) -> int:
        """Extends what is granted, never shortens; returns how many ids were known."""
        known = 0
        for request_id in request_ids:
            lease = self._leases.get(request_id)
            if lease is None:
                continue
            known += 1
            lease.deadline = max(lease.deadline, now + self._extension)
        return known

    def knows(self, request_id: str) -> bool:
        return request_id in self._leases

    def release(self, request_id: str, readers: int = 1) -> bool:
        """One of `readers` has read. True: the lease ended by this call."""
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        lease.reads += 1
        lease.readers = max(lease.readers, readers)
        if not lease.is_read or lease.state is LeaseState.EXPECTED:
            return False
        self._end(request_id)
        return True

    def expire(self, now: float) -> list[str]:
        expired = []
        while self._by_deadline and self._by_deadline[0][0] <= now:
            _, request_id = heapq.heappop(self._by_deadline)
            lease = self._leases.get(request_id)
            if lease is None or lease.state is not LeaseState.GRANTED:
                continue
            if lease.deadline > now:
                heapq.heappush(self._by_deadline, (lease.deadline, request_id))
                continue
            self._end(request_id)
            expired.append(request_id)
        return expired

    def next_deadline(self) -> float | None:
        """A moment before which `expire` has nothing to do; None when nothing is granted."""
        return self._by_deadline[0][0] if self._num_granted else None

    def _end(self, request_id: str) -> None:
        del self._leases[request_id]
        self._num_granted -= 1
        if not self._num_granted:
            self._by_deadline.clear()


@dataclass(slots=True)
class _EngineBeat:
    source: RemoteSource
    """Any request's source: where the engine is."""
    remote_ids: dict[str, str] = field(default_factory=dict)
    """Our request id -> the id P knows."""
    last_sent: float = float("-inf")
    due: float = 0.0


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat to send: every id that `source`'s engine holds for us."""

    source: RemoteSource
    remote_ids: tuple[str, ...]


class HeartbeatTracker:
    """What to renew, where. A new id is beaten for at once, but no engine more often than five
    times an interval; after that every `interval` seconds, all ids of an engine in one message.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._engines: dict[str, _EngineBeat] = {}
        self._engine_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._engine_of)

    def track(self, request_id: str, source: RemoteSource, now: float) -> None:
        beat = self._engines.setdefault(source.engine_id, _EngineBeat(source))
        beat.source = source
        beat.remote_ids[request_id] = source.request_id
        self._engine_of[request_id] = source.engine_id
        beat.due = min(beat.due, max(now, beat.last_sent + self._interval / 5))

    def untrack(self, request_id: str) -> None:
        engine_id = self._engine_of.pop(request_id, None)
        if engine_id is None:
            return
        beat = self._engines[engine_id]
        del beat.remote_ids[request_id]
        if not beat.remote_ids:
            del self._engines[engine_id]

    def due(self, now: float) -> list[Beat]:
        """What to send now; taken as sent."""
        beats = []
        for beat in self._engines.values():
            if beat.due <= now:
                beat.last_sent, beat.due = now, now + self._interval
                beats.append(Beat(beat.source, tuple(beat.remote_ids.values())))
        return beats

    def retry(self, source: RemoteSource, at: float) -> None:
        """The last beat to this engine could not be sent: it is due again at `at`."""
        beat = self._engines.get(source.engine_id)
        if beat is not None:
            beat.due = min(beat.due, at)

    def next_due(self) -> float | None:
        return min((beat.due for beat in self._engines.values()), default=None)
