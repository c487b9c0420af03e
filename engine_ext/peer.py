"""The other engines we talk to: handshakes in flight, and what they led to.

A peer is CONNECTING, then READY, or it has failed and is gone, so that the next request starts
afresh. Handshakes never block each other: each has its own socket and its own deadline.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine_ext.agent import Agent, AgentError, PeerHandle
from engine_ext.config import ConnectorConfig
from engine_ext.dial import Dialer, Handshake, ZmqDialer
from engine_ext.plan import PlanError, match_peer
from engine_ext.types import CacheGeometry, ConnectorStats, PeerAddress, Region
from engine_ext.wire import (
    EXTENSION_VERSION,
    AgentMetadata,
    HandshakePayload,
    Hello,
    WireError,
    compatibility_hash,
    decode_metadata,
    encode_extension,
)

logger = logging.getLogger(__name__)


class PeerError(Exception):
    """The peer cannot be used; the message says why."""


@dataclass(slots=True)
class Connecting:
    client: Handshake
    deadline: float


def compatibility_problem(ours: Mapping[str, str], payload: HandshakePayload) -> str | None:
    """Why the peer's model or cache is not ours, naming each field; None when it is."""
    if payload.compatibility_hash == compatibility_hash(ours):
        return None
    theirs = payload.compat_factors
    if theirs is None:
        return "compatibility hash differs, and the peer does not say in what"
    keys = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    fields = ", ".join(f"{key} ({ours.get(key)} here, {theirs.get(key)} there)" for key in keys)
    return f"incompatible engines: {fields}"


class Peers:
    def __init__(
        self,
        agent: Agent,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        regions: Sequence[Region],
        factors: Mapping[str, str],
        stats: ConnectorStats,
        is_in_use: Callable[[PeerHandle], bool] = lambda handle: False,
        dialer: Dialer | None = None,
    ) -> None:
        """`is_in_use`: a transfer with that peer is under way, and it must stay known."""
        self._agent = agent
        self._config = config
        self._geometry = geometry
        self._regions = regions
        self._factors = factors
        self._stats = stats
        self._is_in_use = is_in_use
        self._dialer = dialer or ZmqDialer()
        self._ready: dict[PeerAddress, PeerHandle] = {}
        self._connecting: dict[PeerAddress, Connecting] = {}
        self._failed: dict[PeerAddress, str] = {}

    @property
    def num_connecting(self) -> int:
        return len(self._connecting)

    def connect(self, address: PeerAddress, now: float) -> PeerHandle | None:
        """The engine there, or None while its handshake runs.

        The first call starts the handshake; a call after it failed raises PeerError, once per
        `step`, and the next one starts a new one.
        """
        if (ready := self._ready.get(address)) is not None:
            return ready
        if address in self._failed:
            raise PeerError(self._failed[address])
        if address not in self._connecting:
            self._start(address, now)
        return None

    def step(self, now: float) -> None:
        """Moves every handshake on. Failures are seen by `connect` until the next step."""
        self._failed.clear()
        for address, connecting in list(self._connecting.items()):
            try:
                self._advance(address, connecting, now)
            except (WireError, PeerError, PlanError, AgentError) as error:
                self._fail(address, str(error))
            except Exception as error:
                logger.exception("engine %s", address.engine_id)
                self._fail(address, repr(error))

    def forget(self, address: PeerAddress) -> None:
        """Something failed with this peer: the next use starts with a handshake.

        Not while a transfer with it runs, which will find out itself whether the peer lives.
        """
        handle = self._ready.get(address)
        if handle is None or self._is_in_use(handle):
            return
        del self._ready[address]
        for undo in (
            partial(self._agent.drop, handle),
            partial(self._agent.remove_remote, handle.name),
        ):
            try:
                undo()
            except AgentError as error:
                logger.warning("engine %s: %s", address.engine_id, error)

    def close(self) -> None:
        for connecting in self._connecting.values():
            connecting.client.close()
        self._dialer.close()

    def _start(self, address: PeerAddress, now: float) -> None:
        try:
            client = self._dialer.dial(address)
        except WireError as error:
            raise PeerError(str(error)) from None
        self._connecting[address] = Connecting(client, now + self._config.handshake_timeout)

    def _advance(self, address: PeerAddress, connecting: Connecting, now: float) -> None:
        payload = connecting.client.receive()
        if payload is not None:
            self._check(payload)
            self._accept(address, decode_metadata(payload))
        elif now >= connecting.deadline:
            raise PeerError(f"no handshake within {self._config.handshake_timeout:g} s")

    def _check(self, payload: HandshakePayload) -> None:
        problem = compatibility_problem(self._factors, payload)
        if problem and self._config.enforce_handshake_compat:
            raise PeerError(problem)
        if problem:
            logger.warning("%s; going on, enforce_handshake_compat is false", problem)

    def _accept(self, address: PeerAddress, metadata: AgentMetadata) -> None:
        if metadata.engine_id != address.engine_id:
            raise PeerError(f"engine {metadata.engine_id} answers where {address.engine_id} was")
        self._ready[address] = self._introduce(metadata)
        self._connecting.pop(address).client.close()
        self._stats.handshakes_ok += 1
        logger.info("connected to engine %s at %s:%d", *address)

    def _introduce(self, metadata: AgentMetadata) -> PeerHandle:
        layout = match_peer(self._geometry, self._regions, metadata)
        name = self._agent.add_remote(metadata.agent_metadata)
        descriptors = self._agent.prepare(name, layout)
        has_extension = metadata.disagg_ext == EXTENSION_VERSION
        if has_extension:
            self._agent.notify(name, encode_extension(Hello(self._agent.metadata())))
        return PeerHandle(name, layout, descriptors, has_extension, metadata.lease_extension)

    def _fail(self, address: PeerAddress, problem: str) -> None:
        self._connecting.pop(address).client.close()
        self._failed[address] = problem
        self._stats.handshakes_failed += 1
        logger.warning("engine %s at %s:%d: %s", *address, problem)
