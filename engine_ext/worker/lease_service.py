"""The source's side of leases: what it answers to readers, and when blocks are free.

leases.py holds the states and the clock's rules; this file reads and sends the messages. The life
of a lease, in the order in which it happens (H: scheduler/held_blocks.py, T: leases.py, S: this
file; of the reader, B: heartbeats.py, P: pulls.py):

    event                              function                  order, message or report
    ---------------------------------  ------------------------  ---------------------------------
    a prefill leg, or a turn, arrives  H.expect_*, T.expect      Expect, ExpectTurn
    the reader has the leg's params    B.track                   TrackOrder
    it ends without KV to read         H._cancel, T.cancel       LeaseCancel
    it ends with KV                    H._lease, S.grant         LeaseGrant (and a PushOffer)
    another engine asks for a prefix   loop._ask_loan, S.lend    AskLoan -> LoanAnswer -> Loan
    the reader renews                  B.due, S.renew            Renew -> Renewed: seconds of each
                                                                 lease, leases gone, our clock
    a stock reader renews              S.heartbeat               Heartbeat; nothing is answered
    a READ has ended                   P._read, S.read           Read -> ReadAck: the lease was
                                                                 still valid; blocks' checksums
    a reader is done, or declines      S.read, S.read_done       Read, or stock's ReadDone
    P writes instead (push)            T.take, T.put_back        PushRegistered -> PushDone
    the blocks are needed              H.revoke*, S.revoke       Revoke -> Gone
    the deadline passes                T.expire, S.step          Gone; readers confirm by Read
    every reader is done               S.confirm, _confirmed     finished_sending
    all horizons and the grace passed  T.reap, S.step            finished_sending
    the host frees the blocks          H.reported

A message may be lost, come twice or late. A lost renewal or confirmation costs time: the lease
expires. A lost ReadAck fails the load, or a heartbeat's answer has proven it already.
"""

import logging
from collections.abc import Callable

from engine_ext.common.orders import LeaseGrant, LoanAnswer
from engine_ext.wire import notifications as wire
from engine_ext.worker.checksums import Checksums, to_wire
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.leases import LeaseTable
from engine_ext.worker.push_component import PushComponent
from engine_ext.worker.reply_channels import ReplyChannels

logger = logging.getLogger(__name__)

MAX_UNANSWERED = 4096
"""Readers that wait for checksums; a message of one more is dropped, as any message may be lost."""


class LeaseService:
    """Grants, renews and ends leases. `free` is called for each request whose lease has ended
    here. `push` is the component of push mode."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        leases: LeaseTable,
        channels: ReplyChannels,
        free: Callable[[str], None],
        push: PushComponent | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        self._stats = context.stats
        self._extension = context.config.lease_extension
        self._leases = leases
        self._channels = channels
        self._free = free
        self._push = push
        self._checksums = checksums
        self._unanswered: dict[tuple[str, wire.Read], None] = {}
        """Readers, and their messages, whose leases' checksums are not made yet. Until they are,
        these readers have not confirmed."""

    def grant(self, grant: LeaseGrant, now: float) -> None:
        lease = grant.request_id, now, grant.seconds, grant.renewable, grant.extension
        if not self._leases.grant(*lease):
            # D may read as soon as it has the answer, which leaves with this order: its
            # confirmation was faster.
            self._confirmed(grant.request_id)
        elif self._checksums is not None and grant.block_ids:
            self._checksums.lease(grant.request_id, grant.block_ids)

    def lend(self, answer: LoanAnswer, now: float) -> None:
        """Grant the reader its horizon on a loan, then answer. If the loan has ended meanwhile,
        refuse."""
        # Before the answer leaves, so that no reader is faster than its horizon.
        seconds = self._leases.renew(answer.loan_id, answer.reader, now) if answer.loan_id else None
        more = answer.may_hold_more
        loan = wire.Loan(answer.sequence, may_hold_more=more or bool(answer.loan_id))
        if seconds:
            where = answer.block_ids, answer.num_tokens, answer.last_key
            loan = wire.Loan(answer.sequence, answer.loan_id, *where, seconds, more)
        self._stats.loans_given += bool(seconds)
        self._stats.loans_refused += not seconds
        self._channels.answer(answer.reader, loan)

    def revoke(self, request_id: str, now: float) -> None:
        if self._leases.revoke(request_id, now):
            self._notify_gone(request_id)

    def revoke_all(self, now: float) -> None:
        for request_id in self._leases.revoke_all(now):
            self._notify_gone(request_id)

    def step(self, now: float) -> None:
        for request_id in self._leases.expire(now):
            logger.warning("request %s: lease expired, no engine read its blocks", request_id)
            self._notify_gone(request_id)
        for request_id in self._leases.reap(now):
            if self._push is not None:
                self._push.cancel(request_id, now)
            self._free(request_id)
        unanswered, self._unanswered = self._unanswered, {}
        for sender, message in unanswered:
            self.read(sender, message, now)

    def heartbeat(self, sender: str, message: wire.Heartbeat, now: float) -> None:
        self._stats.heartbeats_received += 1
        for name in message.request_ids:
            self._renew(sender, name, now)

    def renew(self, sender: str, message: wire.Renew, now: float) -> None:
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
        answer = wire.Renewed(message.sequence, self._extension, gone, shorter, now)
        self._channels.answer(sender, answer)

    def _renew(self, sender: str, name: str, now: float) -> float | None:
        request_id = name
        if self._push is not None and not self._leases.knows(name):
            request_id = self._push.own_id(name)
        if request_id == name:
            return self._leases.renew(name, sender, now)
        # A decode engine that waits for P's WRITE reads nothing, and needs no horizon.
        return 0.0 if self._leases.extend(request_id, now) else None

    def read(self, sender: str, message: wire.Read, now: float) -> None:
        """Answer whether the lease is still valid: if so, all that was read until now is right."""
        valid = self._leases.knows(message.request_id)  # Before `confirm`, which may end it.
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
            self._channels.answer(sender, wire.ReadAck(message.sequence, valid, sums))
        self.confirm(message.request_id, now, message.readers, sender)

    def read_done(self, sender: str, message: wire.ReadDone, now: float) -> bool:
        """Return False if it is not about a lease of ours."""
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
        if self._push is not None:
            self._push.forget(request_id)
        self._free(request_id)

    def _notify_gone(self, request_id: str) -> None:
        """Stock readers have no such message, and a reader that gets one is taken for one with the
        extension from then on."""
        for reader in self._leases.readers_of(request_id):
            if self._channels.knows(reader):
                self._channels.answer(reader, wire.Gone((request_id,)))
