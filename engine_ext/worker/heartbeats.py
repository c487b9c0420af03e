"""The reader's side of leases: which to renew, where and when, and until when each is valid.

Heartbeat
    A reader renews every lease that it means to read, from the time that the request arrives until
    its READ has ended. All leases of one engine share one heartbeat: a quarter of the engine's
    lease extension after the last one, and sooner for a new lease or where a request waits for the
    answer. A stock source answers nothing.

Horizon
    A source with our extension answers with the seconds that each lease will hold at least, counted
    from when the heartbeat arrived. The reader counts them from when the heartbeat left, which is
    earlier, and takes off `CLOCK_DRIFT`, because the two clocks may run at different rates. The
    result is the lease's horizon by the reader's clock. A READ that has ended before the horizon
    has read what the lease covers; no clocks are compared.

What counts
    Only the agent that was asked can answer, or report that a lease is gone: another process at its
    address knows none of its leases. An engine that answers none of several heartbeats in a row is
    silent.

Messages may be lost. What is remembered of unanswered heartbeats and confirmations is bounded. No
clock in here: `now` is passed in, in seconds, monotonic. The source's side is leases.py.

Source of the rules: vLLM's NIXL lease design (lease 30 s, heartbeat every sixth, extension two
thirds); the answers are ours.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_ext.common.latest import keep_latest
from engine_ext.common.types import PeerAddress
from engine_ext.worker.leases import FOREVER, NEVER

CLOCK_DRIFT = 0.05
"""Two clocks' rates differ by less than this share. Crystals differ by 0.01 %, virtual machines
that are slewed by 0.1 %."""

BEATS_PER_EXTENSION = 4
"""A lease is renewed every sixth of its duration by two thirds of it."""

SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.05, 100.0
"""Bounds on the seconds between two heartbeats, whatever lease extension a source announces."""

HURRY_SECONDS = 1.0
"""Least seconds between two heartbeats where a request waits for the answer."""

LONGEST_BEAT = 5.0
"""Most seconds that one unanswered heartbeat counts for in an engine's silence. A reader that waits
sends heartbeats more often than an engine with long leases asks for."""


@dataclass(slots=True)
class _EngineBeat:
    interval: float
    remote_ids: dict[str, str] = field(default_factory=dict)
    """Our request id -> the source's."""
    last_sent: float = NEVER
    due: float = FOREVER
    silent_since: float | None = None
    """When the first of the latest unanswered heartbeats was sent."""
    num_unanswered: int = 0
    """Heartbeats since then, that one included."""
    counted: float = NEVER
    """When the last of those was due: one heartbeat may be several messages."""
    agents: set[str] = field(default_factory=set)
    """The agents of that engine that we have asked."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat to send, for every lease of ours at that engine."""

    address: PeerAddress
    remote_ids: tuple[str, ...]
    is_repeated: bool = False
    """The one before it was not answered."""


@dataclass(frozen=True, slots=True)
class _Sent:
    at: float
    address: PeerAddress
    agent: str
    remote_ids: tuple[str, ...]


class _Horizon(NamedTuple):
    until: float
    agent: str


class Lost(NamedTuple):
    """A request of ours, and the lease that it waited for."""

    request_id: str
    address: PeerAddress
    remote_id: str


class HeartbeatTracker:
    """Decides which heartbeat is due, and what each answer means.

    A new lease is renewed at once, but no engine gets more than five heartbeats per interval.
    `interval`, in seconds, is for engines that do not announce the length of their leases.
    """

    MAX_UNANSWERED = 256
    """Of one agent."""
    MAX_ASKED = 4096
    """Agents with an unanswered heartbeat."""
    MAX_CONFIRMED = 8192

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._engines: dict[PeerAddress, _EngineBeat] = {}
        self._engine_of: dict[str, PeerAddress] = {}
        self._unanswered: OrderedDict[str, OrderedDict[int, _Sent]] = OrderedDict()
        """By agent and sequence, so that an agent that never answers displaces no other's. The
        agent that was asked longest ago is first."""
        self._valid_until: dict[str, _Horizon] = {}
        self._gone: set[str] = set()
        self._confirmed: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Leases that we are done with, by engine id, because its host may have several names. An
        answer about one of these may have been sent before the source received that."""

    def __len__(self) -> int:
        return len(self._engine_of)

    def track(
        self,
        request_id: str,
        address: PeerAddress,
        remote_id: str,
        now: float,
        lasts: float | None = None,
    ) -> None:
        """Renew this lease from now on: at once, or in a quarter of the time that it `lasts`."""
        beat = self._engines.setdefault(address, _EngineBeat(self._interval))
        beat.remote_ids[request_id] = remote_id
        self._engine_of[request_id] = address
        if (address.engine_id, remote_id) in self._confirmed:
            self._lose(request_id)
        soonest = max(now, beat.last_sent + beat.interval / 5)
        beat.due = min(beat.due, soonest if lasts is None else now + lasts / BEATS_PER_EXTENSION)

    def granted(self, request_id: str, agent: str, asked_at: float, seconds: float) -> None:
        """Record a lease that this agent has granted for so long, in answer to a message that left
        at `asked_at`."""
        until = asked_at + seconds * (1 - CLOCK_DRIFT)
        self._valid_until[request_id] = _Horizon(until, agent)

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
        """Return the heartbeats to send now. They count as sent."""
        beats = []
        for address, beat in self._engines.items():
            if beat.due <= now:
                beat.last_sent, beat.due = now, now + beat.interval
                is_repeated = beat.silent_since is not None
                beats.append(Beat(address, tuple(beat.remote_ids.values()), is_repeated))
        return beats

    def follow(self, address: PeerAddress, extension: float) -> None:
        """That engine extends its leases by so many seconds, which sets our interval."""
        beat = self._engines.get(address)
        if beat is None or extension <= 0:
            return
        interval = extension / BEATS_PER_EXTENSION
        beat.interval = min(max(interval, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        beat.due = min(beat.due, beat.last_sent + beat.interval)

    def hurry(self, address: PeerAddress, now: float) -> None:
        """A request waits for this engine's answer, however long its leases are."""
        beat = self._engines.get(address)
        if beat is not None:
            soonest = beat.last_sent + min(HURRY_SECONDS, beat.interval / 5)
            beat.due = min(beat.due, max(now, soonest))

    def retry(self, address: PeerAddress, at: float) -> None:
        """The last heartbeat to this engine could not be sent: it is due again at `at`."""
        beat = self._engines.get(address)
        if beat is not None:
            beat.due = min(beat.due, at)

    def sent(
        self,
        sequence: int,
        address: PeerAddress,
        agent: str,
        remote_ids: tuple[str, ...],
        now: float,
    ) -> None:
        beat = self._engines.get(address)
        if beat is not None:
            beat.agents.add(agent)
            self._count_unanswered(beat, now)
        unanswered = self._unanswered.get(agent, OrderedDict())
        sent = _Sent(now, address, agent, remote_ids)
        keep_latest(unanswered, sequence, sent, self.MAX_UNANSWERED)
        keep_latest(self._unanswered, agent, unanswered, self.MAX_ASKED)

    @staticmethod
    def _count_unanswered(beat: _EngineBeat, now: float) -> None:
        if beat.silent_since is None:
            beat.silent_since = now
        if beat.counted < beat.last_sent:
            beat.counted = beat.last_sent
            beat.num_unanswered += 1

    def answered(
        self,
        sender: str,
        sequence: int,
        seconds: float,
        gone: Iterable[str] = (),
        shorter: Mapping[str, float] | None = None,
    ) -> bool:
        """Record that the heartbeat's leases hold for `seconds`, except those in `shorter` and in
        `gone`. Return False if that agent was not asked."""
        unanswered = self._unanswered.get(sender)
        if unanswered is None or (sent := unanswered.pop(sequence, None)) is None:
            return False
        if not unanswered:
            del self._unanswered[sender]
        if (beat := self._engines.get(sent.address)) is not None:
            beat.silent_since, beat.num_unanswered, beat.counted = None, 0, NEVER
            self._renew(beat, sent, seconds, set(gone), shorter or {})
        return True

    def _renew(
        self,
        beat: _EngineBeat,
        sent: _Sent,
        seconds: float,
        missing: set[str],
        shorter: Mapping[str, float],
    ) -> None:
        renewed = set(sent.remote_ids)
        for request_id, remote_id in beat.remote_ids.items():
            if remote_id in missing:
                self._lose(request_id)
            elif remote_id in renewed and request_id not in self._gone:
                granted = min(seconds, shorter.get(remote_id, seconds))
                # From when the heartbeat left, which is before the source began to count.
                horizon = sent.at + granted * (1 - CLOCK_DRIFT)
                known = self.valid_until(request_id, sent.agent)
                self._valid_until[request_id] = _Horizon(max(horizon, known), sent.agent)

    def lost(self, sender: str, remote_ids: Iterable[str]) -> list[Lost]:
        """Record that a source has ended these leases. Return the requests that wait for one."""
        missing = set(remote_ids)
        lost = [
            Lost(request_id, address, remote_id)
            for address, beat in self._engines.items()
            if sender in beat.agents
            for request_id, remote_id in beat.remote_ids.items()
            if remote_id in missing
        ]
        for one in lost:
            self._lose(one.request_id)
        return lost

    def is_silent(self, address: PeerAddress, now: float, beats: int, at_least: float) -> bool:
        """Return whether the engine has answered none of so many heartbeats, for so many seconds
        at least."""
        beat = self._engines.get(address)
        if beat is None or beat.silent_since is None or beat.num_unanswered < beats:
            return False
        seconds = beats * min(beat.interval, LONGEST_BEAT)
        return now - beat.silent_since >= max(at_least, seconds)

    def confirm(self, engine_id: str, remote_id: str) -> None:
        """We have notified the source that we are done with the lease, so it may end."""
        keep_latest(self._confirmed, (engine_id, remote_id), None, self.MAX_CONFIRMED)
        # To the source, one engine is one reader: this confirmation may end the lease for our other
        # requests, too, and no answer proves anything for them.
        for request_id, waits_for in self._requests_at(engine_id):
            if waits_for == remote_id:
                self._lose(request_id)

    def waits_for(self, engine_id: str, remote_id: str) -> bool:
        """Return whether a request of ours may still read that lease."""
        return any(waits_for == remote_id for _, waits_for in self._requests_at(engine_id))

    def _requests_at(self, engine_id: str) -> Iterator[tuple[str, str]]:
        for address, beat in self._engines.items():
            if address.engine_id == engine_id:
                yield from beat.remote_ids.items()

    def valid_until(self, request_id: str, agent: str) -> float:
        """Return the horizon that this very agent has granted."""
        horizon = self._valid_until.get(request_id)
        return NEVER if horizon is None or horizon.agent != agent else horizon.until

    def horizon(self, request_id: str) -> float:
        """Return the last horizon that any agent has granted."""
        horizon = self._valid_until.get(request_id)
        return NEVER if horizon is None else horizon.until

    def is_gone(self, request_id: str) -> bool:
        return request_id in self._gone

    def _lose(self, request_id: str) -> None:
        self._gone.add(request_id)
        self._valid_until.pop(request_id, None)
