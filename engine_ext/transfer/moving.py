"""One READ or WRITE under way, until NIXL has let go of it."""

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

    def has_ended(self, agent: Agent, now: float) -> bool:
        """True, once: NIXL touches the blocks no more, and `problem` tells how it went.

        A transfer that NIXL cannot be asked about may go on; it is let go of, or it is past its
        deadline. One that NIXL says is running has not ended, whatever the time.
        """
        is_late = now >= self.deadline
        try:
            state = agent.poll(self.transfer)
        except AgentError as error:
            self.problem = self.problem or str(error)
            state = TransferState.FAILED if is_late else TransferState.RUNNING
        if state is TransferState.RUNNING and is_late:
            self.problem = self.problem or "it took too long"
        if state is TransferState.FAILED:
            self.problem = self.problem or "it failed"
        if state is TransferState.RUNNING:
            return self.problem is not None and self._let_go(agent)
        self._let_go(agent)
        return True

    def _let_go(self, agent: Agent) -> bool:
        try:
            agent.discard(self.transfer)
        except AgentError as error:
            logger.debug("%s", error)
            return False
        return True
