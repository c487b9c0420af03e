"""On the engine that reads: which leases to renew where and when, and until when each is valid.

No clock in here: `now` is passed in, in seconds, monotonic.
Source of the rules: vLLM's NIXL lease design (lease 30 s, beat every sixth, extension two thirds);
the answers are ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_ext.base.types import PeerAddress
from engine_ext.transfer.leases import NEVER


@dataclass(slots=True)
class _EngineBeat:
    remote_ids: dict[str, str] = field(default_factory=dict)
    """Our request id -> the id the holder knows."""
    last_sent: float = NEVER
    due: float = 0.0
    silent_since: float | None = None
    """When the first heartbeat was sent that was not answered, nor any after it."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat to send: every id that the engine holds for us."""

    address: PeerAddress
    remote_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sent:
    at: float
    address: PeerAddress
    remote_ids: tuple[str, ...]
    extension: float


class HeartbeatTracker:
    """What to renew, where. A new id is beaten for at once, but no engine more often than five
    times an interval; after that every `interval` seconds, all ids of an engine together.

    An answered heartbeat proves that the holder keeps the blocks for its extension from the moment
    the heartbeat was sent: `valid_until`.
    """

    MAX_UNANSWERED = 256

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._engines: dict[PeerAddress, _EngineBeat] = {}
        self._engine_of: dict[str, PeerAddress] = {}
        self._unanswered: dict[int, _Sent] = {}
        self._valid_until: dict[str, float] = {}
        self._gone: set[str] = set()

    def __len__(self) -> int:
        return len(self._engine_of)

    def track(self, request_id: str, address: PeerAddress, remote_id: str, now: float) -> None:
        beat = self._engines.setdefault(address, _EngineBeat())
        beat.remote_ids[request_id] = remote_id
        self._engine_of[request_id] = address
        beat.due = min(beat.due, max(now, beat.last_sent + self._interval / 5))

    def untrack(self, request_id: str) -> None:
        address = self._engine_of.pop(request_id, None)
        self._valid_until.pop(request_id, None)
        self._gone.discard(request_id)
        if address is None:
            return
        beat = self._engines[address]
        del beat.remote_ids[request_id]
        if not beat.remote_ids:
            del self._engines[address]

    def due(self, now: float) -> list[Beat]:
        """What to send now; taken as sent."""
        beats = []
        for address, beat in self._engines.items():
            if beat.due <= now:
                beat.last_sent, beat.due = now, now + self._interval
                beats.append(Beat(address, tuple(beat.remote_ids.values())))
        return beats

    def retry(self, address: PeerAddress, at: float) -> None:
        """The last beat to this engine could not be sent: it is due again at `at`."""
        beat = self._engines.get(address)
        if beat is not None:
            beat.due = min(beat.due, at)

    def sent(
        self,
        sequence: int,
        address: PeerAddress,
        remote_ids: tuple[str, ...],
        now: float,
        extension: float,
    ) -> None:
        """A heartbeat that will be answered left; each answer extends by `extension` seconds."""
        beat = self._engines.get(address)
        if beat is not None and beat.silent_since is None:
            beat.silent_since = now
        self._unanswered[sequence] = _Sent(now, address, remote_ids, extension)
        while len(self._unanswered) > self.MAX_UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]

    def answered(self, sequence: int, gone: Iterable[str]) -> None:
        sent = self._unanswered.pop(sequence, None)
        beat = self._engines.get(sent.address) if sent is not None else None
        if sent is None or beat is None:
            return
        beat.silent_since = None
        missing, renewed = set(gone), set(sent.remote_ids)
        for request_id, remote_id in beat.remote_ids.items():
            if remote_id in missing:
                self._lose(request_id)
            elif remote_id in renewed and request_id not in self._gone:
                self._valid_until[request_id] = sent.at + sent.extension

    def lost(self, remote_ids: Iterable[str]) -> None:
        """A holder says that these ended. Ids are unique: whichever engine holds them."""
        missing = set(remote_ids)
        for beat in self._engines.values():
            for request_id, remote_id in beat.remote_ids.items():
                if remote_id in missing:
                    self._lose(request_id)

    def silence(self, address: PeerAddress, now: float) -> float:
        """For how many seconds an engine that answers heartbeats has answered none."""
        beat = self._engines.get(address)
        return 0.0 if beat is None or beat.silent_since is None else now - beat.silent_since

    def read(self, address: PeerAddress, remote_id: str) -> None:
        """We have read it, so the holder frees it: for others of ours who wait for the same, what
        was proven before proves nothing any more."""
        beat = self._engines.get(address)
        for request_id, waits_for in beat.remote_ids.items() if beat is not None else ():
            if waits_for == remote_id:
                self._lose(request_id)

    def valid_until(self, request_id: str) -> float:
        return self._valid_until.get(request_id, NEVER)

    def is_gone(self, request_id: str) -> bool:
        return request_id in self._gone

    def _lose(self, request_id: str) -> None:
        self._gone.add(request_id)
        self._valid_until.pop(request_id, None)
