"""Compare the router's policies in a simulated fleet of prefill and decode engines.

    python scripts/bench.py fleet                        every policy for prefill, 16 + 16 engines
    python scripts/bench.py fleet --prefillers 500 --decoders 500 --requests 200000 --shape chat
    python scripts/bench.py fleet --prefill-policy prefix --decode-policy prefix --min-remote 0 256
    python scripts/bench.py fleet --trace conversation_trace.jsonl --prefillers 4 --decoders 4 \\
        --cache-tokens 4000000 --speed qwen3-32b-h200

A trace of Mooncake's format is replayed at its own times. One line for each combination: goodput
(the share of requests within both goals), TTFT and TPOT, tokens found in prefix caches, the busiest
engine beside the mean one, jobs that a decoder did alone, further legs of hedged requests, and the
median time of a choice on this machine. All but the last follow from --seed alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from router.routing.policy import LoadBound
from router.routing.route import POLICIES
from scripts.benchmarks.common import bench_parser
from scripts.benchmarks.fleet_simulation import (
    CACHE_TOKENS,
    SPEEDS,
    Engine,
    Outcome,
    Setup,
    Simulation,
)
from scripts.benchmarks.traces import SHAPES, TraceError, published

HEADER = (
    f"{'shape':<9} {'fleet':>8} {'prefill by':<12} {'decode by':<12} {'remote':>6} "
    f"{'goodput':>7} {'TTFT ms p50':>11} {'p99':>7} {'TPOT ms p50':>11} {'p99':>6} "
    f"{'hits P':>6} {'D':>4} {'max/mean P':>10} {'D':>5} "
    f"{'alone':>6} {'extra':>6} {'us P':>5} {'D':>5}"
)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        traces = {
            path.stem[:9]: published(path, options.trace_speed, options.spread)
            for path in options.trace
        }
    except (OSError, TraceError) as error:
        print(f"bench fleet: error: {error}", file=sys.stderr)
        return 2
    print(HEADER, flush=True)
    combinations = product(
        traces or options.shape,
        options.decode_policy,
        options.min_remote,
        options.hedged,
        options.routers,
        options.prefill_policy,
    )
    for shape, decode_policy, min_remote, hedged, routers, prefill_policy in combinations:
        setup = Setup(
            shape="uniform" if traces else shape,
            prefillers=options.prefillers,
            decoders=options.decoders,
            requests=options.requests,
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            load=options.load,
            bursty=options.bursty,
            min_remote_prefill_tokens=min_remote,
            late=options.count_late,
            hedged=hedged,
            threshold=options.threshold,
            cache_tokens=options.cache_tokens,
            prefill_bound=LoadBound(options.load_factor, options.prefill_floor),
            decode_bound=LoadBound(options.load_factor, options.decode_floor),
            seed=options.seed,
            speed=SPEEDS[options.speed],
            routers=routers,
            share_interval=options.share_interval,
            arrivals=traces.get(shape, ()),
        )
        outcome = Simulation(setup).run()
        goodput = _goodput(outcome, options.ttft_goal, options.tpot_goal)
        print(line(shape, setup, outcome, goodput), flush=True)
    return 0


def _goodput(outcome: Outcome, ttft: float, tpot: float) -> float:
    """Return the share of requests within both goals (seconds)."""
    pairs = zip(outcome.first_tokens, outcome.per_token, strict=True)
    good = sum(first <= ttft and each <= tpot for first, each in pairs)
    return good / max(1, len(outcome.first_tokens))


def line(shape: str, setup: Setup, outcome: Outcome, goodput: float) -> str:
    fleet = f"{setup.prefillers}+{setup.decoders}" + (f"/{setup.routers}" * (setup.routers > 1))
    remote = f"x{setup.hedged}" if setup.hedged else setup.min_remote_prefill_tokens or "all"
    jobs = max(1, len(outcome.decode_costs))
    ttft = [1000 * _quantile(outcome.first_tokens, share) for share in (0.5, 0.99)]
    tpot = [1000 * _quantile(outcome.per_token, share) for share in (0.5, 0.99)]
    hits_p, hits_d = (_hits(engines) for engines in (outcome.prefillers, outcome.decoders))
    most_p, most_d = (_imbalance(engines) for engines in (outcome.prefillers, outcome.decoders))
    cost_p, cost_d = (
        median(costs or [0.0]) for costs in (outcome.prefill_costs, outcome.decode_costs)
    )
    return (
        f"{shape:<9} {fleet:>8} {setup.prefill_policy:<12} {setup.decode_policy:<12} "
        f"{remote:>6} {goodput:>7.3f} {ttft[0]:>11.0f} {ttft[1]:>7.0f} "
        f"{tpot[0]:>11.1f} {tpot[1]:>6.1f} "
        f"{hits_p:>6.0%} {hits_d:>4.0%} {most_p:>10.2f} {most_d:>5.2f} "
        f"{outcome.alone / jobs:>6.0%} {outcome.extra / jobs:>6.1f} {cost_p:>5.1f} {cost_d:>5.1f}"
    )


def _quantile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def _hits(engines: Sequence[Engine]) -> float:
    return sum(e.cached for e in engines) / max(1, sum(e.asked for e in engines))


def _imbalance(engines: Sequence[Engine]) -> float:
    busy = [engine.busy for engine in engines]
    return max(busy) / (mean(busy) or 1.0)


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("fleet", __doc__)
    add, engines, tokens = parser.add_argument, _whole(1, 1000), _whole(0, 10**8)
    policies: dict[str, Any] = {"nargs": "+", "choices": POLICIES, "metavar": "POLICY"}
    known = ", ".join(POLICIES)
    add("--prefillers", type=engines, default=16, metavar="N", help="prefill engines (16)")
    add("--decoders", type=engines, default=16, metavar="N", help="decode engines (16)")
    add("--requests", type=_whole(1, 10**6), default=20_000, metavar="N", help="(20000)")
    add("--shape", nargs="+", choices=SHAPES, default=[*SHAPES], help="of the prompts (all)")
    add("--prefill-policy", default=[*POLICIES], help=f"any of {known} (all)", **policies)
    add("--decode-policy", default=["power_of_two"], help="likewise (power_of_two)", **policies)
    add("--min-remote-prefill-tokens", "--min-remote", dest="min_remote", nargs="+", type=tokens,
        default=[0], metavar="N", help="a decoder does a prompt alone that has fewer tokens which "
        "it is not expected to hold; 0: never (0)")  # fmt: skip
    add("--load", type=_positive, default=0.9, metavar="X",
        help="of what the prefillers could do if nothing was cached (0.9)")  # fmt: skip
    add("--hedged-decoders", "--scatter", dest="hedged", nargs="+", type=_whole(0, 1000),
        default=[0], metavar="K", help="decoders of a hedged request (0)")  # fmt: skip
    add("--threshold", type=_positive, default=0.5, metavar="SHARE",
        help="of a prompt that a hedged decoder must hold (0.5)")  # fmt: skip
    add("--bursty", action="store_true", help="arrivals come in bursts, not evenly (Poisson)")
    add("--count-late", action="store_true",
        help="a decode leg counts as load once it starts, not once it is chosen")  # fmt: skip
    add("--cache-tokens", type=tokens, default=CACHE_TOKENS, metavar="N",
        help=f"of an engine's prefix cache ({CACHE_TOKENS})")  # fmt: skip
    add("--load-factor", type=_positive, default=1.5, metavar="X",
        help="affinity ends at an engine with more than X times the mean legs (1.5)")  # fmt: skip
    add("--prefill-floor", type=tokens, default=2, metavar="N",
        help="but not a prefiller with fewer legs (2)")  # fmt: skip
    add("--decode-floor", type=tokens, default=8, metavar="N",
        help="nor a decoder with fewer legs (8)")  # fmt: skip
    add("--trace", nargs="+", type=Path, default=[], metavar="FILE",
        help="replay these published traces instead of shapes")  # fmt: skip
    add("--trace-speed", type=_positive, default=1.0, metavar="X", help="times as fast (1)")
    add(
        "--spread",
        action="store_true",
        help="arrivals of one instant are spread until the next; the published ones come in ticks",
    )
    add("--routers", nargs="+", type=engines, default=[1], metavar="N",
        help="routers, each of which gets requests by chance (1)")  # fmt: skip
    add("--share-interval", type=_positive, default=0.0, metavar="S",
        help="seconds between reports of a router to the others (they share nothing)")  # fmt: skip
    add("--speed", choices=SPEEDS, default="generic", help="of the engines (generic)")
    add("--ttft-goal", type=_positive, default=2.0, metavar="S", help="for goodput (2)")
    add("--tpot-goal", type=_positive, default=0.05, metavar="S", help="for goodput (0.05)")
    add("--seed", type=_whole(0, 2**63), default=0, metavar="N", help="(0)")
    return parser


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text[:20]) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return read


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, 100 at most")
    return value
