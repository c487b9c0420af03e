"""Registrations that have come, until it is known whose they are.

One counts from the very agent that would be written to: the one that answers our handshake where
the registration says.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from engine_ext.common.latest import keep_latest
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import PeerAddress
from engine_ext.layout.plan import PlanError
from engine_ext.layout.ranks import RankError
from engine_ext.push.matching_state import Registered, RegisteredByKey, RegistrationKey
from engine_ext.push.replies import TOO_MANY, Replies
from engine_ext.push.writes import rank_of
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.leases import NEVER
from engine_ext.worker.peers import PeerError, Peers

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

RECHECK_SECONDS = 5.0
"""An engine is met anew no more often than this because of who registers in its name: without a
secret, anybody can."""
MAX_RECHECKED = 4096


class SenderChecks:
    """`accept` is called for each registration that is its engine's own."""

    def __init__(
        self,
        context: WorkerContext,
        peers: Peers,
        replies: Replies,
        accept: Callable[[Registered, float], None],
    ) -> None:
        self._allowed, self._us = context.config.access.peers, context.rank
        self._peers = peers
        self._replies = replies
        self._accept = accept
        self._unchecked = RegisteredByKey()
        self._rechecked: OrderedDict[PeerAddress, float] = OrderedDict()
        """When engines were last met anew, the one longest ago first."""

    def __len__(self) -> int:
        return len(self._unchecked)

    def refresh(self, registered: Registered) -> bool:
        """True: it is among these, and is worth keeping for longer now."""
        return self._unchecked.refresh(registered)

    def forget(self, key: RegistrationKey) -> None:
        if key in self._unchecked:
            self._unchecked.pop(key)

    def begin(self, registered: Registered, now: float) -> None:
        host = registered.message.decode_host
        if not self._allowed.may_admit(host):
            self._replies.refuse(registered, f"{host} is not one of our allowed_peers")
        elif not self._unchecked.has_room_for(registered):
            self._replies.refuse(registered, TOO_MANY)
        else:
            self._unchecked.add(registered)
            self._check(registered, now)

    def step(self, now: float) -> None:
        for registered in self._unchecked:
            self._check(registered, now)

    def _check(self, registered: Registered, now: float) -> None:
        try:
            rank = rank_of(registered.message, self._us)
            peer = self._peers.connect(registered.address, now, *rank)
            is_theirs = peer is not None and peer.name == registered.sender
            if peer is not None and is_theirs:
                peer.layout.check_registered(registered.message.local_block_ids)
        except (PeerError, PlanError, RankError) as error:
            self._unchecked.pop(registered.key)
            self._replies.refuse(registered, str(error))
            return
        is_open = peer is None or (not is_theirs and self._waits_for_recheck(registered, now))
        if is_open and registered.deadline > now:
            return
        self._unchecked.pop(registered.key)
        if is_theirs:
            self._accept(registered, now)
        else:
            logger.warning("ignored a registration by another agent than it is for")

    def _waits_for_recheck(self, registered: Registered, now: float) -> bool:
        """Its agent may have come to the place of the one that we know. False: whoever is there was
        met since it came, for this one or for another."""
        address = registered.address
        last = self._rechecked.get(address, NEVER)
        if last >= registered.came_at:
            return False
        if now - last >= RECHECK_SECONDS:
            met_at = max(now, registered.came_at)
            keep_latest(self._rechecked, address, met_at, MAX_RECHECKED)
            self._peers.forget(address)
        return True
