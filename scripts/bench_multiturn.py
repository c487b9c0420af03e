"""What reuse is worth: the time to a second turn's first token, for several lengths of history.

scripts/bench_multiturn.py                     starts a tiny model's engines and a router itself
scripts/bench_multiturn.py --router URL --alone URL --model NAME
                                               measures running ones, a real model

One line for each length: with reuse (the prefiller pulls the last turn from the decoder), without
(the same turn outside its conversation), and one engine alone whose prefix cache has the history.
The engines that are started here have prefillers without a prefix cache: what is measured is a turn
that meets a prefiller which has not seen the conversation.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.getenv("PYTHONPATH")]))

import httpx  # noqa: E402 # the checkout's own packages come first

from router.children import Child, Family  # noqa: E402
from tests.conftest import find_free_ports  # noqa: E402

TINY = "engine_ext.reference.tiny_model"
ENGINE = "engine_ext.reference.cli"
NEW_TOKENS = 64
ANSWER_TOKENS = 16
VOCABULARY = 256
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
    reuse_ms: float
    without_ms: float
    alone_ms: float

    def line(self) -> str:
        return (
            f"history {self.history:>6} tokens: reuse {self.reuse_ms:8.1f} ms | "
            f"without {self.without_ms:8.1f} ms (reuse takes {self.over(self.without_ms)}) | "
            f"one engine's prefix cache {self.alone_ms:8.1f} ms "
            f"(reuse takes {self.over(self.alone_ms)})"
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
    with _servers(options) as servers, httpx.Client(timeout=600) as client:
        results = []
        for history in options.histories:
            results.append(measure(client, servers, history, options.repeats))
            print(results[-1].line(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    return 0


def measure(client: httpx.Client, servers: Servers, history: int, repeats: int) -> Result:
    """The first round warms connections and caches up, and does not count."""
    rounds = [_round(client, servers, history, number) for number in range(repeats + 1)][1:]
    reuse, without, alone = (1000 * statistics.median(times) for times in zip(*rounds, strict=True))
    return Result(history, reuse, without, alone)


def _round(
    client: httpx.Client, servers: Servers, history: int, number: int
) -> tuple[float, float, float]:
    seeds = [f"{history}-{number}-{case}" for case in ("reuse", "without", "alone")]
    return (
        _second_turn(client, servers.router, servers.model, history, seeds[0], seeds[0]),
        _second_turn(client, servers.router, servers.model, history, seeds[1], None),
        _second_turn(client, servers.alone, servers.model, history, seeds[2], None),
    )


def _second_turn(
    client: httpx.Client, url: str, model: str, history: int, seed: str, conversation: str | None
) -> float:
    """Two turns over a prompt of their own; returns seconds to the second's first token."""
    words = random.Random(seed)
    prompt = [words.randrange(1, VOCABULARY) for _ in range(history)]
    first = ask(client, url, model, prompt, conversation)
    new = [words.randrange(1, VOCABULARY) for _ in range(NEW_TOKENS)]
    return ask(client, url, model, [*prompt, *first.tokens, *new], conversation).first_after


def ask(
    client: httpx.Client, url: str, model: str, prompt: list[int], conversation: str | None
) -> Spoken:
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if conversation is not None:
        body["conversation_id"] = conversation
    tokens: list[int] = []
    started, first_after = time.perf_counter(), 0.0
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise SystemExit(f"{url} answered {answer.status_code}: {answer.text[:500]}")
        for line in answer.iter_lines():
            found = _tokens_in(line)
            if found and not tokens:
                first_after = time.perf_counter() - started
            tokens += found
    return Spoken(tokens, first_after)


def _tokens_in(line: str) -> list[int]:
    if not line.startswith("data: {"):
        return []
    choices = json.loads(line[6:]).get("choices") or [{}]
    return list(choices[0].get("token_ids") or [])


@contextmanager
def _servers(options: argparse.Namespace) -> Iterator[Servers]:
    if options.router:
        yield Servers(options.router.rstrip("/"), options.alone.rstrip("/"), options.model)
        return
    with tempfile.TemporaryDirectory(prefix="bench-multiturn-") as directory:
        family = Family(Path(directory))
        try:
            yield _start(family, max(options.histories))
        finally:
            family.stop()


def _start(family: Family, longest: int) -> Servers:
    positions = longest + ANSWER_TOKENS * 2 + NEW_TOKENS + 1024
    model = str(family.directory / "tiny")
    make = [sys.executable, "-m", TINY, model, "--max-positions", str(positions)]
    family.start("model", make, "").process.wait()
    engines = [
        _engine(family, model, name, *flags)
        for name, *flags in (
            ("prefill", "--no-enable-prefix-caching"),
            ("decode", "--enable-prefix-caching"),
            ("alone", "--enable-prefix-caching"),
        )
    ]
    prefill, decode, alone = (engine.url for engine in engines)
    (port,) = find_free_ports(1)
    command = [sys.executable, "-m", "router.cli", "--port", str(port)]
    for role, url in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{role}-hosts", "127.0.0.1", f"--{role}-ports", url.rpartition(":")[2]]
    router = family.start("router", command, f"http://127.0.0.1:{port}")
    for child, path in [*((engine, "/health") for engine in engines), (router, "/ready")]:
        _wait(child, path)
    return Servers(router.url, alone, "tiny")


def _engine(family: Family, model: str, name: str, *flags: str) -> Child:
    port, side_channel = find_free_ports(2)
    config = {
        "kv_connector": "DisaggConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
    }
    command = [sys.executable, "-m", ENGINE, "--model", model, "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--num-threads", "1"]
    command += ["--kv-transfer-config", json.dumps(config), *flags]
    return family.start(
        name,
        command,
        f"http://127.0.0.1:{port}",
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(side_channel),
        UCX_NET_DEVICES=os.environ.get("UCX_NET_DEVICES", "all"),
    )


def _wait(child: Child, path: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        child.check()
        try:
            if httpx.get(child.url + path, timeout=2).status_code == 200:
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
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count; default 3")
    parser.add_argument("--router", help="URL of a running router; needs --alone and --model")
    parser.add_argument("--alone", help="URL of a running engine that answers everything itself")
    parser.add_argument("--model", help="the model's name there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
