"""One half of a transfer in a process of its own, so that it can be killed: `python -m ... ROLE`.

`hold` fills memory, leases it and prints its params; any line it is given makes it take the blocks
back and fill them anew. `read` reads for each line of params; before it posts the READ it says so
and waits for a line, and while the READ runs, each line is answered with how much has come and
whether NIXL still says that it runs. Both print a line of JSON for what happens.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import Revoke, StepMetadata
from engine_ext.common.types import (
    CacheGeometry,
    EngineIdentity,
    FinishStatus,
    Region,
    TransferResults,
)
from engine_ext.connector import Connector, SchedulerConnector, build_worker
from engine_ext.layout.plan import Indices
from engine_ext.wire.errors import CONNECTOR_VERSION
from engine_ext.worker.agent import NixlAgent, PeerHandle, Transfer, TransferState
from tests.unit.engine_ext.scheduler.fakes import Request

LAYERS, BLOCKS, BLOCK_SIZE = 4, 64, 16
TOKENS = (BLOCKS - 1) * BLOCK_SIZE
PATIENCE = 60.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def contents(seed: int) -> Any:
    """One byte value for every block of every layer."""
    return ((np.arange(LAYERS * BLOCKS) * 7 + seed) % 251).reshape(LAYERS, BLOCKS)


def layer_regions(cache: Any, name: str = "layer.{}") -> list[Region]:
    """Return a region for each layer of an array of layers, blocks and bytes."""
    _, blocks, size = cache.shape
    return [
        Region(name.format(number), layer.ctypes.data, size, size, blocks)
        for number, layer in enumerate(cache)
    ]


class WatchedAgent(NixlAgent):
    """The real one; posts a READ when told to, and remembers what NIXL said of it last."""

    def __init__(self, regions: Sequence[Region], config: ConnectorConfig) -> None:
        super().__init__(regions, config.backends, config.num_threads)
        self.is_asked = threading.Event()
        self.may_post = threading.Event()
        self.may_post.set()
        self.num_polls = 0
        self.state = TransferState.RUNNING

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        self.is_asked.set()
        assert self.may_post.wait(PATIENCE)
        return super().start_read(peer, local, remote, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        self.state = super().poll(transfer)
        self.num_polls += 1
        return self.state


class Memory:
    def __init__(
        self, name: str, port: int, block_bytes: int, config: ConnectorConfig | None = None
    ) -> None:
        self.cache = np.zeros((LAYERS, BLOCKS, block_bytes), dtype=np.uint8)
        config = config or ConnectorConfig(engine_id=name)
        geometry = CacheGeometry(BLOCK_SIZE, BLOCKS)
        factors = {
            "model": "bytes",
            "connector_version": str(CONNECTOR_VERSION),
            "transfer_mode": config.transfer_mode,
        }
        identity = EngineIdentity(name, "127.0.0.1", port, compat_factors=factors)
        self.connector = Connector(
            SchedulerConnector(config, identity, geometry),
            build_worker(config, geometry, identity, self.open_agent),
        )
        self.connector.start(layer_regions(self.cache))

    def open_agent(self, regions: Sequence[Region], config: ConnectorConfig) -> WatchedAgent:
        self.agent = WatchedAgent(regions, config)
        return self.agent

    def fill(self, seed: int) -> None:
        self.cache[:] = contents(seed)[:, :, None]

    def step(self) -> None:
        self.connector.worker.start_load_kv(self.connector.scheduler.build_connector_meta())


def hold(memory: Memory) -> None:
    memory.fill(1)
    request = Request("p-1", {"do_remote_decode": True}, TOKENS, TOKENS)
    scheduler = memory.connector.scheduler
    scheduler.on_new_request(request)
    blocks = (tuple(range(1, BLOCKS)),)
    answer = scheduler.request_finished(request, blocks, FinishStatus.LENGTH_CAPPED)
    memory.step()
    say(params=answer.kv_transfer_params)
    threading.Thread(target=revoke_when_told, args=(memory,), daemon=True).start()
    wait_for(memory.connector.worker.get_transfer_results)
    memory.fill(2)
    say(freed=True)
    time.sleep(PATIENCE)


def revoke_when_told(memory: Memory) -> None:
    sys.stdin.readline()
    memory.connector.worker.start_load_kv(StepMetadata((Revoke("p-1"),)))


def read(memory: Memory) -> None:
    """Once for each line of params on standard input."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=put_lines, args=(lines,), daemon=True).start()
    for number in range(100):
        params = lines.get()
        memory.cache[:] = 0
        memory.agent.is_asked.clear()
        memory.agent.may_post.clear()
        request = Request(f"d-{number}", json.loads(params), TOKENS)
        scheduler, worker = memory.connector.scheduler, memory.connector.worker
        scheduler.on_new_request(request)
        missing, _ = scheduler.get_num_new_matched_tokens(request, 0)
        blocks = (tuple(range(BLOCKS - 1, 0, -1)),)
        scheduler.update_state_after_alloc(request, blocks, missing or 0)
        memory.step()
        wait_for(memory.agent.is_asked.is_set)
        say(reading=True)
        lines.get()
        memory.agent.may_post.set()
        results = wait_for_results(memory, lines)
        say(
            ok=request.request_id not in results.failed_recving,
            is_right=is_right(memory),
            unproven=worker.stats().reads_unproven,
        )


def put_lines(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)


def wait_for_results(memory: Memory, lines: "queue.SimpleQueue[str]") -> TransferResults:
    """Answers each line meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while not (results := memory.connector.worker.get_transfer_results()):
        if not lines.empty():
            lines.get()
            say_how_far(memory)
        if time.monotonic() > deadline:
            say(hung=True)
            raise TimeoutError
        time.sleep(0.001)
    return results


def say_how_far(memory: Memory) -> None:
    """After NIXL was asked anew, where it is still asked."""
    asked, deadline = memory.agent.num_polls, time.monotonic() + 0.2
    while memory.agent.num_polls < asked + 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    is_running = memory.agent.num_polls > asked and memory.agent.state is TransferState.RUNNING
    say(arrived=share_that_arrived(memory), is_running=is_running)


def share_that_arrived(memory: Memory) -> float:
    """Of 64 bytes of each block that are not what they were before."""
    ours, theirs = np.arange(BLOCKS - 1, 0, -1), np.arange(1, BLOCKS)
    values = contents(1)[:, theirs]
    places = np.linspace(0, memory.cache.shape[2] - 1, 64, dtype=np.int64)
    found = memory.cache[:, :, places][:, ours] == values[:, :, None]
    return float(found[values != 0].mean())


def is_right(memory: Memory) -> bool:
    """All that `hold` fills its blocks with stands in ours, in `read`'s order."""
    return share_that_arrived(memory) == 1


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            say(hung=True)
            raise TimeoutError
        time.sleep(0.001)


def main(role: str, name: str, port: str, block_bytes: str) -> None:
    memory = Memory(name, int(port), int(block_bytes))
    (hold if role == "hold" else read)(memory)
    memory.connector.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
