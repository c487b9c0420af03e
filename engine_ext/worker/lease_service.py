"""What the owner thread does as the holder of blocks that others read: leases, and answers."""

import logging
from collections.abc import Callable

from engine_ext.common.types import ConnectorStats, LeaseGrant
from engine_ext.wire.notifications import Gone, Heartbeat, Read, ReadAck, ReadDone, Renew, Renewed
from engine_ext.worker.checksums import Checksums, to_wire
from engine_ext.worker.leases import LeaseTable
from engine_ext.worker.reply_channels import Readers

logger = logging.getLogger(__name__)

MAX_UNANSWERED = 4096
"""Readers that wait for checksums; what more of them say is lost, as any message may be."""


class Holder:
    """`alias`: our own id of what a reader may call a request. `on_read` and `on_unread` are told
    of each lease that ended here, and when, and `on_free` of each."""

    def __init__(
        self,
        leases: LeaseTable,
        readers: Readers,
        extension: float,
        stats: ConnectorStats,
        on_free: Callable[[str], None],
        alias: Callable[[str], str],
        on_read: Callable[[str], None],
        on_unread: Callable[[str, float], None],
        checksums: Checksums | None = None,
    ) -> None:
        self._leases = leases
        self._readers = readers
        self._extension = extension
        self._stats = stats
        self._on_free = on_free
        self._alias = alias
        self._on_read = on_read
        self._on_unread = on_unread
        self._checksums = checksums
        self._unanswered: dict[tuple[str, Read], None] = {}
        """Readers, and their messages, whose leases' checksums are not made yet. Until they are,
        these readers have not confirmed."""

    def grant(self, grant: LeaseGrant, now: float) -> None:
        if not self._leases.grant(grant.request_id, now, grant.seconds, grant.renewable):
            self._confirmed(grant.request_id)
        elif self._checksums is not None and grant.block_ids:
            self._checksums.lease(grant.request_id, grant.block_ids)

    def revoke(self, request_id: str, now: float) -> None:
        if self._leases.revoke(request_id, now):
            self._tell_gone(request_id)

    def revoke_all(self, now: float) -> None:
        for request_id in self._leases.revoke_all(now):
            self._tell_gone(request_id)

    def step(self, now: float) -> None:
        for request_id in self._leases.expire(now):
            logger.warning("request %s: lease expired, nobody read its blocks", request_id)
            self._tell_gone(request_id)
        for request_id in self._leases.reap(now):
            self._on_unread(request_id, now)
            self._on_free(request_id)
        unanswered, self._unanswered = self._unanswered, {}
        for sender, message in unanswered:
            self.read(sender, message, now)

    def heartbeat(self, sender: str, message: Heartbeat, now: float) -> None:
        """A stock reader's: it believes in the lease from now on, and hears nothing."""
        self._stats.heartbeats_received += 1
        for name in message.request_ids:
            self._renew(sender, name, now)

    def renew(self, sender: str, message: Renew, now: float) -> None:
        """`now` must have been read after the message was received: the reader counts from when it
        was sent."""
        self._stats.heartbeats_received += 1
        granted = {name: self._renew(sender, name, now) for name in message.request_ids}
        gone = tuple(name for name, seconds in granted.items() if seconds is None)
        shorter = {
            name: seconds
            for name, seconds in granted.items()
            if seconds is not None and seconds < self._extension
        }
        answer = Renewed(message.sequence, self._extension, gone, shorter, now)
        self._readers.answer(sender, answer)

    def _renew(self, sender: str, name: str, now: float) -> float | None:
        """Who knows it by another name waits to be written to, and believes in nothing."""
        request_id = name if self._leases.knows(name) else self._alias(name)
        if request_id == name:
            return self._leases.renew(name, sender, now)
        return 0.0 if self._leases.extend(request_id, now) else None

    def read(self, sender: str, message: Read, now: float) -> None:
        """What was read until now is right, if the lease still is."""
        valid = self._leases.knows(message.request_id)
        sums: tuple[bytes, ...] | None = None
        if valid and message.wants_sums and self._checksums is not None:
            summing = self._checksums.ask(message.request_id)
            is_made = self._leases.is_held(message.request_id)  # Else they will be, when granted.
            if not is_made or (summing is not None and not summing.is_done):
                if len(self._unanswered) < MAX_UNANSWERED:
                    self._unanswered[sender, message] = None
                return
            if summing is not None and summing.sums is not None:
                sums = to_wire(summing.sums)
        if message.sequence:
            self._stats.confirmations_late += not valid
            self._readers.answer(sender, ReadAck(message.sequence, valid, sums))
        self.confirm(message.request_id, now, message.readers, sender)

    def read_done(self, sender: str, message: ReadDone, now: float) -> bool:
        """A stock reader's. False: it is not about a lease of ours."""
        if not self._leases.knows(message.request_id):
            return False
        self.confirm(message.request_id, now, message.readers, sender)
        return True

    def confirm(self, request_id: str, now: float, readers: int = 1, reader: str = "") -> None:
        age = self._leases.age(request_id, now)
        if self._leases.confirm(request_id, now, readers, reader):
            if age is not None:
                self._stats.lease_age_at_read_seconds.observe(age)
            self._confirmed(request_id)

    def _confirmed(self, request_id: str) -> None:
        self._on_read(request_id)
        self._on_free(request_id)

    def _tell_gone(self, request_id: str) -> None:
        """Not stock, which has no word for it, and would be taken for one of ours from then on."""
        for reader in self._leases.readers_of(request_id):
            if self._readers.knows(reader):
                self._readers.answer(reader, Gone((request_id,)))
