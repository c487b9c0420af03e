"""What a prefiller's own first token is worth: the time to a stream's first text.

scripts/bench_first_token.py                     the demo's chat model, made if it is not there yet
scripts/bench_first_token.py --model DIR         another
scripts/bench_first_token.py --url one=URL ...   running servers, whose model is --served-model-name

One engine alone, a router whose decoder samples the first token again (--first-token decoder), and
one whose prefiller hands its own over; both routers stand before the same prefiller and decoder.
The cases take turns, one request at a time, with prompts that nobody has seen. Of the routers also:
the time from asking the decoder, when the prefiller has answered, to its first byte. Not saturated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)

import httpx  # noqa: E402 # the checkout's own packages come first

from router.common.child_processes import ChildEndedError, ChildProcesses  # noqa: E402
from scripts.bench_multiturn import lines_of, start_engine, start_router, until_ready  # noqa: E402
from scripts.benchmarks.common import describe  # noqa: E402

ALONE, AGAIN, HANDED = "one engine alone", "P/D, sampled again", "P/D, P's token"
WORDS = ("river", "stone", "lantern", "quiet", "orchard", "winter", "letter", "bridge", "copper")
HANDED_OVER = 'disagg_router_handed_over_total{outcome="went_on"}'
FIRST_BYTES = "disagg_router_decode_first_byte_seconds"
WARM_UP = 2


@dataclass
class Case:
    """`texts`: seconds to the first text of each request; `after`: of a router, to the decoder's
    first byte from when it was asked."""

    name: str
    url: str
    model: str
    texts: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def line(self, other: Case) -> str:
        ratio = statistics.median(self.texts) / statistics.median(other.texts)
        after = f" | after P {_ms(statistics.median(self.after))}" if self.after else ""
        return (
            f"{self.name:<20} p50 {_ms(statistics.median(self.texts))} | "
            f"p99 {_ms(_percentile(self.texts, 99))} | {ratio:.2f} of one engine{after}"
        )


def main() -> int:
    options = _parser().parse_args()
    try:
        with _cases(options) as cases, httpx.Client(timeout=600, verify=False) as client:
            for words in options.words:
                measure(client, cases, words, options.repeats)
                print(f"{words} words")
                for case in cases:
                    print("  " + case.line(cases[0]), flush=True)
                if options.json is not None:
                    report = {"words": words, "cases": [asdict(case) for case in cases]}
                    with options.json.open("a") as file:
                        file.write(json.dumps({"machine": describe(), **report}) + "\n")
    except ChildEndedError as error:
        raise SystemExit(str(error)) from None
    return 0


def measure(client: httpx.Client, cases: list[Case], words: int, repeats: int) -> None:
    for case in cases:
        case.texts.clear()
        case.after.clear()
    for number in range(repeats + WARM_UP):
        for case in cases:
            before = _counts(client, case.url)
            seconds = ask(client, case, _prompt(words, f"{words} {number} {case.name}"))
            after = _counts(client, case.url)
            if number < WARM_UP:
                continue
            case.texts.append(seconds)
            handed = after.get(HANDED_OVER, 0) - before.get(HANDED_OVER, 0)
            if handed != (case.name == HANDED):
                _say(f"not what was to be measured: {case.name} handed over {handed:g}")
            if f"{FIRST_BYTES}_sum" in after:
                case.after.append(after[f"{FIRST_BYTES}_sum"] - before[f"{FIRST_BYTES}_sum"])
        _say(f"{words} words, round {number + 1} of {repeats + WARM_UP}")


def ask(client: httpx.Client, case: Case, prompt: str) -> float:
    """Seconds to the first text."""
    body = {
        "model": case.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 8,
        "min_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    started, first = time.perf_counter(), 0.0
    with client.stream("POST", f"{case.url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise SystemExit(f"{case.url} answered {answer.status_code}: {answer.text[:500]}")
        for line in lines_of(answer):
            if not first and line.startswith(b"data: {") and _has_text(json.loads(line[6:])):
                first = time.perf_counter() - started
    return first


def _has_text(chunk: dict[str, list[dict[str, dict[str, str]]]]) -> bool:
    return any(choice["delta"].get("content") for choice in chunk["choices"])


def _prompt(words: int, seed: str) -> str:
    rng = random.Random(seed)
    return seed + " " + " ".join(rng.choices(WORDS, k=words))


def _counts(client: httpx.Client, url: str) -> Mapping[str, float]:
    lines = client.get(f"{url}/metrics").text.splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith("disagg_router_"))
    return {name: float(value) for name, _, value in samples}


def _percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:7.1f} ms"


def _say(text: str) -> None:
    """Progress, for people."""
    sys.stderr.write(f"{text}\n")


@contextmanager
def _cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    if options.url:
        pairs = (given.partition("=") for given in options.url)
        yield [Case(name, url.rstrip("/"), options.served_model_name) for name, _, url in pairs]
        return
    with tempfile.TemporaryDirectory(prefix="bench-first-token-") as directory:
        family = ChildProcesses(Path(directory))
        try:
            yield _start(family, options.model)
        finally:
            family.stop()


def _start(family: ChildProcesses, model: str) -> list[Case]:
    if not Path(model).is_dir():
        _say("making the chat model")
        make = [sys.executable, "-m", "engine_ext.reference.chat_model", model]
        if family.start("model", make, "").process.wait():
            raise SystemExit(f"the chat model could not be made in {model}")
    _say("starting a prefiller, a decoder, one engine alone, and two routers")
    engines = [start_engine(family, model, name) for name in ("prefill", "decode", "alone")]
    for engine in engines:
        until_ready(engine, "/health")
    prefill, decode, alone = (engine.url for engine in engines)
    routers = [
        start_router(family, f"router {choice}", prefill, decode, "--first-token", choice)
        for choice in ("decoder", "auto")
    ]
    for router in routers:
        until_ready(router, "/ready")
    urls = (alone, *(router.url for router in routers))
    return [Case(name, url, "tiny") for name, url in zip((ALONE, AGAIN, HANDED), urls, strict=True)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chat = Path.home() / ".cache/disagg-router/chat-1/SmolLM2-135M-Instruct"
    parser.add_argument("--model", default=str(chat), help="a directory; default the demo's")
    parser.add_argument("--words", type=int, nargs="+", default=[50, 400], help="of a prompt")
    parser.add_argument("--repeats", type=int, default=20, help="of each case; default 20")
    parser.add_argument("--url", nargs="+", metavar="NAME=URL", help="running servers instead")
    parser.add_argument("--served-model-name", default="tiny", help="with --url")
    parser.add_argument("--json", type=Path, help="also add the figures to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
