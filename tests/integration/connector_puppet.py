"""A process with both halves of the connector over the real NIXL, and the least of an engine, moved
step by step through a pipe. Its owner thread runs all the time, as in an engine.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import FinishStatus, Region
from engine_ext.layout.plan import Indices
from engine_ext.scheduler import block_pressure
from engine_ext.worker.agent import PeerHandle, Transfer, TransferState
from tests.integration.memory_engine import BLOCK_SIZE, BLOCKS, Memory, WatchedAgent, contents
from tests.unit.engine_ext.scheduler.fakes import Request

BLOCK_BYTES = 1 << 19
"""Sixteen megabytes in half a cache: more than the kernel's buffers of a young connection hold, so
that a transfer is not over before anybody has looked."""
"""A transfer of half the cache is much more than the sockets of a connection hold."""
HALVES = {"first": tuple(range(1, BLOCKS // 2)), "second": tuple(range(BLOCKS // 2, BLOCKS))}
CANARY = 0xAA
PATIENCE = 20.0


class StoppingAgent(WatchedAgent):
    """Stops a process, its own or another, as soon as a transfer has begun to land in `cache`."""

    def __init__(self, regions: Sequence[Region], config: ConnectorConfig) -> None:
        super().__init__(regions, config)
        self.may_post.set()
        self.cache: Any = None
        self.whom_to_stop = 0
        self.num_rounds = 0
        """How often the owner thread came by."""
        self.num_started = 0

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        self.num_started += 1
        return super().start_read(peer, local, remote, notification)

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        self.num_started += 1
        return super().start_write(peer, local, remote, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        state = super().poll(transfer)
        self._stop_in_the_middle()
        return state

    def notifications(self) -> list[tuple[str, bytes]]:
        received = super().notifications()
        self.num_rounds += 1
        self._stop_in_the_middle()
        return received

    def _stop_in_the_middle(self) -> None:
        if self.whom_to_stop and self.cache[:, :, 0].any():
            whom, self.whom_to_stop = self.whom_to_stop, 0
            os.kill(whom, signal.SIGSTOP)


class ConnectorPuppet(Memory):
    """Blocks are named by the half of the cache that they are; a reader's are in reverse order."""

    def __init__(self, name: str, port: int, settings: dict[str, Any]) -> None:
        config = ConnectorConfig(engine_id=name, **settings)
        super().__init__(name, port, BLOCK_BYTES, config)
        # Both halves of the cache may wait for P at once.
        block_pressure.EARLY_SHARE = 1.0
        self.name = name
        self.port = port
        self.sent: list[str] = []
        self.loads: dict[str, str] = {}
        self.requests: dict[str, Request] = {}

    def open_agent(self, regions: Sequence[Region], config: ConnectorConfig) -> WatchedAgent:
        self.agent = self.stopping = StoppingAgent(regions, config)
        self.stopping.cache = self.cache
        return self.agent

    def prefill(self, request_id: str, half: str, transfer_id: str | None = None) -> Any:
        """Has just finished: its params."""
        return self._finish(
            request_id, half, {"do_remote_decode": True, "transfer_id": transfer_id}
        )

    def retain(self, request_id: str, half: str) -> Any:
        """An answer has just finished, and its KV is retained for the next turn: its params."""
        return self._finish(request_id, half, {"retain": True})

    def _finish(self, request_id: str, half: str, params: dict[str, Any]) -> Any:
        num_tokens = len(HALVES[half]) * BLOCK_SIZE
        request = Request(request_id, params, num_tokens, num_tokens)
        scheduler = self.connector.scheduler
        scheduler.on_new_request(request)
        blocks = (HALVES[half],)
        answer = scheduler.request_finished(request, blocks, FinishStatus.LENGTH_CAPPED)
        self.step()
        return answer.kv_transfer_params

    def coordinates(self) -> dict[str, Any]:
        """What tells a decode engine that this one will write to it."""
        return {
            "do_remote_prefill": True,
            "remote_engine_id": self.name,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "remote_request_id": "x",
        }

    def load(self, request_id: str, params: Any, half: str) -> None:
        request = Request(request_id, params, len(HALVES[half]) * BLOCK_SIZE)
        self.requests[request_id] = request
        scheduler = self.connector.scheduler
        scheduler.on_new_request(request)
        missing, _ = scheduler.get_num_new_matched_tokens(request, 0)
        assert missing
        scheduler.update_state_after_alloc(request, (HALVES[half][::-1],), missing)
        self.step()

    def stop_in_the_middle(self, process: int | None = None) -> None:
        """Of the next transfer into this memory; this process, if no other is named."""
        self.stopping.whom_to_stop = process or os.getpid()

    def load_reported(self, request_id: str) -> str:
        """Waits until it is; "ok" or "failed"."""
        self._wait_for(lambda: request_id in self.loads)
        return self.loads[request_id]

    def policy(self, request_id: str) -> str:
        """What the host does now that the load has failed."""
        return self.connector.scheduler.load_failure_policy(self.requests[request_id])

    def end_with_error(self, request_id: str, half: str) -> bool:
        """True: the host must keep its blocks."""
        decision = self.connector.scheduler.request_finished(
            self.requests[request_id], (HALVES[half][::-1],), FinishStatus.ERROR
        )
        self.step()
        return decision.delay_free

    def freed(self, request_id: str, half: str, value: int = CANARY) -> float:
        """Waits until the request's blocks are the host's again, and fills them at once. Returns
        what share of them held what `fill(1)` of the other side had put there."""
        self._wait_for(lambda: request_id in self.sent)
        found = self.cache.copy()
        self.cache[:, HALVES[half]] = value
        return share_of(found, half, 1)

    def share(self, half: str, seed: int = 1) -> float:
        """Of the bytes of our half that are what `fill(seed)` of the other side puts there."""
        return share_of(self.cache, half, seed)

    def is_untouched(self, half: str) -> bool:
        """Since `freed` filled it."""
        return bool((self.cache[:, HALVES[half]] == CANARY).all())

    def freed_by(self, num_rounds: int) -> list[str]:
        """Which requests' blocks have ever been freed once the owner thread has come by so often
        again, and asked NIXL."""
        until = self.stopping.num_rounds + num_rounds
        self._wait_for(lambda: self.stopping.num_rounds >= until)
        return self.sent

    def num_started(self) -> int:
        """READs and WRITEs."""
        return self.stopping.num_started

    def quarantined(self, num_blocks: int) -> None:
        """Waits until so many are."""
        stats = self.connector.worker.stats
        self._wait_for(lambda: stats().quarantined_blocks_active == num_blocks)

    def _wait_for(self, condition: Callable[[], object]) -> None:
        """The engine steps meanwhile."""
        deadline = time.monotonic() + PATIENCE
        self._hear()
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.001)
            self._hear()

    def _hear(self) -> None:
        worker, scheduler = self.connector.worker, self.connector.scheduler
        results = scheduler.update_connector_output(worker.get_transfer_results())
        self.sent += sorted(results.finished_sending)
        for name in results.finished_recving:
            self.loads[name] = "failed" if name in results.failed_recving else "ok"
        self.step()


def share_of(cache: Any, half: str, seed: int) -> float:
    ours, theirs = np.array(HALVES[half][::-1]), np.array(HALVES[half])
    return float((cache[:, ours] == contents(seed)[:, theirs, None]).mean())
