"""Who reads from us: agents that said where to send answers."""

import logging
from collections import OrderedDict

from engine_ext.transfer.agent import Agent, AgentError
from engine_ext.wire.notifications import ExtensionMessage, encode_extension

logger = logging.getLogger(__name__)


class Readers:
    """Bounded: the reader that said hello longest ago is forgotten first."""

    LIMIT = 4096

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._metadata: OrderedDict[str, bytes] = OrderedDict()

    def hello(self, metadata: bytes) -> None:
        name = self._agent.add_remote(metadata)
        self._metadata[name] = metadata
        self._metadata.move_to_end(name)
        while len(self._metadata) > self.LIMIT:
            oldest, _ = self._metadata.popitem(last=False)
            self._agent.remove_remote(oldest)

    def answer(self, name: str, message: ExtensionMessage) -> None:
        """To a reader that said hello; what is said to others is lost, as any message may be."""
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
