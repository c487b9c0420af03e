"""Seeds, one after the other: `python -m tests.unit.engine_ext.simulation.run --seeds 10000`.

`--seed S --trace` shows step by step what happened in one.
"""

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.unit.engine_ext.simulation.scenario import KINDS, LOANS, Scenario
from tests.unit.engine_ext.simulation.timeline import Violation

COMMAND = "python -m tests.unit.engine_ext.simulation.run"
SHOWN = 20


def failure_of(
    seed: int,
    kind: str | None = None,
    *,
    bounded_writes: bool = True,
    mixes_versions: bool | None = None,
) -> str | None:
    """What went wrong with this seed, in a line; None when nothing did."""
    scenario = Scenario(
        seed, kind=kind, bounded_writes=bounded_writes, mixes_versions=mixes_versions
    )
    try:
        scenario.run()
    except Violation:
        return f"{scenario.kind}: {scenario.network.violations[0]}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{scenario.kind}: {error!r} in {where.name}, {where.filename}:{where.lineno}"
    return None


def run(seeds: Iterable[int], options: argparse.Namespace) -> Counter[str]:
    """Failures by what kind of thing it was."""
    failures: Counter[str] = Counter()
    begun, done = time.process_time(), 0
    for seed in seeds:
        problem = failure_of(
            seed,
            options.kind,
            bounded_writes=not options.unbounded_writes,
            mixes_versions=options.mixed_versions,
        )
        done += 1
        if problem is not None:
            failures[_kind_of(problem)] += 1
            if failures.total() <= options.show:
                print(f"seed {seed}: {problem}\n  {_replay(seed, options)}", flush=True)
        if done % options.every == 0:
            rate = done / (time.process_time() - begun)
            print(f"{done} seeds, {rate:.0f} a second, {failures.total()} failed", flush=True)
    rate = done / max(1e-9, time.process_time() - begun)
    print(f"{done} seeds, {rate:.0f} a second, {failures.total()} failed")
    for kind, count in failures.most_common():
        print(f"{count:8}  {kind}")
    return failures


def _kind_of(problem: str) -> str:
    """Without names and numbers."""
    mode, _, rest = problem.partition(": ")
    who, _, what = rest.partition(": ")
    words = [word for word in what.split() if not any(c.isdigit() for c in word)]
    return f"{mode}: {' '.join(words)}" if what else f"{mode}: {who}"


def _replay(seed: int, options: argparse.Namespace) -> str:
    more = "".join(
        [
            f" --kind {options.kind}" if options.kind else "",
            " --unbounded-writes" if options.unbounded_writes else "",
            " --mixed-versions" if options.mixed_versions else "",
        ]
    )
    return f"{COMMAND} --seed {seed} --trace{more}"


def _show(options: argparse.Namespace) -> bool:
    """One seed, and all that happened. True: nothing went wrong."""
    scenario = Scenario(
        options.seed,
        kind=options.kind,
        bounded_writes=not options.unbounded_writes,
        mixes_versions=options.mixed_versions,
    )
    problem: str | None = None
    try:
        scenario.run()
    except Violation:
        problem = scenario.network.violations[0]
    finally:
        if options.trace:
            print("\n".join(scenario.network.trace.lines()))
    print(f"seed {options.seed}, {scenario.kind}: {problem or 'nothing went wrong'}")
    return problem is None


def _counting(first: int, number: int) -> Iterator[int]:
    return iter(range(first, first + number))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=int, default=500, help="seeds between progress lines")
    parser.add_argument("--show", type=int, default=SHOWN, help="failures to show one by one")
    parser.add_argument("--kind", choices=(*KINDS, LOANS), help="of traffic; by default the seed's")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: everything it did")
    parser.add_argument(
        "--unbounded-writes",
        action="store_true",
        help="a WRITE may land after the time that P promised: no bound of P's can hold then",
    )
    parser.add_argument(
        "--mixed-versions",
        action="store_true",
        default=None,
        help="each engine has a version of the extension of its own; by default some seeds' do",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    logging.getLogger("engine_ext").setLevel(logging.CRITICAL)
    if options.seed is not None:
        return 0 if _show(options) else 1
    return 1 if run(_counting(options.first, options.seeds), options) else 0


if __name__ == "__main__":
    sys.exit(main())
