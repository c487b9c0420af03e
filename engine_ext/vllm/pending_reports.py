"""The reports that vLLM's scheduler waits for. It raises, and the engine ends, if a request is
reported twice or was never pending."""

import logging

from vllm.v1.outputs import KVConnectorOutput

from engine_ext.common.types import FinishDecision

logger = logging.getLogger(__name__)


class PendingReports:
    def __init__(self) -> None:
        self._loads: set[str] = set()
        self._unwanted: set[str] = set()
        """Loads of requests that have ended since."""
        self._frees: set[str] = set()

    def load(self, request_id: str) -> None:
        """The request is parked until its load is reported."""
        self._loads.add(request_id)

    def finish(self, request_id: str, decision: FinishDecision) -> FinishDecision:
        """The request has ended. If its blocks are kept, they are kept until they are reported
        free, whatever else is reported of it."""
        if decision.delay_free:
            self._frees.add(request_id)
            if request_id in self._loads:
                self._loads.remove(request_id)
                self._unwanted.add(request_id)
        return decision

    def settle(self, output: KVConnectorOutput) -> None:
        """Remove from the results of all ranks, before vLLM reads them, what it does not expect."""
        ended = (output.finished_recving or set()) & self._unwanted
        if output.finished_recving and ended:
            self._unwanted -= ended
            output.finished_recving = output.finished_recving - ended
        output.finished_recving = _expected(output.finished_recving, self._loads)
        output.finished_sending = _expected(output.finished_sending, self._frees)


def _expected(reported: set[str] | None, pending: set[str]) -> set[str] | None:
    if not reported:
        return reported
    if not reported <= pending:
        logger.warning(
            "KV connector: dropped reports of requests that are not pending: %s",
            sorted(reported - pending),
        )
    found = reported & pending
    pending -= found
    return found
