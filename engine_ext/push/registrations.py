"""Push mode on D: blocks that wait for P's WRITE. Each registration ends in exactly one report.

    CONNECTING --> REGISTERED --(written)----> reported ok
        |              |  \\--(P failed)----> reported failed
        |              +--(deadline, silence, abort)--> WITHDRAWING --> (over)
        |              |                                     ^
        |              +--(reclaim)--> RETURNING --(the same)+
        |              ^                 |   \\--(written)----> reported ok
        |              |                 +--(P gave back)--> RETURNED, reported given back
        |              +--(others were written)------------------+--(order)----> reported failed
        +--(no handshake)--> reported failed; (reclaim)--> RETURNED

A withdrawn registration is reported as failed at once where the host will ask before it frees the
blocks (`touches`), else when it is over. It is over when P can no longer write into the blocks: P
has said so, or its clock, as far as we know it, has passed the time by which it was to begin, and
the bound that it announced for a WRITE to land is over, too. Both are P's promises, by P's clock:
nothing is concluded from our own settings, and with an engine that promises nothing, as stock does
not, nothing is registered. Another process at P's address, under its id or not, says nothing of
the one that was asked, which may be cut off and live. P's promise to begin by a time is renewed
each time that it is asked, with the same message; P remembers how each registration ended, so what
was lost on the way is asked for again. A number tells one registration of a request from the next,
so that what comes late is not taken for an answer.

Where P has more ranks than we do, several write: the registration has ended well when all have, and
badly when one has not and the others can write no more.

A registration whose blocks another request needs more is given back (see
`engine_ext.scheduler.block_pressure`): only when every rank of P has said that it has not written,
and will not. Silence gives nothing back: it ends the request as ever. Where some ranks of P have
written and others gave back, P holds the whole prompt: the blocks stay, and we register again with
those others. So it is among our own ranks: the scheduler half hears when all have given back, and
orders the end; a rank that waits for that order in vain registers again, for others may have been
written.
"""

import enum
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_ext.common.inspection import QuarantineSeen
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.states import after
from engine_ext.common.types import (
    STATE,
    BlockIds,
    LoadProblem,
    PeerAddress,
    PushRegistration,
    PushWithdrawal,
    num_blocks_in,
)
from engine_ext.layout.plan import without_holes
from engine_ext.push.remote_clocks import RemoteClocks
from engine_ext.push.replies import GIVEN_UP, OF_REQUEST
from engine_ext.wire.notifications import (
    PushDone,
    PushExtension,
    PushFailed,
    PushRegistered,
    ReturnBlocks,
    Withdraw,
    encode_extension,
    encode_registration,
)
from engine_ext.worker.agent import AgentError, PeerHandle
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.heartbeats import CLOCK_DRIFT, HeartbeatTracker
from engine_ext.worker.leases import NEVER
from engine_ext.worker.peers import PeerError, Peers

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

SILENT_BEATS = 3
SILENT_SECONDS = 3.0
"""P has answered none of so many heartbeats, for so long at least: it is taken for dead."""
RETURNED_SECONDS = 2.0
"""After so long without an order, a rank registers again what P gave back."""
LONGEST_ASKING = 5.0
"""Seconds between two times that P is asked, at most, however long our own leases are."""
BEGIN_BEATS = 3
"""P may begin a WRITE until it should have been asked so many times more; longer, and its silence
keeps our blocks longer."""


class RegistrationState(enum.Enum):
    CONNECTING = "connecting"
    REGISTERED = "registered"
    RETURNING = "returning"
    RETURNED = "returned"
    WITHDRAWING = "withdrawing"


class RegistrationEvent(enum.Enum):
    REGISTER = "register"
    RECLAIM = "reclaim"
    RETURN = "return"
    CONNECT = "connect"
    WITHDRAW = "withdraw"


_NEXT = {
    (RegistrationState.CONNECTING, RegistrationEvent.REGISTER): RegistrationState.REGISTERED,
    (RegistrationState.REGISTERED, RegistrationEvent.RECLAIM): RegistrationState.RETURNING,
    (RegistrationState.REGISTERED, RegistrationEvent.WITHDRAW): RegistrationState.WITHDRAWING,
    (RegistrationState.CONNECTING, RegistrationEvent.RETURN): RegistrationState.RETURNED,
    (RegistrationState.RETURNING, RegistrationEvent.RETURN): RegistrationState.RETURNED,
    (RegistrationState.RETURNING, RegistrationEvent.REGISTER): RegistrationState.REGISTERED,
    (RegistrationState.RETURNED, RegistrationEvent.REGISTER): RegistrationState.REGISTERED,
    (RegistrationState.RETURNED, RegistrationEvent.CONNECT): RegistrationState.CONNECTING,
    (RegistrationState.RETURNING, RegistrationEvent.WITHDRAW): RegistrationState.WITHDRAWING,
}


@dataclass(slots=True)
class PendingRegistration:
    registration: PushRegistration
    generation: int
    deadline: float
    state: RegistrationState = RegistrationState.CONNECTING
    peers: dict[str, PeerHandle] = field(default_factory=dict)
    """Those that may still write, by name: who comes to the place of one does not speak for it."""
    begin_by: dict[str, float] = field(default_factory=dict)
    """By name: the latest time, by its own clock, until which that peer was ever asked to begin."""
    landed_by: dict[str, float] = field(default_factory=dict)
    """By name: the time, by our clock, at which what that peer's failed WRITE had sent has
    landed."""
    returned: dict[str, PeerHandle] = field(default_factory=dict)
    """Those that gave back, by name."""
    returned_at: float = NEVER
    has_told: bool = False
    """It was reported as given back: its blocks may be freed as soon as its end is reported."""
    is_to_end: bool = False
    """All our ranks have reported that."""
    has_written: bool = False
    """One of P's ranks has."""
    is_spoilt: bool = False
    """One of them will not write, or nobody waits any more."""
    is_aborted: bool = False
    """Our request ended while it waited."""
    problem: LoadProblem | None = None
    """The first, if it was not that our request ended."""
    is_reported: bool = False
    ask_again_at: float = 0.0

    @property
    def request_id(self) -> str:
        return self.registration.request_id

    @property
    def address(self) -> PeerAddress:
        return self.registration.target.address

    @property
    def is_wanted(self) -> bool:
        """P was asked, and has not been told to leave it."""
        return self.state in (RegistrationState.REGISTERED, RegistrationState.RETURNING)

    def on(self, event: RegistrationEvent) -> None:
        """Raises IllegalEventError."""
        self.state = after(_NEXT, self.state, event)

    def meet(self, peers: list[PeerHandle]) -> bool:
        """Of those who answer at P's address, some may have been met anew. False: one that was
        asked is not among them."""
        self.peers.update((peer.name, peer) for peer in peers if peer.name in self.peers)
        return self.peers.keys() <= {peer.name for peer in peers}


class Registrations:
    """`clocks` is kept up to date by the answers to our heartbeats."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        peers: Peers,
        beats: HeartbeatTracker,
        clocks: RemoteClocks,
    ) -> None:
        self._context = context
        self._agent, self._config = context.agent, context.config
        self._results, self._stats = context.results, context.stats
        self._peers = peers
        self._beats = beats
        self._clocks = clocks
        self._asks_every = min(context.config.heartbeat_interval, LONGEST_ASKING)
        self._waiting: dict[str, PendingRegistration] = {}
        self._declines: list[PushWithdrawal] = []

    @property
    def num_active(self) -> int:
        return len(self._waiting)

    @property
    def has_unsent(self) -> bool:
        """Something is to be said, and the handshake for it still runs."""
        return bool(self._declines)

    @property
    def num_blocks_quarantined(self) -> int:
        """Of what was reported, and may still be written to."""
        return sum(
            num_blocks_in(waiting.registration.local_block_ids)
            for waiting in self._waiting.values()
            if waiting.is_reported
        )

    def quarantined(self, now: float) -> Iterator[QuarantineSeen]:
        for waiting in self._waiting.values():
            if waiting.is_reported:
                yield QuarantineSeen(
                    waiting.request_id,
                    waiting.address.engine_id,
                    num_blocks_in(waiting.registration.local_block_ids),
                    max(0.0, now - waiting.deadline),
                )

    def touches(self, request_id: str) -> bool:
        """P may still write into this request's blocks."""
        return request_id in self._waiting

    def register(self, registration: PushRegistration, now: float) -> None:
        deadline = now + self._config.push_deadline
        waiting = PendingRegistration(registration, next(self._context.sequence), deadline)
        self._waiting[waiting.request_id] = waiting

    def withdraw(self, withdrawal: PushWithdrawal, now: float) -> None:
        waiting = self._waiting.get(withdrawal.request_id)
        if waiting is None:
            self._declines.append(withdrawal)
        elif waiting.state in (RegistrationState.CONNECTING, RegistrationState.RETURNED):
            waiting.is_aborted = True
            self._end(waiting, ok=False)
            self._declines.append(withdrawal)
        elif waiting.is_wanted:
            waiting.is_aborted = True
            self._withdraw(waiting, now)

    def reclaim(self, request_id: str, now: float) -> None:
        """Another request needs these blocks more. One that has ended, or is withdrawn, is reported
        as such."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        if waiting.state is RegistrationState.CONNECTING:
            self._return(waiting, now)
        elif waiting.state is not RegistrationState.REGISTERED:
            return
        elif all(peer.returns_blocks for peer in waiting.peers.values()):
            waiting.on(RegistrationEvent.RECLAIM)
            waiting.ask_again_at = now
        else:
            self._results.ready(request_id)  # It cannot be given back.

    def give_back(self, request_id: str, now: float) -> None:
        """Every rank of ours has reported that this was given back."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        waiting.is_to_end = True
        if waiting.state is RegistrationState.RETURNED:
            self._end_given_back(waiting)
        else:
            self.reclaim(request_id, now)

    def written(self, message: PushDone, sender: str, now: float) -> None:
        """That agent's WRITE has landed."""
        waiting = self._find(message.request_id, sender, message.generation)
        if waiting is not None:
            waiting.has_written = True
            self._settle(waiting, sender, now)

    def failed(self, message: PushFailed, sender: str, now: float) -> None:
        waiting = self._find(message.request_id, sender, message.generation)
        if waiting is None:
            return
        if message.is_given_back and waiting.state is RegistrationState.RETURNING:
            waiting.returned[sender] = waiting.peers[sender]
            self._settle(waiting, sender, now)
            return
        if waiting.is_wanted:
            # When a client leaves, P's abort may be heard of before our own.
            level = logging.INFO if message.reason == GIVEN_UP else logging.WARNING
            logger.log(
                level, "request %s: P will not write: %.200s", waiting.request_id, message.reason
            )
        if waiting.problem is None and not waiting.is_aborted:
            reason = f"P will not write: {message.reason}"
            is_of_pair = message.seconds > 0 or message.reason not in OF_REQUEST
            waiting.problem = LoadProblem(reason, is_of_pair)
        waiting.is_spoilt = True
        if sender in waiting.landed_by:
            pass  # What it said first counts.
        elif message.seconds > 0:
            over = now + message.seconds * (1 + CLOCK_DRIFT)
            waiting.landed_by[sender] = over
        else:
            self._settle(waiting, sender, now)
        if waiting.peers and waiting.is_wanted:
            self._withdraw(waiting, now)

    def _settle(self, waiting: PendingRegistration, sender: str, now: float) -> None:
        del waiting.peers[sender]
        if waiting.peers:
            return
        if waiting.is_spoilt or not waiting.returned:
            self._end(waiting, ok=not waiting.is_spoilt)
        elif waiting.has_written:
            self._register_again(waiting)
        else:
            self._return(waiting, now)

    def _return(self, waiting: PendingRegistration, now: float) -> None:
        """P does not write into these blocks; they stay until all our ranks can say so."""
        waiting.on(RegistrationEvent.RETURN)
        waiting.returned_at = now
        if waiting.is_to_end:
            self._end_given_back(waiting)
        elif not waiting.has_told:
            waiting.has_told = True
            self._results.given_back(waiting.request_id)

    def _register_again(self, waiting: PendingRegistration) -> None:
        """With those ranks of P that gave back, and hold the whole prompt now as others do."""
        if not waiting.returned:
            waiting.on(RegistrationEvent.CONNECT)
            return
        waiting.on(RegistrationEvent.REGISTER)
        waiting.generation = next(self._context.sequence)
        waiting.peers, waiting.returned = waiting.returned, {}
        waiting.ask_again_at = 0.0

    def _end_given_back(self, waiting: PendingRegistration) -> None:
        del self._waiting[waiting.request_id]
        waiting.is_reported = True
        self._stats.pushes_given_back += 1
        self._results.received(waiting.request_id, ok=False)

    def step(self, now: float) -> None:
        for waiting in list(self._waiting.values()):
            try:
                self._advance(waiting, now)
            except (PeerError, AgentError) as error:
                self._fail(waiting, str(error), now, is_of_pair=True)
            except Exception as error:
                logger.exception("request %s", waiting.request_id)
                self._fail(waiting, repr(error), now)
        declines, self._declines = self._declines, []
        for withdrawal in declines:
            self._say_decline(withdrawal, now)

    def _advance(self, waiting: PendingRegistration, now: float) -> None:
        if waiting.state is RegistrationState.WITHDRAWING:
            self._forget_harmless(waiting, now)
        elif waiting.state is RegistrationState.RETURNED:
            if now - waiting.returned_at >= RETURNED_SECONDS:
                self._register_again(waiting)
        elif waiting.deadline <= now:
            self._fail(waiting, "P has not written", now)
        elif self._beats.is_silent(waiting.address, now, SILENT_BEATS, SILENT_SECONDS):
            self._fail(waiting, "P is silent", now, is_of_pair=True)
            self._peers.forget(waiting.address)
        elif waiting.state is RegistrationState.CONNECTING:
            self._register(waiting, now)
        else:
            self._ask_again(waiting, now)

    def _fail(
        self, waiting: PendingRegistration, problem: str, now: float, *, is_of_pair: bool = False
    ) -> None:
        """Whatever is wrong: nobody waits for P's WRITE any more, which may come all the same."""
        if waiting.problem is None and not waiting.is_aborted:
            waiting.problem = LoadProblem(problem, is_of_pair)
        if waiting.state is RegistrationState.WITHDRAWING:
            logger.debug("request %s: %s", waiting.request_id, problem)
            return
        logger.warning("request %s: %s", waiting.request_id, problem)
        if waiting.state is RegistrationState.CONNECTING:
            self._end(waiting, ok=False)
        else:
            self._withdraw(waiting, now)

    def _register(self, waiting: PendingRegistration, now: float) -> None:
        peers = self._peers.connect_all(waiting.address, now)
        if peers is None:
            return
        if not all(peer.has_extension for peer in peers):
            raise PeerError("P does not promise when its WRITE would have landed")
        if (num_blocks := self.num_blocks_quarantined) > self._context.max_quarantined:
            raise PeerError(f"{num_blocks} blocks are in quarantine")
        if not self._may_ask(waiting, peers, now):
            return
        # Before the first message leaves: one that cannot be sent may have arrived.
        waiting.peers = {peer.name: peer for peer in peers}
        waiting.on(RegistrationEvent.REGISTER)
        self._ask(waiting, peers, now)

    def _may_ask(self, waiting: PendingRegistration, peers: list[PeerHandle], now: float) -> bool:
        """P's clock is known, which it tells with every answer to a heartbeat, so that it can be
        told by when to begin."""
        if all(self._clocks.is_fresh(peer.name, now) for peer in peers):
            return True
        self._beats.hurry(waiting.address, now)
        return False

    def _ask_again(self, waiting: PendingRegistration, now: float) -> None:
        """The same message once more, to peers that remember what they answered."""
        if waiting.ask_again_at > now:
            return
        try:
            peers = self._peers.connect_all(waiting.address, now)
        except PeerError:
            waiting.ask_again_at = now + self._config.heartbeat_interval
            raise
        if peers is None:
            return
        if not waiting.meet(peers) and waiting.is_wanted:
            self._fail(waiting, "P is another process now", now)
        elif waiting.state is not RegistrationState.REGISTERED or self._may_ask(
            waiting, peers, now
        ):
            self._ask(waiting, peers, now)

    def _ask(self, waiting: PendingRegistration, peers: list[PeerHandle], now: float) -> None:
        """Those of `peers` that were asked before, and have not answered."""
        waiting.ask_again_at = now + self._asks_every
        is_well = True
        for peer in peers:
            if peer.name not in waiting.peers or peer.name in waiting.landed_by:
                continue
            try:
                self._agent.notify(peer.name, self._question(waiting, peer, now))
            except AgentError as error:
                logger.warning("request %s: %s", waiting.request_id, error)
                is_well = False
        if not is_well:
            self._peers.forget(waiting.address)

    def _question(self, waiting: PendingRegistration, peer: PeerHandle, now: float) -> bytes:
        if waiting.state is RegistrationState.REGISTERED:
            begin_by = self._clocks.earliest(peer.name, now) + BEGIN_BEATS * max(
                self._asks_every, 1.0
            )
            waiting.begin_by[peer.name] = max(begin_by, waiting.begin_by.get(peer.name, NEVER))
            return encode_registration(self._message(waiting, begin_by))
        target = waiting.registration.target
        if waiting.state is RegistrationState.RETURNING:
            return encode_extension(
                ReturnBlocks(waiting.request_id, waiting.generation, target.transfer_id)
            )
        return encode_extension(
            Withdraw(
                waiting.request_id,
                waiting.generation,
                target.remote_request_id,
                target.transfer_id,
            )
        )

    def _withdraw(self, waiting: PendingRegistration, now: float) -> None:
        waiting.on(RegistrationEvent.WITHDRAW)
        waiting.is_spoilt = True
        waiting.ask_again_at = now
        if not (waiting.registration.recomputes or waiting.has_told):
            self._report(waiting, ok=False)
        try:
            self._ask_again(waiting, now)
        except (PeerError, AgentError) as error:
            logger.warning("request %s: %s", waiting.request_id, error)

    def _forget_harmless(self, waiting: PendingRegistration, now: float) -> None:
        """Peers that can write no more; then asks the others."""
        for name, peer in list(waiting.peers.items()):
            if self._is_harmless(waiting, peer, now):
                self._settle(waiting, name, now)
        if waiting.peers:
            self._ask_again(waiting, now)

    def _is_harmless(self, waiting: PendingRegistration, peer: PeerHandle, now: float) -> bool:
        """By its own clock it is too late to begin, and what has begun has landed."""
        if peer.name in waiting.landed_by:
            return now >= waiting.landed_by[peer.name]
        if not self._clocks.knows(peer.name):
            return False
        began_by = waiting.begin_by.get(peer.name, NEVER)
        return self._clocks.earliest(peer.name, now) > began_by + peer.write_bound

    def _say_decline(self, withdrawal: PushWithdrawal, now: float) -> None:
        """Nothing was registered, but P need not keep the blocks."""
        target = withdrawal.target
        message = Withdraw(withdrawal.request_id, 0, target.remote_request_id, target.transfer_id)
        try:
            peers = self._peers.connect_all(target.address, now, moves_kv=False)
        except PeerError as error:
            logger.warning("engine %s was not told: %s", target.address.engine_id, error)
            return
        if peers is None:
            self._declines.append(withdrawal)
        for peer in peers or ():
            self._tell(peer, message)

    def _tell(self, peer: PeerHandle, message: Withdraw) -> None:
        """Stock has no word for it."""
        if not peer.has_extension:
            return
        try:
            self._agent.notify(peer.name, encode_extension(message))
        except AgentError as error:
            logger.warning("%s was not told: %s", peer.name, error)

    def _message(self, waiting: PendingRegistration, begin_by: float) -> PushRegistered:
        registration, target = waiting.registration, waiting.registration.target
        identity, geometry = self._context.identity, self._context.geometry
        return PushRegistered(
            request_id=registration.request_id,
            decode_engine_id=identity.engine_id,
            decode_host=identity.host,
            decode_port=identity.port,
            decode_tp_size=identity.tp_size,
            local_block_ids=self._awaited(registration),
            remote_engine_id=target.address.engine_id,
            remote_host=target.address.host,
            remote_port=target.address.port,
            remote_tp_size=target.tp_size,
            remote_pp_size=target.address.pp_size,
            transfer_id=target.transfer_id,
            disagg=PushExtension(
                generation=waiting.generation,
                first_token=registration.first_token,
                last_token=registration.last_token,
                digest=registration.digest,
                remote_request_id=target.remote_request_id,
                begin_by=begin_by,
                tp_rank=geometry.tp_rank,
                pp_rank=geometry.pp_rank,
                pp_size=identity.pp_size,
            ),
        )

    def _awaited(self, registration: PushRegistration) -> BlockIds:
        """Those of the tokens that are to be written, and of a state the one that it has."""
        geometry = self._context.geometry
        first = registration.first_token // geometry.block_size
        last = -(-registration.last_token // geometry.block_size)
        windows = geometry.group_windows
        groups = zip(registration.local_block_ids, windows, strict=True)
        awaited = tuple(ids if window == STATE else ids[first:last] for ids, window in groups)
        return without_holes(awaited, windows)

    def _find(self, request_id: str, sender: str, generation: int) -> PendingRegistration | None:
        waiting = self._waiting.get(request_id)
        if waiting is None or sender not in waiting.peers or generation != waiting.generation:
            return None
        return waiting

    def _end(self, waiting: PendingRegistration, *, ok: bool) -> None:
        del self._waiting[waiting.request_id]
        self._report(waiting, ok=ok)

    def _report(self, waiting: PendingRegistration, *, ok: bool) -> None:
        """Once."""
        if waiting.is_reported:
            return
        waiting.is_reported = True
        if ok:
            self._stats.pushes_received += 1
        elif waiting.is_aborted:
            self._stats.pushes_aborted += 1
        else:
            self._stats.pushes_missed += 1
        if waiting.problem is not None and not ok and not waiting.is_aborted:
            self._results.explain(waiting.request_id, waiting.problem)
        self._results.received(waiting.request_id, ok=ok)
