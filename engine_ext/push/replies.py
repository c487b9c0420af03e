"""What P answers registrations, and remembers of it: what comes again is answered again."""

import logging

from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import ConnectorStats
from engine_ext.push.matching_state import Outcomes, Registered, RegistrationKey
from engine_ext.wire.notifications import PushDone, PushFailed
from engine_ext.worker.reply_channels import ReplyChannels

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

GIVEN_UP = "P gave this request up"
WITHDRAWN = "withdrawn"
NO_FAULTS = (GIVEN_UP, WITHDRAWN)
"""Reasons for a push that ends because its request ended on P or on D."""
DIFFERENT = "the two engines' prompts differ"
LEASE_ENDED = "P's lease has ended"
TOO_LATE = "it is too late to begin"
TOO_MANY = "too many registrations wait here"
UNKNOWN = "P has had no such request"
LEAVING = "P shuts down"
OF_REQUEST = (*NO_FAULTS, DIFFERENT, LEASE_ENDED, TOO_LATE, TOO_MANY, UNKNOWN, LEAVING)
"""Reasons that say nothing of the next push between the same two engines."""


class Replies:
    def __init__(self, channels: ReplyChannels, stats: ConnectorStats) -> None:
        self._channels = channels
        self._stats = stats
        self._outcomes = Outcomes()

    def repeat(self, key: RegistrationKey) -> PushDone | PushFailed | None:
        """Return the recorded outcome and send it again; None if there is none yet."""
        answer = self._outcomes.find(key)
        if answer is not None:
            self._channels.answer(key.sender, answer)
        return answer

    def written(self, registered: Registered) -> None:
        """The WRITE's own notification says so; this is for those who ask again."""
        self._stats.pushes_ok += 1
        done = PushDone(registered.message.request_id, registered.generation)
        self._outcomes.add(registered.key, done)

    def refuse(self, registered: Registered, reason: str, landing: float = 0.0) -> None:
        """`landing`: for so many seconds what a WRITE that failed had sent may land yet."""
        is_fault = reason not in NO_FAULTS
        level = logging.WARNING if is_fault else logging.DEBUG
        logger.log(level, "push to request %s: %s", registered.message.request_id, reason)
        self._stats.pushes_failed += is_fault
        if registered.message.disagg is not None:
            self.fail(registered.key, reason, landing)

    def fail(self, key: RegistrationKey, reason: str, landing: float = 0.0) -> None:
        self._end(key, PushFailed(key.request_id, key.generation, reason, landing))

    def give_back(self, key: RegistrationKey) -> None:
        """Answer that nothing will be written. P keeps the prompt, and D registers again."""
        reason = "D needs its blocks for another request"
        self._end(key, PushFailed(key.request_id, key.generation, reason, is_given_back=True))

    def _end(self, key: RegistrationKey, answer: PushFailed) -> None:
        self._outcomes.add(key, answer)
        self._channels.answer(key.sender, answer)
