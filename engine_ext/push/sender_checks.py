"""Push mode on P: registrations whose sender is not authenticated yet.

A registration counts only from the agent that would be written to: the one that answers a handshake
at the address in the registration. Anybody can send one in another engine's name, so a handshake is
repeated for that reason at most once in `RECHECK_SECONDS`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from engine_ext.common.latest import keep_latest
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import PeerAddress
from engine_ext.layout.plan import PlanError
from engine_ext.layout.ranks import RankError
from engine_ext.push.matching_state import BoundedRegistrations, Registered
from engine_ext.push.replies import TOO_MANY, Replies
from engine_ext.push.writes import rank_of
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.leases import NEVER
from engine_ext.worker.peers import PeerError, Peers

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

RECHECK_SECONDS = 5.0
MAX_RECHECKED = 4096


class SenderChecks(BoundedRegistrations):
    """`accept` is called for each registration that is its engine's own."""

    def __init__(
        self,
        context: WorkerContext,
        peers: Peers,
        replies: Replies,
        accept: Callable[[Registered, float], None],
    ) -> None:
        super().__init__()
        self._allowed, self._us = context.config.access.peers, context.rank
        self._peers = peers
        self._replies = replies
        self._accept = accept
        self._rechecked: OrderedDict[PeerAddress, float] = OrderedDict()
        """When the handshake with an engine was last repeated."""

    def begin(self, registered: Registered, now: float) -> None:
        host = registered.message.decode_host
        if not self._allowed.may_admit(host):
            self._replies.refuse(registered, f"{host} is not one of our allowed_peers")
        elif not self.has_room_for(registered):
            self._replies.refuse(registered, TOO_MANY)
        else:
            self.add(registered)
            self._check(registered, now)

    def step(self, now: float) -> None:
        for registered in self:
            self._check(registered, now)

    def _check(self, registered: Registered, now: float) -> None:
        try:
            rank = rank_of(registered.message, self._us)
            peer = self._peers.connect(registered.address, now, *rank)
            is_theirs = peer is not None and peer.name == registered.sender
            if peer is not None and is_theirs:
                peer.layout.check_registered(registered.message.local_block_ids)
        except (PeerError, PlanError, RankError) as error:
            self.pop(registered.key)
            self._replies.refuse(registered, str(error))
            return
        is_open = peer is None or (not is_theirs and self._waits_for_recheck(registered, now))
        if is_open and registered.deadline > now:
            return
        self.pop(registered.key)
        if is_theirs:
            self._accept(registered, now)
        else:
            logger.warning("ignored a registration by another agent than it is for")

    def _waits_for_recheck(self, registered: Registered, now: float) -> bool:
        """The sender may be a new process at the address of the agent that we know. Return False if
        a handshake was repeated since the registration came."""
        address = registered.address
        last = self._rechecked.get(address, NEVER)
        if last >= registered.came_at:
            return False
        if now - last >= RECHECK_SECONDS:
            checked_at = max(now, registered.came_at)
            keep_latest(self._rechecked, address, checked_at, MAX_RECHECKED)
            self._peers.forget(address)
        return True
