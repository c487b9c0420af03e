"""Push over pull: the time to the first token through two routers before the same two engines.

scripts/bench_push.py                          tiny model, prompts of 256 to 16,384 tokens

The engines are set up to push. One router asks them one after the other (--transfer-mode pull: the
decoder registers when the prefiller has answered), the other both at once. The cases take turns, so
that a machine's mood cancels out; one request at a time: neither engines nor router are saturated.
A line for each length: medians, the ratio, and the quartile distance over the median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.getenv("PYTHONPATH")]))

import httpx  # noqa: E402 # the checkout's own packages come first

from router.children import Child, ChildEndedError, Family  # noqa: E402
from scripts.bench.machine import describe  # noqa: E402
from scripts.bench_multiturn import VOCABULARY, ask, start_engine, until_ready  # noqa: E402
from tests.conftest import find_free_ports  # noqa: E402

MODES = ("pull", "push")
WARM_UP = 128


@dataclass(frozen=True)
class Result:
    tokens: int
    pull_ms: float
    push_ms: float
    pull_spread: float
    push_spread: float

    def line(self) -> str:
        spreads = f"{self.pull_spread:.0%} {self.push_spread:.0%}"
        return (
            f"{self.tokens:8,d} tokens   pull {self.pull_ms:8.1f} ms   push {self.push_ms:8.1f} ms"
            f"   ratio {self.push_ms / self.pull_ms:.2f}   spread {spreads}"
        )


def main() -> int:
    options = _parser().parse_args()
    if min(options.lengths) < 1 or options.repeats < 1:
        print("bench_push.py: lengths and repeats must be at least 1", file=sys.stderr)
        return 2
    print(describe(), file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-push-") as directory:
            results = _measured(Family(Path(directory)), options.lengths, options.repeats)
    except ChildEndedError as error:
        print(f"bench_push.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    return 0


def _measured(family: Family, lengths: list[int], repeats: int) -> list[Result]:
    print("starting a prefiller, a decoder and two routers", file=sys.stderr)
    try:
        with _routers(family, max(lengths)) as routers, httpx.Client(timeout=300) as client:
            return [_measure(client, routers, length, repeats) for length in lengths]
    finally:
        family.stop()


def _measure(client: httpx.Client, routers: dict[str, str], length: int, repeats: int) -> Result:
    words = random.Random(length)
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(repeats + 1):
        for mode in MODES:
            prompt = [words.randrange(1, VOCABULARY) for _ in range(length)]
            first_after = ask(client, routers[mode], "tiny", prompt, {"max_tokens": 2}).first_after
            if number:  # the first round warms up
                took[mode].append(first_after * 1000)
    pull, push = (statistics.median(took[mode]) for mode in MODES)
    result = Result(length, pull, push, _spread(took["pull"]), _spread(took["push"]))
    print(result.line(), flush=True)
    return result


def _spread(values: list[float]) -> float:
    if len(values) < 4:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / statistics.median(values)


@contextmanager
def _routers(family: Family, longest: int) -> Iterator[dict[str, str]]:
    model = str(family.directory / "tiny")
    make = [sys.executable, "-m", "engine_ext.reference.tiny_model", model]
    family.start("model", [*make, "--max-positions", str(longest + 1024)], "").process.wait()
    engines = [
        start_engine(
            family, model, name, "--no-enable-prefix-caching", connector="DisaggPushConnector"
        )
        for name in ("prefill", "decode")
    ]
    for engine in engines:
        until_ready(engine, "/health")
    routers = {mode: _router(family, mode, engines) for mode in MODES}
    for router in routers.values():
        until_ready(router, "/ready")
    with httpx.Client(timeout=60) as client:
        for router in routers.values():
            ask(client, router.url, "tiny", [1] * WARM_UP, {"max_tokens": 1})
    yield {mode: router.url for mode, router in routers.items()}


def _router(family: Family, mode: str, engines: list[Child]) -> Child:
    (port,) = find_free_ports(1)
    command = [sys.executable, "-m", "router.cli", "--port", str(port), "--transfer-mode", mode]
    for role, engine in zip(("prefiller", "decoder"), engines, strict=True):
        at = engine.url.rpartition(":")[2]
        command += [f"--{role}-hosts", "127.0.0.1", f"--{role}-ports", at]
    return family.start(f"router-{mode}", command, f"http://127.0.0.1:{port}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths = [256, 1024, 4096, 16384]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="in tokens")
    parser.add_argument("--repeats", type=int, default=9, help="rounds; default 9")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
