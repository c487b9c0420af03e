"""What the owner thread does in one step: leases as source, heartbeats and READs as reader.

A *source* is an engine whose blocks others read, in either role: P after a prefill leg, D between
two turns. A *reader* is an engine that reads them.

Step
    `apply` carries out the orders of one engine step, in the order in which they were decided.
    `step` receives notifications, moves every protocol on without blocking, and returns how long
    the thread may sleep. Nothing else touches the agent. A fault in one part is logged and stops
    no other part: leases expire whatever a READ does.

Quarantine
    NIXL cannot stop a transfer. A transfer that outlives its deadline has failed for its request,
    but its data may still arrive in our blocks, or leave them. These blocks are in quarantine until
    NIXL has reported the end. See pulls.py and `engine_ext.push` for which deadline applies.

Fence
    Before the host frees blocks that a load may touch, it orders a fence (`Fence`)
    and keeps the blocks. The fence gives up the request's load. It is answered, as
    `finished_sending`, in the first step in which nothing `touches` the request: no transfer runs,
    waits for a handshake, or is in quarantine. The end of a lease whose blocks a WRITE still reads
    is reported by the same rule.

Push mode adds one component (`PushComponent`, built by engine_ext/connector.py). An engine in pull
mode has none and refuses what other engines push.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import assert_never

from engine_ext.common import orders
from engine_ext.common.inspection import Inspection, first, first_of
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.orders import Order, PushOrder, StepMetadata
from engine_ext.common.types import LoanRequest, PeerAddress, RemoteSource, ReportCheck
from engine_ext.wire import notifications as wire
from engine_ext.wire.notifications import (
    batch_ids,
    decode_notification,
    encode_extension,
    encode_heartbeat,
)
from engine_ext.worker.agent import AgentError, PeerHandle
from engine_ext.worker.checksums import BlockMemory, Checksums, HostBlocks
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.heartbeats import Beat, HeartbeatTracker
from engine_ext.worker.lease_service import LeaseService
from engine_ext.worker.leases import NEVER, LeaseTable
from engine_ext.worker.loan_asks import LoanAsks
from engine_ext.worker.peers import Peers
from engine_ext.worker.pulls import Pulls, encode_read
from engine_ext.worker.push_component import (
    NO_PUSH,
    KvTransfers,
    LoopParts,
    PushComponent,
    PushFactory,
    refusal_of_push,
)
from engine_ext.worker.reply_channels import ReplyChannels
from engine_ext.worker.validator import TRUSTING

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

TRANSFER_WAIT = 20e-6
RECENT_WAIT = 1e-3
PEER_WAIT = 5e-3
LEASED_WAIT = 25e-3
IDLE_WAIT = 50e-3
"""Seconds."""
WAIT_SHARE = 0.01
"""The thread sleeps for this share of the time since the last event, within the waits above: the
next event is noticed late by at most 1 % of the time that passed without one."""


class TransferLoop:
    """One `step` at a time. The time is passed in. It is read from the context's clock only where
    it must be later than an event: a message that came, a transfer that has ended.

    `open_push` is needed in push mode and refused in pull mode. `blocks` reads the KV memory for
    checksums, by default in host memory. Raises ValueError.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        open_push: PushFactory | None = None,
        blocks: BlockMemory | None = None,
    ) -> None:
        config = context.config
        if (config.transfer_mode == "push") != (open_push is not None):
            raise ValueError(f"transfer mode {config.transfer_mode}, push component: {open_push}")
        self._context = context
        self._agent, self._stats, self._results = context.agent, context.stats, context.results
        checksums: Checksums | None = None
        if config.checksums:
            checksums = Checksums(context.regions, context.geometry, blocks or HostBlocks())
        self._checksums = checksums
        self._peers = Peers(context, is_in_use=self._is_in_use)
        self._leases = LeaseTable(config.lease_extension, config.revoke_grace, context.stats)
        self._channels = ReplyChannels(
            context.agent,
            config.unused_ttl,
            is_peer=self._peers.knows,
            # With a secret, a hello without a valid seal does not arrive here.
            validator=context.validator if config.access.secret is None else TRUSTING,
        )
        self.beats = HeartbeatTracker(config.heartbeat_interval)
        self._pulls = Pulls(
            context,
            peers=self._peers,
            beats=self.beats,
            decline=self._decline,
            checksums=checksums,
        )
        self._loan_asks = LoanAsks(
            context, peers=self._peers, beats=self.beats, may_read=self._pulls.may_read
        )
        self._push: PushComponent | None = None
        self._transfers: tuple[KvTransfers, ...] = (self._pulls,)
        if open_push is not None:
            self._push = open_push(
                LoopParts(
                    context, self._peers, self.beats, self._leases, self._channels, self._free
                )
            )
            self._transfers = (self._pulls, self._push)
        self._lease_service = LeaseService(
            context,
            leases=self._leases,
            channels=self._channels,
            free=self._free,
            push=self._push,
            checksums=checksums,
        )
        self._declines: list[RemoteSource] = []
        self._fences: set[str] = set()
        self._checks: dict[tuple[str, bool], ReportCheck] = {}
        """The latest check of each request's load, and of its kept blocks."""
        self._last_event = NEVER
        self._only_messages_until = NEVER
        """Before this, a step without an order only looks for notifications."""
        # In this order, a renewal that has arrived counts before `_lease_service.step` ends leases,
        # and a fence is answered in the step in which its last transfer ends.
        self._parts: tuple[Callable[[float], object], ...] = (
            *(() if checksums is None else (lambda now: checksums.step(),)),
            self._receive,
            context.validator.step,
            self._peers.step,
            self._loan_asks.step,
            self._pulls.step,
            *(() if self._push is None else self._push.steps),
            self._answer_fences,
            self._answer_checks,
            self._send_declines,
            self._send_heartbeats,
            self._lease_service.step,
            self._channels.step,
        )

    def apply(self, meta: StepMetadata, now: float) -> None:
        """An order that fails, by a fault of ours, costs no other order."""
        self._last_event = now
        self._only_messages_until = NEVER
        for order in meta.orders:
            try:
                self._carry_out(order, now)
            except Exception:
                logger.exception("order: %.200r", order)

    def _carry_out(self, order: Order, now: float) -> None:
        push = self._push
        if isinstance(order, PushOrder):
            if push is not None:
                push.carry_out(order, now)
            return
        match order:
            case orders.Expect(request_id, transfer_id):
                self._leases.expect(request_id)
                if push is not None:
                    push.expect(request_id, transfer_id)
            case orders.ExpectTurn(request_id):
                self._leases.expect(request_id)
            case orders.LeaseCancel(request_id, transfer_id, is_turn):
                self._leases.cancel(request_id)
                if push is not None and not is_turn:
                    push.cancel(request_id, now, transfer_id)
            case orders.LeaseGrant():
                self._lease_service.grant(order, now)
            case orders.LoanAnswer():
                self._lease_service.lend(order, now)
            case orders.Revoke(request_id):
                self._lease_service.revoke(request_id, now)
            case orders.TrackOrder(request_id, address, remote_id):
                self.beats.track(request_id, address, remote_id, now)
            case orders.Untrack(request_id):
                self.beats.untrack(request_id)
                self._loan_asks.give_up(request_id)
                if push is not None:
                    push.end_inquiry(request_id)
            case orders.LoanAsk():
                self._loan_asks.start(order, now)
            case orders.PullOrder():
                self._pulls.start(order, now)
            case orders.Decline(source):
                self._decline(source)
            case orders.Fence(request_id):
                self._fences.add(request_id)
                self._pulls.give_up(request_id)
            case orders.FailLoad(request_id):
                self._results.received(request_id, ok=False)
            case ReportCheck(request_id, _, is_load):
                self._checks[request_id, is_load] = order
            case orders.SaveOrder():
                pass  # The engine's thread makes the copies: see staging.py.
            case _:
                assert_never(order)

    def step(self, now: float) -> float:
        """Move everything on. Return the seconds after which it wants to be called again."""
        # NIXL wakes no thread, so a decode engine that waits for P's WRITE looks every `PEER_WAIT`.
        # Only a message, an order or a deadline changes anything there, and the deadline may be
        # noticed late by `LEASED_WAIT`: a full step would cost three times as much.
        if now < self._only_messages_until and not self._receive(now):
            return self._wait_up_to(PEER_WAIT, now)
        self._only_messages_until = NEVER
        is_faulty = False
        for part in self._parts:
            try:
                part(now)
            except Exception:
                logger.exception("transfer loop")
                is_faulty = True
        self._stats.leases_active = self._leases.num_held
        num_quarantined = 0
        for transfers in self._transfers:
            for seen in transfers.quarantined(now):
                num_quarantined += seen.num_blocks
        self._stats.quarantined_blocks_active = num_quarantined
        return IDLE_WAIT if is_faulty else self._wait(now)

    @property
    def has_unsent(self) -> bool:
        """Messages to other engines wait for a handshake or for validated metadata."""
        is_push_waiting = self._push is not None and self._push.has_unsent
        return bool(self._declines) or is_push_waiting or self._channels.num_delayed > 0

    @property
    def num_open(self) -> int:
        """Leases, transfers, heartbeats, fences and messages that have not come to an end."""
        return (
            len(self._leases)
            + len(self.beats)
            + sum(transfers.num_open for transfers in self._transfers)
            + len(self._declines)
            + len(self._fences)
            + len(self._checks)
            + self._loan_asks.num_open
            + self._channels.num_delayed
        )

    def inspect(self, now: float, request_id: str | None = None) -> Inspection:
        """Return leases and quarantine of one request only, if one is named."""
        quarantined = [seen for transfers in self._transfers for seen in transfers.quarantined(now)]
        return Inspection(
            tp_rank=self._context.geometry.tp_rank,
            leases=first_of(request_id, self._leases.seen(now)),
            num_leases=len(self._leases),
            quarantined=first_of(request_id, quarantined),
            num_quarantined=len(quarantined),
            peers=first(self._peers.seen(now)),
            num_peers=self._peers.num_ready,
            engine_id=self._context.identity.engine_id,
            transfers=self._context.log.transfers(now),
            moved=self._context.log.moved(),
        )

    def revoke_all(self, now: float) -> None:
        """The memory goes away: notify every engine that still waits to read it."""
        self._lease_service.revoke_all(now)
        if self._push is not None:
            self._push.leave(now)

    def close(self) -> None:
        self._peers.close()
        self._context.validator.close()
        self._agent.close()

    def _is_in_use(self, peer: PeerHandle) -> bool:
        return any(transfers.uses(peer) for transfers in self._transfers)

    def _touches(self, request_id: str) -> bool:
        return any(transfers.touches(request_id) for transfers in self._transfers)

    def _wait(self, now: float) -> float:
        if self._checksums is not None and self._checksums.is_busy:
            return 0.0
        times = [began for one in self._transfers if (began := one.youngest_began) is not None]
        if times:
            # A transfer that hangs must not cost the engine a core until its deadline.
            return max(TRANSFER_WAIT, min(WAIT_SHARE * (now - max(times)), RECENT_WAIT))
        if self._peers.num_connecting or self._context.validator.num_pending:
            return RECENT_WAIT
        longest = LEASED_WAIT if len(self._leases) or len(self.beats) else IDLE_WAIT
        has_steps = any(transfers.needs_steps(now) for transfers in self._transfers)
        if has_steps or self._loan_asks.num_open:
            longest = PEER_WAIT
        elif any(transfers.awaits_message for transfers in self._transfers):
            longest = PEER_WAIT
            self._only_messages_until = now + LEASED_WAIT
        return self._wait_up_to(longest, now)

    def _wait_up_to(self, longest: float, now: float) -> float:
        return max(RECENT_WAIT, min(WAIT_SHARE * (now - self._last_event), longest))

    def _receive(self, now: float) -> bool:
        """Return whether there were notifications."""
        try:
            messages = self._agent.notifications()
        except AgentError as error:
            logger.warning("%s", error)
            return False
        if not messages:
            return False
        # What is granted to a sender counts from when it asked, which was before this.
        received_at = self._context.clock()
        for sender, message in messages:
            notification = decode_notification(message)
            self._channels.note_message(sender, received_at)
            if not isinstance(notification, wire.Renewed):  # It ends an exchange: nothing follows.
                self._last_event = now
            try:
                self._handle(sender, notification, received_at)
            except AgentError as error:
                logger.warning("a notification of %s was not handled: %s", sender, error)
            except Exception:
                logger.exception("a notification of %s was not handled: %.200r", sender, message)
        return True

    def _handle(self, sender: str, notification: wire.Notification, now: float) -> None:
        leases = self._lease_service
        match notification:
            case wire.ReadDone() as read_done if leases.read_done(sender, read_done, now):
                pass
            case wire.ReadDone() as late:
                self._stats.confirmations_late += 1
                self._ignore(late)
            case wire.Heartbeat() as heartbeat:
                leases.heartbeat(sender, heartbeat, now)
            case wire.Hello(metadata):
                self._channels.hello(sender, metadata, now)
            case wire.Renew() as renew:
                leases.renew(sender, renew, now)
            case wire.Renewed() as renewed:
                self._renewed(sender, renewed, now)
            case wire.Read() as read:
                leases.read(sender, read, now)
            case wire.ReadAck(sequence, valid, sums):
                self._pulls.answered(sender, sequence, valid, sums)
            case wire.Gone(remote_ids):
                self._gone(sender, remote_ids)
            case wire.AskLoan(sequence, scheme, keys):
                self._ask_loan(LoanRequest(sender, sequence, scheme, keys))
            case wire.Loan() as loan:
                self._loan_asks.answered(sender, loan, now)
            case (
                wire.PushRegistered()
                | wire.PushDone()
                | wire.PushFailed()
                | wire.Withdraw()
                | wire.AwaitPrompt()
                | wire.PromptReady()
                | wire.ReturnBlocks()
            ):
                if self._push is None:
                    self._refuse_push(sender, notification)
                else:
                    self._push.receive(notification, sender, now)
            case unknown:
                self._ignore(unknown)

    def _ask_loan(self, request: LoanRequest) -> None:
        """Pass it on to the scheduler half, if the reader can be answered."""
        if not self._channels.knows(request.reader):
            return
        if not (self._context.geometry.lends and self._results.loan_requested(request)):
            self._channels.answer(request.reader, wire.Loan(request.sequence, may_hold_more=True))

    def _ignore(self, notification: wire.Notification) -> None:
        self._stats.notifications_unknown += 1
        logger.warning("ignored notification %.200r", notification)

    def _refuse_push(self, sender: str, notification: wire.Notification) -> None:
        if isinstance(notification, wire.PushRegistered):
            logger.warning("push to request %s: %s", notification.request_id, NO_PUSH)
            self._stats.pushes_failed += 1
        answer = refusal_of_push(notification)
        if answer is not None:
            self._channels.answer(sender, answer)

    def _renewed(self, sender: str, answer: wire.Renewed, now: float) -> None:
        # Only an agent that was asked may set its clock here: the clock ends quarantines.
        was_asked = self.beats.answered(
            sender, answer.sequence, answer.seconds, answer.gone, answer.shorter
        )
        if was_asked and self._push is not None:
            self._push.clock_reported(sender, answer.clock, now)

    def _gone(self, sender: str, remote_ids: tuple[str, ...]) -> None:
        """Confirm what we do not read now; a READ under way ends with a message of its own."""
        lost = self.beats.lost(sender, remote_ids)
        being_read = {one.remote_id for one in lost if self._pulls.reads(one.request_id)}
        for engine_id, remote_id in {(one.address.engine_id, one.remote_id) for one in lost}:
            if remote_id not in being_read:
                self.beats.confirm(engine_id, remote_id)
                self._agent.notify(sender, encode_extension(wire.Read(remote_id)))

    def _free(self, request_id: str) -> None:
        """Its lease has ended; a part of the prompt may be under way all the same."""
        if self._checksums is not None:
            self._checksums.forget(request_id)
        if self._touches(request_id):
            self._fences.add(request_id)
        else:
            self._results.sent(request_id)

    def _answer_fences(self, now: float) -> None:
        if not self._fences:
            return
        touched = {request_id for request_id in self._fences if self._touches(request_id)}
        for request_id in self._fences - touched:
            self._results.sent(request_id)
        self._fences = touched

    def _answer_checks(self, now: float) -> None:
        for key, check in list(self._checks.items()):
            if not self._is_open(check):
                del self._checks[key]
                self._results.lost(check)

    def _is_open(self, check: ReportCheck) -> bool:
        """Return True if the load's end, or the end of the kept blocks, is reported later."""
        name = check.request_id
        if check.is_load:
            return any(transfers.loads(name) for transfers in self._transfers)
        return name in self._fences or self._leases.is_held(name) or self._touches(name)

    def _decline(self, source: RemoteSource) -> None:
        """Another engine may have our engine_id, at an address of its own."""
        identity = self._context.identity
        has_our_id = source.address.engine_id == identity.engine_id
        is_leased = self._leases.knows(source.request_id)
        if has_our_id and (is_leased or identity.is_at(source.address)):
            self._lease_service.confirm(source.request_id, self._context.clock())
        else:
            self._declines.append(source)

    def _send_declines(self, now: float) -> None:
        """Notify sources that we will not read. A message is dropped when no handshake succeeds.
        Where another request of ours waits for the same lease, that request's end counts for both:
        to the source we are one reader."""
        sources, self._declines = self._declines, []
        for source in sources:
            if self.beats.waits_for(source.address.engine_id, source.request_id):
                continue
            if self._notify(source.address, partial(self._send_decline, source), now):
                self.beats.confirm(source.address.engine_id, source.request_id)
            else:
                self._declines.append(source)

    def _notify(self, address: PeerAddress, send: Callable[[PeerHandle], None], now: float) -> bool:
        """Return False while a handshake runs. A programming error costs no other engine's
        message."""
        try:
            return self._peers.notify_all(address, now, send)
        except Exception:
            logger.exception("engine %s was not notified", address.engine_id)
            return True

    def _send_decline(self, source: RemoteSource, peer: PeerHandle) -> None:
        self._agent.notify(peer.name, encode_read(source, peer))

    def _send_heartbeats(self, now: float) -> None:
        for beat in self.beats.due(now):
            if not self._notify(beat.address, partial(self._send_beat, beat), now):
                self.beats.retry(beat.address, now)

    def _send_beat(self, beat: Beat, peer: PeerHandle) -> None:
        if peer.has_extension and beat.is_repeated:
            # It may not know where to answer: what introduced us can be lost like any message.
            self._agent.notify(peer.name, encode_extension(wire.Hello(self._agent.metadata())))
        for ids in batch_ids(beat.remote_ids):
            if peer.has_extension:
                sequence = next(self._context.sequence)
                # Recorded before it is sent: a heartbeat that cannot be sent counts as unanswered.
                self.beats.sent(sequence, beat.address, peer.name, ids, self._context.clock())
                self.beats.follow(beat.address, peer.lease_extension)
                self._agent.notify(peer.name, encode_extension(wire.Renew(sequence, ids)))
            else:
                self._agent.notify(peer.name, encode_heartbeat(ids))
        self._stats.heartbeats_sent += 1
