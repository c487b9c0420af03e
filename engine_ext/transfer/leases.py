"""For how long an engine holds blocks for a reader. No clock in here: `now` is passed in, in
seconds, monotonic.

    expect -> EXPECTED -- cancel --> (gone)
                 | grant
                 v
              GRANTED -- read by all readers, or released --> ended
                 |  ^ renew: max(deadline, now + extension)
                 +--- deadline passed, or revoked --> REVOKED -- read, or grace over --> ended

A revoked lease is no longer renewed, and its reader is told; its blocks stay for a short grace, so
that a READ that is on its way still finds what it came for. A read can be announced before `grant`
arrives, because the answer that lets D read and the order that starts the lease leave the scheduler
together: an EXPECTED lease remembers it.

The reader's side is heartbeats.py.
Source of the rules: vLLM's NIXL lease design (lease 30 s, beat every sixth, extension two thirds);
revocation and answers are ours.
"""

import enum
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

NEVER = float("-inf")


class LeaseState(enum.Enum):
    EXPECTED = "expected"
    GRANTED = "granted"
    REVOKED = "revoked"


@dataclass(slots=True)
class Lease:
    state: LeaseState = LeaseState.EXPECTED
    deadline: float = 0.0
    renewable: bool = True
    read_by: set[str] = field(default_factory=set)
    readers: int = 1

    @property
    def is_read(self) -> bool:
        return len(self.read_by) >= self.readers


class LeaseTable:
    """Which finished requests' blocks are held for a remote reader, and until when.

    Each id that was granted ends exactly once: by `confirm`, or in what `reap` returns.
    """

    def __init__(self, extension: float, grace: float) -> None:
        self._extension = extension
        self._grace = grace
        self._leases: dict[str, Lease] = {}
        # One entry per held lease, at its deadline when last looked at; renewals only move the
        # lease, looking at the entry puts it back where it belongs.
        self._by_deadline: list[tuple[float, str]] = []
        self._num_held = 0

    @property
    def num_held(self) -> int:
        return self._num_held

    def __len__(self) -> int:
        return len(self._leases)

    def expect(self, request_id: str) -> None:
        self._leases.setdefault(request_id, Lease())

    def cancel(self, request_id: str) -> None:
        lease = self._leases.get(request_id)
        if lease is not None and lease.state is LeaseState.EXPECTED:
            del self._leases[request_id]

    def grant(self, request_id: str, now: float, seconds: float, renewable: bool = True) -> bool:
        """Starts the lease. False: it was read already, so it has ended by this very call."""
        lease = self._leases.setdefault(request_id, Lease())
        if lease.state is not LeaseState.EXPECTED:
            return True
        if lease.is_read:
            del self._leases[request_id]
            return False
        lease.state = LeaseState.GRANTED
        lease.renewable = renewable
        self._num_held += 1
        self._set_deadline(request_id, lease, now + seconds)
        return True

    def renew(self, request_ids: Iterable[str], now: float) -> list[str]:
        """Extends what is granted, never shortens; returns the ids that cannot be extended."""
        gone = []
        for request_id in request_ids:
            lease = self._leases.get(request_id)
            if lease is None or lease.state is LeaseState.REVOKED:
                gone.append(request_id)
            elif lease.renewable:
                lease.deadline = max(lease.deadline, now + self._extension)
        return gone

    def is_held(self, request_id: str) -> bool:
        lease = self._leases.get(request_id)
        return lease is not None and lease.state is not LeaseState.EXPECTED

    def is_read_by(self, request_id: str, reader: str) -> bool:
        lease = self._leases.get(request_id)
        return lease is not None and reader in lease.read_by

    def would_end(self, request_id: str, readers: int = 1, reader: str = "") -> bool:
        """Whether `confirm` would end a lease that still runs."""
        lease = self._leases.get(request_id)
        if lease is None or lease.state is not LeaseState.GRANTED:
            return False
        return len(lease.read_by | {reader}) >= max(lease.readers, readers)

    def knows(self, request_id: str) -> bool:
        """The blocks are still those of this request."""
        return request_id in self._leases

    def confirm(self, request_id: str, readers: int = 1, reader: str = "") -> bool:
        """`reader`, one of `readers`, has read. True: the lease ended by this call."""
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        lease.read_by.add(reader)
        lease.readers = max(lease.readers, readers)
        if not lease.is_read or lease.state is LeaseState.EXPECTED:
            return False
        self._end(request_id)
        return True

    def take(self, request_id: str) -> bool:
        """True: the lease was held and is the caller's now, who frees the blocks."""
        lease = self._leases.get(request_id)
        if lease is None or lease.state is LeaseState.EXPECTED:
            return False
        self._end(request_id)
        return True

    def revoke(self, request_id: str, now: float) -> bool:
        """Ends a granted lease before its time. True: it was granted; the grace runs."""
        lease = self._leases.get(request_id)
        if lease is None or lease.state is not LeaseState.GRANTED:
            return False
        lease.state = LeaseState.REVOKED
        self._set_deadline(request_id, lease, now + self._grace)
        return True

    def revoke_all(self, now: float) -> list[str]:
        """Revokes everything granted; returns those ids."""
        return [name for name in list(self._leases) if self.revoke(name, now)]

    def expire(self, now: float) -> list[str]:
        """Revokes what nobody read or renewed in time; returns those ids."""
        return [name for name in self._due(LeaseState.GRANTED, now) if self.revoke(name, now)]

    def reap(self, now: float) -> list[str]:
        """Ends what was revoked a grace ago; returns those ids."""
        ended = list(self._due(LeaseState.REVOKED, now))
        for request_id in ended:
            self._end(request_id)
        return ended

    def _due(self, state: LeaseState, now: float) -> list[str]:
        due, other = [], []
        while self._by_deadline and self._by_deadline[0][0] <= now:
            entry = heapq.heappop(self._by_deadline)
            lease = self._leases.get(entry[1])
            if lease is None or lease.state is LeaseState.EXPECTED:
                continue
            if lease.deadline > now:
                other.append((lease.deadline, entry[1]))
            elif lease.state is state:
                due.append(entry[1])
            else:
                other.append(entry)
        for entry in other:
            heapq.heappush(self._by_deadline, entry)
        return list(dict.fromkeys(due))

    def _set_deadline(self, request_id: str, lease: Lease, deadline: float) -> None:
        lease.deadline = deadline
        heapq.heappush(self._by_deadline, (deadline, request_id))

    def _end(self, request_id: str) -> None:
        del self._leases[request_id]
        self._num_held -= 1
        if not self._num_held:
            self._by_deadline.clear()
