"""Who reads from us: agents that said where to send answers.

A hello carries the NIXL metadata that answers need. The metadata of an agent that has not proven
that it holds the shared secret is validated first; what is answered to the agent meanwhile waits.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.wire.nixl_metadata import agent_name
from engine_ext.wire.notifications import ExtensionMessage, encode_extension
from engine_ext.worker.agent import Agent, AgentError
from engine_ext.worker.validator import TRUSTING, MetadataValidation, Validator

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())


@dataclass(slots=True)
class Reader:
    metadata: bytes
    heard_at: float


MAX_DELAYED = 64
"""Answers that wait for one agent's metadata to be validated."""


@dataclass(slots=True)
class Arrival:
    """An agent that has said hello; its metadata is being validated."""

    sender: str
    check: MetadataValidation


class ReplyChannels:
    """Bounded in number and age: the reader that was heard of longest ago is forgotten first.

    `validator` bounds the arrivals.
    """

    LIMIT = 4096

    def __init__(
        self,
        agent: Agent,
        ttl: float,
        is_peer: Callable[[str], bool],
        validator: Validator = TRUSTING,
    ) -> None:
        """`is_peer`: we read from or write to that agent, too, and NIXL must go on knowing it."""
        self._agent = agent
        self._ttl = ttl
        self._is_peer = is_peer
        self._validator = validator
        self._arrivals: list[Arrival] = []
        self._delayed: dict[str, list[bytes]] = {}
        """Answers for agents among the arrivals, by name."""
        self._readers: OrderedDict[str, Reader] = OrderedDict()

    def hello(self, sender: str, metadata: bytes, now: float) -> None:
        """Counts from the agent itself alone: nobody says for another where its answers go."""
        if agent_name(metadata) not in (None, sender):
            logger.warning("ignored a hello of %s in another agent's name", sender)
            return
        check = self._validator.submit(metadata, now, is_expected=False)
        if check.is_pending:
            self._arrivals.append(Arrival(sender, check))
        else:
            self._admit(sender, check, now)

    def _admit(self, sender: str, check: MetadataValidation, now: float) -> None:
        if check.problem:
            logger.warning("ignored a hello of %s: %s", sender, check.problem)
            return
        metadata = check.metadata
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
        return name in self._readers or self._is_arriving(name)

    def heard(self, sender: str, now: float) -> None:
        reader = self._readers.get(sender)
        if reader is not None:
            reader.heard_at = now
            self._readers.move_to_end(sender)

    def step(self, now: float) -> None:
        self._admit_validated(now)
        while self._readers and next(iter(self._readers.values())).heard_at <= now - self._ttl:
            self._forget_oldest()

    def answer(self, name: str, message: ExtensionMessage) -> None:
        """To a reader that said hello; what is said to others is lost, as any message may be."""
        encoded = encode_extension(message)
        if name in self._readers or not self._is_arriving(name):
            self._send(name, encoded)
        elif len(delayed := self._delayed.setdefault(name, [])) < MAX_DELAYED:
            delayed.append(encoded)

    @property
    def num_delayed(self) -> int:
        """Answers that wait until their reader's metadata is validated."""
        return sum(map(len, self._delayed.values()))

    def _is_arriving(self, name: str) -> bool:
        return any(one.sender == name for one in self._arrivals)

    def _send(self, name: str, message: bytes) -> None:
        try:
            self._tell(name, message)
        except AgentError as error:
            logger.debug("reader %s was not answered: %s", name, error)

    def _admit_validated(self, now: float) -> None:
        validated = [one for one in self._arrivals if not one.check.is_pending]
        self._arrivals = [one for one in self._arrivals if one.check.is_pending]
        for arrival in validated:
            try:
                self._admit(arrival.sender, arrival.check, now)
            except AgentError as error:
                logger.warning("ignored a hello of %s: %s", arrival.sender, error)
            if arrival.sender in self._readers or not self._is_arriving(arrival.sender):
                delayed = self._delayed.pop(arrival.sender, ())
                for message in delayed if arrival.sender in self._readers else ():
                    self._send(arrival.sender, message)

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
