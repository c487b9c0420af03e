"""Push over pull: the time to the first token through two routers before the same two engines.

scripts/bench_push.py                          tiny model, prompts of 256 to 16,384 tokens
scripts/bench_push.py --vllm                   the same engines in vLLM (scripts/install_vllm)
scripts/bench_push.py --late                   nothing is written before a prompt is computed

The engines are set up to push. One router asks them one after the other (--transfer-mode pull: the
decoder registers when the prefiller has answered), the other both at once. The cases take turns, so
that a machine's mood cancels out; one request at a time: neither engines nor router are saturated.
A line for each length: medians, the ratio, and the quartile distance over the median.

Then the hand-over without a router: from the prefiller's answer to the decoder's first token, where
the decoder registers after that answer, and where it waits from the start and is written most of
the prompt while the rest is computed; and how many of its blocks were left for the last WRITE.
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
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.getenv("PYTHONPATH")]))

import httpx  # noqa: E402 # the checkout's own packages come first

from router.commands.demo.engines import ENGINES, VLLM_ABSENT, VLLM_ON_CPU, find_vllm  # noqa: E402
from router.common.child_processes import ChildEndedError, ChildProcess, ChildProcesses  # noqa: E402
from scripts.bench_multiturn import VOCABULARY, ask, start_engine, until_ready  # noqa: E402
from scripts.benchmarks.common import describe  # noqa: E402
from tests.conftest import find_free_ports  # noqa: E402

MODES = ("pull", "push")
WARM_UP = 128
BLOCK = 32
"""Tokens of one of the reference engine's blocks."""
WAITING = "disagg_engine_kv_pushes_active"
CHUNK = 512
"""Tokens that vLLM computes in one step here: by itself, all of these prompts."""

Params = dict[str, object]


@dataclass(frozen=True)
class Result:
    tokens: int
    pull_ms: float
    push_ms: float
    pull_spread: float
    push_spread: float
    handover_pull_ms: float
    handover_push_ms: float
    blocks: int
    blocks_left: float
    """For the last WRITE, where the decoder waited from the start."""

    def line(self) -> str:
        spreads = f"{self.pull_spread:.0%} {self.push_spread:.0%}"
        return (
            f"{self.tokens:8,d} tokens   pull {self.pull_ms:8.1f} ms   push {self.push_ms:8.1f} ms"
            f"   ratio {self.push_ms / self.pull_ms:.2f}   spread {spreads}"
            f"   hand-over {self.handover_pull_ms:.1f} and {self.handover_push_ms:.1f} ms"
            f"   left {self.blocks_left:.0f} of {self.blocks} blocks"
        )


def main() -> int:
    options = _parser().parse_args()
    if min(options.lengths) < 1 or options.repeats < 1:
        print("bench_push.py: lengths and repeats must be at least 1", file=sys.stderr)
        return 2
    print(describe(), file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-push-") as directory:
            results = _measured(ChildProcesses(Path(directory)), options)
    except ChildEndedError as error:
        print(f"bench_push.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    return 0


def _measured(family: ChildProcesses, options: argparse.Namespace) -> list[Result]:
    print("starting a prefiller, a decoder and two routers", file=sys.stderr)
    lengths, repeats = options.lengths, options.repeats
    try:
        engines = _engines(family, max(lengths), options)
        with httpx.Client(timeout=300) as client:
            routers = _routers(family, engines, client)
            return [_measure(client, routers, engines, length, repeats) for length in lengths]
    finally:
        family.stop()


def _measure(
    client: httpx.Client, routers: dict[str, str], engines: Engines, length: int, repeats: int
) -> Result:
    words = random.Random(length)
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    handed: dict[str, list[float]] = {mode: [] for mode in MODES}
    left = []
    for number in range(repeats + 1):
        for mode in MODES:
            prompt = [words.randrange(1, VOCABULARY) for _ in range(length)]
            first_after = ask(client, routers[mode], "tiny", prompt, {"max_tokens": 2}).first_after
            early = engines.num_early_blocks(client)
            hand_over = engines.hand_over(client, [VOCABULARY - token for token in prompt], mode)
            if not number:  # the first round warms up
                continue
            took[mode].append(first_after * 1000)
            handed[mode].append(hand_over * 1000)
            if mode == "push":
                left.append(-(-length // BLOCK) - (engines.num_early_blocks(client) - early))
    result = Result(
        tokens=length,
        pull_ms=statistics.median(took["pull"]),
        push_ms=statistics.median(took["push"]),
        pull_spread=_spread(took["pull"]),
        push_spread=_spread(took["push"]),
        handover_pull_ms=statistics.median(handed["pull"]),
        handover_push_ms=statistics.median(handed["push"]),
        blocks=-(-length // BLOCK),
        blocks_left=statistics.median(left),
    )
    print(result.line(), flush=True)
    return result


@dataclass(frozen=True)
class Engines:
    prefiller: ChildProcess
    decoder: ChildProcess

    def num_early_blocks(self, client: httpx.Client) -> float:
        return _metric(client, self.prefiller, "disagg_engine_kv_early_blocks_total")

    def hand_over(self, client: httpx.Client, prompt: list[int], mode: str) -> float:
        """Seconds from the prefiller's answer to the decoder's first token."""
        (rank,) = client.get(f"{self.prefiller.url}/disagg/identity").json()["ranks"]
        params = {key: value for key, value in rank.items() if key != "prefix_proof"}
        params |= {"do_remote_prefill": True, "remote_request_id": str(uuid.uuid4())}
        params["transfer_id"] = str(uuid.uuid4())
        with ThreadPoolExecutor(1) as pool:
            if mode == "pull":
                answered = self._prefill(client, prompt, params)
                return self._decode(client, prompt, params) - answered
            first = pool.submit(self._decode, client, prompt, params)
            while not (first.done() or _metric(client, self.decoder, WAITING)):
                time.sleep(0.001)
            answered = self._prefill(client, prompt, params)
            return first.result() - answered

    def _prefill(self, client: httpx.Client, prompt: list[int], params: Params) -> float:
        asked = {"do_remote_decode": True, "transfer_id": params["transfer_id"]}
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": asked}
        client.post(f"{self.prefiller.url}/v1/completions", json=body).raise_for_status()
        return time.perf_counter()

    def _decode(self, client: httpx.Client, prompt: list[int], params: Params) -> float:
        began = time.perf_counter()
        fields: Params = {"max_tokens": 2, "kv_transfer_params": params}
        return began + ask(client, self.decoder.url, "tiny", prompt, fields).first_after


def _metric(client: httpx.Client, engine: ChildProcess, name: str) -> float:
    lines = client.get(f"{engine.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def _spread(values: list[float]) -> float:
    if len(values) < 4:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / statistics.median(values)


def _engines(family: ChildProcesses, longest: int, options: argparse.Namespace) -> Engines:
    model = str(family.directory / "tiny")
    make = [sys.executable, "-m", "engine_ext.reference.tiny_model", model]
    family.start("model", [*make, "--max-positions", str(longest + 1024)], "").process.wait()
    start = _started_in_vllm if options.vllm else start_engine
    transfer: dict[str, object] = {"kv_connector": "DisaggPushConnector"}
    if options.late:
        transfer["kv_connector_extra_config"] = {"push_while_computing": False}
    engines = [
        start(family, model, name, "--no-enable-prefix-caching", transfer=transfer)
        for name in ("prefill", "decode")
    ]
    for engine in engines:
        until_ready(engine, "/health")
    return Engines(*engines)


def _started_in_vllm(
    family: ChildProcesses, model: str, name: str, *flags: str, transfer: Mapping[str, object]
) -> ChildProcess:
    python = find_vllm()
    if python is None:
        raise SystemExit(f"bench_push.py: {VLLM_ABSENT}")
    flags += ("--block-size", str(BLOCK), "--enforce-eager", "--dtype", "float32")
    flags += ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "64")
    flags += ("--scheduler-cls", "engine_ext.vllm.scheduler.DisaggScheduler")
    here = {"kv_connector_module_path": "engine_ext.vllm", "kv_buffer_device": "cpu"}
    return start_engine(
        family,
        model,
        name,
        *flags,
        program=[python, *ENGINES.vllm],
        environment={**VLLM_ON_CPU, "OMP_NUM_THREADS": "1"},
        transfer={**here, **transfer},
    )


def _routers(family: ChildProcesses, engines: Engines, client: httpx.Client) -> dict[str, str]:
    both = [engines.prefiller, engines.decoder]
    routers = {mode: _router(family, mode, both) for mode in MODES}
    for router in routers.values():
        until_ready(router, "/ready")
        ask(client, router.url, "tiny", [1] * WARM_UP, {"max_tokens": 1})
    return {mode: router.url for mode, router in routers.items()}


def _router(family: ChildProcesses, mode: str, engines: list[ChildProcess]) -> ChildProcess:
    (port,) = find_free_ports(1)
    command = [
        sys.executable,
        "-m",
        "router.commands.cli",
        "--port",
        str(port),
        "--transfer-mode",
        mode,
    ]
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
    parser.add_argument("--vllm", action="store_true", help="engines in vLLM's CPU build")
    parser.add_argument("--late", action="store_true", help="push_while_computing: false")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
