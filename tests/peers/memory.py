"""Memory and time of a choice when all caches of 4 million tokens are full of 16k-token prompts.

    python -m tests.peers.memory ENGINES BLOCK_TOKENS [PEERS]

PEERS is the environment of `bench.py field`: then it measures Dynamo's selection service without KV
events, else this router's rule with 64 MiB.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import random
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from router.fleet.engine import EngineLoad
from router.routing.chunk_index import ChunkIndex
from router.routing.policy import LoadBound, RoutingQuery
from router.routing.prefix_cache import PrefillCost

CACHE, PROMPT, CHOICES = 4_000_000, 16_384, 500


class FullEngine(EngineLoad):
    role, preferred_role, cache_tokens = "prefill", "prefill", CACHE

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Rule:
    def __init__(self, engines: int) -> None:
        self._engines = tuple(FullEngine(f"10.0.{n // 256}.{n % 256}:80") for n in range(engines))
        self._policy = PrefillCost(LoadBound(1.5, 2), ChunkIndex())

    def choose(self, turn: int, chunks: tuple[int, ...]) -> None:
        self._query = RoutingQuery(turn, "", chunks, PROMPT)
        self._engine = self._policy.order(self._engines, self._query)[0]
        self._engine.add_load(1, 5000)
        self._policy.note_sent(self._engine.name, self._query)

    def end(self, turn: int) -> None:
        self._policy.note_cached(self._engine.name, self._query, 0)


class Service:
    def __init__(self, engines: int, block: int, peers: Path) -> None:
        sys.path += map(str, peers.glob("lib/python3*/site-packages"))
        os.environ |= {"DYN_LOG": "error", "DYN_ROUTER_USE_KV_EVENTS": "false"}
        os.environ["DYN_ROUTER_APPROXIMATE_CACHE_POLICY"] = "lru"
        self._service = importlib.import_module("dynamo._core").SelectionService(indexer_threads=1)
        self._loop = asyncio.new_event_loop()
        for worker in range(engines):
            record = {"worker_id": worker, "endpoint": "http://engine", "block_size": block}
            self._call("upsert_worker", record | {"total_kv_blocks": CACHE // block})

    def _call(self, name: str, argument: Any) -> None:
        async def call() -> None:
            await getattr(self._service, name)(argument)

        self._loop.run_until_complete(call())

    def choose(self, turn: int, chunks: tuple[int, ...]) -> None:
        hashes = {"block_hashes": [*chunks], "sequence_hashes": [*chunks]}
        request = hashes | {"isl_tokens": PROMPT, "selection_id": str(turn)}
        self._call("select_and_reserve", request)

    def end(self, turn: int) -> None:
        self._call("prefill_complete", str(turn))
        self._call("free_reservation", str(turn))


def resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(engines: int, block: int, peers: str = "") -> None:
    chosen = Service(engines, block, Path(peers)) if peers else Rule(engines)
    begin, chance = resident_mib(), random.Random(1)
    prompts = range(engines * CACHE // PROMPT)
    times = []
    for turn in range(len(prompts) + CHOICES):
        number = turn if turn < len(prompts) else chance.choice(prompts[len(prompts) // 2 :])
        first = number << 20
        began = perf_counter()
        chosen.choose(turn, tuple(range(first, first + PROMPT // block)))
        times.append(1e6 * (perf_counter() - began))
        chosen.end(turn)
    print(f"{resident_mib() - begin:.0f} MiB, {median(times[-CHOICES:]):.0f} us")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
