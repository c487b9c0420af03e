"""Many transfers between two connectors over the real NIXL, whose clocks run faster and which are
replaced again and again: nothing is held at the end, nothing grows, and nothing becomes slower.

DISAGG_SOAK_TRANSFERS is the number of transfers.
"""

import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from engine_ext.common.clock import boottime
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import BlockIds, CacheGeometry, FinishStatus
from engine_ext.connector import build_connector
from tests.conftest import find_free_ports
from tests.integration.memory_engine import layer_regions
from tests.unit.engine_ext.scheduler.fakes import Request
from tests.unit.engine_ext.wire.waiting import until

logger = logging.getLogger(__name__)

TRANSFERS = int(os.environ.get("DISAGG_SOAK_TRANSFERS", "20000"))
AT_ONCE, BLOCKS_OF_PROMPT = 8, 7
LAYERS, BLOCKS, BLOCK_BYTES, BLOCK_SIZE = 4, 64, 4096, 16
TOKENS = 100
ROUNDS = TRANSFERS // AT_ONCE
RESTARTS = max(1, min(20, ROUNDS // 100))
"""Each of the two engines restarts this often, at even intervals."""
FASTER = 4.0
"""Seconds of the connectors' clocks in one second: leases end and engines are forgotten sooner."""
MOST_GROWTH = 32 * 2**20
"""Bytes of resident memory between a fifth of the run and its end."""
MOST_SLOWDOWN = 1.5
AT_REST = ("leases_active", "pulls_active", "quarantined_blocks_active")


@pytest.fixture(autouse=True)
def fast_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_ext.worker.worker.boottime", lambda: FASTER * boottime())


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """KV of four layers in host memory, and a connector over it."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        rng = np.random.default_rng(list(name.encode()))
        self.cache = rng.integers(0, 255, (LAYERS, BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.connector = build_connector(
            ConnectorConfig(engine_id=name),
            CacheGeometry(BLOCK_SIZE, BLOCKS),
            host="127.0.0.1",
            port=port,
            model_factors={"model": "bytes"},
        )
        self.connector.start(layer_regions(self.cache, "model.layers.{}.self_attn.attn"))

    def prefill(self, request_id: str, blocks: BlockIds) -> dict[str, Any]:
        """Ends with the one step that hands the finished request over."""
        request = Request(request_id, {"do_remote_decode": True}, TOKENS, TOKENS)
        scheduler = self.connector.scheduler
        scheduler.on_new_request(request)
        answer = scheduler.request_finished(request, blocks, FinishStatus.LENGTH_CAPPED)
        self.step()
        assert answer.kv_transfer_params is not None
        return answer.kv_transfer_params

    def load(self, request_id: str, params: Any, blocks: BlockIds) -> Request:
        request = Request(request_id, params, TOKENS)
        scheduler = self.connector.scheduler
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0)[0] == TOKENS
        scheduler.update_state_after_alloc(request, blocks, TOKENS)
        self.step()
        return request

    def step(self) -> None:
        self.connector.worker.start_load_kv(self.connector.scheduler.build_connector_meta())


class Engines:
    """A prefill and a decode engine, and what all of them have counted."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.p, self.d = self._make("p"), self._make("d")

    def _make(self, letter: str) -> Memory:
        self._made[letter] += 1
        return Memory(f"{letter}-{self._made[letter]}", find_free_ports(1)[0])

    def restart(self, letter: str) -> None:
        """Replace an engine by another process of its kind, with another id."""
        self.close(getattr(self, letter))
        setattr(self, letter, self._make(letter))

    def close(self, memory: Memory) -> None:
        """An engine holds nothing when it ends."""
        stats = memory.connector.worker.stats()
        assert {name: getattr(stats, name) for name in AT_REST} == dict.fromkeys(AT_REST, 0)
        assert memory.connector.scheduler.num_leased == 0
        self.counts["loaded"] += stats.pulls_ok
        self.counts["failed"] += stats.pulls_failed
        self.counts["ended leases"] += stats.leases_released + stats.leases_expired
        memory.connector.shutdown()

    def transfer(self, number: int) -> None:
        """Move AT_ONCE prompts, and wait until both engines have reported the end."""
        names = [f"{number}-{index}" for index in range(AT_ONCE)]
        rng = np.random.default_rng(number)
        ours, theirs = (rng.permutation(BLOCKS)[: AT_ONCE * BLOCKS_OF_PROMPT] for _ in "pd")
        self.p.cache[:, :, :8] = rng.integers(0, 255, self.p.cache[:, :, :8].shape, dtype=np.uint8)
        requests = [
            self.d.load(f"d-{name}", self.p.prefill(f"p-{name}", (sent,)), (got,))
            for name, sent, got in zip(names, _parts(theirs), _parts(ours), strict=True)
        ]
        failed: set[str] = set()
        for memory, field in ((self.d, "finished_recving"), (self.p, "finished_sending")):
            missing = {f"{memory.name[0]}-{name}" for name in names}
            while missing:
                results = until(memory.connector.worker.get_transfer_results)
                results = memory.connector.scheduler.update_connector_output(results)
                failed |= results.failed_recving
                missing -= getattr(results, field)
            # An engine that has failed a load may renew its lease until the request has ended.
            for request in requests if memory is self.d else ():
                self.d.connector.scheduler.request_finished(request, ((),), FinishStatus.ABORTED)
            memory.step()
        if not failed:
            assert (self.d.cache[:, ours] == self.p.cache[:, theirs]).all()


def _parts(blocks: np.ndarray) -> Iterator[tuple[int, ...]]:
    for part in np.split(blocks, AT_ONCE):
        yield tuple(map(int, part))


@pytest.mark.timeout(3600)
def test_many_transfers_leave_nothing_behind_and_become_no_slower() -> None:
    engines, began = Engines(), time.monotonic()
    restarts = {ROUNDS * (1 + n) // (1 + 2 * RESTARTS): "pd"[n % 2] for n in range(2 * RESTARTS)}
    seconds: list[float] = []
    memory: list[int] = []
    for number in range(ROUNDS):
        if number in restarts:
            engines.restart(restarts[number])
        started = time.monotonic()
        engines.transfer(number)
        seconds.append(time.monotonic() - started)
        if number % max(1, ROUNDS // 20) == 0:
            memory.append(resident_bytes())
    engines.close(engines.d)
    engines.close(engines.p)
    memory.append(resident_bytes())
    rate = ROUNDS * AT_ONCE / (time.monotonic() - began)
    first, last = (median(part) for part in (seconds[: ROUNDS // 5], seconds[-ROUNDS // 5 :]))
    logger.info(
        "%d transfers, %d failed, %.0f a second; a round of %d: %.2f ms at first, %.2f at last; "
        "MiB: %s",
        ROUNDS * AT_ONCE,
        engines.counts["failed"],
        rate,
        AT_ONCE,
        1000 * first,
        1000 * last,
        [one >> 20 for one in memory],
    )
    counts = engines.counts
    assert counts["loaded"] + counts["failed"] == counts["ended leases"] == ROUNDS * AT_ONCE
    # UCX still tries to reach an engine that has gone, so the loads after a restart may be late.
    assert counts["failed"] <= 2 * RESTARTS * AT_ONCE
    assert memory[-1] - memory[len(memory) // 5] < MOST_GROWTH
    assert last < MOST_SLOWDOWN * first
