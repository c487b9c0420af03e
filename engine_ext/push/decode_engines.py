"""Push mode on P: what decode engines send, before a registration is matched and after its end.

Sender check
    A registration counts only from the agent that would be written to: the one that answers a
    handshake at the address in the registration. Any agent can send one in another engine's name,
    so a handshake is repeated for that reason at most once in `RECHECK_SECONDS`.

Outcome
    The end of each registration is recorded, so that a repeated registration gets the same answer.

Inquiry
    A decode engine without room waits until P holds the prompt. It repeats its inquiry every few
    seconds, and P forgets an inquiry that is not repeated. P answers when the prompt is offered, or
    when it is known that it never will be.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine_ext.common.latest import keep_latest
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.request_names import names_of
from engine_ext.common.types import ConnectorStats, PeerAddress
from engine_ext.layout.plan import PlanError
from engine_ext.layout.ranks import RankError, TensorRank
from engine_ext.push.matching_state import (
    BoundedRegistrations,
    FairTable,
    NameTable,
    Registered,
    RegistrationKey,
    means_another,
)
from engine_ext.wire.notifications import (
    AwaitPrompt,
    PromptReady,
    PushDone,
    PushFailed,
    PushRegistered,
)
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.leases import NEVER
from engine_ext.worker.peers import PeerError, Peers
from engine_ext.worker.reply_channels import ReplyChannels

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

GIVEN_UP = "P gave this request up"
WITHDRAWN = "withdrawn"
NO_FAULTS = (GIVEN_UP, WITHDRAWN)
"""The request ended on P or on D."""
DIFFERENT = "the two engines' prompts differ"
LEASE_ENDED = "P's lease has ended"
TOO_LATE = "it is too late to begin"
TOO_MANY = "too many registrations wait here"
UNKNOWN = "P has had no such request"
LEAVING = "P shuts down"
OF_REQUEST = (*NO_FAULTS, DIFFERENT, LEASE_ENDED, TOO_LATE, TOO_MANY, UNKNOWN, LEAVING)
"""Reasons that concern one request, not the pair of engines."""

RECHECK_SECONDS = 5.0
MAX_RECHECKED = 4096
FORGET_SECONDS = 15.0
"""Decode engines ask again within a third of that."""


class Outcomes(FairTable[RegistrationKey, PushDone | PushFailed]):
    """How registrations ended."""


class Replies:
    def __init__(self, channels: ReplyChannels, stats: ConnectorStats) -> None:
        self._channels = channels
        self._stats = stats
        self._outcomes = Outcomes()

    def repeat(self, key: RegistrationKey) -> PushDone | PushFailed | None:
        """Send the recorded outcome again and return it; None if there is none yet."""
        answer = self._outcomes.find(key.sender, key)
        if answer is not None:
            self._channels.answer(key.sender, answer)
        return answer

    def written(self, registered: Registered) -> None:
        """Record a WRITE that ended well. Its own notification has reported that to D."""
        self._stats.pushes_ok += 1
        done = PushDone(registered.message.request_id, registered.generation)
        self._outcomes.add(registered.sender, registered.key, done)

    def refuse(self, registered: Registered, reason: str, landing: float = 0.0) -> None:
        """`landing`: for so many seconds, data of a failed WRITE may still arrive at D."""
        is_fault = reason not in NO_FAULTS
        level = logging.WARNING if is_fault else logging.DEBUG
        logger.log(level, "push to request %s: %s", registered.message.request_id, reason)
        self._stats.pushes_failed += is_fault
        if registered.message.disagg is not None:
            self.fail(registered.key, reason, landing)

    def fail(self, key: RegistrationKey, reason: str, landing: float = 0.0) -> None:
        self._end(key, PushFailed(key.request_id, key.generation, reason, landing))

    def return_blocks(self, key: RegistrationKey) -> None:
        """Answer that nothing will be written. P keeps the prompt, and D registers again."""
        reason = "D needs its blocks for another request"
        self._end(key, PushFailed(key.request_id, key.generation, reason, blocks_returned=True))

    def _end(self, key: RegistrationKey, answer: PushFailed) -> None:
        self._outcomes.add(key.sender, key, answer)
        self._channels.answer(key.sender, answer)


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
            logger.warning("ignored a registration that names another agent's blocks")

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


def rank_of(message: PushRegistered, us: TensorRank) -> tuple[int, int]:
    """Return the tensor rank of D that registered, and its stage; stock does not name them. Raises
    RankError, PlanError."""
    faced = us.faces(message.decode_tp_size)
    rank = message.disagg.tp_rank if message.disagg else faced[0]
    if rank not in faced or (len(faced) > 1 and message.disagg is None):
        raise PlanError(f"rank {us} here does not know which rank of D registered")
    stage, stages = (message.disagg.pp_rank, message.disagg.pp_size) if message.disagg else (0, 1)
    if stage >= stages:
        raise PlanError(f"stage {stage} of {stages}")
    return rank, stage


@dataclass(slots=True)
class Inquiry:
    message: AwaitPrompt
    sender: str
    until: float
    """When it is forgotten, unless D repeats it."""
    unknown_since: float
    """Since when P has had no request of its names."""

    @property
    def key(self) -> tuple[str, str]:
        return self.sender, self.message.request_id

    @property
    def names(self) -> tuple[str, ...]:
        message = self.message
        return names_of(message.request_id, message.transfer_id, message.remote_request_id)

    def may_mean(self, transfer_id: str | None) -> bool:
        """The router's names do not exclude it."""
        return not means_another(self.message.transfer_id, transfer_id)


class IncomingInquiries(FairTable[str, Inquiry]):
    """By sender and D's request id. D repeats an inquiry that was dropped for lack of room."""

    LIMIT = 8192
    LIMIT_BY_SENDER = 2048

    def __init__(self, channels: ReplyChannels) -> None:
        super().__init__()
        self._channels = channels
        self._names: NameTable[tuple[str, str]] = NameTable()

    def receive(self, message: AwaitPrompt, sender: str, now: float) -> Inquiry:
        inquiry = Inquiry(message, sender, now + FORGET_SECONDS, now)
        known = self.find(*inquiry.key)
        if known is not None:
            inquiry.unknown_since = known.unknown_since
            self._forget(known)
        displaced = self.add(*inquiry.key, inquiry)
        if displaced is not None:
            self._names.remove(displaced.key)
        self._names.add(inquiry.key, inquiry.names)
        return inquiry

    def named(self, names: tuple[str, ...]) -> list[Inquiry]:
        found = (self.find(*key) for key in self._names.find(names))
        return [inquiry for inquiry in found if inquiry is not None]

    def answer(self, inquiry: Inquiry) -> None:
        """Answer that D may register. If the message is lost, D sends its inquiry again."""
        self._forget(inquiry)
        self._channels.answer(inquiry.sender, PromptReady(inquiry.message.request_id))

    def forget_old(self, now: float) -> None:
        for inquiry in self:
            if inquiry.until <= now:
                self._forget(inquiry)

    def _forget(self, inquiry: Inquiry) -> None:
        self.pop(*inquiry.key)
        self._names.remove(inquiry.key)
