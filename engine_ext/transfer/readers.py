"""Who reads from us: agents that said where to send answers."""

import logging
from collections import OrderedDict
from collections.abc import Iterable

from engine_ext.transfer.agent import Agent, AgentError
from engine_ext.wire.notifications import ExtensionMessage, encode_extension

logger = logging.getLogger(__name__)


class Readers:
    """Bounded: the reader that said hello longest ago is forgotten first."""

    LIMIT = 4096

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._metadata: OrderedDict[str, bytes] = OrderedDict()
        self._of_lease: dict[str, set[str]] = {}

    def hello(self, metadata: bytes) -> None:
        name = self._agent.add_remote(metadata)
        self._metadata[name] = metadata
        self._metadata.move_to_end(name)
        while len(self._metadata) > self.LIMIT:
            oldest, _ = self._metadata.popitem(last=False)
            self._agent.remove_remote(oldest)

    def renewed(self, name: str, request_ids: Iterable[str]) -> None:
        """`name` is one of those who wait for these."""
        for request_id in request_ids:
            self._of_lease.setdefault(request_id, set()).add(name)

    def has_read(self, name: str, request_id: str) -> bool:
        """`name` waits no longer. True: others do."""
        waiting = self._of_lease.get(request_id, set())
        waiting.discard(name)
        return bool(waiting)

    def ended(self, request_id: str) -> set[str]:
        """Forgets the lease; returns who waited for it."""
        return self._of_lease.pop(request_id, set())

    def answer(self, name: str, message: ExtensionMessage) -> None:
        try:
            self._tell(name, encode_extension(message))
        except AgentError as error:
            logger.debug("reader %s was not answered: %s", name, error)

    def _tell(self, name: str, message: bytes) -> None:
        try:
            self._agent.notify(name, message)
        except AgentError:
            # As a peer of ours it may have been forgotten meanwhile, and lives all the same.
            if name not in self._metadata:
                raise
            self._agent.add_remote(self._metadata[name])
            self._agent.notify(name, message)
