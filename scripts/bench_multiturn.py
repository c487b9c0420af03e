"""What reuse is worth: the time to a second turn's first token, for several lengths of history.

scripts/bench_multiturn.py                     starts a tiny model's engines and a router itself
scripts/bench_multiturn.py --router URL --alone URL --model NAME
                                               measures running ones, a real model

One line for each length: with reuse (the prefiller pulls the last turn from the decoder), without
(the same turn outside its conversation), by the decoder alone (decode first: it holds the history),
and one engine alone whose prefix cache has the history. Medians; the cases take turns. The engines
that are started here have prefillers without a prefix cache: what is measured is a turn that meets
a prefiller which has not seen the conversation. Running ones are best measured with
--decode-first-turns 0, or the decoder may answer alone where the prefiller is to pull.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.getenv("PYTHONPATH")]))

import httpx  # noqa: E402 # the checkout's own packages come first

from router.common.child_processes import ChildEndedError, ChildProcess, ChildProcesses  # noqa: E402
from scripts.benchmarks.common import describe  # noqa: E402
from tests.conftest import find_free_ports  # noqa: E402

TINY = "engine_ext.reference.tiny_model"
ENGINE = "engine_ext.reference.cli"
NEW_TOKENS = 64
ANSWER_TOKENS = 16
VOCABULARY = 256
WARM_UP = 256
CASES = ("reuse", "without", "decoder alone", "one engine")
DECODE_FIRST = 0.5
REUSED = 'disagg_router_conversation_turns_total{outcome="hit",reason=""}'
ALONE = 'disagg_router_decode_first_total{outcome="answered"}'
START_SECONDS = 120.0


@dataclass(frozen=True)
class Servers:
    router: str
    alone: str
    model: str


@dataclass(frozen=True)
class Result:
    """Medians, in milliseconds."""

    history: int
    repeats: int
    reuse_ms: float
    without_ms: float
    decoder_ms: float
    alone_ms: float

    def line(self) -> str:
        return (
            f"history {self.history:>6} tokens: reuse {self.reuse_ms:8.1f} ms | "
            f"without {self.without_ms:8.1f} ms (reuse takes {self.over(self.without_ms)}) | "
            f"one engine's prefix cache {self.alone_ms:8.1f} ms "
            f"(reuse takes {self.over(self.alone_ms)}) | "
            f"decoder alone {self.decoder_ms:8.1f} ms"
        )

    def over(self, other_ms: float) -> str:
        return f"{self.reuse_ms / other_ms:.2f} of it"


@dataclass(frozen=True)
class Spoken:
    """A streamed answer: its token ids, and seconds to the first of them."""

    tokens: list[int]
    first_after: float


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.router and not (options.alone and options.model):
        parser.error("--router needs --alone and --model")
    try:
        results = _results(options)
    except ChildEndedError as error:
        raise SystemExit(str(error)) from None
    if options.json is not None:
        options.json.write_text(json.dumps(_report(results), indent=2) + "\n")
    return 0


def _results(options: argparse.Namespace) -> list[Result]:
    results = []
    with _servers(options) as servers, httpx.Client(timeout=600, verify=False) as client:
        _say("warming up")
        _round(client, servers, WARM_UP, "warm-up")
        for history in options.histories:
            results.append(measure(client, servers, history, options.repeats))
            print(results[-1].line(), flush=True)
    return results


def _report(results: list[Result]) -> dict[str, object]:
    return {
        "machine": describe(),
        "command": " ".join(sys.argv),
        "results": [asdict(result) for result in results],
    }


def _say(text: str) -> None:
    """Progress, for people."""
    sys.stderr.write(f"{text}\n")


def measure(client: httpx.Client, servers: Servers, history: int, repeats: int) -> Result:
    rounds = []
    for number in range(repeats):
        rounds.append(_round(client, servers, history, str(number)))
        pairs = zip(CASES, rounds[-1], strict=True)
        shown = ", ".join(f"{case} {1000 * seconds:.0f}" for case, seconds in pairs)
        _say(f"{history} tokens, round {number + 1} of {repeats}: {shown} ms")
    medians = (1000 * statistics.median(times) for times in zip(*rounds, strict=True))
    return Result(history, repeats, *medians)


def _round(
    client: httpx.Client, servers: Servers, history: int, name: str
) -> tuple[float, float, float, float]:
    """Seconds, for each of CASES."""

    def turn(url: str, case: str, **second: object) -> float:
        return _second_turn(client, url, servers.model, history, f"{history}-{name}-{case}", second)

    with _counted(client, servers.router, REUSED), _counted(client, servers.router, ALONE):
        reuse = turn(
            servers.router, "reuse", conversation_id=f"bench-{os.getpid()}-{history}-{name}"
        )
        without = turn(servers.router, "without")
        decoder = turn(servers.router, "decoder", cache_hit_threshold=DECODE_FIRST)
    return reuse, without, decoder, turn(servers.alone, "alone")


@contextmanager
def _counted(client: httpx.Client, url: str, sample: str) -> Iterator[None]:
    """Says so when what is to be measured did not happen just once."""
    before = _value(client, url, sample)
    yield
    count = _value(client, url, sample) - before
    if count != 1:
        _say(f"not what was to be measured: {sample} went up by {count:g}, not by 1")


def _value(client: httpx.Client, url: str, sample: str) -> float:
    lines = client.get(f"{url}/metrics").text.splitlines()
    found = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{sample} ")]
    return float(found[0]) if found else 0.0


def _second_turn(
    client: httpx.Client,
    url: str,
    model: str,
    history: int,
    seed: str,
    second: dict[str, object],
) -> float:
    """Two turns over a prompt of their own; returns seconds to the second's first token.

    `second` are fields of the second turn; of these the first has the conversation only.
    """
    words = random.Random(seed)
    prompt = [words.randrange(1, VOCABULARY) for _ in range(history)]
    fields = {name: value for name, value in second.items() if name == "conversation_id"}
    first = ask(client, url, model, prompt, fields)
    new = [words.randrange(1, VOCABULARY) for _ in range(NEW_TOKENS)]
    return ask(client, url, model, [*prompt, *first.tokens, *new], second).first_after


def ask(
    client: httpx.Client, url: str, model: str, prompt: list[int], fields: dict[str, object]
) -> Spoken:
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }
    tokens: list[int] = []
    started, first_after = time.perf_counter(), 0.0
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise SystemExit(f"{url} answered {answer.status_code}: {answer.text[:500]}")
        for line in lines_of(answer):
            found = _tokens_in(line)
            if found and not tokens:
                first_after = time.perf_counter() - started
            tokens += found
    return Spoken(tokens, first_after)


def lines_of(answer: httpx.Response) -> Iterator[bytes]:
    """Not `iter_lines`, to which some of a model's characters are ends of lines."""
    rest = b""
    for some in answer.iter_bytes():
        *lines, rest = (rest + some).split(b"\n")
        yield from lines


def _tokens_in(line: bytes) -> list[int]:
    if not line.startswith(b"data: {"):
        return []
    choices = json.loads(line[6:]).get("choices") or [{}]
    return list(choices[0].get("token_ids") or [])


@contextmanager
def _servers(options: argparse.Namespace) -> Iterator[Servers]:
    if options.router:
        yield Servers(options.router.rstrip("/"), options.alone.rstrip("/"), options.model)
        return
    with tempfile.TemporaryDirectory(prefix="bench-multiturn-") as directory:
        family = ChildProcesses(Path(directory))
        _say("starting a prefiller, a decoder, one engine alone, and a router")
        try:
            yield _start(family, max(options.histories))
        finally:
            family.stop()


def _start(family: ChildProcesses, longest: int) -> Servers:
    positions = longest + ANSWER_TOKENS * 2 + NEW_TOKENS + 1024
    model = str(family.directory / "tiny")
    make = [sys.executable, "-m", TINY, model, "--max-positions", str(positions)]
    family.start("model", make, "").process.wait()
    engines = [
        start_engine(family, model, name, *flags)
        for name, *flags in (
            ("prefill", "--no-enable-prefix-caching"),
            ("decode", "--enable-prefix-caching"),
            ("alone", "--enable-prefix-caching"),
        )
    ]
    prefill, decode, alone = (engine.url for engine in engines)
    router = start_router(family, "router", prefill, decode, "--decode-first-turns", "0")
    for child, path in [*((engine, "/health") for engine in engines), (router, "/ready")]:
        until_ready(child, path)
    return Servers(router.url, alone, "tiny")


def start_engine(
    family: ChildProcesses,
    model: str,
    name: str,
    *flags: str,
    program: Sequence[str] = (sys.executable, "-m", ENGINE, "--num-threads", "1"),
    environment: Mapping[str, str] | None = None,
    transfer: Mapping[str, object] | None = None,
) -> ChildProcess:
    """`transfer`: beside what every engine's `kv_transfer_config` has here."""
    port, side_channel = find_free_ports(2)
    config = {
        "kv_connector": "DisaggConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
        **(transfer or {}),
    }
    command = [*program, "--model", model, "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-transfer-config", json.dumps(config), *flags]
    return family.start(
        name,
        command,
        f"http://127.0.0.1:{port}",
        environment=environment,
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(side_channel),
        UCX_NET_DEVICES=os.environ.get("UCX_NET_DEVICES", "all"),
    )


def start_router(
    family: ChildProcesses,
    name: str,
    prefill: str,
    decode: str,
    *flags: str,
) -> ChildProcess:
    """Before two engines, of which the URLs are given."""
    (port,) = find_free_ports(1)
    command = [sys.executable, "-m", "router.commands.cli", "--port", str(port), *flags]
    for role, url in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{role}-hosts", "127.0.0.1", f"--{role}-ports", url.rpartition(":")[2]]
    return family.start(name, command, f"http://127.0.0.1:{port}")


def until_ready(child: ChildProcess, path: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        child.check()
        try:
            if httpx.get(child.url + path, timeout=2, verify=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"{child.name} is not ready after {START_SECONDS:.0f} s")
        time.sleep(0.1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths = [1024, 4096, 16384]
    parser.add_argument("--histories", type=int, nargs="+", default=lengths, help="in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; default 3")
    parser.add_argument("--router", help="URL of a running router; needs --alone and --model")
    parser.add_argument("--alone", help="URL of a running engine that answers everything itself")
    parser.add_argument("--model", help="the model's name there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
