"""Stock peers: vLLM 0.32's connector, as far as another engine sees it.

They heartbeat with `HB:`, say `<id>:<readers>` when they have read or written, answer nothing and
prove nothing. Their blocks are free when they think so.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine_ext.wire.notifications import (
    Heartbeat,
    PushRegistered,
    ReadDone,
    decode_notification,
    encode_heartbeat,
    encode_read_done,
    encode_registration,
)
from engine_ext.worker.agent import TransferState
from tests.unit.engine_ext.simulation.agents import SimTransfer
from tests.unit.engine_ext.simulation.engine import handshake_payload, new_name
from tests.unit.engine_ext.simulation.memory import num_blocks_of
from tests.unit.engine_ext.simulation.network import Network

BEAT = 5.0
LEASE, EXTENSION = 30.0, 20.0
LOOK = 0.1
PATIENCE = 100.0
"""Of a client: stock stops to heartbeat for a request that was aborted, and reads on."""


class StockPeer:
    """The half of a stock engine that reader and holder share."""

    def __init__(self, network: Network, name: str, port: int) -> None:
        self.network, self.name, self.port = network, name, port
        self.agent = network.agent(new_name(network, name))
        self.agent.on_wake = self.listen
        self.memory = self.agent.memory
        network.listeners["sim", port] = handshake_payload(self.agent, name, None)

    def listen(self) -> None:
        """A stock engine looks when it steps."""

    def tell(self, remote: str, message: bytes) -> None:
        self.agent.known.add(remote)
        self.agent.notify(remote, message)


@dataclass(eq=False)
class StockRead:
    holder: str
    remote_id: str
    tokens: list[int]
    remote_blocks: list[int]
    client_leaves_at: float
    blocks: list[int] = field(default_factory=list)
    is_over: bool = False
    was_right: bool | None = None


class StockReader(StockPeer):
    """A decode engine."""

    def pull(
        self, holder: str, params: dict[str, Any], tokens: list[int], queued: float = 0.0
    ) -> StockRead:
        """Heartbeats at once, READs after it has queued. `holder`: the agent's name."""
        read = StockRead(
            holder,
            params["remote_request_id"],
            tokens,
            list(params["remote_block_ids"][0]),
            self.network.now + queued + PATIENCE,
        )
        self._beat(read)
        self.network.later(queued, partial(self._begin, read))
        return read

    def leave(self, read: StockRead) -> None:
        """The client is gone before the READ: stock says that it has read."""
        if not read.is_over and not read.blocks:
            read.is_over = True
            self.tell(read.holder, encode_read_done(read.remote_id))

    def register(self, holder: Any, request_id: str, tokens: list[int]) -> list[int] | None:
        """Push mode: waits for `holder`, an engine, to write. Returns the blocks."""
        blocks = self.memory.take(num_blocks_of(len(tokens)), request_id)
        if blocks is None:
            return None
        message = PushRegistered(
            request_id=request_id,
            decode_engine_id=self.name,
            decode_host="sim",
            decode_port=self.port,
            decode_tp_size=1,
            local_block_ids=(tuple(blocks),),
            remote_engine_id=holder.name,
            remote_host="sim",
            remote_port=holder.identity.port,
            remote_tp_size=1,
        )
        self.tell(holder.agent.name, encode_registration(message))
        return blocks

    def _beat(self, read: StockRead) -> None:
        if read.is_over or not self.agent.is_alive or self.network.now > read.client_leaves_at:
            return
        self.tell(read.holder, encode_heartbeat([read.remote_id]))
        self.network.later(BEAT, partial(self._beat, read))

    def _begin(self, read: StockRead) -> None:
        if read.is_over or not self.agent.is_alive:
            return
        blocks = self.memory.take(len(read.remote_blocks), read.remote_id)
        if blocks is None:
            self.leave(read)
            return
        read.blocks = blocks
        self.agent.known.add(read.holder)
        done = encode_read_done(read.remote_id)
        transfer = self.network.start(
            "READ", self.agent, read.holder, blocks, read.remote_blocks, done
        )
        self._look(read, transfer)

    def _look(self, read: StockRead, transfer: SimTransfer) -> None:
        """An engine step: finished transfers are noticed, whatever they have read is used."""
        state = self.agent.poll(transfer) if self.agent.is_alive else TransferState.FAILED
        if state is TransferState.RUNNING:
            self.network.later(LOOK, partial(self._look, read, transfer))
            return
        read.is_over = True
        if state is TransferState.DONE:
            read.was_right = self.memory.holds(read.blocks, read.tokens)
        self.memory.give_back(read.blocks)


@dataclass(eq=False)
class StockLease:
    blocks: list[int]
    tokens: list[int]
    until: float
    is_written: bool = False


class StockHolder(StockPeer):
    """A prefill engine: reads, heartbeats, and in push mode registrations."""

    def __init__(self, network: Network, name: str, port: int) -> None:
        super().__init__(network, name, port)
        self.leases: dict[str, StockLease] = {}
        self._registered: dict[str, tuple[str, PushRegistered]] = {}

    def finish(self, request_id: str, tokens: list[int]) -> dict[str, Any] | None:
        """A P leg has been computed; the answer's params."""
        blocks = self.memory.take(num_blocks_of(len(tokens)), request_id)
        if blocks is None:
            return None
        self.memory.fill(blocks, tokens)
        self.leases[request_id] = StockLease(blocks, tokens, self.network.now + LEASE)
        self._look(request_id)
        self._match(request_id)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.name,
            "remote_request_id": request_id,
            "remote_host": "sim",
            "remote_port": self.port,
            "tp_size": 1,
            "remote_num_tokens": len(tokens),
        }

    def listen(self) -> None:
        for sender, message in self.agent.notifications():
            self._hear(sender, message)

    def _hear(self, sender: str, message: bytes) -> None:
        match decode_notification(message):
            case Heartbeat(request_ids):
                for request_id in request_ids:
                    if (lease := self.leases.get(request_id)) is not None:
                        lease.until = max(lease.until, self.network.now + EXTENSION)
            case ReadDone(request_id):
                self._free(request_id)
            case PushRegistered() as registered:
                self._registered[registered.request_id.rpartition("-")[0]] = (sender, registered)
                for request_id in list(self.leases):
                    self._match(request_id)

    def _look(self, request_id: str) -> None:
        lease = self.leases.get(request_id)
        if lease is None or not self.agent.is_alive:
            return
        if lease.until <= self.network.now and not lease.is_written:
            self._free(request_id)
        else:
            self.network.later(1.0, partial(self._look, request_id))

    def _match(self, request_id: str) -> None:
        """The two names differ in what each engine has appended."""
        found = self._registered.pop(request_id.rpartition("-")[0], None)
        if found is None:
            return
        sender, registered = found
        lease = self.leases[request_id]
        lease.is_written = True
        self.agent.known.add(sender)
        done = encode_read_done(registered.request_id)
        remote = registered.local_block_ids[0]
        transfer = self.network.start("WRITE", self.agent, sender, lease.blocks, remote, done)
        self._wait(request_id, transfer)

    def _wait(self, request_id: str, transfer: SimTransfer) -> None:
        if self.agent.poll(transfer) is TransferState.RUNNING:
            self.network.later(LOOK, partial(self._wait, request_id, transfer))
        else:
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        lease = self.leases.pop(request_id, None)
        if lease is not None:
            self.memory.give_back(lease.blocks)
