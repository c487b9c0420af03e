"""Compare the router's policies in a simulated fleet of prefill and decode engines.

    python scripts/bench.py fleet                        every policy for prefill, 16 + 16 engines
    python scripts/bench.py fleet --prefillers 500 --decoders 500 --requests 200000 --shape chat
    python scripts/bench.py fleet --prefill-policy prefix --min-remote all 256 load
    python scripts/bench.py fleet --trace conversation_trace.jsonl --prefillers 4 --decoders 4 \\
        --cache-tokens 4000000 --speed qwen3-32b-h200 --load 0.8 1 1.2 --svg goodput.svg

A trace of Mooncake's format, and the shape `changing`, are replayed at their own times. One line
for each combination: goodput (the share of requests within all goals), TTFT, TPOT, the 99th
percentile of each request's gaps between tokens and the worst gap of all, tokens found in prefix
caches and lent by other engines, tokens of last turns that their decoder has (`kept`) and `more` if
it retained turns, jobs that a decoder did alone, and the busiest prefiller beside the mean one. All
follow from --seed alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from router.routing.route import POLICIES
from scripts.benchmarks.common import bench_parser, positive
from scripts.benchmarks.fleet_chart import Lines, goodput_chart
from scripts.benchmarks.fleet_simulation import CACHE_TOKENS, Latency, Outcome, Setup, Simulation
from scripts.benchmarks.simulated_engine import SPEEDS, Engine
from scripts.benchmarks.traces import SHAPES, Arrival, TraceError, changing, published

HEADER = (
    f"{'shape':<9} {'load':>4} {'fleet':>7} {'prefill by':<12} {'decode by':<12} {'remote':>6} "
    f"{'goodput':>7} {'TTFT ms p50':>11} {'p99':>6} {'TPOT':>5} {'gap p99':>7} {'worst':>5} "
    f"{'hits P':>6} {'D':>4} {'lent':>4} {'kept':>4} {'more':>4} "
    f"{'alone':>5} {'max/mean P':>10}"
)
CHANGING = "changing"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    traces: dict[str, list[Arrival]] = {}
    try:
        for path in options.trace:
            traces[path.stem] = published(path, options.spread)
    except (OSError, TraceError) as error:
        print(f"bench fleet: error: {error}", file=sys.stderr)
        return 2
    shapes = [*traces] or options.shape
    if CHANGING in shapes:
        traces[CHANGING] = changing(options.seed)
    speed = SPEEDS[options.speed]
    speed = replace(speed, nic_tokens_per_s=options.network or speed.nic_tokens_per_s)
    print(HEADER, flush=True)
    charted: dict[str, Lines] = {}
    combinations = product(
        shapes,
        options.decode_policy,
        options.min_remote,
        options.routers,
        options.prefill_policy,
        options.load,
    )
    for shape, decode_policy, min_remote, routers, prefill_policy, load in combinations:
        arrivals = traces.get(shape, ())
        load = load or (1.0 if arrivals else 0.9)
        setup = Setup(
            shape="uniform" if arrivals else shape,
            prefillers=options.prefillers,
            decoders=options.decoders,
            requests=options.requests,
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            load=load,
            bursty=options.bursty,
            min_remote_prefill_tokens=int(min_remote) if min_remote.isdecimal() else 0,
            target_itl=options.target_itl if min_remote == "load" else 0.0,
            cache_tokens=options.cache_tokens,
            step_tokens=options.step_tokens,
            step_s=options.step_ms / 1000,
            seed=options.seed,
            speed=speed,
            routers=routers,
            by_conversation=options.by_conversation,
            share_interval=options.share_interval,
            loans=options.loans,
            restarts=options.restarts,
            arrivals=[(at / load, job) for at, job in arrivals],
        )
        outcome = Simulation(setup).run()
        goals = Latency(options.ttft_goal, options.tpot_goal, options.gap_goal, float("inf"))
        goodput = mean(
            all(a <= b for a, b in zip(one, goals, strict=True)) for one in outcome.answers
        )
        print(line(shape, setup, outcome, goodput), flush=True)
        rule = f"{prefill_policy}, {decode_policy}, remote: {_remote(setup)}, {_fleet(setup)}"
        charted.setdefault(shape, {}).setdefault(rule, []).append((load, goodput))
    if options.svg is not None:
        options.svg.write_text(goodput_chart(charted), encoding="utf-8")
    return 0


def line(shape: str, setup: Setup, outcome: Outcome, goodput: float) -> str:
    answers, jobs = outcome.answers, max(1, outcome.jobs)
    ttft = [1000 * _quantile([one.ttft for one in answers], share) for share in (0.5, 0.99)]
    tpot = 1000 * median(one.tpot for one in answers)
    gap = 1000 * _quantile([one.gap for one in answers], 0.99)
    worst = 1000 * max(one.worst for one in answers)
    hits_p, hits_d = (_hits(engines) for engines in (outcome.prefillers, outcome.decoders))
    asked = max(1, sum(engine.asked for engine in outcome.prefillers))
    lent = sum(e.borrowed for e in (*outcome.prefillers, *outcome.decoders)) / asked
    last = max(1, outcome.last_tokens)
    kept, more = outcome.kept_tokens / last, outcome.retained_tokens / last
    return (
        f"{shape[:9]:<9} {setup.load:>4g} {_fleet(setup):>7} {setup.prefill_policy:<12} "
        f"{setup.decode_policy:<12} {_remote(setup):>6} {goodput:>7.3f} "
        f"{ttft[0]:>11.0f} {ttft[1]:>6.0f} {tpot:>5.1f} {gap:>7.0f} {worst:>5.0f} "
        f"{hits_p:>6.0%} {hits_d:>4.0%} {lent:>4.0%} {kept:>4.0%} {more:>4.0%} "
        f"{outcome.alone / jobs:>5.0%} {_imbalance(outcome.prefillers):>10.2f}"
    )


def _fleet(setup: Setup) -> str:
    return f"{setup.prefillers}+{setup.decoders}" + (f"/{setup.routers}" * (setup.routers > 1))


def _remote(setup: Setup) -> str:
    return "load" if setup.target_itl else str(setup.min_remote_prefill_tokens or "all")


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
    add = parser.add_argument
    policies: dict[str, Any] = {"nargs": "+", "choices": POLICIES, "metavar": "POLICY"}
    known, shapes = ", ".join(POLICIES), (*SHAPES, CHANGING)
    add("--prefillers", type=positive, default=16, metavar="N", help="prefill engines (16)")
    add("--decoders", type=positive, default=16, metavar="N", help="decode engines (16)")
    add("--requests", type=positive, default=20_000, metavar="N", help="(20000)")
    add("--shape", nargs="+", choices=shapes, default=[*SHAPES],
        help=f"of the requests (all but {CHANGING})")  # fmt: skip
    add("--prefill-policy", default=[*POLICIES], help=f"any of {known} (all)", **policies)
    add("--decode-policy", default=["prefix"], help="likewise (prefix)", **policies)
    add("--min-remote-prefill-tokens", "--min-remote", dest="min_remote", nargs="+",
        type=_rule, default=["all"], metavar="N", help="a decoder does a prompt alone that has "
        "fewer tokens which it is not expected to hold; all: none does; load: where it is sooner "
        "and keeps --target-itl (all)")  # fmt: skip
    add(
        "--target-itl",
        type=_positive,
        default=0.05,
        metavar="S",
        help="of --min-remote load (0.05)",
    )
    add("--load", nargs="+", type=_positive, default=[0.0], metavar="X",
        help="of shapes: of what the prefillers could do if nothing was cached (0.9); of traces: "
        "times as fast (1)")  # fmt: skip
    add("--bursty", action="store_true", help="arrivals come in bursts, not evenly (Poisson)")
    add("--cache-tokens", type=positive, default=CACHE_TOKENS, metavar="N",
        help=f"of an engine's prefix cache, with its host's ({CACHE_TOKENS})")  # fmt: skip
    add("--step-tokens", type=positive, default=256, metavar="N",
        help="prompt tokens that a step of a decoder computes at most (256)")  # fmt: skip
    add("--step-ms", type=_positive, default=0.0, metavar="X",
        help="time of a decoder's step, which limits its prompt tokens (no limit)")  # fmt: skip
    add("--trace", nargs="+", type=Path, default=[], metavar="FILE",
        help="replay these published traces instead of shapes")  # fmt: skip
    add("--spread", action="store_true", help="requests of one instant of a trace are spread until "
        "the next; the published ones come in ticks")  # fmt: skip
    add("--routers", nargs="+", type=positive, default=[1], metavar="N",
        help="routers, each of which gets requests by chance (1)")  # fmt: skip
    add("--by-conversation", action="store_true",
        help="a conversation's requests go to the same router, by hash")  # fmt: skip
    add("--share-interval", type=_positive, default=0.0, metavar="S",
        help="seconds between reports of a router to the others (they share nothing)")  # fmt: skip
    add("--loans", action="store_true", help="engines borrow prefixes from others' caches")
    add("--restarts", type=int, default=0, metavar="N",
        help="prefill engines that lose their cache at half of the arrivals (0)")  # fmt: skip
    add("--speed", choices=SPEEDS, default="generic", help="of the engines (generic)")
    add("--network", type=positive, default=0, metavar="N",
        help="tokens a second through each network interface (that of --speed)")  # fmt: skip
    add("--ttft-goal", type=_positive, default=2.0, metavar="S", help="for goodput (2)")
    add("--tpot-goal", type=_positive, default=0.05, metavar="S", help="for goodput (0.05)")
    add("--gap-goal", type=_positive, default=0.05, metavar="S",
        help="for the 99th percentile of a request's gaps, for goodput (0.05)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="(0)")
    add("--svg", type=Path, metavar="FILE", help="draw the goodput of each rule by load")
    return parser


def _rule(text: str) -> str:
    if text not in ("all", "load") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, all or load")
    return text


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, 1000 at most")
    return value
