"""Answers to agents that this engine has not connected to.

A reader introduces itself with a hello, which carries the NIXL metadata that answers to it need.
The metadata of an agent without the shared secret is validated before it is loaded; answers to the
agent wait until then.
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
class ReplyChannel:
    metadata: bytes
    last_message_at: float


MAX_DELAYED = 64
"""Answers to one agent that wait until its metadata is validated."""


@dataclass(slots=True)
class PendingHello:
    """A hello whose metadata is under validation."""

    sender: str
    check: MetadataValidation


class ReplyChannels:
    """By agent. Bounded in number and age: the agent without a message for the longest time is
    forgotten first. `validator` bounds pending hellos."""

    LIMIT = 4096

    def __init__(
        self,
        agent: Agent,
        ttl: float,
        is_peer: Callable[[str], bool],
        validator: Validator = TRUSTING,
    ) -> None:
        """`ttl` in seconds. `is_peer`: the agent is also a peer, which NIXL must go on knowing."""
        self._agent = agent
        self._ttl = ttl
        self._is_peer = is_peer
        self._validator = validator
        self._pending: list[PendingHello] = []
        self._delayed: dict[str, list[bytes]] = {}
        """Answers to agents with a pending hello, by name."""
        self._channels: OrderedDict[str, ReplyChannel] = OrderedDict()

    def hello(self, sender: str, metadata: bytes, now: float) -> None:
        """A hello counts only from the agent that its metadata names."""
        if agent_name(metadata) not in (None, sender):
            logger.warning("ignored a hello of %s in another agent's name", sender)
            return
        check = self._validator.submit(metadata, now, is_expected=False)
        if check.is_pending:
            self._pending.append(PendingHello(sender, check))
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
            if name not in self._channels:
                self._remove(name)
            return
        self._channels[name] = ReplyChannel(metadata, now)
        self._channels.move_to_end(name)
        while len(self._channels) > self.LIMIT:
            self._forget_oldest()

    def knows(self, name: str) -> bool:
        """The agent has sent a hello, so it runs our extension."""
        return name in self._channels or self._is_arriving(name)

    def note_message(self, sender: str, now: float) -> None:
        channel = self._channels.get(sender)
        if channel is not None:
            channel.last_message_at = now
            self._channels.move_to_end(sender)

    def step(self, now: float) -> None:
        if self._pending:
            self._admit_validated(now)
        while (
            self._channels
            and next(iter(self._channels.values())).last_message_at <= now - self._ttl
        ):
            self._forget_oldest()

    def answer(self, name: str, message: ExtensionMessage) -> None:
        """Answer an agent that sent a hello. An answer to another agent is lost, as any message may
        be."""
        encoded = encode_extension(message)
        if name in self._channels or not self._is_arriving(name):
            self._send(name, encoded)
        elif len(delayed := self._delayed.setdefault(name, [])) < MAX_DELAYED:
            delayed.append(encoded)

    @property
    def num_delayed(self) -> int:
        """Answers that wait until metadata is validated."""
        return sum(map(len, self._delayed.values()))

    def _is_arriving(self, name: str) -> bool:
        return any(one.sender == name for one in self._pending)

    def _send(self, name: str, message: bytes) -> None:
        try:
            self._notify(name, message)
        except AgentError as error:
            logger.debug("agent %s was not answered: %s", name, error)
        except Exception:
            # The caller has changed its state by half: no answer is worth that.
            logger.exception("agent %s was not answered", name)

    def _admit_validated(self, now: float) -> None:
        validated = [one for one in self._pending if not one.check.is_pending]
        self._pending = [one for one in self._pending if one.check.is_pending]
        for pending in validated:
            try:
                self._admit(pending.sender, pending.check, now)
            except AgentError as error:
                logger.warning("ignored a hello of %s: %s", pending.sender, error)
            except Exception:
                logger.exception("a hello of %s", pending.sender)
            if pending.sender in self._channels or not self._is_arriving(pending.sender):
                delayed = self._delayed.pop(pending.sender, ())
                for message in delayed if pending.sender in self._channels else ():
                    self._send(pending.sender, message)

    def _notify(self, name: str, message: bytes) -> None:
        try:
            self._agent.notify(name, message)
        except AgentError:
            # NIXL does not know it any more if it was forgotten as a peer meanwhile.
            if name not in self._channels:
                raise
            self._agent.add_remote(self._channels[name].metadata)
            self._agent.notify(name, message)

    def _forget_oldest(self) -> None:
        name, _ = self._channels.popitem(last=False)
        self._remove(name)

    def _remove(self, name: str) -> None:
        if self._is_peer(name):
            return
        try:
            self._agent.remove_remote(name)
        except AgentError as error:
            logger.debug("%s", error)
