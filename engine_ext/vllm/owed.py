"""What vLLM's scheduler waits for. It dies of a report about anything else, and of a second one."""

import logging

from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)


class Owed:
    def __init__(self) -> None:
        self._loads: set[str] = set()
        self._unwanted: set[str] = set()
        """Loads of requests that have ended since."""
        self._frees: set[str] = set()

    def load(self, request_id: str) -> None:
        """The request is parked until its load is reported."""
        self._loads.add(request_id)

    def free(self, request_id: str) -> None:
        """The request has ended; its blocks are kept until they are reported free, whatever else is
        reported of it."""
        self._frees.add(request_id)
        if request_id in self._loads:
            self._loads.remove(request_id)
            self._unwanted.add(request_id)

    def settle(self, output: KVConnectorOutput) -> None:
        """Of all ranks, before vLLM reads it: what nobody waits for is taken out."""
        ended = (output.finished_recving or set()) & self._unwanted
        if output.finished_recving and ended:
            self._unwanted -= ended
            output.finished_recving = output.finished_recving - ended
        output.finished_recving = _expected(output.finished_recving, self._loads)
        output.finished_sending = _expected(output.finished_sending, self._frees)


def _expected(reported: set[str] | None, owed: set[str]) -> set[str] | None:
    if not reported:
        return reported
    if not reported <= owed:
        logger.warning("KV connector: reports that nobody waits for: %s", sorted(reported - owed))
    found = reported & owed
    owed -= found
    return found
