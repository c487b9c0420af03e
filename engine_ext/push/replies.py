"""Push mode on P: the answers to registrations, recorded so that a repeated registration gets the
same answer."""

import logging

from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import ConnectorStats
from engine_ext.push.matching_state import FairTable, Registered, RegistrationKey
from engine_ext.wire.notifications import PushDone, PushFailed
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
