"""Compare the router's policies in a simulated fleet of engines.

    python scripts/bench.py fleet                        every policy for prefill, 16 + 16 engines
    python scripts/bench.py fleet --fleet 500+500 --requests 200000 --shape chat
    python scripts/bench.py fleet --prefill-policy prefix --min-remote all 256 load
    python scripts/bench.py fleet --trace conversation_trace.jsonl --fleet 4+4 \\
        --cache-tokens 4000000 --speed qwen3-32b-h200 --load 0.8 1 1.2
    python scripts/bench.py fleet --shape changing --prefill-policy prefix --min-remote load \\
        --fleet 6+2 8 --form free boundary --speed qwen3-32b-h200 --step-ms 45 --seeds 10

A trace of Mooncake's format, and the shape `changing`, are replayed at their own times. One line
for each combination: goodput (the share of requests within all goals), TTFT, TPOT, the 99th
percentile of each request's gaps between tokens and the worst gap of all, tokens found in prefix
caches and lent by other engines, jobs that one engine did alone, and the busiest prefiller beside
the mean one.
With --seeds, goodput is a mean with its 95 % confidence interval (`+-`). `changing` has the goodput
of each phase, too. All follows from --seed alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf, nan, sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from router.routing.route import POLICIES
from scripts.benchmarks.common import bench_parser, positive
from scripts.benchmarks.fleet_simulation import CACHE_TOKENS, Answer, Outcome, Setup, Simulation
from scripts.benchmarks.simulated_engine import SPEEDS, Engine
from scripts.benchmarks.traces import SHAPES, Arrival, TraceError, at_load, changing, published

HEADER = (
    f"{'shape':<9} {'load':>4} {'fleet':>9} {'prefill by':<12} {'decode by':<12} {'remote':>6} "
    f"{'goodput':>7} {'TTFT ms p50':>11} {'p99':>6} {'TPOT':>5} {'gap p99':>7} {'worst':>5} "
    f"{'hits P':>6} {'D':>4} {'lent':>4} "
    f"{'alone':>5} {'max/mean P':>10} {'mix':>4} {'+-':>5} by phase"
)
CHANGING = "changing"
LONG_TOKENS = 16_384
# The 97.5th percentile of Student's distribution, by degrees of freedom.
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    traces: dict[str, list[Arrival]] = {}
    try:
        for path in options.trace:
            traces[path.stem] = published(path, options.rhythm == "spread")
    except (OSError, TraceError) as error:
        print(f"bench fleet: error: {error}", file=sys.stderr)
        return 2
    speed = SPEEDS[options.speed]
    speed = replace(speed, nic_tokens_per_s=options.network or speed.nic_tokens_per_s)
    print(HEADER, flush=True)
    combinations = product(
        [*traces] or options.shape,
        options.decode_policy,
        options.min_remote,
        options.mix,
        options.routers,
        options.prefill_policy,
        [(fleet, form) for fleet in options.fleet for form in options.form[: 99 * fleet[2] or 1]],
        options.load,
    )
    for shape, decode_policy, min_remote, mix, routers, prefill_policy, fleet, load in combinations:
        load = load or (1.0 if shape in traces or shape == CHANGING else 0.9)
        (prefillers, decoders, both), form = fleet
        setup = Setup(
            "uniform" if shape in traces or shape == CHANGING else shape,
            prefillers, decoders, options.requests, prefill_policy, decode_policy,
            both=both, form=form if both else "", load=load, rhythm=options.rhythm,
            min_remote_prefill_tokens=int(min_remote) if min_remote.isdecimal() else 0,
            target_itl=options.target_itl if min_remote == "load" or both else 0.0,
            cache_tokens=options.cache_tokens, step_tokens=options.step_tokens,
            step_s=options.step_ms / 1000, speed=replace(speed, mixing=mix), routers=routers,
            by_conversation=options.by_conversation, share_interval=options.share_interval,
            loans=options.loans, restarts=options.restarts, lend_s=options.lend,
            slow_pair=options.slow_pair, pair_rates=not options.no_pair_rates,
            closed_loop=options.closed_loop,
        )  # fmt: skip
        phases = [(0.0, inf)]
        outcomes = []
        for seed in range(options.seed, options.seed + options.seeds):
            arrivals = traces.get(shape, [])
            if shape == CHANGING:
                arrivals, phases = changing(seed, options.rhythm, options.phase)
            arrivals = at_load(arrivals, load)
            outcomes.append(Simulation(replace(setup, seed=seed, arrivals=arrivals)).run())
        goods = [
            [_goodput(one, options, a / load, b / load) for one in outcomes] for a, b in phases
        ]
        everything = [_goodput(one, options) for one in outcomes]
        print(line(shape, setup, outcomes, everything, goods), flush=True)
    return 0


def _goodput(
    outcome: Outcome, options: argparse.Namespace, begin: float = 0.0, end: float = inf
) -> float:
    """Return the share of the requests that arrived in this time and are within all goals."""

    def is_good(one: Answer) -> bool:
        goals = options.ttft_goal[-(one.tokens > LONG_TOKENS)], options.tpot_goal, options.gap_goal
        return all(a <= b for a, b in zip((one.ttft, one.tpot, one.gap), goals, strict=True))

    found = [is_good(one) for one in outcome.answers if begin <= one.arrived < end]
    return mean(found) if found else nan


def line(
    shape: str,
    setup: Setup,
    outcomes: Sequence[Outcome],
    goodput: Sequence[float],
    phases: Sequence[Sequence[float]],
) -> str:
    answers = [one for outcome in outcomes for one in outcome.answers]
    prefillers = [engine for outcome in outcomes for engine in outcome.prefillers]
    decoders = [engine for outcome in outcomes for engine in outcome.decoders]
    ttft = [1000 * _quantile([one.ttft for one in answers], share) for share in (0.5, 0.99)]
    tpot = 1000 * median(one.tpot for one in answers)
    gap = 1000 * _quantile([one.gap for one in answers], 0.99)
    worst = 1000 * max(one.worst for one in answers)
    asked = max(1, sum(engine.asked for engine in prefillers or decoders))
    lent = sum(e.borrowed for e in (*prefillers, *decoders)) / asked
    alone = sum(one.alone for one in outcomes) / max(1, sum(one.jobs for one in outcomes))
    by_phase = " ".join(_interval(one) for one in phases) if len(phases) > 1 else ""
    return (
        f"{shape[:9]:<9} {setup.load:>4g} {_fleet(setup):>9} {setup.prefill_policy:<12} "
        f"{setup.decode_policy:<12} {_remote(setup):>6} {mean(goodput):>7.3f} "
        f"{ttft[0]:>11.0f} {ttft[1]:>6.0f} {tpot:>5.1f} {gap:>7.0f} {worst:>5.0f} "
        f"{_hits(prefillers):>6.0%} {_hits(decoders):>4.0%} {lent:>4.0%} "
        f"{alone:>5.0%} {_imbalance(prefillers):>10.2f} {setup.speed.mixing:>4g} "
        f"{_interval(goodput)[6:]:>5} {by_phase}".rstrip()
    )


def _interval(values: Sequence[float]) -> str:
    """Return the mean with the half of its 95 % confidence interval."""
    if len(values) < 2:
        return f"{mean(values):.3f}"
    half = T_95.get(len(values) - 1, 1.96) * stdev(values) / sqrt(len(values))
    return f"{mean(values):.3f}±{half:.3f}"


def _fleet(setup: Setup) -> str:
    parts = (f"{setup.prefillers}+{setup.decoders}", f"{setup.both} {setup.form}")
    static = setup.prefillers + setup.decoders
    text = "+".join(parts[not static : 1 + bool(setup.both)])
    return text + (f"/{setup.routers}" * (setup.routers > 1))


def _remote(setup: Setup) -> str:
    return "load" if setup.target_itl else str(setup.min_remote_prefill_tokens or "all")


def _quantile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def _hits(engines: Sequence[Engine]) -> float:
    return sum(e.cached for e in engines) / max(1, sum(e.asked for e in engines))


def _imbalance(engines: Sequence[Engine]) -> float:
    busy = [engine.busy for engine in engines] or [0.0]
    return max(busy) / (mean(busy) or 1.0)


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("fleet", __doc__)
    add = parser.add_argument
    policies: dict[str, Any] = {"nargs": "+", "choices": POLICIES, "metavar": "POLICY"}
    known, shapes = ", ".join(POLICIES), (*SHAPES, CHANGING)
    add("--fleet", nargs="+", type=_engines, default=[(16, 16, 0)], metavar="P+D",
        help="P prefill and D decode engines, or N of both roles, or P+D+N (16+16)")  # fmt: skip
    add("--form", nargs="+", choices=("auto", "free", "boundary"), default=["auto"],
        help="of engines of both roles; free: by cost; auto: by mixing penalty (auto)")  # fmt: skip
    add("--mix", nargs="+", type=float, default=[0.0], metavar="X",
        help="weight reads that a step with prompts and answers takes more (0)")  # fmt: skip
    add("--requests", type=positive, default=20_000, metavar="N", help="(20000)")
    add("--shape", nargs="+", choices=shapes, default=[*SHAPES],
        help=f"of the requests (all but {CHANGING})")  # fmt: skip
    add("--prefill-policy", default=[*POLICIES], help=f"any of {known} (all)", **policies)
    add("--decode-policy", default=["prefix"], help="likewise (prefix)", **policies)
    add("--min-remote-prefill-tokens", "--min-remote", dest="min_remote", nargs="+",
        type=_rule, default=["all"], metavar="N", help="a decoder does a prompt alone that has "
        "fewer tokens which it is not expected to hold; all: none does; load: where it is sooner "
        "and keeps --target-itl (all)")  # fmt: skip
    add("--target-itl", type=_positive, default=0.05, metavar="S",
        help="of --min-remote load (0.05)")  # fmt: skip
    add("--load", nargs="+", type=_positive, default=[0.0], metavar="X",
        help="of shapes: of what the prefillers could do if nothing was cached (0.9); of traces: "
        "times as fast (1)")  # fmt: skip
    add("--bursty", dest="rhythm", action="store_const", const="bursty", default="",
        help="arrivals come in bursts (Poisson)")  # fmt: skip
    add("--phase", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3],
        help="of the shape changing, one after another (1 2 3)")  # fmt: skip
    add("--cache-tokens", type=positive, default=CACHE_TOKENS, metavar="N",
        help=f"of an engine's prefix cache, with its host's ({CACHE_TOKENS})")  # fmt: skip
    add("--step-tokens", type=positive, default=256, metavar="N",
        help="prompt tokens that a step of a decoder computes at most (256)")  # fmt: skip
    add("--step-ms", type=_positive, default=0.0, metavar="X",
        help="time of a decoder's step, which limits its prompt tokens (no limit)")  # fmt: skip
    add("--trace", nargs="+", type=Path, default=[], metavar="FILE",
        help="replay these published traces instead of shapes")  # fmt: skip
    add("--spread", dest="rhythm", action="store_const", const="spread",
        help="arrivals come evenly. Requests of one instant of a trace are spread until the next; "
        "the published ones come in ticks")  # fmt: skip
    add("--closed-loop", action="store_true",
        help="a session's request waits for the answer before it, then for its pause")  # fmt: skip
    add("--routers", nargs="+", type=positive, default=[1], metavar="N",
        help="routers, each of which gets requests by chance (1)")  # fmt: skip
    add("--by-conversation", action="store_true",
        help="a conversation's requests go to the same router, by hash")  # fmt: skip
    add("--share-interval", type=_positive, default=0.0, metavar="S",
        help="seconds between reports of a router to the others (they share nothing)")  # fmt: skip
    add("--loans", action="store_true", help="engines borrow prefixes from others' caches")
    add("--restarts", type=int, default=0, metavar="N",
        help="prefill engines that new ones replace at half of the arrivals (0)")  # fmt: skip
    add("--lend", type=_positive, default=0.0, metavar="S",
        help="seconds for which the replaced engines still lend (0)")  # fmt: skip
    add("--slow-pair", type=_positive, default=1.0, metavar="X",
        help="KV moves X times as slowly from the first prefill engine to the first decode engine "
        "(1)")  # fmt: skip
    add("--no-pair-rates", action="store_true",
        help="the routers do not measure how fast KV moves")  # fmt: skip
    add("--speed", choices=SPEEDS, default="generic", help="of the engines (generic)")
    add("--network", type=positive, default=0, metavar="N",
        help="tokens a second through each network interface (that of --speed)")  # fmt: skip
    add("--ttft-goal", nargs="+", type=_positive, default=[2.0], metavar="S",
        help=f"for goodput; a second number is for prompts above {LONG_TOKENS} tokens (2)"
        )  # fmt: skip
    add("--tpot-goal", type=_positive, default=0.05, metavar="S", help="for goodput (0.05)")
    add("--gap-goal", type=_positive, default=0.05, metavar="S",
        help="for the 99th percentile of a request's gaps, for goodput (0.05)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="(0)")
    add("--seeds", type=positive, default=1, metavar="N", help="runs with --seed and the next (1)")
    return parser


def _engines(text: str) -> tuple[int, int, int]:
    parts = text.split("+")
    numbers = [int(one) for one in parts if one.isdecimal()]
    if len(numbers) < len(parts) or len(parts) > 3 or (len(parts) == 2 and 0 in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not P+D, N or P+D+N")
    prefillers, decoders, both = ([0, 0, *numbers], [*numbers, 0])[len(parts) > 1][:3]
    return prefillers, decoders, both


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
