"""Engines that this one connects to: handshakes in flight, and ready peers.

A peer is one rank of an engine. It is connecting, then ready; or it has failed and is forgotten, so
that the next request starts a new handshake. Handshakes never block each other: each has its own
socket and its own deadline, and those of an engine's ranks run together. The NIXL metadata of a
peer without the shared secret is validated before it is loaded, with a deadline of its own.

No KV moves between engines with different versions of our extension. They exchange stock vLLM's
notification that a reader will not read (see EXTENSION_VERSION).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec

from engine_ext.common.inspection import PeerSeen
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import CONFIGURATION, PeerAddress
from engine_ext.layout.match import match_peer, one_by_one
from engine_ext.layout.plan import PlanError
from engine_ext.layout.ranks import MAX_FACED, RankError, TensorRank
from engine_ext.wire.dialer import PeerRank, PendingHandshake, TcpDialer
from engine_ext.wire.errors import EXTENSION_VERSION, WireError
from engine_ext.wire.handshake import (
    AgentMetadata,
    HandshakePayload,
    compatibility_hash,
    decode_metadata,
)
from engine_ext.wire.notifications import Hello, encode_extension
from engine_ext.worker.agent import AgentError, PeerHandle
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.leases import NEVER
from engine_ext.worker.validator import TRUSTING, MetadataValidation

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

MAX_CONNECTING = 256
MAX_CONNECTING_THERE = 32
"""With one host; more wait for their turn. One request may name an unknown engine of 64 ranks."""
MAX_PEERS = 4096
EVICTION_SECONDS = 60.0


class PeerError(Exception):
    """The peer cannot be used; the message gives the reason."""


class RefusedPeerError(PeerError):
    """No KV may move between this peer and us. Notifications may still be sent to it."""


@dataclass(slots=True)
class Connecting:
    client: PendingHandshake
    started: float
    deadline: float
    metadata: AgentMetadata | None = None
    """The peer's answer. Its NIXL metadata is under validation."""
    check: MetadataValidation | None = None


@dataclass(slots=True)
class Ready:
    handle: PeerHandle
    since: float
    used_at: float


def compatibility_problem(
    ours: Mapping[str, str], payload: HandshakePayload, our_hash: str | None = None
) -> str | None:
    """Return what differs in the peer's model or cache, naming each field; None if nothing."""
    theirs = payload.compat_factors
    if payload.effective_hash == (our_hash or compatibility_hash(ours)):
        both = (ours.get(CONFIGURATION), (theirs or {}).get(CONFIGURATION))
        if None in both or len({*both}) == 1:
            return None
    if theirs is None:
        return "compatibility hash differs, and the peer does not name the difference"
    keys = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    fields = ", ".join(f"{key} ({ours.get(key)} here, {theirs.get(key)} there)" for key in keys)
    return f"incompatible engines: {fields or 'no named field differs'}"


def _refusal_of(metadata: AgentMetadata) -> str | None:
    theirs = metadata.disagg_ext
    if theirs in (None, EXTENSION_VERSION):
        return None
    return (
        f"engine {metadata.engine_id} runs version {theirs} of this extension, this engine version "
        f"{EXTENSION_VERSION}: no KV moves between them"
    )


class Peers:
    """Bounded: a peer that was not used for `ConnectorConfig.unused_ttl` is forgotten, and where
    there are too many, the one unused for longest. A peer with a transfer under way stays."""

    def __init__(
        self,
        context: WorkerContext,
        is_in_use: Callable[[PeerHandle], bool] = lambda handle: False,
    ) -> None:
        """`is_in_use`: a transfer with that peer is under way."""
        self._context = context
        self._agent, self._config, self._us = context.agent, context.config, context.rank
        self._identity, self._stats = context.identity, context.stats
        self._is_in_use = is_in_use
        self._ttl = context.config.unused_ttl
        self._dialer = context.dialer or TcpDialer(access=context.config.access)
        self._ready: dict[PeerRank, Ready] = {}
        self._next_round = NEVER
        self._connecting: dict[PeerRank, Connecting] = {}
        self._failed: dict[PeerRank, str] = {}

    @property
    def num_connecting(self) -> int:
        return len(self._connecting)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def seen(self, now: float) -> Iterator[PeerSeen]:
        for (address, rank, _), ready in self._ready.items():
            yield PeerSeen(
                address.engine_id,
                address.host,
                address.port,
                rank,
                now - ready.since,
                self._is_in_use(ready.handle),
            )

    def connect(
        self,
        address: PeerAddress,
        now: float,
        rank: int | None = None,
        stage: int = 0,
        *,
        moves_kv: bool = True,
    ) -> PeerHandle | None:
        """Return that rank of the engine's stage, by default the first that we face; None while its
        handshake runs.

        The first call starts the handshake. If it fails, calls raise PeerError until the next
        `step`, and then start a new one. Raises RefusedPeerError if no KV may move between the two
        engines, except with `moves_kv` False, which is for notifications.
        """
        peer = PeerRank(address, self._faced(address)[0] if rank is None else rank, stage)
        if (ready := self._ready.get(peer)) is not None:
            ready.used_at = now
            if moves_kv and ready.handle.refusal is not None:
                raise RefusedPeerError(ready.handle.refusal)
            return ready.handle
        if peer in self._failed:
            raise PeerError(self._failed[peer])
        there = sum(one.address.host == address.host for one in self._connecting)
        if peer not in self._connecting and there < MAX_CONNECTING_THERE:
            self._start(peer, now)
        return None

    def connect_all(
        self, address: PeerAddress, now: float, *, moves_kv: bool = True
    ) -> list[PeerHandle] | None:
        """Return every rank of the engine that we face, in each of its stages; None while a
        handshake runs. Else as `connect`."""
        faced, stages = self._faced(address), range(address.pp_size)
        if len(faced) * len(stages) > MAX_FACED:
            raise PeerError(f"{len(stages)} stages of {len(faced)} ranks: at most {MAX_FACED}")
        handles = [
            self.connect(address, now, rank, stage, moves_kv=moves_kv)
            for rank in faced
            for stage in stages
        ]
        ready = [handle for handle in handles if handle is not None]
        if len(ready) < len(handles):
            return None
        if self._has_stages(address):
            for first in range(0, len(ready), len(stages)):
                self._check_layers(ready[first : first + len(stages)])
        return ready

    def notify_all(
        self, address: PeerAddress, now: float, send: Callable[[PeerHandle], None]
    ) -> bool:
        """Send to every rank of the engine that we face. Return False while a handshake runs: try
        again. A failure is logged and not repeated."""
        try:
            peers = self.connect_all(address, now, moves_kv=False)
        except PeerError as error:
            logger.warning("engine %s was not notified: %s", address.engine_id, error)
            return True
        if peers is None:
            return False
        has_failed = False
        for peer in peers:
            try:
                send(peer)
            except AgentError as error:
                logger.warning("engine %s was not notified: %s", address.engine_id, error)
                has_failed = True
        if has_failed:
            self.forget(address)
        return True

    def step(self, now: float) -> None:
        self._failed.clear()
        if now >= self._next_round:
            self._next_round = now + min(self._ttl / 4, EVICTION_SECONDS)
            unused = now - self._ttl
            for peer in [peer for peer, ready in self._ready.items() if ready.used_at <= unused]:
                if self._forget(peer):
                    logger.info("%s: forgotten, unused for %g s", peer, self._ttl)
        for peer, connecting in list(self._connecting.items()):
            try:
                self._advance(peer, connecting, now)
            except (WireError, PeerError, PlanError, AgentError) as error:
                self._fail(peer, str(error))
            except Exception as error:
                logger.exception("%s", peer)
                self._fail(peer, repr(error))

    def forget(self, address: PeerAddress) -> None:
        """Something failed with this engine: its next use starts with handshakes, except with ranks
        that a transfer runs with."""
        for peer in [peer for peer in self._ready if peer.address == address]:
            self._forget(peer)

    def knows(self, name: str) -> bool:
        """Return whether it is the agent of a ready peer."""
        return any(ready.handle.name == name for ready in self._ready.values())

    def close(self) -> None:
        for connecting in self._connecting.values():
            connecting.client.close()

    def _has_stages(self, address: PeerAddress) -> bool:
        """With pipeline stages on either side, a rank there may lack some of our layers."""
        return address.pp_size > 1 or self._identity.pp_size > 1

    def _check_layers(self, stages: list[PeerHandle]) -> None:
        """Check that each of our layers is in exactly one stage there."""
        found = sorted(layer for peer in stages for layer in peer.layout.layers)
        if found != self._layers:
            raise PeerError(
                f"{len(found)} layers here of {len(self._layers)} in its {len(stages)} stages"
            )

    @cached_property
    def _layers(self) -> list[str]:
        return sorted(
            layer for region in one_by_one(self._context.regions) for layer in region.layers
        )

    def _faced(self, address: PeerAddress) -> range:
        try:
            return self._us.faces(address.tp_size)
        except RankError as error:
            raise PeerError(str(error)) from None

    def _make_room(self) -> None:
        if len(self._ready) < MAX_PEERS:
            return
        by_use = sorted(self._ready, key=lambda peer: self._ready[peer].used_at)
        if not any(self._forget(peer) for peer in by_use):
            raise PeerError(f"{len(self._ready)} engines are in use already")

    def _forget(self, peer: PeerRank) -> bool:
        """Return False if a transfer runs with it."""
        handle = self._ready[peer].handle
        if self._is_in_use(handle):
            return False
        del self._ready[peer]
        self._undo(partial(self._agent.unprepare, handle), partial(self._remove, handle.name))
        return True

    def _remove(self, name: str) -> None:
        """Unless the agent is also known by another address."""
        if not self.knows(name):
            self._agent.remove_remote(name)

    @staticmethod
    def _undo(*steps: Callable[[], None]) -> None:
        for step in steps:
            try:
                step()
            except AgentError as error:
                logger.warning("%s", error)

    def _start(self, peer: PeerRank, now: float) -> None:
        if len(self._connecting) >= MAX_CONNECTING:
            raise PeerError(f"{len(self._connecting)} handshakes are under way already")
        try:
            client = self._dialer.dial(peer)
        except WireError as error:
            raise PeerError(str(error)) from None
        self._connecting[peer] = Connecting(client, now, now + self._config.handshake_timeout)

    def _advance(self, peer: PeerRank, connecting: Connecting, now: float) -> None:
        if connecting.metadata is None and (payload := connecting.client.receive()) is not None:
            self._check(payload)
            metadata = decode_metadata(payload)
            if metadata.engine_id != (expected := peer.address.engine_id):
                raise PeerError(f"engine {metadata.engine_id} answers where {expected} was")
            connecting.metadata = metadata
            connecting.check = self._validate(metadata, now)
            connecting.deadline = now + self._config.handshake_timeout
        check = connecting.check
        if connecting.metadata is not None and check is not None and not check.is_pending:
            if check.problem:
                raise PeerError(check.problem)
            metadata = msgspec.structs.replace(connecting.metadata, agent_metadata=check.metadata)
            self._accept(peer, metadata, now)
            self._stats.handshake_seconds.observe(now - connecting.started)
        elif now >= connecting.deadline:
            raise PeerError(f"no handshake within {self._config.handshake_timeout:g} s")

    def _check(self, payload: HandshakePayload) -> None:
        identity = self._identity
        problem = compatibility_problem(identity.compat_factors, payload, identity.compat_hash)
        if problem and self._config.enforce_handshake_compat:
            raise PeerError(problem)
        if problem:
            logger.warning("%s; connected all the same, enforce_handshake_compat is false", problem)

    def _validate(self, metadata: AgentMetadata, now: float) -> MetadataValidation:
        """With a secret, the answer of an engine with the extension is authenticated (see
        wire/secret_handshake.py). Without one, and for stock engines in mixed mode, it is not."""
        is_proven = self._config.access.secret is not None and metadata.disagg_ext is not None
        validator = TRUSTING if is_proven else self._context.validator
        return validator.submit(metadata.agent_metadata, now, is_expected=True)

    def _accept(self, peer: PeerRank, metadata: AgentMetadata, now: float) -> None:
        self._make_room()
        them = TensorRank(peer.rank, peer.address.tp_size)
        handle = self._introduce(them, metadata, self._has_stages(peer.address))
        self._ready[peer] = Ready(handle, since=now, used_at=now)
        self._connecting.pop(peer).client.close()
        self._stats.handshakes_ok += 1
        logger.info("connected to %s", peer)

    def _introduce(self, them: TensorRank, metadata: AgentMetadata, has_stages: bool) -> PeerHandle:
        if metadata.tensor_rank not in (None, them):
            raise PeerError(f"{TensorRank(*metadata.tensor_rank)} answers where {them} was")
        layout = match_peer(
            self._context.geometry,
            self._context.regions,
            metadata,
            self._us,
            them,
            permute=self._config.permute_layout,
            in_part=has_stages,
        )
        name = self._agent.add_remote(metadata.agent_metadata)
        with ExitStack() as failing:
            failing.callback(self._undo, partial(self._remove, name))
            handle = PeerHandle(
                name,
                layout,
                descriptors=self._agent.prepare(name, layout),
                has_extension=metadata.disagg_ext == EXTENSION_VERSION,
                lease_extension=metadata.lease_extension,
                write_bound=metadata.write_bound,
                readers=self._us.facing(them.size) * self._identity.pp_size,
                refusal=_refusal_of(metadata),
                returns_blocks=metadata.returns_blocks,
            )
            failing.callback(self._undo, partial(self._agent.unprepare, handle))
            if handle.has_extension:
                self._agent.notify(name, encode_extension(Hello(self._agent.metadata())))
            failing.pop_all()
        return handle

    def _fail(self, peer: PeerRank, problem: str) -> None:
        failed = self._connecting.pop(peer)
        failed.client.close()
        if failed.check is not None:
            failed.check.is_wanted = False
        self._failed[peer] = problem
        self._stats.handshakes_failed += 1
        logger.warning("%s: %s", peer, problem)
