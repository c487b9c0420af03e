"""On the engine that reads: which leases to renew where and when, and until when each is valid.

No clock in here: `now` is passed in, in seconds, monotonic.

The holder answers a heartbeat with the seconds that each lease will hold at least from when it
arrived. We count them from when it left, which is earlier, and take a little off, because the two
clocks may run at different rates. Only the agent that was asked can answer or say that a lease is
gone.

Source of the rules: vLLM's NIXL lease design (lease 30 s, beat every sixth, extension two thirds);
the answers are ours.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_ext.common.latest import keep_latest
from engine_ext.common.types import PeerAddress
from engine_ext.worker.leases import NEVER

CLOCK_DRIFT = 0.05
"""Two clocks' rates differ by less than this share. Crystals differ by 0.01 %, virtual machines
that are slewed by 0.1 %."""

BEATS_PER_EXTENSION = 4
"""A lease is renewed every sixth of its duration by two thirds of it."""

SHORTEST_INTERVAL, LONGEST_INTERVAL = 0.05, 100.0
"""Seconds between two beats, whatever a holder says of its leases."""

HURRY_SECONDS = 1.0
"""Between two beats at least, where somebody waits for the answer."""

LONGEST_BEAT = 5.0
"""Seconds that one unanswered beat counts for, at most, in an engine's silence: who waits beats
more often than an engine with long leases wants to be beaten for."""


@dataclass(slots=True)
class _EngineBeat:
    interval: float
    remote_ids: dict[str, str] = field(default_factory=dict)
    """Our request id -> the id the holder knows."""
    last_sent: float = NEVER
    due: float = 0.0
    silent_since: float | None = None
    """When the first heartbeat was sent that was not answered, nor any after it."""
    num_unanswered: int = 0
    """Beats since then, that one included."""
    counted: float = NEVER
    """When the last of those was due: one beat may be several messages."""
    agents: set[str] = field(default_factory=set)
    """Whom of that engine we have asked: nobody else can speak of its leases."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat to send: every id that the engine holds for us."""

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
    """What to renew, where. A new id is beaten for at once, but no engine more often than five
    times an interval; after that every interval of that engine, all its ids together, and sooner
    where somebody waits for an answer.

    `interval` is for engines that do not say how long their leases are.
    """

    MAX_UNANSWERED = 256
    """Of one agent."""
    MAX_ASKED = 4096
    """Agents that owe an answer."""
    MAX_CONFIRMED = 8192

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._engines: dict[PeerAddress, _EngineBeat] = {}
        self._engine_of: dict[str, PeerAddress] = {}
        self._unanswered: OrderedDict[str, OrderedDict[int, _Sent]] = OrderedDict()
        """By agent: one that answers nothing leaves the others what they were asked. The one that
        was asked longest ago is first."""
        self._valid_until: dict[str, _Horizon] = {}
        self._gone: set[str] = set()
        self._confirmed: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Leases that we are done with, by engine, whose host may have several names. To the holder
        we are one reader, however many of ours read: whatever it answers about these was, or may
        have been, said before it heard so."""

    def __len__(self) -> int:
        return len(self._engine_of)

    def track(self, request_id: str, address: PeerAddress, remote_id: str, now: float) -> None:
        beat = self._engines.setdefault(address, _EngineBeat(self._interval))
        beat.remote_ids[request_id] = remote_id
        self._engine_of[request_id] = address
        if (address.engine_id, remote_id) in self._confirmed:
            self._lose(request_id)
        beat.due = min(beat.due, max(now, beat.last_sent + beat.interval / 5))

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
                beat.last_sent, beat.due = now, now + beat.interval
                is_repeated = beat.silent_since is not None
                beats.append(Beat(address, tuple(beat.remote_ids.values()), is_repeated))
        return beats

    def follow(self, address: PeerAddress, extension: float) -> None:
        """That engine extends its leases by so many seconds: it wants to hear of us in time."""
        beat = self._engines.get(address)
        if beat is None or extension <= 0:
            return
        interval = extension / BEATS_PER_EXTENSION
        beat.interval = min(max(interval, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        beat.due = min(beat.due, beat.last_sent + beat.interval)

    def hurry(self, address: PeerAddress, now: float) -> None:
        """Somebody waits for what this engine answers, however long its leases are."""
        beat = self._engines.get(address)
        if beat is not None:
            soonest = beat.last_sent + min(HURRY_SECONDS, beat.interval / 5)
            beat.due = min(beat.due, max(now, soonest))

    def retry(self, address: PeerAddress, at: float) -> None:
        """The last beat to this engine could not be sent: it is due again at `at`."""
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
        """A heartbeat that `agent` will answer left."""
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
        """The leases that the heartbeat named hold for `seconds`, but for those that `shorter` has
        other seconds for, and those that are gone. False: that agent was not asked."""
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
                horizon = sent.at + granted * (1 - CLOCK_DRIFT)
                known = self.valid_until(request_id, sent.agent)
                self._valid_until[request_id] = _Horizon(max(horizon, known), sent.agent)

    def lost(self, sender: str, remote_ids: Iterable[str]) -> list[Lost]:
        """A holder says that these ended. Returns our requests that are concerned."""
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
        """An engine that answers heartbeats has answered none for so many of them, and seconds."""
        beat = self._engines.get(address)
        if beat is None or beat.silent_since is None or beat.num_unanswered < beats:
            return False
        seconds = beats * min(beat.interval, LONGEST_BEAT)
        return now - beat.silent_since >= max(at_least, seconds)

    def confirm(self, engine_id: str, remote_id: str) -> None:
        """We have told the holder that we are done with it, so it may free it: for others of ours
        who wait for the same, now or later, nothing that it answers proves anything."""
        self._confirmed[engine_id, remote_id] = None
        while len(self._confirmed) > self.MAX_CONFIRMED:
            self._confirmed.popitem(last=False)
        for request_id, waits_for in self._requests_at(engine_id):
            if waits_for == remote_id:
                self._lose(request_id)

    def waits_for(self, engine_id: str, remote_id: str) -> bool:
        """A request of ours may still read that lease, and believes in it."""
        return any(waits_for == remote_id for _, waits_for in self._requests_at(engine_id))

    def _requests_at(self, engine_id: str) -> Iterator[tuple[str, str]]:
        """Ours, and what each waits for there."""
        for address, beat in self._engines.items():
            if address.engine_id == engine_id:
                yield from beat.remote_ids.items()

    def valid_until(self, request_id: str, agent: str) -> float:
        """What that very agent has granted: another that has come to its place knows no lease."""
        horizon = self._valid_until.get(request_id)
        return NEVER if horizon is None or horizon.agent != agent else horizon.until

    def is_gone(self, request_id: str) -> bool:
        return request_id in self._gone

    def _lose(self, request_id: str) -> None:
        self._gone.add(request_id)
        self._valid_until.pop(request_id, None)
