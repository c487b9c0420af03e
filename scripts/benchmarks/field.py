"""Compare this router's choice of engines with those of Dynamo and vllm-router.

    python -m venv /tmp/peers
    /tmp/peers/bin/pip install ai-dynamo-runtime==1.6.1 vllm-router==0.1.17
    python scripts/bench.py field --peers /tmp/peers --trace conversation_trace.jsonl --load 1 1.2

All but the choice of the prefill engine is equal (`bench.py fleet --help`): 4 prefill and 4 decode
engines with caches of 4 million tokens, and `power_of_two` for the decode engine. Who chooses,
beside the other policies of this router:

prefix       this router, by what it remembers
local        the same; a decode engine computes a prompt itself by load (--target-itl 0.05)
exact        the least uncached + 0.35 queued tokens, by what the caches hold
dynamo       Dynamo's selection service, which gets all KV events
dynamo-lru   the same without KV events: it remembers its choices (its policy `lru`)
cache_aware  a vllm-router in front of engines that hold each request as long as the simulated one

Goodput is the share of requests with TTFT within 2 s and TPOT within 50 ms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from router.routing.costs import QUEUE_SHARE
from router.routing.policy import Policy, RoutingQuery
from router.routing.route import POLICIES, PREFILL_POLICIES
from scripts.benchmarks.common import BenchError, bench_parser
from scripts.benchmarks.fleet_simulation import Setup, Simulation
from scripts.benchmarks.simulated_engine import SPEEDS
from scripts.benchmarks.traces import Arrival, Job, TraceError, at_load, published


class WholePromptPolicy(Policy):
    """Sees whole prompts. A query has only the chunks that this router hashes."""

    uses_feedback = True

    def __init__(self, jobs: list[Job], *common: object) -> None:
        self.jobs = jobs

    def chunks(self, query: RoutingQuery) -> Sequence[int]:
        return self.jobs[query.turn - 1].chunks

    def close(self) -> None:
        return


class ExactCaches(WholePromptPolicy):
    def order(self, candidates: Sequence[Any], query: RoutingQuery) -> Sequence[Any]:
        self._caches = {one.name: one.engine.cache for one in candidates}
        cost = [
            QUEUE_SHARE * one.total_tokens - self.expected_tokens(one.name, query)
            for one in candidates
        ]
        return [candidates[cost.index(min(cost))]]

    def expected_tokens(self, name: str, query: RoutingQuery) -> int:
        held: int = self._caches[name].held(self.chunks(query))
        return held


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("field", __doc__)
    add = parser.add_argument
    add("--trace", nargs="+", type=Path, required=True, metavar="FILE", help="of Mooncake's format")
    add("--load", nargs="+", type=float, default=[1.0], metavar="X", help="times as fast (1)")
    add("--spread", action="store_true", help="requests of one instant are spread until the next")
    add("--closed-loop", action="store_true", help="requests wait for the answers before them")
    add("--loans", action="store_true", help="engines borrow prefixes from others' caches")
    add("--cache-tokens", type=int, default=4_000_000, metavar="N", help="of each cache (4000000)")
    add("--peers", type=Path, default=Path(), metavar="DIR", help="environment of the others")
    options = parser.parse_args(arguments)
    policies: dict[str, Any] = dict.fromkeys((*POLICIES, "local"))
    policies["exact"] = ExactCaches
    if any(options.peers.glob("lib/python3*/site-packages/dynamo")):
        from tests.peers.policies import Dynamo

        policies["dynamo"] = partial(Dynamo, options.peers, True)
        policies["dynamo-lru"] = partial(Dynamo, options.peers, False)
    if (options.peers / "bin/vllm-router").exists():
        from tests.peers.policies import CacheAware

        policies["cache_aware"] = partial(CacheAware, options.peers)
    if not {"dynamo", "cache_aware"} <= policies.keys():
        print("bench field: without Dynamo or vllm-router, see --peers", file=sys.stderr)
    print("trace      load chosen by    goodput  reuse  TTFT ms p50     p90     p99")
    try:
        for path, load in product(options.trace, options.load):
            arrivals = at_load(published(path, options.spread), load)
            for name, policy in policies.items():
                jobs: list[Job] = []
                if policy is not None:
                    PREFILL_POLICIES[name] = partial(policy, jobs)
                figures = _figures(name, arrivals, jobs, options)
                print(f"{path.stem[:9]:<9} {load:>5g} {figures}", flush=True)
    except (OSError, ImportError, TraceError, BenchError) as error:
        print(f"bench field: error: {error}", file=sys.stderr)
        return 2
    return 0


def _figures(
    name: str, arrivals: Sequence[Arrival], jobs: list[Job], options: argparse.Namespace
) -> str:
    policies = ("prefix", "prefix") if name == "local" else (name, "power_of_two")
    setup = Setup("uniform", 4, 4, 0, *policies, cache_tokens=options.cache_tokens,
        arrivals=arrivals, closed_loop=options.closed_loop, loans=options.loans,
        speed=SPEEDS["qwen3-32b-h200"], target_itl=0.05 * (name == "local"))  # fmt: skip
    simulation = Simulation(setup, jobs)
    policy = simulation.routers[0].prefill_policy
    with closing(policy) if isinstance(policy, WholePromptPolicy) else nullcontext():
        outcome = simulation.run()
    ttft = sorted(1000 * one.ttft for one in outcome.answers)
    p50, p90, p99 = (ttft[int(share * len(ttft))] for share in (0.5, 0.9, 0.99))
    goodput = mean(one.ttft <= 2 and one.tpot <= 0.05 for one in outcome.answers)
    asked = [(one.cached, one.asked) for one in outcome.prefillers]
    reuse = sum(cached for cached, _ in asked) / max(1, sum(asked for _, asked in asked))
    return f"{name:<12} {goodput:>7.3f} {reuse:>6.3f} {p50:>12.0f} {p90:>7.0f} {p99:>7.0f}"
