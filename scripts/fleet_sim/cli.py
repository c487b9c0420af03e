"""The command line of scripts/simulate_fleet.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from time import monotonic
from typing import Any, NoReturn

from router.routing.load_policies import LoadBound
from router.routing.route import POLICIES
from scripts.fleet_sim.engines import CACHE_TOKENS
from scripts.fleet_sim.report import HEADER, costs_of, figures_of, line
from scripts.fleet_sim.simulation import Setup, Simulation
from scripts.fleet_sim.traces import SHAPES

PROGRAM = "simulate_fleet"
PATIENCE = 2.0
MOST_ENGINES = 1000
MOST_REQUESTS = 1_000_000
DESCRIPTION = """\
Simulates a fleet of prefill and decode engines, to compare the policies of router/policies.

  simulate_fleet.py                                       every policy for prefill, 16+16 engines
  simulate_fleet.py --prefillers 500 --decoders 500 --requests 200000 --shape chat
  simulate_fleet.py --prefill-policy prefix --decode-policy prefix --min-remote 0 256 1024

One line for each combination: time to first token, time per output token, tokens found in a prefix
cache, the busiest engine beside the mean one, jobs a decoder did alone, and what a choice costs
(the median, on this machine). All but the last follow from --seed alone.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    print(HEADER, flush=True)
    try:
        for setup in _setups(options):
            outcome = Simulation(setup).run(_progress(setup))
            _wipe()
            print(line(setup, figures_of(outcome), costs_of(outcome)), flush=True)
    except KeyboardInterrupt:
        _wipe()
        return 130
    return 0


def _setups(options: argparse.Namespace) -> Iterator[Setup]:
    combinations = product(
        options.shape,
        options.decode_policy,
        options.min_remote,
        options.scatter,
        options.prefill_policy,
    )
    for shape, decode_policy, least, scatter, prefill_policy in combinations:
        yield Setup(
            shape=shape,
            prefillers=options.prefillers,
            decoders=options.decoders,
            requests=options.requests,
            prefill_policy=prefill_policy,
            decode_policy=decode_policy,
            load=options.load,
            bursty=options.bursty,
            min_remote_prefill_tokens=least,
            late=options.count_late,
            scatter=scatter,
            threshold=options.threshold,
            cache_tokens=options.cache_tokens,
            prefill_bound=LoadBound(options.load_factor, options.prefill_floor),
            decode_bound=LoadBound(options.load_factor, options.decode_floor),
            seed=options.seed,
        )


def _progress(setup: Setup) -> Callable[[int], None]:
    began = monotonic()

    def tell(done: int) -> None:
        if sys.stderr.isatty() and monotonic() - began > PATIENCE:
            what = f"{setup.shape}, {setup.prefill_policy}: {done / setup.requests:4.0%}"
            sys.stderr.write(f"\r{what} of {setup.requests} requests ")
            sys.stderr.flush()

    return tell


def _wipe() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, engines = parser.add_argument, _whole(1, MOST_ENGINES)
    add("--prefillers", type=engines, default=16, metavar="N", help="prefill engines (16)")
    add("--decoders", type=engines, default=16, metavar="N", help="decode engines (16)")
    add("--requests", type=_whole(1, MOST_REQUESTS), default=20_000, metavar="N", help="(20000)")
    add("--shape", nargs="+", choices=SHAPES, default=[*SHAPES], help="of the prompts (all)")
    names: dict[str, Any] = {"nargs": "+", "choices": POLICIES, "metavar": "POLICY"}
    known = ", ".join(POLICIES)
    add("--prefill-policy", default=[*POLICIES], help=f"any of {known} (all)", **names)
    add("--decode-policy", default=["power_of_two"], help="likewise (power_of_two)", **names)
    add(
        "--min-remote-prefill-tokens",
        "--min-remote",
        dest="min_remote",
        nargs="+",
        type=_whole(0, 10**6),
        default=[0],
        metavar="N",
        help="a decoder does a prompt alone with fewer tokens than that which it is not believed "
        "to hold; 0: never (0)",
    )
    add(
        "--load",
        type=_positive,
        default=0.9,
        metavar="X",
        help="of what the prefillers could do if nothing was cached (0.9)",
    )
    add(
        "--scatter",
        nargs="+",
        type=_whole(0, 1000),
        default=[0],
        metavar="K",
        help="decoders that are asked at once whether they hold --threshold of a prompt (0)",
    )
    add("--threshold", type=_positive, default=0.5, metavar="SHARE", help="for them (0.5)")
    add("--bursty", action="store_true", help="arrivals come in bursts, not evenly (Poisson)")
    add(
        "--count-late",
        action="store_true",
        help="a decode leg counts as load once it starts, not once its engine is chosen",
    )
    add(
        "--cache-tokens",
        type=_whole(0, 10**8),
        default=CACHE_TOKENS,
        metavar="N",
        help=f"of an engine's prefix cache ({CACHE_TOKENS})",
    )
    add(
        "--load-factor",
        type=_positive,
        default=1.5,
        metavar="X",
        help="session and prefix leave an engine with more than X times the mean legs (1.5)",
    )
    floor: dict[str, Any] = {"type": _whole(0, 10**6), "metavar": "N"}
    add("--prefill-floor", default=2, help="but not a prefiller with fewer legs (2)", **floor)
    add("--decode-floor", default=8, help="nor a decoder with fewer legs (8)", **floor)
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
