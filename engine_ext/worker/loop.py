"""What the owner thread does: leases and answers as holder, reads and heartbeats as reader."""

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.inspection import Inspection, first, first_of
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import (
    CacheGeometry,
    Clock,
    ConnectorStats,
    EngineIdentity,
    LeaseCancel,
    PeerAddress,
    Region,
    RemoteSource,
    StepMetadata,
    TrackOrder,
)
from engine_ext.layout.ranks import TensorRank
from engine_ext.push.matcher import PushWriter
from engine_ext.push.outgoing_inquiries import AwaitedPrompts
from engine_ext.push.registrations import Registrations
from engine_ext.push.remote_clocks import RemoteClocks
from engine_ext.wire.dialer import Dialer
from engine_ext.wire.notifications import (
    AwaitPrompt,
    Gone,
    Heartbeat,
    Hello,
    Notification,
    PromptReady,
    PushDone,
    PushFailed,
    PushRegistered,
    Read,
    ReadAck,
    ReadDone,
    Renew,
    Renewed,
    ReturnBlocks,
    Withdraw,
    batch_ids,
    decode_notification,
    encode_extension,
    encode_heartbeat,
    encode_read_done,
)
from engine_ext.worker.agent import Agent, AgentError, PeerHandle
from engine_ext.worker.checksums import BlockMemory, Checksums, HostBlocks
from engine_ext.worker.heartbeats import Beat, HeartbeatTracker
from engine_ext.worker.lease_service import Holder
from engine_ext.worker.leases import NEVER, LeaseTable
from engine_ext.worker.peers import PeerError, Peers
from engine_ext.worker.pulls import Pulls
from engine_ext.worker.reply_channels import Readers
from engine_ext.worker.results import Results, TransferReport
from engine_ext.worker.validator import TRUSTING, Validator

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

READING_WAIT = 20e-6
RECENT_WAIT = 1e-3
REGISTERED_WAIT = 5e-3
LEASED_WAIT = 25e-3
IDLE_WAIT = 50e-3
PATIENCE = 0.01
"""What comes next is noticed after at most this share of the time that nothing came, within the
waits above: waking costs more than looking."""


class TransferLoop:
    """One `step` at a time. The time is passed in, and read from `clock` where it must be later
    than something that has happened: a message that came, a transfer that has ended."""

    def __init__(
        self,
        agent: Agent,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        identity: EngineIdentity,
        regions: tuple[Region, ...],
        results: Results,
        stats: ConnectorStats,
        clock: Clock,
        dialer: Dialer | None = None,
        validator: Validator = TRUSTING,
        blocks: BlockMemory | None = None,
    ) -> None:
        """`blocks`: where they lie, if not in host memory."""
        us = TensorRank(geometry.tp_rank, identity.tp_size)
        sequence = itertools.count(1)
        max_quarantined = int(config.quarantine_share * geometry.num_blocks)
        self._agent = agent
        self._tp_rank = geometry.tp_rank
        self._identity = identity
        self._results = results
        self._stats = stats
        self._checksums = (
            Checksums(regions, geometry, blocks or HostBlocks()) if config.checksums else None
        )
        self._clock = clock
        self._sequence = sequence
        self._validator = validator
        self._peers = Peers(
            agent,
            config,
            geometry,
            regions,
            identity,
            stats,
            us,
            self._is_in_use,
            dialer,
            validator,
        )
        self._leases = LeaseTable(config.lease_extension, config.revoke_grace, stats)
        # With a secret, only its holders are heard to say hello.
        arriving = validator if config.access.secret is None else TRUSTING
        self._readers = Readers(agent, config.unused_ttl, self._peers.knows, arriving)
        self._report = TransferReport(clock)
        self._writer = PushWriter(
            agent,
            self._peers,
            self._readers,
            self._leases,
            config,
            us,
            stats,
            clock,
            self._report,
            on_free=self._free,
        )
        self._holder = Holder(
            self._leases,
            self._readers,
            config.lease_extension,
            stats,
            on_free=self._free,
            alias=self._writer.request_of,
            on_read=self._writer.forget,
            on_unread=self._writer.cancel,
            checksums=self._checksums,
        )
        self._beats = HeartbeatTracker(config.heartbeat_interval)
        self._pulls = Pulls(
            agent,
            self._peers,
            self._beats,
            sequence,
            results,
            config,
            stats,
            clock,
            self._report,
            decline=self._decline,
            max_quarantined=max_quarantined,
            checksums=self._checksums,
        )
        self._clocks = RemoteClocks()
        self._registrations = Registrations(
            agent,
            self._peers,
            self._beats,
            self._clocks,
            sequence,
            results,
            config,
            geometry,
            identity,
            stats,
            max_quarantined,
        )
        self._awaited = AwaitedPrompts(agent, self._peers, self._beats, results, config, stats)
        self._declines: list[RemoteSource] = []
        self._fences: set[str] = set()
        self._last_event = NEVER
        self._orders = self._orders_in_turn()
        self._parts: tuple[Callable[[float], None], ...] = (
            self._sum_up,
            self._receive,
            self._validator.step,
            self._peers.step,
            self._pulls.step,
            self._writer.step,
            self._registrations.step,
            self._awaited.step,
            self._answer_fences,
            self._send_declines,
            self._send_heartbeats,
            self._holder.step,
            self._readers.step,
        )

    def apply(self, meta: StepMetadata, now: float) -> None:
        """An order that fails, by a fault of ours, costs no other order."""
        self._last_event = now
        for name, obey in self._orders:
            for order in getattr(meta, name):
                try:
                    obey(order, now)
                except Exception:
                    logger.exception("order of %s: %.200r", name, order)

    def _orders_in_turn(self) -> tuple[tuple[str, Callable[[Any, float], object]], ...]:
        """Fields of `StepMetadata`, and what each order in them is for."""
        return (
            ("expects", self._expect),
            ("transfer_names", lambda named, now: self._writer.name(*named)),
            ("drafts", self._writer.draft),
            ("cancels", self._cancel),
            ("grants", self._holder.grant),
            ("revokes", self._holder.revoke),
            ("tracks", self._track),
            ("inquiries", self._awaited.ask),
            ("pulls", lambda order, now: self._pulls.start(order)),
            ("untracks", lambda request_id, now: self._untrack(request_id)),
            ("offers", self._writer.offer),
            ("registrations", self._registrations.register),
            ("withdrawals", self._registrations.withdraw),
            ("reclaims", self._registrations.reclaim),
            ("give_backs", self._registrations.give_back),
            ("declines", lambda source, now: self._decline(source)),
            ("fences", lambda request_id, now: self._fence(request_id)),
            ("failures", lambda request_id, now: self._results.received(request_id, ok=False)),
        )

    def _expect(self, request_id: str, now: float) -> None:
        self._leases.expect(request_id)
        self._writer.expect(request_id)

    def _cancel(self, cancel: LeaseCancel, now: float) -> None:
        self._leases.cancel(cancel.request_id)
        self._writer.cancel(cancel.request_id, now, cancel.transfer_id)

    def _track(self, track: TrackOrder, now: float) -> None:
        self._beats.track(track.request_id, track.address, track.remote_id, now)

    def _untrack(self, request_id: str) -> None:
        self._beats.untrack(request_id)
        self._awaited.end(request_id)

    def _fence(self, request_id: str) -> None:
        self._fences.add(request_id)
        self._pulls.give_up(request_id)

    def step(self, now: float) -> float:
        """Moves everything on; returns the seconds after which it wants to be called again.

        A fault of ours in one part does not stop the others: leases end whatever a READ does.
        """
        is_faulty = False
        for part in self._parts:
            try:
                part(now)
            except Exception:
                logger.exception("transfer loop")
                is_faulty = True
        self._count(now)
        return IDLE_WAIT if is_faulty else self._wait(now)

    @property
    def owes_messages(self) -> bool:
        """Holders wait to hear that we will not read, or readers for their answers."""
        is_owed = bool(self._declines) or self._registrations.owes_messages
        return is_owed or self._readers.num_delayed > 0

    @property
    def num_open(self) -> int:
        """Leases, loads, heartbeats, fences and messages that have not come to an end."""
        return (
            len(self._leases)
            + len(self._beats)
            + self._pulls.num_active
            + self._pulls.num_quarantined
            + len(self._writer.writes)
            + self._writer.num_waiting
            + self._registrations.num_active
            + len(self._awaited)
            + len(self._declines)
            + len(self._fences)
            + self._readers.num_delayed
        )

    def inspect(self, now: float, asked: str | None = None) -> Inspection:
        """Leases and quarantine of request `asked` only, if one is named."""
        quarantined = [
            *self._pulls.quarantined(now),
            *self._writer.writes.quarantined(now),
            *self._registrations.quarantined(now),
        ]
        return Inspection(
            tp_rank=self._tp_rank,
            leases=first_of(asked, self._leases.seen(now)),
            num_leases=len(self._leases),
            quarantined=first_of(asked, quarantined),
            num_quarantined=len(quarantined),
            peers=first(self._peers.seen(now)),
            num_peers=self._peers.num_ready,
            engine_id=self._identity.engine_id,
            transfers=self._report.transfers(now),
            moved=self._report.moved(),
        )

    def revoke_all(self, now: float) -> None:
        """The memory goes away: whoever still waits to read it is told."""
        self._holder.revoke_all(now)
        self._writer.leave(now)

    def close(self) -> None:
        self._peers.close()
        self._validator.close()
        self._agent.close()

    def _is_in_use(self, peer: PeerHandle) -> bool:
        return self._pulls.uses(peer) or self._writer.writes.uses(peer)

    def _count(self, now: float) -> None:
        self._stats.leases_active = self._leases.num_held
        self._stats.pushes_active = len(self._writer.writes) + self._registrations.num_active
        self._stats.quarantined_blocks_active = (
            self._pulls.num_blocks_quarantined
            + self._registrations.num_blocks_quarantined
            + self._writer.writes.num_blocks_quarantined(now)
        )

    def _sum_up(self, now: float) -> None:
        if self._checksums is not None:
            self._checksums.step()

    def _wait(self, now: float) -> float:
        if self._checksums is not None and self._checksums.is_busy:
            return 0.0
        moving = (self._pulls.youngest_began, self._writer.writes.youngest_began)
        began = max((one for one in moving if one is not None), default=None)
        if began is not None:
            # A transfer that hangs must not cost the engine a core until its deadline.
            return max(READING_WAIT, min(PATIENCE * (now - began), RECENT_WAIT))
        if self._peers.num_connecting or self._validator.num_pending:
            return RECENT_WAIT
        return max(RECENT_WAIT, min(PATIENCE * (now - self._last_event), self._longest_wait()))

    def _longest_wait(self) -> float:
        waits_for_p = self._registrations.num_active or len(self._awaited)
        if waits_for_p or self._pulls.num_quarantined or self._writer.writes:
            return REGISTERED_WAIT
        return LEASED_WAIT if len(self._leases) or len(self._beats) else IDLE_WAIT

    def _receive(self, now: float) -> None:
        messages = self._notifications()
        # What is granted to a sender counts from when it asked, which was before this.
        received_at = self._clock()
        for sender, message in messages:
            notification = decode_notification(message)
            self._readers.heard(sender, received_at)
            if not isinstance(notification, Renewed):  # It ends an exchange: nothing follows.
                self._last_event = now
            try:
                self._handle(sender, notification, received_at)
            except AgentError as error:
                logger.warning("a notification of %s was not handled: %s", sender, error)
            except Exception:
                logger.exception("a notification of %s was not handled: %.200r", sender, message)

    def _notifications(self) -> list[tuple[str, bytes]]:
        try:
            return self._agent.notifications()
        except AgentError as error:
            logger.warning("%s", error)
            return []

    def _handle(self, sender: str, notification: Notification, now: float) -> None:
        match notification:
            case ReadDone() as read_done if self._holder.read_done(sender, read_done, now):
                pass
            case ReadDone() as late:
                self._stats.confirmations_late += 1
                self._ignore(late)
            case Heartbeat() as heartbeat:
                self._holder.heartbeat(sender, heartbeat, now)
            case Hello(metadata):
                self._readers.hello(sender, metadata, now)
            case Renew() as renew:
                self._holder.renew(sender, renew, now)
            case Renewed() as renewed:
                self._renewed(sender, renewed, now)
            case Read() as read:
                self._holder.read(sender, read, now)
            case ReadAck(sequence, valid, sums):
                self._pulls.answered(sender, sequence, valid, sums)
            case Gone(remote_ids):
                self._gone(sender, remote_ids)
            case PushRegistered() as registration:
                self._writer.registered(registration, sender, now)
            case PushDone() as done:
                self._registrations.written(done, sender, now)
            case PushFailed() as failure:
                self._registrations.failed(failure, sender, now)
            case Withdraw() as withdrawal:
                self._writer.withdrawn(withdrawal, sender, now)
            case AwaitPrompt() as inquiry:
                self._writer.awaited(inquiry, sender, now)
            case PromptReady(request_id):
                self._awaited.answered(request_id, sender)
            case ReturnBlocks() as wish:
                self._writer.asked_back(wish, sender)
            case unknown:
                self._ignore(unknown)

    def _ignore(self, notification: Notification) -> None:
        self._stats.notifications_unknown += 1
        logger.warning("ignored notification %.200r", notification)

    def _renewed(self, sender: str, answer: Renewed, now: float) -> None:
        if self._beats.answered(
            sender, answer.sequence, answer.seconds, answer.gone, answer.shorter
        ):
            self._clocks.told(sender, answer.clock, now)

    def _gone(self, sender: str, remote_ids: tuple[str, ...]) -> None:
        """Confirms what we do not read now; a READ under way ends with a message of its own."""
        lost = self._beats.lost(sender, remote_ids)
        being_read = {one.remote_id for one in lost if self._pulls.reads(one.request_id)}
        for engine_id, remote_id in {(one.address.engine_id, one.remote_id) for one in lost}:
            if remote_id not in being_read:
                self._beats.confirm(engine_id, remote_id)
                self._agent.notify(sender, encode_extension(Read(remote_id)))

    def _free(self, request_id: str) -> None:
        """Its lease has ended; a part of a draft may be under way all the same."""
        if self._checksums is not None:
            self._checksums.forget(request_id)
        if self._writer.writes.touches(request_id):
            self._fences.add(request_id)
        else:
            self._results.sent(request_id)

    def _answer_fences(self, now: float) -> None:
        touched = {
            name
            for name in self._fences
            if any(
                part.touches(name)
                for part in (self._pulls, self._registrations, self._writer.writes)
            )
        }
        for request_id in self._fences - touched:
            self._results.sent(request_id)
        self._fences = touched

    def _decline(self, source: RemoteSource) -> None:
        """Another engine may have our engine_id, at an address of its own."""
        has_our_id = source.address.engine_id == self._identity.engine_id
        is_held = self._leases.knows(source.request_id)
        if has_our_id and (is_held or self._identity.is_at(source.address)):
            self._holder.confirm(source.request_id, self._clock())
        else:
            self._declines.append(source)

    def _send_declines(self, now: float) -> None:
        """Tells holders that we will not read; dropped when no handshake succeeds. Where another
        request of ours waits for the same lease, that one's end speaks for both: to the holder we
        are one reader."""
        sources, self._declines = self._declines, []
        for source in sources:
            if self._beats.waits_for(source.address.engine_id, source.request_id):
                continue
            if self._with_peer(source.address, now, partial(self._send_decline, source)):
                self._beats.confirm(source.address.engine_id, source.request_id)
            else:
                self._declines.append(source)

    def _send_decline(self, source: RemoteSource, peer: PeerHandle) -> None:
        if peer.has_extension:
            self._agent.notify(peer.name, encode_extension(Read(source.request_id, peer.readers)))
        else:
            self._agent.notify(peer.name, encode_read_done(source.request_id, peer.readers))

    def _send_heartbeats(self, now: float) -> None:
        for beat in self._beats.due(now):
            if not self._with_peer(beat.address, now, partial(self._send_beat, beat)):
                self._beats.retry(beat.address, now)

    def _send_beat(self, beat: Beat, peer: PeerHandle) -> None:
        if peer.has_extension and beat.is_repeated:
            # It may not know where to answer: what introduced us can be lost like any message.
            self._agent.notify(peer.name, encode_extension(Hello(self._agent.metadata())))
        for ids in batch_ids(beat.remote_ids):
            if peer.has_extension:
                sequence = next(self._sequence)
                # Before it is: one that cannot be sent is a heartbeat that nobody answers.
                self._beats.sent(sequence, beat.address, peer.name, ids, self._clock())
                self._beats.follow(beat.address, peer.lease_extension)
                self._agent.notify(peer.name, encode_extension(Renew(sequence, ids)))
            else:
                self._agent.notify(peer.name, encode_heartbeat(ids))
        self._stats.heartbeats_sent += 1

    def _with_peer(
        self, address: PeerAddress, now: float, action: Callable[[PeerHandle], None]
    ) -> bool:
        """To every rank of the engine that we face. False while a handshake runs: try again. A
        failure is logged and taken as done."""
        try:
            peers = self._peers.connect_all(address, now, moves_kv=False)
        except PeerError as error:
            logger.warning("engine %s was not told: %s", address.engine_id, error)
            return True
        if peers is None:
            return False
        is_well = True
        for peer in peers:
            try:
                action(peer)
            except AgentError as error:
                logger.warning("engine %s was not told: %s", address.engine_id, error)
                is_well = False
        if not is_well:
            self._peers.forget(address)
        return True
