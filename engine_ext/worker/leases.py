"""The source's side of leases: how long it keeps a finished request's blocks for readers.

    expect -> EXPECTED -- cancel --> (gone)
                 | grant
                 v
              GRANTED -- every reader has confirmed --> ended
                 |  ^ renew: max(deadline, now + extension), and the reader's own horizon
                 +--- deadline passed, or revoked --> REVOKED -- confirmed, or all horizons
                                                                 have passed --> ended

Lease
    The host frees the blocks when the lease has ended. A granted lease has a deadline, which a
    renewal moves to `extension` seconds from now. A lease is revoked when its deadline passes or
    when the blocks are needed elsewhere.

Horizon
    The answer to a heartbeat grants its reader a horizon, never later than the deadline: until then
    the reader may rely on the lease without asking again (heartbeats.py). So a lease ends when
    every reader that a confirmation counted has confirmed, and every reader with a horizon has
    confirmed or its horizon has passed. A reader that confirms ends its own share only.

Grace
    A revoked lease stays for a short time in any case, so that a READ on its way still finds its
    blocks. A confirmation may come before the grant, because the answer that lets D read and the
    order that starts the lease leave the scheduler together: an EXPECTED lease remembers it.

Push
    P takes a lease (WRITING) while it writes the blocks, and nothing ends it then. P puts it back,
    as a revoked one, when NIXL has ended the WRITE.

Each granted lease is counted as one outcome, by the first event that decides it: expired, revoked,
or else, at its end, released. No clock in here: `now` is passed in, in seconds, monotonic.

Source of the rules: vLLM's NIXL lease design (lease 30 s, heartbeat every sixth, extension two
thirds); horizons, revocation and answers are ours.
"""

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_ext.common.inspection import LeaseSeen, ReaderSeen
from engine_ext.common.types import ConnectorStats

NEVER = float("-inf")
FOREVER = float("inf")

MAX_READERS = 1024
"""Most readers of one lease that are counted. More are granted no horizon, and must ask after each
READ."""


class LeaseState(enum.Enum):
    EXPECTED = "expected"
    GRANTED = "granted"
    REVOKED = "revoked"
    WRITING = "writing"


class LeaseEvent(enum.Enum):
    GRANT = "grant"
    CANCEL = "cancel"
    REVOKE = "revoke"
    TAKE = "take"
    PUT_BACK = "put back"
    END = "end"


ENDED = None
"""No lease: its blocks are the host's again, or never were held."""

NEXT: dict[tuple[LeaseState, LeaseEvent], LeaseState | None] = {
    (LeaseState.EXPECTED, LeaseEvent.GRANT): LeaseState.GRANTED,
    (LeaseState.EXPECTED, LeaseEvent.CANCEL): ENDED,
    (LeaseState.GRANTED, LeaseEvent.REVOKE): LeaseState.REVOKED,
    (LeaseState.GRANTED, LeaseEvent.END): ENDED,
    (LeaseState.REVOKED, LeaseEvent.END): ENDED,
    (LeaseState.GRANTED, LeaseEvent.TAKE): LeaseState.WRITING,
    (LeaseState.REVOKED, LeaseEvent.TAKE): LeaseState.WRITING,
    (LeaseState.WRITING, LeaseEvent.PUT_BACK): LeaseState.REVOKED,
}
"""The next state. An event without an entry changes nothing."""


@dataclass(slots=True)
class Lease:
    state: LeaseState = LeaseState.EXPECTED
    deadline: float = 0.0
    """When it expires, or when a revoked one's grace is over."""
    granted_at: float = 0.0
    renewable: bool = True
    extension: float = 0.0
    """Seconds by which a renewal extends it."""
    num_readers: int = 1
    """How many ranks of one engine read it, as far as confirmations have reported."""
    confirmed: set[str] = field(default_factory=set)
    horizons: dict[str, float] = field(default_factory=dict)
    """By reader: until when it may rely on the lease."""
    looked_at_next: float = FOREVER
    """Its earliest entry in the table's queue, if it has one."""
    has_outcome: bool = False
    """It has been counted as expired or revoked: its end is no release."""

    @property
    def is_counted(self) -> bool:
        """As many readers have confirmed as the confirmations count."""
        return len(self.confirmed) >= self.num_readers

    def last_horizon(self) -> float:
        return max(self.horizons.values(), default=NEVER)

    def ends_at(self) -> float:
        """When no reader may rely on it any more, if nothing else happens."""
        if self.is_counted:
            return self.last_horizon()
        return max(self.deadline, self.last_horizon())


class LeaseTable:
    """Which finished requests' blocks are held for remote readers, and until when.

    Each id that was granted ends exactly once: by `confirm`, or in what `reap` returns. `stats`
    counts grants and outcomes.
    """

    def __init__(self, extension: float, grace: float, stats: ConnectorStats | None = None) -> None:
        self._extension = extension
        self._grace = grace
        self._stats = stats or ConnectorStats()
        self._leases: dict[str, Lease] = {}
        # An entry for each held lease, at its end or before. A renewal only moves the lease; the
        # entry is moved when it is looked at. A lease whose end has come nearer has two entries.
        self._by_end: list[tuple[float, str]] = []
        self.num_held = 0

    def __len__(self) -> int:
        return len(self._leases)

    def knows(self, request_id: str) -> bool:
        return request_id in self._leases

    def is_held(self, request_id: str) -> bool:
        lease = self._leases.get(request_id)
        return lease is not None and lease.state is not LeaseState.EXPECTED

    def age(self, request_id: str, now: float) -> float | None:
        """Return the seconds since the grant, or None without a granted lease."""
        return now - self._leases[request_id].granted_at if self.is_held(request_id) else None

    def seen(self, now: float) -> Iterator[LeaseSeen]:
        for request_id, lease in self._leases.items():
            readers = tuple(ReaderSeen(name, end - now) for name, end in lease.horizons.items())
            left = lease.ends_at() - now if self.is_held(request_id) else None
            age = self.age(request_id, now)
            yield LeaseSeen(request_id, lease.state.value, age, left, readers)

    def readers_of(self, request_id: str) -> list[str]:
        """Return the readers with a horizon, which have not confirmed."""
        lease = self._leases.get(request_id)
        return [] if lease is None else list(lease.horizons)

    def expect(self, request_id: str) -> None:
        self._leases.setdefault(request_id, Lease())

    def cancel(self, request_id: str) -> None:
        self._happens(request_id, LeaseEvent.CANCEL)

    def grant(
        self,
        request_id: str,
        now: float,
        seconds: float,
        renewable: bool = True,
        extension: float | None = None,
    ) -> bool:
        """Start the lease. Return False if it was read already, and has ended by this call."""
        self.expect(request_id)
        if not self._happens(request_id, LeaseEvent.GRANT):
            return True
        lease = self._leases[request_id]
        lease.renewable, lease.granted_at, lease.deadline = renewable, now, now + seconds
        lease.extension = self._extension if extension is None else min(extension, self._extension)
        return not self._ends_if_unread(request_id, lease, now)

    def extend(self, request_id: str, now: float) -> bool:
        """Extend a renewable lease; none is ever shortened. Return False if it is revoked or
        gone."""
        lease = self._leases.get(request_id)
        if lease is None or lease.state is LeaseState.REVOKED:
            return False
        if lease.renewable and lease.state is not LeaseState.EXPECTED:
            lease.deadline = max(lease.deadline, now + lease.extension)
        return True

    def renew(self, request_id: str, reader: str, now: float) -> float | None:
        """Extend the lease and grant `reader` a horizon, in seconds from now. 0: the lease is not
        granted yet. None: the reader has confirmed, or came too late.
        """
        lease = self._leases.get(request_id)
        if lease is None or reader in lease.confirmed or not self.extend(request_id, now):
            return None
        if lease.state is LeaseState.EXPECTED:
            return 0.0
        if reader not in lease.horizons and len(lease.horizons) >= MAX_READERS:
            return 0.0
        seconds = max(0.0, min(lease.extension, lease.deadline - now))
        lease.horizons[reader] = now + seconds
        return seconds

    def confirm(self, request_id: str, now: float, readers: int = 1, reader: str = "") -> bool:
        """`reader`, one of `readers`, is done with it. Return whether that ended the lease."""
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        if len(lease.confirmed) < MAX_READERS:
            lease.confirmed.add(reader)
        lease.horizons.pop(reader, None)
        lease.num_readers = max(lease.num_readers, min(readers, MAX_READERS))
        return self._ends_if_unread(request_id, lease, now)

    def take(self, request_id: str) -> bool:
        """Return whether the lease was held; then nothing ends it before it is put back."""
        return self._happens(request_id, LeaseEvent.TAKE)

    def put_back(self, request_id: str) -> None:
        self._happens(request_id, LeaseEvent.PUT_BACK)

    def revoke(self, request_id: str, now: float) -> bool:
        """End a granted lease before its time. Return whether there are readers to notify."""
        if not self._withdraw(request_id, now):
            return False
        self._stats.leases_revoked += 1
        return True

    def _withdraw(self, request_id: str, now: float) -> bool:
        if not self._happens(request_id, LeaseEvent.REVOKE):
            return False
        lease = self._leases[request_id]
        lease.has_outcome = True
        lease.deadline = now + self._grace
        self._look_again(request_id, lease)
        return True

    def revoke_all(self, now: float) -> list[str]:
        return [name for name in list(self._leases) if self.revoke(name, now)]

    def expire(self, now: float) -> list[str]:
        """Revoke what no reader read or renewed in time. Return those ids."""
        expired = [
            name
            for name in self._due(now)
            if not self._leases[name].is_counted and self._withdraw(name, now)
        ]
        self._stats.leases_expired += len(expired)
        return expired

    def reap(self, now: float) -> list[str]:
        """End what no reader may rely on any more. Return those ids."""
        return [name for name in self._due(now) if self._happens(name, LeaseEvent.END)]

    def _ends_if_unread(self, request_id: str, lease: Lease, now: float) -> bool:
        is_unread = lease.is_counted and lease.last_horizon() <= now
        # The event changes nothing while the lease is EXPECTED or WRITING.
        if is_unread and self._happens(request_id, LeaseEvent.END):
            return True
        if lease.state is not LeaseState.EXPECTED:
            self._look_again(request_id, lease)
        return False

    def _happens(self, request_id: str, event: LeaseEvent) -> bool:
        """Return whether the event moved the lease to its next state."""
        lease = self._leases.get(request_id)
        if lease is None or (lease.state, event) not in NEXT:
            return False
        self._stats.leases_granted += event is LeaseEvent.GRANT
        self._stats.leases_released += event is LeaseEvent.END and not lease.has_outcome
        after = NEXT[lease.state, event]
        self.num_held += (after is not ENDED) - (lease.state is not LeaseState.EXPECTED)
        if after is ENDED:
            del self._leases[request_id]
        else:
            lease.state = after
        if not self.num_held:
            self._by_end.clear()
        return True

    def _due(self, now: float) -> list[str]:
        """Return held leases whose end is reached. They are due again until they have ended."""
        if not self._by_end or self._by_end[0][0] > now:
            return []
        due: dict[str, Lease] = {}
        later: dict[str, Lease] = {}
        while self._by_end and self._by_end[0][0] <= now:
            moment, request_id = heapq.heappop(self._by_end)
            lease = self._leases.get(request_id)
            if lease is not None and lease.state is not LeaseState.EXPECTED:
                if moment >= lease.looked_at_next:
                    lease.looked_at_next = FOREVER
                (due if lease.ends_at() <= now else later)[request_id] = lease
        for request_id, lease in (*due.items(), *later.items()):
            self._look_again(request_id, lease)
        return list(due)

    def _look_again(self, request_id: str, lease: Lease) -> None:
        end = lease.ends_at()
        if end < lease.looked_at_next:
            lease.looked_at_next = end
            heapq.heappush(self._by_end, (end, request_id))
