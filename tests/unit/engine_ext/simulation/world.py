"""A simulated NIXL: agents, their memory and the messages between them, on a clock that tests move.

It is as unkind as the real one may be. A message can be lost, doubled, late or overtaken; a
transfer takes as long as the test says, moves half of its data at its beginning and half at its
end, and tells the other side only when its initiator polls it. Around each agent stands a small
engine: the connector's scheduler half, the owner thread's loop, and a pool whose blocks are reused
as soon as they are free. It checks what no fault may break:

- every lease and every load is reported once, and never for a request that has none;
- what was loaded well is the KV that was asked for;
- nothing is written into blocks that their request does not hold any more.
"""

import hashlib
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from engine_ext.base.config import ConnectorConfig
from engine_ext.base.proof import Keys
from engine_ext.base.types import (
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    FinishStatus,
    PeerAddress,
    Region,
)
from engine_ext.core.loop import TransferLoop
from engine_ext.core.scheduler import SchedulerConnector
from engine_ext.layout.plan import Indices, PeerLayout
from engine_ext.transfer.agent import AgentError, PeerHandle, TransferState
from engine_ext.transfer.results import Results
from engine_ext.wire.dial import Handshake, PeerRank
from engine_ext.wire.errors import EXTENSION_VERSION
from engine_ext.wire.handshake import (
    AgentMetadata,
    HandshakePayload,
    decode_payload,
    encode_payload,
)
from engine_ext.wire.notifications import PushDone, decode_notification

BLOCK_SIZE = 4
NUM_BLOCKS = 24
GEOMETRY = CacheGeometry(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
REGIONS = (Region("layer", 0x1000, 64, 64, NUM_BLOCKS),)
STEP = 0.25
"""Seconds between two steps of the loops while time passes."""

Content = bytes
"""What a block holds: the digest of all tokens up to its end, or a canary."""


def contents_of(tokens: Sequence[int]) -> list[Content]:
    """Of each full or partial block of these tokens."""
    ends = range(BLOCK_SIZE, len(tokens) + BLOCK_SIZE, BLOCK_SIZE)
    return [hashlib.blake2b(repr(list(tokens[:end])).encode()).digest()[:8] for end in ends]


@dataclass
class SimTransfer:
    kind: str
    agent: "SimAgent"
    remote_name: str
    local: list[int]
    remote: list[int]
    notification: bytes
    ends_at: float
    owners: list[str | None]
    """Who held the initiator's blocks when it began."""
    state: TransferState = TransferState.RUNNING
    has_told: bool = False
    is_released: bool = False


@dataclass
class SimAgent:
    """`engine_ext.transfer.agent.Agent`. Methods named in `failing` raise."""

    name: str
    network: "Network"
    memory: list[Content] = field(default_factory=lambda: [b"fresh"] * NUM_BLOCKS)
    known: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    inbox: list[tuple[str, bytes]] = field(default_factory=list)
    is_alive: bool = True
    may_write: Callable[[bytes, int], bool] = lambda notification, block: True
    """Whether a WRITE that ends with this notification may change this block now."""
    owner_of: Callable[[int], str | None] = lambda block: None

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_remote(self, metadata: bytes) -> str:
        self._call("add_remote")
        self.known.add(metadata.decode())
        return metadata.decode()

    def remove_remote(self, name: str) -> None:
        self._call("remove_remote")
        self.known.discard(name)
        for transfer in self.network.transfers:
            # As NIXL does: transfers with an agent that is not known any more have failed.
            if transfer.agent is self and transfer.remote_name == name:
                transfer.state = TransferState.FAILED

    def prepare(self, name: str, layout: PeerLayout) -> str:
        self._call("prepare")
        return name

    def unprepare(self, peer: PeerHandle) -> None:
        self._call("unprepare")

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> SimTransfer:
        self._call("start_read")
        return self.network.start("READ", self, peer.name, local, remote, notification)

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> SimTransfer:
        self._call("start_write")
        return self.network.start("WRITE", self, peer.name, local, remote, notification)

    def poll(self, transfer: SimTransfer) -> TransferState:
        self._call("poll")
        if transfer.is_released:
            self.network.violations.append("a released transfer was polled")
        if transfer.state is TransferState.DONE and not transfer.has_told:
            transfer.has_told = True
            self.network.send(self.name, transfer.remote_name, transfer.notification)
        return transfer.state

    def discard(self, transfer: SimTransfer) -> None:
        self._call("discard")
        if transfer.is_released:
            self.network.violations.append("a transfer was released twice")
        transfer.is_released = True
        if transfer.state is TransferState.RUNNING:
            transfer.state = TransferState.FAILED

    def notify(self, name: str, message: bytes) -> None:
        self._call("notify")
        if name not in self.known:
            raise AgentError(f"{self.name} does not know {name}")
        self.network.send(self.name, name, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._call("notifications")
        received, self.inbox = self.inbox, []
        return received

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str) -> None:
        if method in self.failing:
            raise AgentError(f"injected: {method}")


@dataclass
class Weather:
    """What becomes of messages and transfers from now on. Seconds."""

    lose: bool = False
    copies: int = 1
    delay: float = 0.0
    spread: float = 0.0
    """Each message is late by up to this much more: they overtake each other."""
    transfer: float = 0.01
    handshake: float = 0.01


@dataclass
class Network:
    now: float = 1000.0
    random: Random = field(default_factory=lambda: Random(0))
    weather: Weather = field(default_factory=Weather)
    agents: dict[str, SimAgent] = field(default_factory=dict)
    listeners: dict[tuple[str, int], bytes] = field(default_factory=dict)
    transfers: list[SimTransfer] = field(default_factory=list)
    lost_at: list[float] = field(default_factory=list)
    losses: int = 2
    """At most so many messages are lost in `WINDOW` seconds: a link, not a wall."""
    num_writes: int = 0
    violations: list[str] = field(default_factory=list)
    """Not raised where they happen: the loops survive exceptions."""
    _messages: list[tuple[float, int, str, str, bytes]] = field(default_factory=list)
    _count: "itertools.count[int]" = field(default_factory=itertools.count)

    WINDOW = 20.0

    def agent(self, name: str) -> SimAgent:
        made = self.agents[name] = SimAgent(name, self)
        return made

    def send(self, sender: str, target: str, message: bytes) -> None:
        if self.weather.lose and self._may_lose():
            self.lost_at.append(self.now)
            return
        for _ in range(self.weather.copies):
            at = self.now + self.weather.delay + self.random.random() * self.weather.spread
            heapq.heappush(self._messages, (at, next(self._count), sender, target, message))

    def _may_lose(self) -> bool:
        recent = [at for at in self.lost_at if at > self.now - self.WINDOW]
        return len(recent) < self.losses

    def start(
        self,
        kind: str,
        agent: SimAgent,
        remote_name: str,
        local: Indices,
        remote: Indices,
        notification: bytes,
    ) -> SimTransfer:
        if remote_name not in agent.known:
            raise AgentError(f"{agent.name} does not know {remote_name}")
        transfer = SimTransfer(
            kind,
            agent,
            remote_name,
            local.tolist(),
            remote.tolist(),
            notification,
            self.now + self.weather.transfer,
            [agent.owner_of(block) for block in local.tolist()],
        )
        self.transfers.append(transfer)
        self.num_writes += kind == "WRITE"
        self._move(transfer, slice(0, None, 2))
        return transfer

    def advance(self, seconds: float) -> None:
        """Time passes; what is due arrives."""
        self.now += seconds
        while self._messages and self._messages[0][0] <= self.now:
            _, _, sender, target, message = heapq.heappop(self._messages)
            self.agents[target].inbox.append((sender, message))
        for transfer in self.transfers:
            self._end(transfer)
        self.transfers = [t for t in self.transfers if t.state is TransferState.RUNNING]

    def dial(self, peer: PeerRank) -> Handshake:
        return SimHandshake(self, peer.address, self.now + self.weather.handshake)

    def close(self) -> None:
        """As a dialer: of one engine, while the others go on."""

    def _end(self, transfer: SimTransfer) -> None:
        if transfer.state is not TransferState.RUNNING:
            return
        if not (transfer.agent.is_alive and self.agents[transfer.remote_name].is_alive):
            transfer.state = TransferState.FAILED
        elif transfer.ends_at <= self.now:
            self._move(transfer, slice(1, None, 2))
            transfer.state = TransferState.DONE

    def _move(self, transfer: SimTransfer, part: slice) -> None:
        theirs = self.agents[transfer.remote_name]
        blocks = zip(transfer.local[part], transfer.remote[part], strict=True)
        for (local, remote), owner in zip(blocks, transfer.owners[part], strict=True):
            if transfer.agent.owner_of(local) != owner:
                self.violations.append(f"block {local} was given back during a {transfer.kind}")
            if transfer.kind == "READ":
                transfer.agent.memory[local] = theirs.memory[remote]
            else:
                if not theirs.may_write(transfer.notification, remote):
                    self.violations.append(f"a late WRITE has landed in block {remote}")
                theirs.memory[remote] = transfer.agent.memory[local]


@dataclass
class SimHandshake:
    network: Network
    address: PeerAddress
    ready_at: float

    def receive(self) -> HandshakePayload | None:
        if self.network.now < self.ready_at:
            return None
        payload = self.network.listeners.get((self.address.host, self.address.port))
        return None if payload is None else decode_payload(payload)

    def close(self) -> None:
        pass


@dataclass
class SimRequest:
    """`engine_ext.base.types.EngineRequest`."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    content_keys: Keys = ()

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class SimEngine:
    """Scheduler half, owner thread's loop, block pool and memory of one engine."""

    def __init__(
        self, network: Network, config: ConnectorConfig, port: int, *, stock: bool = False
    ) -> None:
        self.network = network
        self.config = config
        self.identity = EngineIdentity(config.engine_id, "sim", port, compat_factors={"model": "m"})
        self.agent = network.agent(f"agent of {config.engine_id} at {network.now:g}")
        self.agent.may_write = self._may_be_written
        self.agent.owner_of = self._owner_of
        self.results = Results()
        self.stats = ConnectorStats()
        self.scheduler = SchedulerConnector(config, self.identity, GEOMETRY, lambda: network.now)
        self.loop = TransferLoop(
            self.agent,
            config,
            GEOMETRY,
            self.identity,
            REGIONS,
            self.results,
            self.stats,
            network,
        )
        self.free = list(range(NUM_BLOCKS))
        self.loading: dict[str, SimRequest] = {}
        """Parked or orphaned: a load may write into their blocks."""
        self.held: dict[str, SimRequest] = {}
        """Finished, and kept for a reader."""
        self.outcomes: dict[str, bool] = {}
        self._canaries = itertools.count()
        network.listeners["sim", port] = encode_payload(
            self._metadata(None if stock else EXTENSION_VERSION), self.identity.compat_factors
        )

    def prefill(self, request_id: str, tokens: list[int], **params: Any) -> SimRequest:
        """A P leg arrives."""
        request = SimRequest(request_id, tokens, {"do_remote_decode": True, **params})
        self.scheduler.on_new_request(request)
        return request

    def finish(self, request: SimRequest) -> dict[str, Any] | None:
        """A P leg has its one token: its blocks are leased; None where no block was free."""
        blocks = self._allocate(len(contents_of(request.prompt_token_ids)))
        if blocks is None:
            self.abort(request)
            return None
        request.blocks, request.num_computed_tokens = blocks, request.num_prompt_tokens
        for block, content in zip(blocks, contents_of(request.prompt_token_ids), strict=True):
            self.agent.memory[block] = content
        status = FinishStatus.LENGTH_CAPPED
        decision = self.scheduler.request_finished(request, (tuple(blocks),), status)
        assert decision.delay_free
        self.held[request.request_id] = request
        return decision.kv_transfer_params

    def decode(self, request_id: str, tokens: list[int], params: Any) -> SimRequest | None:
        """A D leg arrives and, if there is room for it, loads at once."""
        request = SimRequest(request_id, tokens, params)
        self.scheduler.on_new_request(request)
        missing, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        blocks = self._allocate(len(contents_of(tokens)))
        if not missing or blocks is None:
            self.free += blocks or []
            self.abort(request)
            return None
        request.blocks = blocks
        self.scheduler.update_state_after_alloc(request, (tuple(blocks),), missing)
        self.loading[request_id] = request
        return request

    def abort(self, request: SimRequest) -> None:
        self.scheduler.request_finished(request, (tuple(request.blocks),), FinishStatus.ABORTED)

    def step(self) -> None:
        if not self.agent.is_alive:
            return
        now = self.network.now
        meta = self.scheduler.build_connector_meta()
        if meta:
            self.loop.apply(meta, now)
        self.loop.step(now)
        self._take_results()

    def die(self) -> None:
        """kill -9: nothing it has or owns matters any more, and nothing answers."""
        self.agent.is_alive = False
        self.network.listeners.pop(("sim", self.identity.port), None)

    def assert_empty(self) -> None:
        assert sorted(self.free) == list(range(NUM_BLOCKS)), (self.loading, self.held)
        stats = self.stats
        assert (stats.leases_active, stats.pushes_active, stats.pulls_active) == (0, 0, 0)
        assert self.loop.num_open == 0

    def _take_results(self) -> None:
        results = self.results.take()
        self.scheduler.update_connector_output(results)
        for request_id in results.finished_sending:
            self._free(self.held.pop(request_id).blocks)
        for request_id in results.finished_recving:
            self._accept(self.loading.pop(request_id), request_id not in results.failed_recving)

    def _accept(self, request: SimRequest, ok: bool) -> None:
        assert request.request_id not in self.outcomes, "reported twice"
        self.outcomes[request.request_id] = ok
        if ok:
            found = [self.agent.memory[block] for block in request.blocks]
            assert found == contents_of(request.prompt_token_ids), "wrong KV was accepted"
        self.scheduler.request_finished(request, (tuple(request.blocks),), FinishStatus.STOPPED)
        self._free(request.blocks)

    def _allocate(self, count: int) -> list[int] | None:
        """The block freed last comes first: what is too early or too late meets somebody."""
        if count > len(self.free):
            return None
        return [self.free.pop() for _ in range(count)]

    def _free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.agent.memory[block] = b"canary %d" % next(self._canaries)
        self.free += blocks

    def _may_be_written(self, notification: bytes, block: int) -> bool:
        done = decode_notification(notification)
        owner = self.loading.get(done.request_id) if isinstance(done, PushDone) else None
        return owner is not None and block in owner.blocks

    def _owner_of(self, block: int) -> str | None:
        requests = (*self.loading.values(), *self.held.values())
        return next((one.request_id for one in requests if block in one.blocks), None)

    def _metadata(self, extension: int | None) -> AgentMetadata:
        return AgentMetadata(
            engine_id=self.config.engine_id,
            agent_metadata=self.agent.metadata(),
            kv_caches_base_addr=[region.base_addr for region in REGIONS],
            device_id=0,
            num_blocks=NUM_BLOCKS,
            block_lens=[region.block_len for region in REGIONS],
            block_strides=[region.block_stride for region in REGIONS],
            kv_cache_layout=GEOMETRY.kv_cache_layout,
            block_size=BLOCK_SIZE,
            attn_backend_name=GEOMETRY.attn_backend_name,
            region_names=[region.name for region in REGIONS],
            disagg_ext=extension,
            lease_extension=self.config.lease_extension,
        )


@dataclass
class World:
    """A network and the engines on it."""

    network: Network = field(default_factory=Network)
    engines: dict[str, SimEngine] = field(default_factory=dict)

    def engine(self, name: str, mode: str = "pull", port: int = 1, **config: Any) -> SimEngine:
        made = ConnectorConfig(engine_id=name, transfer_mode=mode, **config)  # type: ignore[arg-type] # the two modes
        self.engines[name] = SimEngine(self.network, made, port)
        return self.engines[name]

    def pass_time(self, seconds: float) -> None:
        """Everybody steps: often at first, once a second when it takes long."""
        start = self.network.now
        end = start + seconds
        while True:
            for engine in list(self.engines.values()):
                engine.step()
            assert not self.network.violations
            now = self.network.now
            if now >= end:
                return
            self.network.advance(min(STEP if now - start < 5 else 1.0, end - now))

    def until(self, condition: Callable[[], object], within: float = 5.0) -> None:
        """Passes time until then; fails when it takes longer than `within` seconds."""
        deadline = self.network.now + within
        while not condition():
            assert self.network.now < deadline, f"not reached within {within:g} s"
            self.pass_time(0.05)
