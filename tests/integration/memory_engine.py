"""One half of a transfer in a process of its own, so that it can be killed: `python -m ... ROLE`.

`hold` fills memory, leases it and prints its params; any line it is given makes it take the blocks
back and fill them anew. `read` reads for each line of params. Both print a line of JSON for what
happens.
"""

import json
import sys
import threading
import time
from typing import Any

import numpy as np

from engine_ext.base.config import ConnectorConfig
from engine_ext.base.types import CacheGeometry, FinishStatus, Region, StepMetadata
from engine_ext.core.connector import Connector, build_connector
from tests.unit.engine_ext.core.fakes import Request

LAYERS, BLOCKS, BLOCK_SIZE = 4, 64, 16
TOKENS = (BLOCKS - 1) * BLOCK_SIZE
PATIENCE = 60.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def contents(seed: int) -> Any:
    """One byte value for every block of every layer."""
    return ((np.arange(LAYERS * BLOCKS) * 7 + seed) % 251).reshape(LAYERS, BLOCKS)


class Memory:
    def __init__(
        self, name: str, port: int, block_bytes: int, config: ConnectorConfig | None = None
    ) -> None:
        self.cache = np.zeros((LAYERS, BLOCKS, block_bytes), dtype=np.uint8)
        self.connector: Connector = build_connector(
            config or ConnectorConfig(engine_id=name),
            CacheGeometry(BLOCK_SIZE, BLOCKS),
            host="127.0.0.1",
            port=port,
            model_factors={"model": "bytes"},
        )
        layer_bytes = BLOCKS * block_bytes
        self.connector.start(
            [
                Region(
                    f"layer.{i}",
                    self.cache.ctypes.data + i * layer_bytes,
                    block_bytes,
                    block_bytes,
                    BLOCKS,
                )
                for i in range(LAYERS)
            ]
        )

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
    wait_for_results(memory)
    memory.fill(2)
    say(freed=True)
    time.sleep(PATIENCE)


def revoke_when_told(memory: Memory) -> None:
    sys.stdin.readline()
    memory.connector.worker.start_load_kv(StepMetadata(revokes=("p-1",)))


def read(memory: Memory) -> None:
    """Once for each line of params on standard input."""
    for number, line in enumerate(sys.stdin):
        request = Request(f"d-{number}", json.loads(line), TOKENS)
        scheduler, worker = memory.connector.scheduler, memory.connector.worker
        scheduler.on_new_request(request)
        missing, _ = scheduler.get_num_new_matched_tokens(request, 0)
        blocks = (tuple(range(BLOCKS - 1, 0, -1)),)
        scheduler.update_state_after_alloc(request, blocks, missing or 0)
        started = time.monotonic()
        memory.step()
        while not worker.stats().handshakes_ok and time.monotonic() - started < PATIENCE:
            time.sleep(0.001)
        say(reading=True)
        results = wait_for_results(memory)
        say(
            seconds=time.monotonic() - started,
            ok=request.request_id not in results.failed_recving,
            is_right=bool(is_right(memory)),
            unproven=worker.stats().reads_unproven,
        )


def is_right(memory: Memory) -> bool:
    values = contents(1)
    ours, theirs = np.arange(BLOCKS - 1, 0, -1), np.arange(1, BLOCKS)
    return bool((memory.cache[:, ours] == values[:, theirs, None]).all())


def wait_for_results(memory: Memory) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (results := memory.connector.worker.get_transfer_results()):
        if time.monotonic() > deadline:
            say(hung=True)
            raise TimeoutError
        time.sleep(0.001)
    return results


def main(role: str, name: str, port: str, block_bytes: str) -> None:
    memory = Memory(name, int(port), int(block_bytes))
    (hold if role == "hold" else read)(memory)
    memory.connector.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
