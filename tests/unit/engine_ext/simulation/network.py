"""What lies between engines: messages, transfers, handshakes, and the weather that they meet."""

import itertools
from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec

from engine_ext.wire.dialer import PeerRank, PendingHandshake
from engine_ext.wire.errors import EXTENSION_VERSION
from engine_ext.wire.handshake import HandshakePayload, decode_metadata, decode_payload
from engine_ext.wire.notifications import PushDone, ReadDone, decode_notification
from engine_ext.worker.agent import AgentError, TransferState
from tests.unit.engine_ext.simulation.agents import Kind, SimAgent, SimTransfer
from tests.unit.engine_ext.simulation.memory import Content
from tests.unit.engine_ext.simulation.timeline import Action, Dice, Timeline
from tests.unit.engine_ext.simulation.trace import Trace
from tests.unit.engine_ext.simulation.weather import Weather

LATENCY = 0.0005
"""Of a message in the best weather: cause comes before effect."""


class Network:
    WINDOW = 20.0

    def __init__(self, seed: int = 0) -> None:
        self.timeline = Timeline()
        self.trace = Trace()
        self.dice = Dice(seed)
        self.weather = Weather()
        self.agents: dict[str, SimAgent] = {}
        self.listeners: dict[tuple[str, int], bytes] = {}
        self.transfers: list[SimTransfer] = []
        """Those that NIXL has not ended."""
        self.num_writes = 0
        self.num_in_flight = 0
        """Messages on their way, and blocks that will move."""
        self.writes_are_bounded = True
        """A WRITE lands within P's `write_bound` of the moment at which P decided to begin
        it, if it lands at all: what a bound that P announces takes for granted. A process that is
        frozen between its decision and the call, or emulated RMA, does not keep to that."""
        self.heard: deque[tuple[str, str, bytes]] = deque(maxlen=64)
        """What went from whom to whom, lately: for those who listen."""
        self.shared: dict[frozenset[str], list[bytes]] = {}
        """All that two agents have said to each other, or will when a transfer ends."""
        self.violations: list[str] = []
        """Not raised where they happen: the loops survive exceptions."""
        self._lost_at: list[float] = []
        self._count = itertools.count(1)

    @property
    def now(self) -> float:
        return self.timeline.now

    def note(self, who: str, what: str, details: object = "") -> None:
        self.trace.add(self.timeline.now, who, what, details)

    def violate(self, who: str, what: str) -> None:
        self.note(who, "VIOLATION", what)
        self.violations.append(f"{who}: {what}")

    def agent(self, name: str) -> SimAgent:
        made = self.agents[name] = SimAgent(name, self)
        return made

    def number(self) -> int:
        return next(self._count)

    # Messages.

    def send(self, sender: str, target: str, message: bytes) -> None:
        weather = self.weather
        lost, late, lateness, *spreads = self.dice.roll(f"{sender}>{target}", 5)
        self.heard.append((sender, target, message))
        self.shared.setdefault(frozenset((sender, target)), []).append(message)
        if lost < weather.lose and self._may_lose():
            self._lost_at.append(self.now)
            self.note(sender, f"says to {target}, LOST:", message)
            return
        self.note(sender, f"says to {target}:", message)
        delay = LATENCY + weather.delay + (lateness * weather.lateness) * (late < weather.late)
        for copy in range(weather.copies):
            at = self.now + delay + spreads[copy % 2] * weather.spread
            self.num_in_flight += 1
            self.timeline.at(at, partial(self._arrive, sender, target, message), sender + target)

    def _may_lose(self) -> bool:
        if self.weather.losses_at_most is None:
            return True
        recent = [at for at in self._lost_at if at > self.now - self.WINDOW]
        return len(recent) < self.weather.losses_at_most

    def _arrive(self, sender: str, target: str, message: bytes) -> None:
        self.num_in_flight -= 1
        self.deliver(sender, target, message)

    def deliver(self, sender: str, target: str, message: bytes) -> None:
        """Now, whatever the weather."""
        agent = self.agents[target]
        if agent.is_alive:
            self.note(target, f"hears {sender}:", message)
            agent.inbox.append((sender, message))
            agent.on_wake()

    # Transfers.

    def start(
        self,
        kind: Kind,
        agent: SimAgent,
        remote_name: str,
        local: Sequence[int],
        remote: Sequence[int],
        notification: bytes,
    ) -> SimTransfer:
        if remote_name not in agent.known:
            raise AgentError(f"{agent.name} does not know {remote_name}")
        transfer = SimTransfer(
            next(self._count),
            kind,
            agent,
            remote_name,
            list(local),
            list(remote),
            notification,
            [agent.memory.owner[block] for block in local],
            self._written_to(remote_name, remote, notification) if kind == "WRITE" else "",
        )
        if kind == "WRITE" and self.writes_are_bounded:
            transfer.cut_at = agent.clock_read_at + agent.write_seconds
        if notification:
            self.shared.setdefault(frozenset((agent.name, remote_name)), []).append(notification)
        agent.on_start(transfer)
        self.transfers.append(transfer)
        self.num_writes += kind == "WRITE"
        self.note(agent.name, f"begins {transfer}", f"{local} with {remote} of {remote_name}")
        self._schedule(transfer)
        return transfer

    def _written_to(self, remote_name: str, remote: Sequence[int], notification: bytes) -> str:
        """A part that is not the last one tells nobody whose it is: it is whoever has the block."""
        owner = self.agents[remote_name].memory.owner[remote[0]]
        return _request_of(notification) if notification else owner or "nobody"

    def _schedule(self, transfer: SimTransfer) -> None:
        weather, count = self.weather, len(transfer.local)
        fate, share, over, length = self.dice.roll(f"transfer of {transfer.agent.name}", 4)
        seconds = weather.transfer
        if over < weather.overrun:
            seconds = max(seconds, length * weather.longest)
        stops = fate < weather.never + weather.fail
        moving = int(share * count) if stops else count
        end = self.now + seconds
        for index in range(moving):
            at = self.now + seconds * (index / max(1, count - 1))
            if at <= transfer.cut_at:
                transfer.to_land.add(index)
                self.num_in_flight += 1
                self.timeline.at(at, partial(self.move, transfer, index))
        if not stops and end <= transfer.cut_at:
            self.timeline.at(end, partial(self._end, transfer, TransferState.DONE))
        elif fate >= weather.never:
            self.timeline.at(
                min(end, transfer.cut_at), partial(self._end, transfer, TransferState.FAILED)
            )

    def move(self, transfer: SimTransfer, index: int) -> None:
        """A READ and a WRITE read their source now, not when they began."""
        if index in transfer.to_land and (frozen := self._waits_for(transfer)) is not None:
            frozen.waiting_moves.append(partial(self.move, transfer, index))
            return
        self.num_in_flight -= 1
        if index not in transfer.to_land:
            return
        transfer.to_land.discard(index)
        if self.now > transfer.cut_at:
            self.fail(transfer)  # Not all of it has landed, and NIXL does not say that it has.
            return
        ours, theirs = transfer.agent, self.agents[transfer.remote_name]
        if not (ours.is_alive and theirs.is_alive):
            return
        local, remote = transfer.local[index], transfer.remote[index]
        self._check_move(transfer, index)
        if transfer.kind == "READ":
            ours.memory.contents[local] = theirs.memory.contents[remote]
        else:
            theirs.memory.contents[remote] = ours.memory.contents[local]
        self.note(ours.name, f"{transfer} moves", f"{local} with {remote} of {theirs.name}")

    def _waits_for(self, transfer: SimTransfer) -> SimAgent | None:
        """The process without which an emulated transfer does not move."""
        if not self.weather.emulated:
            return None
        ends = (transfer.agent, self.agents[transfer.remote_name])
        return next((agent for agent in ends if agent.is_frozen and agent.is_alive), None)

    def _check_move(self, transfer: SimTransfer, index: int) -> None:
        local, remote = transfer.local[index], transfer.remote[index]
        ours = transfer.agent
        if ours.memory.owner[local] != transfer.owners[index] and not transfer.is_void:
            self.violate(ours.name, f"block {local} changed hands during {transfer}")
        if transfer.kind == "WRITE":
            self._check_landing(transfer, remote)

    def _check_landing(self, transfer: SimTransfer, remote: int) -> None:
        theirs = self.agents[transfer.remote_name]
        owner = theirs.memory.owner[remote]
        if owner != transfer.for_request:
            self.violate(theirs.name, f"{transfer} has landed in block {remote}, now of {owner}")

    def _end(self, transfer: SimTransfer, state: TransferState) -> None:
        if not transfer.is_running:
            return
        if transfer.to_land and state is TransferState.DONE:
            # Blocks wait for a frozen process.
            self.timeline.at(self.now + 0.1, partial(self._end, transfer, state))
            return
        if not (transfer.agent.is_alive and self.agents[transfer.remote_name].is_alive):
            state = TransferState.FAILED
        elif state is TransferState.FAILED and transfer.kind == "WRITE":
            self._leave_on_its_way(transfer)
        if state is TransferState.FAILED:
            transfer.fail()
        elif transfer.kind == "READ":
            self._spoil(transfer)
        transfer.state = state
        self.transfers.remove(transfer)
        self.note(transfer.agent.name, f"{transfer} ends:", state.value)
        transfer.agent.on_wake()

    def _spoil(self, transfer: SimTransfer) -> None:
        """What NIXL calls done is not what the source had. Only between engines that would see it:
        of the others nothing can be expected."""
        weather, agent = self.weather, transfer.agent
        compares = agent.compares_checksums and self.agents[transfer.remote_name].compares_checksums
        if not compares or not weather.flip + weather.swap:
            return
        fate, first, second = self.dice.roll(f"bytes for {agent.name}", 3)
        contents, count = agent.memory.contents, len(transfer.local)
        one, other = (transfer.local[int(share * count)] for share in (first, second))
        if fate < weather.flip:
            contents[one] = (-1, *contents[one])
        elif fate < weather.flip + weather.swap:
            contents[one], contents[other] = contents[other], contents[one]
        self.note(agent.name, f"{transfer} may be spoilt", f"{fate:.2f}: {one}, {other}")

    def _leave_on_its_way(self, transfer: SimTransfer) -> None:
        """What a WRITE had sent when it failed lands for a while: bytes as they were."""
        share, late, lateness = self.dice.roll(f"leavings of {transfer.agent.name}", 3)
        if late >= self.weather.straggle:
            return
        pairs = list(zip(transfer.local, transfer.remote, strict=True))
        seconds = lateness * transfer.agent.landing_seconds
        if self.now + seconds > transfer.cut_at:
            return
        for local, remote in pairs[int(share * len(pairs)) :]:
            content = transfer.agent.memory.contents[local]
            self.num_in_flight += 1
            self.later(seconds, partial(self._straggle, transfer, remote, content))

    def _straggle(self, transfer: SimTransfer, remote: int, content: Content) -> None:
        self.num_in_flight -= 1
        theirs = self.agents[transfer.remote_name]
        if not theirs.is_alive:
            return
        self._check_landing(transfer, remote)
        theirs.memory.contents[remote] = content
        self.note(transfer.agent.name, f"{transfer}, which failed, lands", f"in {remote}")

    def fail(self, transfer: SimTransfer) -> None:
        """Something has gone wrong with it, now."""
        self._end(transfer, TransferState.FAILED)

    def discarded(self, transfer: SimTransfer) -> None:
        (refused,) = self.dice.roll(f"discard by {transfer.agent.name}", 1)
        if transfer.is_running and refused < self.weather.held:
            raise AgentError(f"{transfer} is under way")
        transfer.is_discarded = True
        if transfer.is_running:
            self.note(transfer.agent.name, f"lets {transfer} go, which stops nothing")

    def forgotten(self, agent: SimAgent, name: str) -> None:
        (unknowable,) = self.dice.roll(f"{agent.name} forgets {name}", 1)
        for transfer in self.transfers:
            if transfer.agent is agent and transfer.remote_name == name:
                transfer.is_unknowable = transfer.is_unknowable or unknowable < 0.5

    def died(self, agent: SimAgent) -> None:
        """What it was moving stops; the other side finds out, or does not."""
        for transfer in list(self.transfers):
            if transfer.agent is agent:
                self._end(transfer, TransferState.FAILED)
            elif transfer.remote_name == agent.name:
                (fate,) = self.dice.roll(f"death of {agent.name}", 1)
                transfer.to_land.clear()
                if fate >= self.weather.never:
                    self._end(transfer, TransferState.FAILED)
        waiting, agent.waiting_moves = agent.waiting_moves, []
        for move in waiting:
            move()

    def touching(self, agent: SimAgent, block: int) -> SimTransfer | None:
        """A transfer that may still read or write this block of `agent`, for all that can be known:
        an own one that NIXL has not ended, or another's WRITE that will land there."""
        for transfer in self.transfers:
            if transfer.agent is agent and block in transfer.local and not transfer.is_void:
                return transfer
            if transfer.kind == "WRITE" and transfer.remote_name == agent.name:
                landing = {transfer.remote[index] for index in transfer.to_land}
                may_land = transfer.agent.is_alive and self.now <= transfer.cut_at
                if block in landing and may_land:
                    return transfer
        return None

    def lose_source(self, agent: SimAgent, blocks: Sequence[int]) -> None:
        """What moves from these blocks of `agent` is not to be believed."""
        for transfer in self.transfers:
            if transfer.agent is agent and not {*blocks}.isdisjoint(transfer.local):
                transfer.is_void = True

    # Handshakes.

    def dial(self, peer: PeerRank, version: int | None) -> PendingHandshake:
        """By an engine with that version of the extension."""
        return SimHandshake(self, peer, version, self.now + self.weather.handshake)

    def later(self, seconds: float, action: Action) -> None:
        self.timeline.at(self.now + seconds, action)


class SimHandshake:
    """`version`: of the extension at the engine that dials; None for stock. All engines run the
    same code, which knows one version, its own: versions are shown relative to the dialler's. An
    older engine takes every other version for stock."""

    def __init__(
        self, network: Network, peer: PeerRank, version: int | None, ready_at: float
    ) -> None:
        self._network = network
        self._peer = peer
        self._version = version
        self._ready_at = ready_at

    def receive(self) -> HandshakePayload | None:
        if self._network.now < self._ready_at:
            return None
        address = self._peer.address
        encoded = self._network.listeners.get((address.host, address.port))
        if encoded is None:
            return None
        payload = decode_payload(encoded)
        return _as_seen_by(self._version, payload)

    def close(self) -> None:
        pass


def _as_seen_by(version: int | None, payload: HandshakePayload) -> HandshakePayload:
    metadata = decode_metadata(payload)
    theirs = metadata.disagg_ext
    if version is None or theirs is None or (is_older(version) and theirs != version):
        metadata.disagg_ext = None
    else:
        metadata.disagg_ext = EXTENSION_VERSION + theirs - version
    payload.agent_metadata_bytes = msgspec.msgpack.encode(metadata)
    return payload


def is_older(version: int | None) -> bool:
    """From before the rule that engines of two versions move no KV."""
    return version is not None and version < EXTENSION_VERSION


def _request_of(notification: bytes) -> str:
    """Of D, whose blocks a WRITE with this notification fills."""
    done = decode_notification(notification)
    return done.request_id if isinstance(done, PushDone | ReadDone) else ""
