"""Who reads from us: agents that said where to send answers."""

import logging
from collections import OrderedDict
from collections.abc import Iterable

from engine_ext.agent import Agent, AgentError
from engine_ext.wire import ExtensionMessage, encode_extension

logger = logging.getLogger(__name__)


class Readers:
    """Bounded: the reader that said hello longest ago is forgotten first."""

    LIMIT = 4096

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._names: OrderedDict[str, None] = OrderedDict()
        self._of_lease: dict[str, str] = {}

    def hello(self, metadata: bytes) -> None:
        name = self._agent.add_remote(metadata)
        self._names[name] = None
        while len(self._names) > self.LIMIT:
            oldest, _ = self._names.popitem(last=False)
            self._agent.remove_remote(oldest)

    def renewed(self, name: str, request_ids: Iterable[str]) -> None:
        """`name` is who waits for these."""
        for request_id in request_ids:
            self._of_lease[request_id] = name

    def ended(self, request_id: str) -> str | None:
        """Forgets the lease; returns who waited for it."""
        return self._of_lease.pop(request_id, None)

    def answer(self, name: str, message: ExtensionMessage) -> None:
        try:
            self._agent.notify(name, encode_extension(message))
        except AgentError as error:
            logger.debug("reader %s was not answered: %s", name, error)
