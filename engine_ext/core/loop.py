"""What the owner thread does: leases and answers as holder, reads and heartbeats as reader."""

import itertools
import logging
from collections.abc import Callable
from functools import partial

from engine_ext.base.config import ConnectorConfig
from engine_ext.base.types import (
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    LeaseGrant,
    PeerAddress,
    Region,
    RemoteSource,
    StepMetadata,
)
from engine_ext.layout.ranks import TensorRank
from engine_ext.push.registration import Registrations
from engine_ext.push.writer import PushWriter
from engine_ext.transfer.agent import Agent, AgentError, PeerHandle
from engine_ext.transfer.heartbeats import Beat, HeartbeatTracker
from engine_ext.transfer.leases import NEVER, LeaseTable
from engine_ext.transfer.peer import PeerError, Peers
from engine_ext.transfer.pull import Pulls
from engine_ext.transfer.readers import Readers
from engine_ext.transfer.results import Results
from engine_ext.wire.dial import Dialer
from engine_ext.wire.notifications import (
    Gone,
    Heartbeat,
    Hello,
    Notification,
    PushDone,
    PushFailed,
    PushRegistered,
    Read,
    ReadAck,
    ReadDone,
    Renew,
    Renewed,
    Withdraw,
    batches,
    decode_notification,
    encode_extension,
    encode_heartbeat,
    encode_read_done,
)

logger = logging.getLogger(__name__)

READING_WAIT = 20e-6
RECENT_WAIT = 1e-3
REGISTERED_WAIT = 5e-3
LEASED_WAIT = 25e-3
IDLE_WAIT = 50e-3
PATIENCE = 0.01
"""What comes next is noticed after at most this share of the time that nothing came, within the
waits above: waking costs more than looking."""


class TransferLoop:
    """One `step` at a time. Time is passed in."""

    def __init__(
        self,
        agent: Agent,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        identity: EngineIdentity,
        regions: tuple[Region, ...],
        results: Results,
        stats: ConnectorStats,
        dialer: Dialer | None = None,
    ) -> None:
        self._agent = agent
        self._identity = identity
        self._results = results
        self._stats = stats
        self._sequence = itertools.count(1)
        self._leases = LeaseTable(config.lease_extension, config.revoke_grace)
        self._readers = Readers(agent)
        self._beats = HeartbeatTracker(config.heartbeat_interval)
        self._peers = Peers(
            agent,
            config,
            geometry,
            regions,
            identity,
            stats,
            TensorRank(geometry.tp_rank, identity.tp_size),
            self._is_in_use,
            dialer,
        )
        self._pulls = Pulls(
            agent,
            self._peers,
            self._beats,
            self._sequence,
            results,
            config,
            stats,
        )
        self._writer = PushWriter(
            agent,
            self._peers,
            self._readers,
            self._leases,
            results,
            config,
            TensorRank(geometry.tp_rank, identity.tp_size),
            stats,
        )
        self._registrations = Registrations(
            agent,
            self._peers,
            self._beats,
            self._sequence,
            results,
            config,
            geometry,
            identity,
            stats,
        )
        self._declines: list[RemoteSource] = []
        self._last_event = NEVER
        self._parts: tuple[Callable[[float], None], ...] = (
            self._receive,
            self._peers.step,
            self._pulls.step,
            self._writer.step,
            self._registrations.step,
            self._send_declines,
            self._send_heartbeats,
            self._expire,
        )

    def apply(self, meta: StepMetadata, now: float) -> None:
        self._last_event = now
        for request_id in meta.expects:
            self._leases.expect(request_id)
        for cancel in meta.cancels:
            self._leases.cancel(cancel.request_id)
            self._writer.cancel(cancel.request_id, now, cancel.transfer_id)
        for grant in meta.grants:
            self._grant(grant, now)
        for request_id in meta.revokes:
            self._revoke(request_id, now)
        for track in meta.tracks:
            self._beats.track(track.request_id, track.address, track.remote_id, now)
        for order in meta.pulls:
            self._pulls.start(order)
        for request_id in meta.untracks:
            self._beats.untrack(request_id)
        for offer in meta.offers:
            self._writer.offer(offer, now)
        for registration in meta.registrations:
            self._registrations.register(registration, now)
        for withdrawal in meta.withdrawals:
            self._registrations.withdraw(withdrawal, now)
        for source in meta.declines:
            self._decline(source)

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
        self._stats.leases_active = self._leases.num_held
        self._stats.pushes_active = self._writer.num_active + self._registrations.num_active
        return IDLE_WAIT if is_faulty else self._wait(now)

    @property
    def owes_messages(self) -> bool:
        """Holders wait to hear that we will not read."""
        return bool(self._declines) or self._registrations.owes_messages

    @property
    def num_open(self) -> int:
        """Leases, loads, heartbeats and messages that have not come to an end."""
        return (
            len(self._leases)
            + len(self._beats)
            + self._pulls.num_active
            + self._writer.num_active
            + self._writer.num_waiting
            + self._registrations.num_active
            + len(self._declines)
        )

    def revoke_all(self, now: float) -> None:
        """The memory goes away: whoever still waits to read it is told."""
        for request_id in self._leases.revoke_all(now):
            self._stats.leases_revoked += 1
            self._tell_gone(request_id)

    def close(self) -> None:
        self._peers.close()
        self._agent.close()

    def _is_in_use(self, peer: PeerHandle) -> bool:
        return self._pulls.uses(peer) or self._writer.uses(peer)

    def _wait(self, now: float) -> float:
        if self._pulls.is_busy or self._writer.is_busy:
            return READING_WAIT
        if self._peers.num_connecting:
            return RECENT_WAIT
        return max(RECENT_WAIT, min(PATIENCE * (now - self._last_event), self._longest_wait()))

    def _longest_wait(self) -> float:
        if self._registrations.num_active:
            return REGISTERED_WAIT
        return LEASED_WAIT if len(self._leases) or len(self._beats) else IDLE_WAIT

    def _receive(self, now: float) -> None:
        for sender, message in self._notifications():
            notification = decode_notification(message)
            if not isinstance(notification, Renewed):  # It ends an exchange: nothing follows.
                self._last_event = now
            try:
                self._handle(sender, notification, now)
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
            case ReadDone(request_id, readers) if self._leases.knows(request_id):
                self._read_done(request_id, readers, sender)
            case ReadDone(request_id) if self._registrations.written(request_id, sender):
                pass
            case Heartbeat(request_ids):
                self._stats.heartbeats_received += 1
                self._leases.renew(map(self._writer.request_of, request_ids), now)
            case Hello(metadata):
                self._readers.hello(metadata)
            case Renew(sequence, request_ids):
                self._renew(sender, sequence, request_ids, now)
            case Renewed(sequence, gone):
                self._beats.answered(sequence, gone)
            case Read(request_id, readers, sequence):
                self._read(sender, request_id, readers, sequence, now)
            case ReadAck(sequence, valid):
                self._pulls.answered(sender, sequence, valid)
            case Gone(request_ids):
                self._beats.lost(request_ids)
            case PushRegistered() as registration:
                self._writer.registered(registration, sender, now)
            case PushDone(request_id, generation):
                self._registrations.written(request_id, sender, generation)
            case PushFailed(request_id, generation, reason):
                self._registrations.failed(request_id, sender, generation, reason, now)
            case Withdraw() as withdrawal:
                self._writer.withdrawn(withdrawal, sender, now)
            case unknown:
                self._stats.notifications_unknown += 1
                logger.warning("ignored notification %.200r", unknown)

    def _renew(self, sender: str, sequence: int, request_ids: tuple[str, ...], now: float) -> None:
        self._stats.heartbeats_received += 1
        asked = {self._writer.request_of(name): name for name in request_ids}
        gone = self._leases.renew(asked, now)
        kept = asked.keys() - set(gone)
        # A rank that has read its share renews until the other ranks of its engine have.
        waiting = {name for name in kept if not self._leases.is_read_by(name, sender)}
        self._readers.renewed(sender, waiting)
        self._readers.answer(sender, Renewed(sequence, tuple(asked[name] for name in gone)))

    def _read(self, sender: str, request_id: str, readers: int, sequence: int, now: float) -> None:
        valid = self._leases.knows(request_id)
        if sequence:
            self._readers.answer(sender, ReadAck(sequence, valid))
        if not valid:
            return
        others_wait = self._readers.has_read(sender, request_id)
        if others_wait and self._leases.would_end(request_id, readers, sender):
            # A request sent twice: what the other is reading must not change before it is told.
            self._revoke(request_id, now)
        else:
            self._read_done(request_id, readers, sender)

    def _grant(self, grant: LeaseGrant, now: float) -> None:
        self._stats.leases_granted += 1
        if not self._leases.grant(grant.request_id, now, grant.seconds, grant.renewable):
            self._end_lease(grant.request_id)

    def _read_done(self, request_id: str, readers: int = 1, reader: str = "") -> None:
        if self._leases.confirm(request_id, readers, reader):
            self._end_lease(request_id)

    def _end_lease(self, request_id: str) -> None:
        self._stats.leases_released += 1
        self._readers.ended(request_id)
        self._writer.forget(request_id)
        self._results.sent(request_id)

    def _revoke(self, request_id: str, now: float) -> None:
        if self._leases.revoke(request_id, now):
            self._stats.leases_revoked += 1
            self._tell_gone(request_id)

    def _expire(self, now: float) -> None:
        for request_id in self._leases.expire(now):
            logger.warning("request %s: lease expired, nobody read its blocks", request_id)
            self._stats.leases_expired += 1
            self._tell_gone(request_id)
        for request_id in self._leases.reap(now):
            self._writer.cancel(request_id, now)
            self._results.sent(request_id)

    def _tell_gone(self, request_id: str) -> None:
        for reader in self._readers.ended(request_id):
            self._readers.answer(reader, Gone((request_id,)))

    def _decline(self, source: RemoteSource) -> None:
        if source.address.engine_id == self._identity.engine_id:
            self._read_done(source.request_id)
        else:
            self._declines.append(source)

    def _send_declines(self, now: float) -> None:
        """Tells holders that we will not read; dropped when no handshake succeeds."""
        sources, self._declines = self._declines, []
        for source in sources:
            if not self._with_peer(source.address, now, partial(self._send_decline, source)):
                self._declines.append(source)

    def _send_decline(self, source: RemoteSource, peer: PeerHandle) -> None:
        if peer.has_extension:
            self._agent.notify(peer.name, encode_extension(Read(source.request_id, peer.readers)))
        else:
            self._agent.notify(peer.name, encode_read_done(source.request_id, peer.readers))

    def _send_heartbeats(self, now: float) -> None:
        for beat in self._beats.due(now):
            if not self._with_peer(beat.address, now, partial(self._send_beat, beat, now)):
                self._beats.retry(beat.address, now)

    def _send_beat(self, beat: Beat, now: float, peer: PeerHandle) -> None:
        for ids in batches(beat.remote_ids):
            if peer.has_extension:
                sequence = next(self._sequence)
                # Before it is: one that cannot be sent is a heartbeat that nobody answers.
                self._beats.sent(sequence, beat.address, ids, now, peer.lease_extension)
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
            peers = self._peers.connect_all(address, now)
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
