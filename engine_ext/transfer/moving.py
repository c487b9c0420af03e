"""One READ or WRITE under way, until NIXL has ended it.

Nothing stops a transfer that NIXL has begun: to free its handle, to forget its peer or to stop
asking leaves the data on its way, and it lands later. So a transfer is watched until NIXL says how
it ended, however late; only then are its blocks anybody else's."""

import logging
from dataclasses import dataclass

from engine_ext.transfer.agent import Agent, AgentError, Transfer, TransferState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Moving:
    transfer: Transfer
    deadline: float
    problem: str | None = None
    """Why it counts as failed, whatever NIXL says later."""
    ended: bool = False

    def is_late(self, now: float) -> bool:
        return now >= self.deadline

    def has_ended(self, agent: Agent, now: float) -> bool:
        """True: NIXL touches the blocks no more, and `problem` tells how it went.

        While NIXL cannot be asked, or says that it runs, it has not ended, whatever the time.
        """
        if self.ended:
            return True
        if self.is_late(now):
            self.problem = self.problem or "it took too long"
        try:
            state = agent.poll(self.transfer)
        except AgentError as error:
            logger.debug("%s", error)
            return False
        if state is TransferState.RUNNING:
            return False
        if state is TransferState.FAILED:
            self.problem = self.problem or "it failed"
        self.ended = True
        self._discard(agent)
        return True

    def _discard(self, agent: Agent) -> None:
        try:
            agent.discard(self.transfer)
        except AgentError as error:
            logger.warning("NIXL keeps the handle of a transfer that has ended: %s", error)
