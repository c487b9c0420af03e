"""Doubles that inject faults: the happy path of NIXL itself is tested on the real library."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_ext.common.prefix_hashes import Keys, PrefixHashes
from engine_ext.common.types import PeerAddress, Region, RemoteSource
from engine_ext.layout.plan import Indices, PeerLayout
from engine_ext.wire.handshake import AgentMetadata
from engine_ext.wire.notifications import PushRegistered
from engine_ext.worker.agent import AgentError, PeerHandle, TransferState
from engine_ext.worker.validator import MetadataValidation


def told(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As if the engine itself had said it so: its proof is bound to what it says now."""
    proof = PrefixHashes.from_wire(params["prefix_proof"], params)
    assert isinstance(proof, PrefixHashes)
    params = {**params, **changes}
    return (
        params if "prefix_proof" in changes else {**params, "prefix_proof": proof.to_wire(params)}
    )


@dataclass
class Request:
    """The least an engine's request can be."""

    request_id: str
    kv_transfer_params: Any = None
    num_prompt_tokens: int = 100
    num_computed_tokens: int = 0
    answer: Sequence[int] = ()
    content_keys: Keys | None = ()

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return range(self.num_prompt_tokens)

    @property
    def token_ids(self) -> Sequence[int]:
        return [*self.prompt_token_ids, *self.answer]


@dataclass
class FakeTransfer:
    notification: bytes
    local: list[int]
    remote: list[int]
    state: TransferState = TransferState.RUNNING
    released: bool = False


@dataclass
class FakeAgent:
    """Transfers run until a test ends them. Names of `failing` methods raise AgentError."""

    name: str = "fake"
    failing: set[str] = field(default_factory=set)
    inbox: list[bytes] = field(default_factory=list)
    """From `sender`."""
    sender: str = "agent-p"
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    transfers: list[FakeTransfer] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    closed: bool = False
    starts_as: TransferState = TransferState.RUNNING
    """DONE: as in shared memory, where the post is the transfer."""

    def metadata(self) -> bytes:
        return b"fake"

    def add_remote(self, metadata: bytes) -> str:
        self._check("add_remote")
        self.peers.append(metadata.decode())
        return metadata.decode()

    def remove_remote(self, name: str) -> None:
        self.peers.remove(name)
        self._check("remove_remote")

    def prepare(self, name: str, layout: PeerLayout) -> None:
        self._check("prepare")

    def unprepare(self, peer: PeerHandle) -> None:
        self._check("unprepare")

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> FakeTransfer:
        self._check("start_read")
        transfer = FakeTransfer(notification, local.tolist(), remote.tolist(), self.starts_as)
        self.transfers.append(transfer)
        return transfer

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> FakeTransfer:
        self._check("start_write")
        return self.start_read(peer, local, remote, notification)

    def poll(self, transfer: FakeTransfer) -> TransferState:
        self._check("poll")
        return transfer.state

    def discard(self, transfer: FakeTransfer) -> None:
        self._check("discard")
        transfer.released = True

    def notify(self, name: str, message: bytes) -> None:
        self._check("notify")
        self.sent.append((name, message))

    def notifications(self) -> list[tuple[str, bytes]]:
        self._check("notifications")
        messages, self.inbox = self.inbox, []
        return [(self.sender, message) for message in messages]

    def close(self) -> None:
        self.closed = True

    def _check(self, method: str) -> None:
        if method in self.failing:
            raise AgentError(f"injected: {method}")


@dataclass
class SlowValidator:
    """A verdict comes when a test gives it, on all that waits: why not, or nothing."""

    waiting: list[MetadataValidation] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return len(self.waiting)

    def submit(self, metadata: bytes, now: float, *, is_expected: bool) -> MetadataValidation:
        self.waiting.append(MetadataValidation(metadata, now))
        return self.waiting[-1]

    def judge(self, problem: str = "") -> None:
        while self.waiting:
            self.waiting.pop().problem = problem

    def step(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass


def regions(num_blocks: int = 32, layers: int = 2) -> tuple[Region, ...]:
    return tuple(
        Region(f"model.layers.{i}.self_attn.attn", 0x10000 + i * 0x100000, 4096, 4096, num_blocks)
        for i in range(layers)
    )


def metadata_of(engine_id: str, agent: str, layers: Sequence[Region], **more: Any) -> AgentMetadata:
    """What an engine with this memory tells in its handshake."""
    return AgentMetadata(
        engine_id=engine_id,
        agent_metadata=agent.encode(),
        kv_caches_base_addr=[region.base_addr for region in layers],
        device_id=0,
        num_blocks=layers[0].num_blocks,
        block_lens=[region.block_len for region in layers],
        block_strides=[region.block_stride for region in layers],
        kv_cache_layout="LBHNC",
        block_size=16,
        attn_backend_name="CPU_ATTN",
        **more,
    )


def push_registration(request_id: str = "d-1", **changes: Any) -> PushRegistered:
    """Return the registration that D sends to P for a push."""
    fields: dict[str, Any] = {
        "decode_engine_id": "d",
        "decode_host": "127.0.0.1",
        "decode_port": 5600,
        "decode_tp_size": 1,
        "local_block_ids": ((1, 2),),
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "remote_tp_size": 1,
    }
    return PushRegistered(request_id=request_id, **(fields | changes))


def source(
    request_id: str = "p-1",
    engine_id: str = "engine-p",
    port: int = 5600,
    blocks: Sequence[int] = range(7),
    num_tokens: int | None = 100,
) -> RemoteSource:
    address = PeerAddress(engine_id, "127.0.0.1", port)
    return RemoteSource(address, request_id, 1, (tuple(blocks),), num_tokens)
