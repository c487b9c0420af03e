"""Tests of the choices of Dynamo and vllm-router.

DISAGG_PEERS is the environment of `bench.py field`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from router.routing.policy import RoutingQuery
from router.routing.route import PREFILL_POLICIES
from scripts.benchmarks.field import WholePromptPolicy
from scripts.benchmarks.fleet_simulation import Setup, Simulation
from scripts.benchmarks.simulated_engine import SPEEDS
from scripts.benchmarks.traces import Arrival, Job
from tests.peers.policies import CacheAware, Dynamo

PEERS = Path(os.environ.get("DISAGG_PEERS", "/nowhere"))
pytestmark = pytest.mark.skipif(
    not (PEERS / "bin/vllm-router").exists(),
    reason="needs DISAGG_PEERS, an environment with Dynamo and vllm-router: bench.py field --help",
)


def arrivals(seconds: float) -> list[Arrival]:
    """400 requests for 40 documents of up to 20k tokens, more than the caches hold."""
    found = []
    for number in range(400):
        document = number * number % 40
        chunks = tuple(1000 * document + at for at in range(20 + 3 * (document % 20)))
        found.append(
            (number * seconds, Job(256 * len(chunks) + 10 * number % 256, 20, chunks, chunks))
        )
    return found


def simulate(
    monkeypatch: pytest.MonkeyPatch, jobs: Sequence[Arrival], policy: WholePromptPolicy
) -> Simulation:
    monkeypatch.setitem(PREFILL_POLICIES, "peer", lambda bound, index: policy)
    policies, speed = ("peer", "power_of_two"), SPEEDS["qwen3-32b-h200"]
    setup = Setup("uniform", 3, 2, 0, *policies, cache_tokens=100_000, arrivals=jobs, speed=speed)
    simulation = Simulation(setup, policy.jobs)
    with closing(policy):
        simulation.run()
    return simulation


def test_dynamo_chooses_the_least_uncached_and_queued_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = arrivals(0.15)
    excess: list[float] = []

    class Compared(Dynamo):
        def order(self, candidates: Sequence[Any], query: RoutingQuery) -> Sequence[Any]:
            chosen = super().order(candidates, query)
            self.caches = {one.name: one.engine.cache for one in candidates}
            costs = {
                one.name: one.total_tokens - self.expected_tokens(one.name, query)
                for one in candidates
            }
            excess.append(costs[chosen[0].name] - min(costs.values()))
            return chosen

        def expected_tokens(self, name: str, query: RoutingQuery) -> int:
            held: int = self.caches[name].held(self.chunks(query))
            return held

    simulation = simulate(monkeypatch, jobs, Compared(PEERS, True, []))
    assert len(excess) == len(jobs)
    assert max(excess) == 0
    assert sum(engine.cached for engine in simulation.prefillers) > 0


def test_dynamo_without_events_finds_prompts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = arrivals(1.0)
    simulation = simulate(monkeypatch, jobs, Dynamo(PEERS, False, []))
    asked, cached = (
        sum(getattr(e, key) for e in simulation.prefillers) for key in ("asked", "cached")
    )
    assert cached > 0.3 * asked


def test_cache_aware_sends_a_prompt_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = arrivals(1.0)
    engines: dict[int, set[str]] = {}

    class Recorded(CacheAware):
        def note_sent(self, name: str, query: RoutingQuery) -> None:
            engines.setdefault(query.chunks[0], set()).add(name)

    simulate(monkeypatch, jobs, Recorded(PEERS, []))
    assert len(engines) > 5
    assert all(len(names) == 1 for names in engines.values())
