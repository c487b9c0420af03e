"""Requests for loans of other engines' prefixes: each order ends in one report.

    order --> connecting --> sent --(a loan that fits)--> reported, and its lease is renewed
                  ^  |         |
                  |  +---------+--(no handshake, refused, malformed, too short, no answer)--+
                  +------------------------------(the next holder)-------------------------+
                                    (none left, or `loan_timeout` is over)--> reported without

Deadlines
    An order has `loan_timeout` in all. Each holder gets an equal share of what is left. A handshake
    that takes longer goes on, for the next order. A holder that has not answered is left out for
    `SILENT_SECONDS` or until its answer comes, and so is one with a READ in quarantine. Then a new
    handshake precedes the next message, for another process may be at its address.

What counts
    Only the agent that was asked can answer, under the number of that message, and once. The last
    key must be the order's own key at that place. The horizon counts from before the message was
    sent (heartbeats.py). Nothing else about a loan is believed: block ids that the holder does not
    have fail when the READ is planned.

Given back
    A loan that is not used is confirmed at once: one that does not fit, one that comes when its
    order has ended, and a second answer. Late answers are known by their number and their agent.
    A loan that a request of ours uses is never confirmed here, whatever a message says.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine_ext.common.latest import keep_latest
from engine_ext.common.orders import LoanAsk
from engine_ext.common.types import LoanReport, PeerAddress, RemoteSource
from engine_ext.wire.notifications import AskLoan, Loan, Read, encode_extension
from engine_ext.worker.agent import AgentError, PeerHandle
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.heartbeats import HeartbeatTracker
from engine_ext.worker.peers import PeerError, Peers

logger = logging.getLogger(__name__)

SILENT_SECONDS = 10.0
MAX_REMEMBERED = 4096
"""Messages whose late answers are recognised, and silent holders."""


@dataclass(slots=True, eq=False)
class PendingAsk:
    order: LoanAsk
    deadline: float
    holders: list[PeerAddress]
    """Those that are left. The first is being asked."""
    turn_ends_at: float = 0.0
    """The time at which the next holder is asked instead."""
    sequence: int = 0
    """The number of the message to the first holder, or 0 if none was sent."""
    agent: str = ""
    sent_at: float = 0.0
    is_refused: bool = True
    """All holders before the first one have answered that they do not hold the prefix."""


class LoanAsks:
    """`may_read` returns False for an engine from which no READ may begin now."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        peers: Peers,
        beats: HeartbeatTracker,
        may_read: Callable[[PeerAddress], bool],
    ) -> None:
        self._context = context
        self._agent, self._stats = context.agent, context.stats
        self._block_size = context.geometry.block_size
        self._num_groups = len(context.geometry.group_windows)
        self._peers = peers
        self._beats = beats
        self._may_read = may_read
        self._pending: dict[str, PendingAsk] = {}
        self._sent: OrderedDict[int, tuple[str, PeerAddress]] = OrderedDict()
        """The agent and the engine that got each message, by its number."""
        self._silent_until: OrderedDict[PeerAddress, float] = OrderedDict()

    @property
    def num_open(self) -> int:
        return len(self._pending)

    def start(self, order: LoanAsk, now: float) -> None:
        deadline = now + self._context.config.loan_timeout
        ask = self._pending[order.request_id] = PendingAsk(order, deadline, list(order.holders))
        self._stats.loans_requested += 1
        self._share(ask, now)
        self._advance(ask, now)

    def give_up(self, request_id: str) -> None:
        """The request has ended. A loan that comes now is given back."""
        self._pending.pop(request_id, None)

    def step(self, now: float) -> None:
        for ask in list(self._pending.values()):
            try:
                self._advance(ask, now)
            except Exception:
                # No request may wait for a programming error, its own or another's.
                logger.exception("request %s", ask.order.request_id)
                ask.is_refused = False
                ask.holders.clear()
                self._end(ask)

    def answered(self, sender: str, loan: Loan, now: float) -> None:
        agent, holder = self._sent.get(loan.sequence, (None, None))
        if holder is None or agent != sender:
            return
        self._silent_until.pop(holder, None)
        pending = self._pending.values()
        ask = next((one for one in pending if one.sequence == loan.sequence), None)
        is_used = self._beats.waits_for(holder.engine_id, loan.request_id)
        if ask is not None and not is_used and self._fits(ask.order, loan):
            self._take(ask, loan, now)
            return
        if loan.request_id and not is_used:
            self._notify(sender, Read(loan.request_id))
        if ask is not None:
            ask.is_refused = ask.is_refused and not loan.may_hold_more
            self._next_holder(ask, now)

    def _advance(self, ask: PendingAsk, now: float) -> None:
        """Send to the first holder, or go on to the next one."""
        while ask.holders:
            if now >= ask.turn_ends_at:
                if ask.sequence:
                    until = now + SILENT_SECONDS
                    keep_latest(self._silent_until, ask.holders[0], until, MAX_REMEMBERED)
                ask.is_refused = False
                self._next_holder(ask, now)
                continue
            if ask.sequence:
                return
            try:
                peer = self._connect(ask.holders[0], now)
                if peer is None:
                    return  # The handshake runs.
                self._send(ask, peer)
            except (PeerError, AgentError) as error:
                logger.info("engine %s lends nothing: %s", ask.holders[0].engine_id, error)
                ask.is_refused = False
                if isinstance(error, AgentError):
                    self._peers.forget(ask.holders[0])
                self._next_holder(ask, now)

    def _connect(self, address: PeerAddress, now: float) -> PeerHandle | None:
        """Raises PeerError for a holder that cannot be asked."""
        if now < self._silent_until.get(address, now) or not self._may_read(address):
            raise PeerError("it does not answer")
        if self._silent_until.pop(address, None) is not None:
            # The holder may have restarted, or may have lost this agent's metadata.
            self._peers.forget(address)
        peers = self._peers.connect_all(address, now)
        if peers is None:
            return None
        if len(peers) != 1 or not peers[0].has_extension:
            raise PeerError("it has several ranks or another connector")
        return peers[0]

    def _send(self, ask: PendingAsk, peer: PeerHandle) -> None:
        """Raises AgentError."""
        address, order = ask.holders[0], ask.order
        ask.sequence, ask.agent = next(self._context.sequence), peer.name
        keep_latest(self._sent, ask.sequence, (peer.name, address), MAX_REMEMBERED)
        ask.sent_at = self._context.clock()
        message = AskLoan(ask.sequence, order.scheme, order.keys)
        self._agent.notify(peer.name, encode_extension(message))

    def _next_holder(self, ask: PendingAsk, now: float) -> None:
        ask.holders.pop(0)
        ask.sequence = 0
        if ask.holders and now < ask.deadline:
            self._share(ask, now)
            self._advance(ask, now)
        else:
            ask.holders.clear()
            self._end(ask)

    def _end(self, ask: PendingAsk) -> None:
        """Report the end of the order, without a loan, unless the request has ended first."""
        if self._pending.pop(ask.order.request_id, None) is not None:
            report = LoanReport(ask.order.request_id, is_refused=ask.is_refused)
            self._context.results.loan_ended(report)

    @staticmethod
    def _share(ask: PendingAsk, now: float) -> None:
        ask.turn_ends_at = now + (ask.deadline - now) / len(ask.holders)

    def _fits(self, order: LoanAsk, loan: Loan) -> bool:
        num_blocks, rest = divmod(loan.num_tokens, self._block_size)
        return (
            loan.request_id != ""
            and rest == 0
            and loan.num_tokens >= order.least_tokens
            and order.keys[num_blocks - 1 : num_blocks] == (loan.last_key,)
            and [len(group) for group in loan.block_ids] == [num_blocks] * self._num_groups
        )

    def _take(self, ask: PendingAsk, loan: Loan, now: float) -> None:
        order, address = ask.order, ask.holders[0]
        del self._pending[order.request_id]
        self._stats.loans_received += 1
        self._beats.track(order.request_id, address, loan.request_id, now, loan.seconds)
        self._beats.granted(order.request_id, ask.agent, ask.sent_at, loan.seconds)
        size = self._block_size
        blocks = loan.block_ids, loan.num_tokens, size
        source = RemoteSource(address, loan.request_id, address.tp_size, *blocks)
        self._context.results.loan_ended(LoanReport(order.request_id, source, loan.last_key))

    def _notify(self, agent: str, message: Read) -> None:
        try:
            self._agent.notify(agent, encode_extension(message))
        except AgentError as error:
            logger.debug("agent %s was not notified: %s", agent, error)
