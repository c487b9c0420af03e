"""The other engines we talk to: handshakes in flight, and what they led to.

A peer is one rank of an engine. It is CONNECTING, then READY, or it has failed and is gone, so that
the next request starts afresh. Handshakes never block each other: each has its own socket and its
own deadline, and those of an engine's ranks run together.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine_ext.base.config import ConnectorConfig
from engine_ext.base.types import CacheGeometry, ConnectorStats, EngineIdentity, PeerAddress, Region
from engine_ext.layout.match import match_peer
from engine_ext.layout.plan import ALONE, PlanError
from engine_ext.layout.ranks import RankError, TensorRank
from engine_ext.transfer.agent import Agent, AgentError, PeerHandle
from engine_ext.wire.dial import Dialer, Handshake, PeerRank, ZmqDialer
from engine_ext.wire.errors import EXTENSION_VERSION, WireError
from engine_ext.wire.handshake import (
    AgentMetadata,
    HandshakePayload,
    compatibility_hash,
    decode_metadata,
)
from engine_ext.wire.notifications import Hello, encode_extension

logger = logging.getLogger(__name__)


class PeerError(Exception):
    """The peer cannot be used; the message says why."""


@dataclass(slots=True)
class Connecting:
    client: Handshake
    deadline: float


def compatibility_problem(
    ours: Mapping[str, str], payload: HandshakePayload, our_hash: str | None = None
) -> str | None:
    """Why the peer's model or cache is not ours, naming each field; None when it is."""
    if payload.compatibility_hash == (our_hash or compatibility_hash(ours)):
        return None
    theirs = payload.compat_factors
    if theirs is None:
        return "compatibility hash differs, and the peer does not say in what"
    keys = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    fields = ", ".join(f"{key} ({ours.get(key)} here, {theirs.get(key)} there)" for key in keys)
    return f"incompatible engines: {fields or 'in nothing that either names'}"


class Peers:
    def __init__(
        self,
        agent: Agent,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        regions: Sequence[Region],
        identity: EngineIdentity,
        stats: ConnectorStats,
        us: TensorRank = ALONE,
        is_in_use: Callable[[PeerHandle], bool] = lambda handle: False,
        dialer: Dialer | None = None,
    ) -> None:
        """`is_in_use`: a transfer with that peer is under way, and it must stay known."""
        self._us = us
        self._agent = agent
        self._config = config
        self._geometry = geometry
        self._regions = regions
        self._identity = identity
        self._stats = stats
        self._is_in_use = is_in_use
        self._dialer = dialer or ZmqDialer(access=config.access)
        self._ready: dict[PeerRank, PeerHandle] = {}
        self._connecting: dict[PeerRank, Connecting] = {}
        self._failed: dict[PeerRank, str] = {}

    @property
    def num_connecting(self) -> int:
        return len(self._connecting)

    def connect(
        self, address: PeerAddress, now: float, rank: int | None = None
    ) -> PeerHandle | None:
        """That rank of the engine, by default the first that we face; None while its handshake
        runs.

        The first call starts the handshake; a call after it failed raises PeerError, once per
        `step`, and the next one starts a new one.
        """
        peer = PeerRank(address, self._faced(address)[0] if rank is None else rank)
        if (ready := self._ready.get(peer)) is not None:
            return ready
        if peer in self._failed:
            raise PeerError(self._failed[peer])
        if peer not in self._connecting:
            self._start(peer, now)
        return None

    def connect_all(self, address: PeerAddress, now: float) -> list[PeerHandle] | None:
        """Every rank of the engine that we face; None while a handshake runs. Else as `connect`."""
        handles = [self.connect(address, now, rank) for rank in self._faced(address)]
        ready = [handle for handle in handles if handle is not None]
        return ready if len(ready) == len(handles) else None

    def step(self, now: float) -> None:
        """Moves every handshake on. Failures are seen by `connect` until the next step."""
        self._failed.clear()
        for peer, connecting in list(self._connecting.items()):
            try:
                self._advance(peer, connecting, now)
            except (WireError, PeerError, PlanError, AgentError) as error:
                self._fail(peer, str(error))
            except Exception as error:
                logger.exception("%s", peer)
                self._fail(peer, repr(error))

    def forget(self, address: PeerAddress) -> None:
        """Something failed with this engine: the next use starts with handshakes.

        Ranks that a transfer runs with stay: it will find out itself whether they live.
        """
        for peer, handle in list(self._ready.items()):
            if peer.address == address and not self._is_in_use(handle):
                del self._ready[peer]
                self._undo(peer, handle)

    def close(self) -> None:
        for connecting in self._connecting.values():
            connecting.client.close()
        self._dialer.close()

    def _faced(self, address: PeerAddress) -> range:
        try:
            return self._us.faces(address.tp_size)
        except RankError as error:
            raise PeerError(str(error)) from None

    def _undo(self, peer: PeerRank, handle: PeerHandle) -> None:
        for undo in (
            partial(self._agent.unprepare, handle),
            partial(self._agent.remove_remote, handle.name),
        ):
            try:
                undo()
            except AgentError as error:
                logger.warning("%s: %s", peer, error)

    def _start(self, peer: PeerRank, now: float) -> None:
        try:
            client = self._dialer.dial(peer)
        except WireError as error:
            raise PeerError(str(error)) from None
        self._connecting[peer] = Connecting(client, now + self._config.handshake_timeout)

    def _advance(self, peer: PeerRank, connecting: Connecting, now: float) -> None:
        payload = connecting.client.receive()
        if payload is not None:
            self._check(payload)
            self._accept(peer, decode_metadata(payload))
        elif now >= connecting.deadline:
            raise PeerError(f"no handshake within {self._config.handshake_timeout:g} s")

    def _check(self, payload: HandshakePayload) -> None:
        identity = self._identity
        problem = compatibility_problem(identity.compat_factors, payload, identity.compat_hash)
        if problem and self._config.enforce_handshake_compat:
            raise PeerError(problem)
        if problem:
            logger.warning("%s; going on, enforce_handshake_compat is false", problem)

    def _accept(self, peer: PeerRank, metadata: AgentMetadata) -> None:
        expected = peer.address.engine_id
        if metadata.engine_id != expected:
            raise PeerError(f"engine {metadata.engine_id} answers where {expected} was")
        self._ready[peer] = self._introduce(TensorRank(peer.rank, peer.address.tp_size), metadata)
        self._connecting.pop(peer).client.close()
        self._stats.handshakes_ok += 1
        logger.info("connected to %s", peer)

    def _introduce(self, them: TensorRank, metadata: AgentMetadata) -> PeerHandle:
        if metadata.tensor_rank not in (None, them):
            raise PeerError(f"{TensorRank(*metadata.tensor_rank)} answers where {them} was")
        layout = match_peer(
            self._geometry,
            self._regions,
            metadata,
            self._us,
            them,
            permute=self._config.permute_layout,
        )
        name = self._agent.add_remote(metadata.agent_metadata)
        descriptors = self._agent.prepare(name, layout)
        has_extension = metadata.disagg_ext == EXTENSION_VERSION
        if has_extension:
            self._agent.notify(name, encode_extension(Hello(self._agent.metadata())))
        return PeerHandle(
            name,
            layout,
            descriptors,
            has_extension,
            metadata.lease_extension,
            metadata.write_bound,
            self._us.facing(them.size),
        )

    def _fail(self, peer: PeerRank, problem: str) -> None:
        self._connecting.pop(peer).client.close()
        self._failed[peer] = problem
        self._stats.handshakes_failed += 1
        logger.warning("%s: %s", peer, problem)
