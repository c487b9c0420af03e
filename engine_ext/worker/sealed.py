"""Messages between engines that share a secret: whom they are from, and for whom, is proven.

    b"DS:" + mac (16 bytes) + message

The mac is over the sender's name, the receiver's and the message, so that what one engine was told
counts for no other. It says nothing about when: see docs/security.md. What moves KV knows nothing
of this: it talks to an agent as if there were no secret.

Where stock engines are let in (mixed mode), their messages pass as they are, and what only our
extension says counts from those who hold the secret.
"""

import hashlib
import hmac
import logging
from collections import OrderedDict

from engine_ext.common.access import Access, SharedSecret
from engine_ext.common.latest import keep_latest
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import ConnectorStats
from engine_ext.layout.plan import Indices, PeerLayout
from engine_ext.wire.notifications import (
    EXTENSION_PREFIX,
    REGISTRATION_PREFIX,
    without_extension,
)
from engine_ext.worker.agent import Agent, PeerHandle, Transfer, TransferState

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

SEAL_PREFIX = b"DS:"
MAC_BYTES = 16


def sealed(agent: Agent, access: Access, stats: ConnectorStats) -> Agent:
    """The agent itself where there is no secret."""
    if access.secret is None:
        return agent
    return SealedAgent(agent, access.secret, stats, is_mixed=access.is_mixed)


def seal(secret: SharedSecret, sender: str, receiver: str, message: bytes) -> bytes:
    return SEAL_PREFIX + _mac(secret, sender, receiver, message) + message


def open_seal(secret: SharedSecret, sender: str, receiver: str, message: bytes) -> bytes | None:
    """None for what is not sealed, or not by a holder of the secret, for this pair."""
    mac = message[len(SEAL_PREFIX) : len(SEAL_PREFIX) + MAC_BYTES]
    content = message[len(SEAL_PREFIX) + MAC_BYTES :]
    is_sealed = message.startswith(SEAL_PREFIX) and hmac.compare_digest(
        mac, _mac(secret, sender, receiver, content)
    )
    return content if is_sealed else None


class SealedAgent:
    """`Agent` that seals what it says and hears only what is sealed.

    In mixed mode it seals for those who have proven, in a handshake or by a seal of their own, that
    they hold the secret: something of the extension was said to them, or sealed by them. They are
    heard sealed alone from then on, also when we have forgotten them as peers: whoever speaks in
    such a name without a seal is a stranger. A name is an agent's for its life and nobody else's.
    """

    MAX_HOLDERS = 16384
    """The one longest without a word is forgotten first: only holders get in here, and the readers
    and peers that we may know at a time fit."""

    def __init__(
        self, agent: Agent, secret: SharedSecret, stats: ConnectorStats, *, is_mixed: bool
    ) -> None:
        self._agent = agent
        self._secret = secret
        self._stats = stats
        self._is_mixed = is_mixed
        self._holders: OrderedDict[str, None] = OrderedDict()

    @property
    def name(self) -> str:
        return self._agent.name

    def metadata(self) -> bytes:
        return self._agent.metadata()

    def add_remote(self, metadata: bytes) -> str:
        return self._agent.add_remote(metadata)

    def remove_remote(self, name: str) -> None:
        self._agent.remove_remote(name)

    def prepare(self, name: str, layout: PeerLayout) -> object:
        return self._agent.prepare(name, layout)

    def unprepare(self, peer: PeerHandle) -> None:
        self._agent.unprepare(peer)

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        return self._agent.start_read(peer, local, remote, self._seal(peer.name, notification))

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        return self._agent.start_write(peer, local, remote, self._seal(peer.name, notification))

    def poll(self, transfer: Transfer) -> TransferState:
        return self._agent.poll(transfer)

    def discard(self, transfer: Transfer) -> None:
        self._agent.discard(transfer)

    def notify(self, name: str, message: bytes) -> None:
        self._agent.notify(name, self._seal(name, message))

    def notifications(self) -> list[tuple[str, bytes]]:
        received = self._agent.notifications()
        opened = ((name, self._open(name, message)) for name, message in received)
        return [(name, message) for name, message in opened if message is not None]

    def close(self) -> None:
        self._agent.close()

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
    """What stock could have said in this message; None where it could not."""
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
