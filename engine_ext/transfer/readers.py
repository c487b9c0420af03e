"""Who reads from us: agents that said where to send answers."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine_ext.base.seldom import Seldom
from engine_ext.transfer.agent import Agent, AgentError
from engine_ext.wire.notifications import ExtensionMessage, encode_extension

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


@dataclass(slots=True)
class Reader:
    metadata: bytes
    heard_at: float


class Readers:
    """Bounded in number and age: the reader that was heard of longest ago is forgotten first."""

    LIMIT = 4096

    def __init__(self, agent: Agent, ttl: float, is_peer: Callable[[str], bool]) -> None:
        """`is_peer`: we read from or write to that agent, too, and NIXL must go on knowing it."""
        self._agent = agent
        self._ttl = ttl
        self._is_peer = is_peer
        self._readers: OrderedDict[str, Reader] = OrderedDict()

    def hello(self, sender: str, metadata: bytes, now: float) -> None:
        """Counts from the agent itself alone: nobody says for another where its answers go."""
        name = self._agent.add_remote(metadata)
        if name != sender:
            logger.warning("ignored a hello of %s in the name of %s", sender, name)
            if name not in self._readers:
                self._remove(name)
            return
        self._readers[name] = Reader(metadata, now)
        self._readers.move_to_end(name)
        while len(self._readers) > self.LIMIT:
            self._forget_oldest()

    def knows(self, name: str) -> bool:
        """It has said hello: it speaks our extension."""
        return name in self._readers

    def heard(self, sender: str, now: float) -> None:
        reader = self._readers.get(sender)
        if reader is not None:
            reader.heard_at = now
            self._readers.move_to_end(sender)

    def step(self, now: float) -> None:
        while self._readers and next(iter(self._readers.values())).heard_at <= now - self._ttl:
            self._forget_oldest()

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
            if name not in self._readers:
                raise
            self._agent.add_remote(self._readers[name].metadata)
            self._agent.notify(name, message)

    def _forget_oldest(self) -> None:
        name, _ = self._readers.popitem(last=False)
        self._remove(name)

    def _remove(self, name: str) -> None:
        if self._is_peer(name):
            return
        try:
            self._agent.remove_remote(name)
        except AgentError as error:
            logger.debug("%s", error)
