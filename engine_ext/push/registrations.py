"""Push mode on D: blocks that wait for P's WRITE. Each registration ends in exactly one report.

    CONNECTING --> REGISTERED --(written)----> reported ok
        |              |  \\--(P failed)----> reported failed
        |              +--(deadline, silence, abort)--> WITHDRAWING --> (over)
        |              |                                     ^
        |              +--(reclaim)--> RETURNING --(the same)+
        |              ^                 |   \\--(written)----> reported ok
        |              |                 +--(P returned them)--> RETURNED, reported as returned
        |              +--(other ranks have written)-------------+--(order)----> reported failed
        +--(no handshake)--> reported failed; (reclaim)--> RETURNED

Registration
    D sends its block ids, and until when by P's clock (prefill_engines.py) P may begin its WRITE. D
    repeats the message every few seconds, with a later time. P remembers how each registration
    ended, so a lost message is made good. A number (generation) tells the registrations of one
    request apart.

Withdrawal and quarantine
    D cannot stop P's WRITE. A withdrawn registration is over when P has answered that it writes no
    more, or when P can no longer write: its clock has passed the time by which it had to begin, and
    the bound that P announced for a WRITE to arrive (`write_bound`) has passed too. Until then the
    blocks are in quarantine. The failure is reported at once where the host asks `touches` before
    it frees the blocks, else when the registration is over.

    Both are P's promises, by P's clock. Nothing is concluded from our own settings. With an engine
    that promises nothing, as stock does not, D does not register. Another process at P's address,
    under P's id or not, proves nothing about the one that was asked: that one may be alive and cut
    off.

Ranks of P
    Where P has more ranks than we do, several write. The registration has ended well when all have.
    It has ended badly when one has not and the others can no longer write.

Returning blocks
    Where another request needs the blocks more (engine_ext/scheduler/block_pressure.py), D asks for
    them back. They are returned only when every rank of P has answered that it has not written and
    will not. Silence returns nothing. Where some ranks of P have written, P holds the whole prompt:
    the blocks stay, and D registers again with the other ranks. The same holds among D's own ranks:
    the scheduler half orders the end when all of them have reported the blocks as returned. A rank
    that waits for that order in vain registers again.
"""

import enum
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_ext.common.inspection import QuarantineSeen
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.orders import PushRegistration, PushWithdrawal
from engine_ext.common.states import after
from engine_ext.common.types import (
    STATE,
    BlockIds,
    LoadProblem,
    PeerAddress,
    PushTarget,
    num_blocks_in,
)
from engine_ext.layout.plan import WHOLE, without_holes
from engine_ext.push.decode_engines import GIVEN_UP, OF_REQUEST
from engine_ext.push.prefill_engines import (
    LONGEST_ASKING,
    SILENT_BEATS,
    SILENT_SECONDS,
    RemoteClocks,
)
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
from engine_ext.worker.heartbeats import CLOCK_DRIFT
from engine_ext.worker.leases import NEVER
from engine_ext.worker.peers import PeerError
from engine_ext.worker.push_component import LoopParts

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

RETURNED_SECONDS = 2.0
"""After so long without an order, a rank registers again the blocks that P returned."""
BEGIN_BEATS = 3
"""P may begin a WRITE for the time of so many messages. With a longer time, a silent P keeps our
blocks in quarantine for longer."""


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
    """Agents of P that may still write, by name."""
    begin_by: dict[str, float] = field(default_factory=dict)
    """By name: the latest time, by that agent's clock, until which it may begin."""
    landed_by: dict[str, float] = field(default_factory=dict)
    """By name: when, by our clock, all data of that agent's failed WRITE has arrived."""
    returned: dict[str, PeerHandle] = field(default_factory=dict)
    """Agents that will not write because we asked for the blocks, by name."""
    returned_at: float = NEVER
    was_reported_returned: bool = False
    """Its blocks may be freed as soon as its end is reported."""
    ends_when_returned: bool = False
    """All our ranks have reported it as returned."""
    has_written: bool = False
    """One rank of P has."""
    has_failed: bool = False
    """One rank of P will not write, or our request does not wait any more."""
    is_aborted: bool = False
    """Our request ended while it waited."""
    problem: LoadProblem | None = None
    """The first, other than the end of our request."""
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
        """P was asked to write, and not to stop."""
        return self.state in (RegistrationState.REGISTERED, RegistrationState.RETURNING)

    def on(self, event: RegistrationEvent) -> None:
        self.state = after(_NEXT, self.state, event)

    def meet(self, peers: list[PeerHandle]) -> bool:
        """Take new handles of the agents at P's address. Return False if one that was asked is not
        there any more."""
        self.peers.update((peer.name, peer) for peer in peers if peer.name in self.peers)
        return self.peers.keys() <= {peer.name for peer in peers}


class Registrations:
    """`clocks` is kept up to date by the answers to our heartbeats."""

    def __init__(self, parts: LoopParts, clocks: RemoteClocks) -> None:
        self._context = context = parts.context
        self._agent, self._config = context.agent, context.config
        self._results, self._stats = context.results, context.stats
        self._peers, self._beats, self._clocks = parts.peers, parts.beats, clocks
        self._asks_every = min(context.config.heartbeat_interval, LONGEST_ASKING)
        self._waiting: dict[str, PendingRegistration] = {}
        self._unsent: list[PushWithdrawal] = []

    @property
    def num_active(self) -> int:
        return len(self._waiting)

    def needs_steps(self, now: float) -> bool:
        """P is to be asked, or its handshake, its clock or the end of its WRITE is awaited."""
        return any(
            not waiting.is_wanted or waiting.ask_again_at <= now
            for waiting in self._waiting.values()
        )

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def num_blocks_quarantined(self) -> int:
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
        return request_id in self._waiting

    def loads(self, request_id: str) -> bool:
        """Its end is reported later."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and not waiting.is_reported

    def register(self, registration: PushRegistration, now: float) -> None:
        deadline = now + self._config.push_deadline
        waiting = PendingRegistration(registration, next(self._context.sequence), deadline)
        self._waiting[waiting.request_id] = waiting

    def withdraw(self, withdrawal: PushWithdrawal, now: float) -> None:
        waiting = self._waiting.get(withdrawal.request_id)
        if waiting is None:
            self._unsent.append(withdrawal)
        elif waiting.state in (RegistrationState.CONNECTING, RegistrationState.RETURNED):
            waiting.is_aborted = True
            self._end(waiting, ok=False)
            self._unsent.append(withdrawal)
        elif waiting.is_wanted:
            waiting.is_aborted = True
            self._withdraw(waiting, now)

    def reclaim(self, request_id: str, now: float) -> None:
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
            self._results.ready(request_id)  # These peers cannot return blocks.

    def confirm_returned(self, request_id: str, now: float) -> None:
        """Every rank of ours has reported the blocks as returned."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        waiting.ends_when_returned = True
        if waiting.state is RegistrationState.RETURNED:
            self._end_returned(waiting)
        else:
            self.reclaim(request_id, now)

    def written(self, message: PushDone, sender: str, now: float) -> None:
        waiting = self._find(message.request_id, sender, message.generation)
        if waiting is not None:
            waiting.has_written = True
            self._settle(waiting, sender, now)

    def failed(self, message: PushFailed, sender: str, now: float) -> None:
        waiting = self._find(message.request_id, sender, message.generation)
        if waiting is None:
            return
        if message.blocks_returned and waiting.state is RegistrationState.RETURNING:
            waiting.returned[sender] = waiting.peers[sender]
            self._settle(waiting, sender, now)
            return
        if waiting.is_wanted:
            # When a client disconnects, P's abort may arrive before our own.
            level = logging.INFO if message.reason == GIVEN_UP else logging.WARNING
            logger.log(
                level, "request %s: P will not write: %.200s", waiting.request_id, message.reason
            )
        if waiting.problem is None and not waiting.is_aborted:
            reason = f"P will not write: {message.reason}"
            is_of_pair = message.seconds > 0 or message.reason not in OF_REQUEST
            waiting.problem = LoadProblem(reason, is_of_pair)
        waiting.has_failed = True
        if sender in waiting.landed_by:
            pass  # Its first answer counts.
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
        if waiting.has_failed or not waiting.returned:
            self._end(waiting, ok=not waiting.has_failed)
        elif waiting.has_written:
            self._register_again(waiting)
        else:
            self._return(waiting, now)

    def _return(self, waiting: PendingRegistration, now: float) -> None:
        """P does not write into these blocks; they stay until all our ranks have reported that."""
        waiting.on(RegistrationEvent.RETURN)
        waiting.returned_at = now
        if waiting.ends_when_returned:
            self._end_returned(waiting)
        elif not waiting.was_reported_returned:
            waiting.was_reported_returned = True
            self._results.returned(waiting.request_id)

    def _register_again(self, waiting: PendingRegistration) -> None:
        """Register with the ranks of P that had returned; they hold the whole prompt now."""
        if not waiting.returned:
            waiting.on(RegistrationEvent.CONNECT)
            return
        waiting.on(RegistrationEvent.REGISTER)
        waiting.generation = next(self._context.sequence)
        waiting.peers, waiting.returned = waiting.returned, {}
        waiting.ask_again_at = 0.0

    def _end_returned(self, waiting: PendingRegistration) -> None:
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
        unsent, self._unsent = self._unsent, []
        for withdrawal in unsent:
            try:
                self._send_withdrawal(withdrawal, now)
            except Exception:
                logger.exception("request %s: P was not notified", withdrawal.request_id)

    def _advance(self, waiting: PendingRegistration, now: float) -> None:
        if waiting.state is RegistrationState.WITHDRAWING:
            # Drop peers that can no longer write, and ask the others again.
            for name, peer in list(waiting.peers.items()):
                if self._is_harmless(waiting, peer, now):
                    self._settle(waiting, name, now)
            if waiting.peers:
                self._ask_again(waiting, now)
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
            raise PeerError("P gives no bound for its WRITEs (push_write_bound)")
        if (num_blocks := self.num_blocks_quarantined) > self._context.max_quarantined:
            raise PeerError(f"{num_blocks} blocks are in quarantine")
        if not self._may_ask(waiting, peers, now):
            return
        # Before the first message leaves: a message whose sending failed may have arrived.
        waiting.peers = {peer.name: peer for peer in peers}
        waiting.on(RegistrationEvent.REGISTER)
        self._ask(waiting, peers, now)

    def _may_ask(self, waiting: PendingRegistration, peers: list[PeerHandle], now: float) -> bool:
        """Return whether P's clock is known well enough to give it a time by which to begin."""
        if all(self._clocks.is_fresh(peer.name, now) for peer in peers):
            return True
        self._beats.hurry(waiting.address, now)
        return False

    def _ask_again(self, waiting: PendingRegistration, now: float) -> None:
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
            self._fail(waiting, "P was restarted", now)
        elif waiting.state is not RegistrationState.REGISTERED or self._may_ask(
            waiting, peers, now
        ):
            self._ask(waiting, peers, now)

    def _ask(self, waiting: PendingRegistration, peers: list[PeerHandle], now: float) -> None:
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
            # The latest of all messages: P may act on any of them, in any order.
            waiting.begin_by[peer.name] = max(begin_by, waiting.begin_by.get(peer.name, NEVER))
            return encode_registration(self._message(waiting, begin_by))
        request_id, target = waiting.request_id, waiting.registration.target
        if waiting.state is RegistrationState.RETURNING:
            message = ReturnBlocks(request_id, waiting.generation, target.transfer_id)
            return encode_extension(message)
        return _encode_withdrawal(request_id, waiting.generation, target)

    def _withdraw(self, waiting: PendingRegistration, now: float) -> None:
        waiting.on(RegistrationEvent.WITHDRAW)
        waiting.has_failed = True
        waiting.ask_again_at = now
        # P may still write. A host that fences the blocks may know at once; one that computes into
        # them, or frees them with this report, must wait for P's answer.
        if not (waiting.registration.recomputes or waiting.was_reported_returned):
            self._report(waiting, ok=False)
        try:
            self._ask_again(waiting, now)
        except (PeerError, AgentError) as error:
            logger.warning("request %s: %s", waiting.request_id, error)

    def _is_harmless(self, waiting: PendingRegistration, peer: PeerHandle, now: float) -> bool:
        """By its own clock it is too late to begin, and a WRITE that has begun has arrived."""
        if peer.name in waiting.landed_by:
            return now >= waiting.landed_by[peer.name]
        if not self._clocks.knows(peer.name):
            return False
        began_by = waiting.begin_by.get(peer.name, NEVER)
        return self._clocks.earliest(peer.name, now) > began_by + peer.write_bound

    def _send_withdrawal(self, withdrawal: PushWithdrawal, now: float) -> None:
        """Nothing was registered, but P need not keep its blocks. Stock has no such message."""
        message = _encode_withdrawal(withdrawal.request_id, 0, withdrawal.target)

        def send(peer: PeerHandle) -> None:
            if peer.has_extension:
                self._agent.notify(peer.name, message)

        if not self._peers.notify_all(withdrawal.target.address, now, send):
            self._unsent.append(withdrawal)

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
        """Return the blocks of the tokens to be written. A state has one block in any case."""
        geometry = self._context.geometry
        windows = geometry.group_windows
        groups = zip(registration.local_block_ids, windows, geometry.block_sizes, strict=True)
        awaited = []
        for ids, window, size in groups:
            first, last = WHOLE.between(registration.first_token, registration.last_token, window)
            awaited.append(ids if window == STATE else ids[first // size : -(-last // size)])
        return without_holes(tuple(awaited), windows)

    def _find(self, request_id: str, sender: str, generation: int) -> PendingRegistration | None:
        waiting = self._waiting.get(request_id)
        # A late answer to an earlier registration of the same request must not end this one.
        if waiting is None or sender not in waiting.peers or generation != waiting.generation:
            return None
        return waiting

    def _end(self, waiting: PendingRegistration, *, ok: bool) -> None:
        del self._waiting[waiting.request_id]
        self._report(waiting, ok=ok)

    def _report(self, waiting: PendingRegistration, *, ok: bool) -> None:
        if waiting.is_reported:
            return
        waiting.is_reported = True
        if ok:
            self._stats.pushes_received += 1
        elif waiting.is_aborted:
            self._stats.pushes_aborted += 1
        else:
            self._stats.pushes_missed += 1
        problem = None if ok or waiting.is_aborted else waiting.problem
        self._results.received(waiting.request_id, ok=ok, problem=problem)


def _encode_withdrawal(request_id: str, generation: int, target: PushTarget) -> bytes:
    message = Withdraw(request_id, generation, target.remote_request_id, target.transfer_id)
    return encode_extension(message)
