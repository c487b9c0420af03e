"""Messages between engines that share a secret: sender and receiver are authenticated.

    b"DS:" + mac (16 bytes) + message

The mac covers the sender's name, the receiver's name and the message, so a message to one engine is
not valid for another. It does not cover the time: see docs/security.md. The rest of the worker uses
a sealed agent as it uses any other.

In mixed mode, stock engines' messages pass without a seal. Messages of our extension count only
from agents that hold the secret.
"""

import hashlib
import hmac
import logging
from collections import OrderedDict

from engine_ext.common.access import Access, SharedSecret
from engine_ext.common.latest import keep_latest
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import ConnectorStats
from engine_ext.layout.plan import Indices
from engine_ext.wire.notifications import (
    EXTENSION_PREFIX,
    REGISTRATION_PREFIX,
    without_extension,
)
from engine_ext.worker.agent import Agent, PeerHandle, Transfer

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

SEAL_PREFIX = b"DS:"
MAC_BYTES = 16


def sealed(agent: Agent, access: Access, stats: ConnectorStats) -> Agent:
    """Return the agent itself where there is no secret."""
    if access.secret is None:
        return agent
    return SealedAgent(agent, access.secret, stats, is_mixed=access.is_mixed)


def seal(secret: SharedSecret, sender: str, receiver: str, message: bytes) -> bytes:
    return SEAL_PREFIX + _mac(secret, sender, receiver, message) + message


def open_seal(secret: SharedSecret, sender: str, receiver: str, message: bytes) -> bytes | None:
    """Return the message; None if it is not sealed with the secret for this pair."""
    mac = message[len(SEAL_PREFIX) : len(SEAL_PREFIX) + MAC_BYTES]
    content = message[len(SEAL_PREFIX) + MAC_BYTES :]
    is_sealed = message.startswith(SEAL_PREFIX) and hmac.compare_digest(
        mac, _mac(secret, sender, receiver, content)
    )
    return content if is_sealed else None


class SealedAgent:
    """`Agent` that seals its messages and drops messages without a valid seal.

    In mixed mode, an agent has proven that it holds the secret if it passed a handshake, after
    which we send it messages of the extension, or if it sealed a message. From then on messages to
    it are sealed, and messages in its name count only with a seal, also when it is forgotten as a
    peer. Agent names are unique and used once.
    """

    MAX_HOLDERS = 16384
    """More than the peers and readers that are known at a time. The one without a message for the
    longest time is forgotten first."""

    def __init__(
        self, agent: Agent, secret: SharedSecret, stats: ConnectorStats, *, is_mixed: bool
    ) -> None:
        self._agent = agent
        self._secret = secret
        self._stats = stats
        self._is_mixed = is_mixed
        self._holders: OrderedDict[str, None] = OrderedDict()
        # The agent's own: no message passes through these.
        self.metadata, self.add_remote = agent.metadata, agent.add_remote
        self.remove_remote, self.close = agent.remove_remote, agent.close
        self.prepare, self.unprepare = agent.prepare, agent.unprepare
        self.poll, self.discard = agent.poll, agent.discard

    @property
    def name(self) -> str:
        return self._agent.name

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        return self._agent.start_read(peer, local, remote, self._seal(peer.name, notification))

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        return self._agent.start_write(peer, local, remote, self._seal(peer.name, notification))

    def notify(self, name: str, message: bytes) -> None:
        self._agent.notify(name, self._seal(name, message))

    def notifications(self) -> list[tuple[str, bytes]]:
        received = self._agent.notifications()
        opened = ((name, self._open(name, message)) for name, message in received)
        return [(name, message) for name, message in opened if message is not None]

    def _seal(self, name: str, message: bytes) -> bytes:
        if message.startswith(EXTENSION_PREFIX):
            self._has_proven(name)
        if self._is_mixed and name not in self._holders:
            return message
        return seal(self._secret, self.name, name, message)

    def _open(self, sender: str, message: bytes) -> bytes | None:
        opened = open_seal(self._secret, sender, self.name, message)
        if opened is not None:
            self._has_proven(sender)
        elif self._is_mixed and sender not in self._holders:
            opened = _of_stock(message)
        if opened is None:
            self._stats.notifications_unsealed += 1
            logger.warning("ignored a notification of %s, not sealed: %.32r", sender, message)
        return opened

    def _has_proven(self, name: str) -> None:
        keep_latest(self._holders, name, None, self.MAX_HOLDERS)


def _of_stock(message: bytes) -> bytes | None:
    """Return the message as a stock engine could have sent it; None if it could not."""
    if message.startswith((EXTENSION_PREFIX, SEAL_PREFIX)):
        return None
    if message.startswith(REGISTRATION_PREFIX):
        return without_extension(message)
    return message


def _mac(secret: SharedSecret, sender: str, receiver: str, message: bytes) -> bytes:
    mac = hashlib.blake2b(key=secret.seal_key, digest_size=MAC_BYTES)
    for name in (sender.encode(), receiver.encode()):
        mac.update(len(name).to_bytes(4, "big") + name)
    mac.update(message)
    return mac.digest()
