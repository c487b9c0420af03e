"""Times to the first token through real engines, one request at a time.

    python scripts/bench.py multiturn     a conversation's second turn, by length of its history
    python scripts/bench.py push          push mode beside pull mode, by length of the prompt
    python scripts/bench.py first-token   a prefiller's own first token, handed over or not

Each command starts reference engines and routers. The cases take turns, so that the machine's mood
is the same for all, and figures are medians. See COMMAND --help.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from router.commands.bench.load import Client, LoadExchange, request_bytes
from router.commands.console import CommandError
from router.commands.demo.engines import (
    CHAT_MODEL,
    ENGINES,
    RECIPE,
    VLLM_ABSENT,
    VLLM_ON_CPU,
    cache_directory,
    find_vllm,
    router_command,
    side_channel_variables,
    wait_until_ready,
)
from router.common.child_processes import ChildEndedError, ChildProcess, ChildProcesses
from scripts.benchmarks.common import (
    BenchError,
    Sample,
    bench_parser,
    describe,
    free_ports,
    positive,
    report_progress,
    write_report,
)

ANSWER_TIMEOUT_S = 600.0
VOCABULARY = 256
BLOCK = 32
"""Tokens of one of the reference engine's blocks."""
MODEL = "tiny"
SECOND_TURN_TOKENS, ANSWER_TOKENS = 64, 16
DECODE_FIRST = 0.5
WARM_UP_TOKENS = 256
VLLM_CHUNK = 512
"""Tokens that vLLM computes in one step here. Its default computes these prompts in one step."""
WORDS = ("river", "stone", "lantern", "quiet", "orchard", "winter", "letter", "bridge", "copper")
# Samples of /metrics that show what happened.
REUSED = 'disagg_router_conversation_turns_total{outcome="hit",reason=""}'
DECODED_ALONE = 'disagg_router_decode_first_total{outcome="answered"}'
HANDED_OVER = 'disagg_router_handed_over_total{outcome="continued"}'
FIRST_BYTES = "disagg_router_decode_first_byte_seconds_sum"
WAITING = "disagg_engine_kv_pushes_active"
EARLY_BLOCKS = "disagg_engine_kv_early_blocks_total"

Body = dict[str, Any]
Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Server:
    """A router or an engine on 127.0.0.1."""

    child: ChildProcess

    async def ask(
        self, path: str, body: Body, on_body: Callable[[bytes], object] | None = None
    ) -> LoadExchange:
        """Send a request and read its answer. Raises BenchError."""
        request = request_bytes(path, json.dumps({"model": MODEL, **body}).encode())
        exchange = await self._send(request, on_body)
        if exchange.status != 200 or exchange.problem:
            raise BenchError(f"{self.child.name} answered {exchange.status} {exchange.problem}")
        return exchange

    async def stream(self, path: str, body: Body) -> Answer:
        answer = Answer([])
        body = {"temperature": 0, "stream": True, **body}
        await self.ask(path, body, partial(answer.read, time.monotonic()))
        return answer

    async def get(self, path: str) -> str:
        exchange = await self._send(f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
        return exchange.body.decode() if exchange.status == 200 else ""

    async def metric(self, name: str) -> float:
        """Return the sum of the samples whose name begins so."""
        lines = (await self.get("/metrics")).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def _send(
        self, request: bytes, on_body: Callable[[bytes], object] | None = None
    ) -> LoadExchange:
        client = Client("127.0.0.1", int(self.child.url.rpartition(":")[2]))
        exchange = await client.send(request, ANSWER_TIMEOUT_S, on_body)
        client.close()
        return exchange


@dataclass(slots=True)
class Answer:
    """A streamed answer: its token ids, and seconds until the first token and the first text."""

    tokens: list[int]
    first_token: float = 0.0
    first_text: float = 0.0
    rest: bytes = b""

    def read(self, started: float, piece: bytes) -> None:
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._note(json.loads(line[6:]), time.monotonic() - started)

    def _note(self, event: Body, seconds: float) -> None:
        for choice in event.get("choices") or ():
            tokens = choice.get("token_ids") or []
            if tokens and not self.tokens:
                self.first_token = seconds
            self.tokens += tokens
            if not self.first_text and (choice.get("delta") or {}).get("content"):
                self.first_text = seconds


async def complete(server: Server, prompt: Sequence[int], fields: Body) -> Answer:
    body = {"prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return await server.stream("/v1/completions", {**body, "return_token_ids": True, **fields})


async def chat(server: Server, text: str) -> Answer:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "min_tokens": 8}
    return await server.stream("/v1/chat/completions", body)


def words_of(seed: str, count: int) -> list[int]:
    """Return random token ids."""
    return random.Random(seed).choices(range(1, VOCABULARY), k=count)


# Engines and routers that a command starts.


@dataclass
class Launcher:
    family: ChildProcesses
    model: str = ""

    def make_tiny_model(self, positions: int) -> None:
        more = ("--max-positions", str(positions))
        self._make_model(ENGINES.tiny_model, self.family.directory / MODEL, *more)

    def make_chat_model(self) -> None:
        directory = cache_directory(os.environ) / RECIPE / CHAT_MODEL
        self._make_model(ENGINES.chat_model, directory)

    def _make_model(self, command: Sequence[str], directory: Path, *more: str) -> None:
        """Make a model, unless it is there. Raises BenchError if it cannot be made."""
        self.model = str(directory)
        if not directory.is_dir():
            maker = self.family.start("model", [*command, self.model, *more], "")
            if maker.process.wait():
                raise BenchError(f"the model could not be made in {directory}")

    def engine(
        self, name: str, *flags: str, transfer: Body | None = None, in_vllm: bool = False
    ) -> Server:
        """Start an engine. `transfer` is beside what each `kv_transfer_config` has here."""
        port, side_channel = free_ports(2)
        config: Body = {
            "kv_connector": "DisaggConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
            **(transfer or {}),
        }
        program = [*ENGINES.reference, "--num-threads", "1"]
        environment = side_channel_variables(side_channel)
        if in_vllm:
            python = find_vllm()
            if python is None:
                raise BenchError(VLLM_ABSENT)
            program = [python, *ENGINES.vllm]
            flags += ("--block-size", str(BLOCK), "--enforce-eager", "--dtype", "float32")
            flags += ("--max-num-batched-tokens", str(VLLM_CHUNK), "--max-num-seqs", "64")
            flags += ("--scheduler-cls", "engine_ext.vllm.scheduler.DisaggScheduler")
            config |= {"kv_connector_module_path": "engine_ext.vllm", "kv_buffer_device": "cpu"}
            environment |= {**VLLM_ON_CPU, "OMP_NUM_THREADS": "1"}
        command = [*program, "--model", self.model, "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--kv-transfer-config", json.dumps(config), *flags]
        return self._start(name, port, command, "/health", environment)

    def router(self, name: str, prefill: Server, decode: Server, *flags: str) -> Server:
        (port,) = free_ports(1)
        command = router_command("127.0.0.1", port, [prefill.child], [decode.child])
        return self._start(name, port, [*command, *flags], "/ready")

    def _start(
        self,
        name: str,
        port: int,
        command: list[str],
        path: str,
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        url = f"http://127.0.0.1:{port}"
        child = self.family.start(name, command, url, environment=environment)
        wait_until_ready([child], path, [child], report_progress)
        return Server(child)


# Commands. Each yields a row of figures, in milliseconds, for each length.


async def multiturn(options: argparse.Namespace, launcher: Launcher) -> dict[int, Row]:
    """Measure a second turn with reuse, without, by the decoder alone, and by one engine alone."""
    longest = max(options.lengths)
    launcher.make_tiny_model(longest + 2 * ANSWER_TOKENS + SECOND_TURN_TOKENS + 1024)
    prefill = launcher.engine("prefill", "--no-enable-prefix-caching")
    decode = launcher.engine("decode", "--enable-prefix-caching")
    alone = launcher.engine("alone", "--enable-prefix-caching")
    router = launcher.router("router", prefill, decode, "--decode-first-turns", "0")

    async def turn(server: Server, seed: str, history: int, **second: object) -> float:
        """Return the milliseconds to the first token of a second turn."""
        fields = {name: second[name] for name in second if name == "conversation_id"}
        prompt = words_of(seed, history)
        first = await complete(server, prompt, fields)
        new = words_of(f"{seed} new", SECOND_TURN_TOKENS)
        return 1e3 * (await complete(server, [*prompt, *first.tokens, *new], second)).first_token

    async def one_round(history: int, number: int) -> Row:
        seed = f"{history} {number}"
        name = f"bench-{os.getpid()}-{history}-{number}"
        before = await router.metric(REUSED), await router.metric(DECODED_ALONE)
        row = {
            "reuse_ms": await turn(router, f"{seed} r", history, conversation_id=name),
            "without_ms": await turn(router, f"{seed} w", history),
            "decoder_ms": await turn(
                router, f"{seed} d", history, cache_hit_threshold=DECODE_FIRST
            ),
            "one_engine_ms": await turn(alone, f"{seed} a", history),
        }
        after = await router.metric(REUSED), await router.metric(DECODED_ALONE)
        if (after[0] - before[0], after[1] - before[1]) != (1, 1):
            report_progress(f"not what was to be measured: from {before} to {after} turns")
        return row

    await one_round(WARM_UP_TOKENS, -1)
    return await _medians(options, one_round)


async def push(options: argparse.Namespace, launcher: Launcher) -> dict[int, Row]:
    """Measure two routers, of pull and of push mode, before the same two engines."""
    launcher.make_tiny_model(max(options.lengths) + 1024)
    transfer = {"kv_connector": "DisaggPushConnector"}
    prefill, decode = [
        launcher.engine(name, "--no-enable-prefix-caching", transfer=transfer, in_vllm=options.vllm)
        for name in ("prefill", "decode")
    ]
    routers = {
        mode: launcher.router(f"router-{mode}", prefill, decode, "--transfer-mode", mode)
        for mode in ("pull", "push")
    }
    (rank,) = json.loads(await prefill.get("/disagg/identity"))["ranks"]

    async def hand_over(prompt: list[int], mode: str) -> float:
        """Return the milliseconds from the prefiller's answer to the decoder's first token."""
        params = {key: value for key, value in rank.items() if key != "prefix_proof"}
        params |= {"do_remote_prefill": True, "remote_request_id": str(uuid.uuid4())}
        params["transfer_id"] = str(uuid.uuid4())

        async def decoding() -> float:
            started = time.monotonic()
            fields = {"max_tokens": 2, "kv_transfer_params": params}
            return started + (await complete(decode, prompt, fields)).first_token

        async def prefilling() -> float:
            asked = {"do_remote_decode": True, "transfer_id": params["transfer_id"]}
            body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": asked}
            return (await prefill.ask("/v1/completions", body)).ended

        if mode == "pull":
            answered = await prefilling()
            return 1e3 * (await decoding() - answered)
        first = asyncio.create_task(decoding())
        while not (first.done() or await decode.metric(WAITING)):  # noqa: ASYNC110 # another process
            await asyncio.sleep(0.001)
        answered = await prefilling()
        return 1e3 * (await first - answered)

    async def one_round(length: int, number: int) -> Row:
        """The decoder of the last figure waits from the start, and is written most blocks early."""
        row: Row = {}
        for mode, router in routers.items():
            prompt = words_of(f"{length} {number} {mode}", length)
            answer = await complete(router, prompt, {"max_tokens": 2})
            row[f"{mode}_ms"] = 1e3 * answer.first_token
            early = await prefill.metric(EARLY_BLOCKS)
            row[f"{mode}_hand_over_ms"] = await hand_over(prompt[::-1], mode)
            early = await prefill.metric(EARLY_BLOCKS) - early
        row["blocks_left"] = -(-length // BLOCK) - early
        return row

    return await _medians(options, one_round)


async def first_token(options: argparse.Namespace, launcher: Launcher) -> dict[int, Row]:
    """Measure one engine, a decoder that samples again, and a prefiller's token handed over."""
    launcher.make_chat_model()
    prefill, decode, alone = [launcher.engine(name) for name in ("prefill", "decode", "alone")]
    servers = {"one_engine": alone}
    for name, choice in (("sampled_again", "decoder"), ("handed_over", "auto")):
        servers[name] = launcher.router(name, prefill, decode, "--first-token", choice)

    async def one_round(words: int, number: int) -> Row:
        row: Row = {}
        for name, server in servers.items():
            seed = f"{words} {number} {name}"
            text = " ".join([seed, *random.Random(seed).choices(WORDS, k=words)])
            handed, after_p = await server.metric(HANDED_OVER), await server.metric(FIRST_BYTES)
            row[f"{name}_ms"] = 1e3 * (await chat(server, text)).first_text
            handed = await server.metric(HANDED_OVER) - handed
            if handed != (name == "handed_over"):
                report_progress(f"not what was to be measured: {name} handed over {handed:g}")
            if after_p or await server.metric(FIRST_BYTES):
                row[f"{name}_after_p_ms"] = 1e3 * (await server.metric(FIRST_BYTES) - after_p)
        return row

    return await _medians(options, one_round)


async def _medians(
    options: argparse.Namespace, one_round: Callable[[int, int], Any]
) -> dict[int, Row]:
    """Measure rounds for each length, the first of which only warms up."""
    found: dict[int, Row] = {}
    for length in options.lengths:
        rows: list[Row] = []
        for number in range(options.repeats + 1):
            rows += [await one_round(length, number)]
            shown = ", ".join(f"{name} {value:.1f}" for name, value in rows[-1].items())
            report_progress(f"{length}, round {number} of {options.repeats}: {shown}")
        columns = {name: Sample([row[name] for row in rows[1:]]) for name in rows[1]}
        found[length] = {name: sample.median for name, sample in columns.items()}
        texts = (f"{name} {one.median:.1f} ({one.spread:.0%})" for name, one in columns.items())
        print(f"{length:>7}  {'  '.join(texts)}", flush=True)
    return found


COMMANDS = {"multiturn": multiturn, "push": push, "first-token": first_token}
LENGTHS = {
    "multiturn": (1024, 4096, 16384),
    "push": (256, 1024, 4096, 16384),
    "first-token": (50, 400),
}
REPEATS = {"multiturn": 3, "push": 9, "first-token": 20}


def main(arguments: Sequence[str]) -> int:
    name, *rest = arguments
    options = _parser(name).parse_args(rest)
    machine = describe()
    report_progress(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{'tokens' if name != 'first-token' else 'words':>7}  medians, and spreads in brackets")
    with tempfile.TemporaryDirectory(prefix=f"bench-{name}-") as directory:
        family = ChildProcesses(Path(directory))
        try:
            found = asyncio.run(COMMANDS[name](options, Launcher(family)))
        except (BenchError, ChildEndedError, CommandError) as error:
            print(f"bench {name}: error: {error}", file=sys.stderr)
            return 1
        finally:
            family.stop()
    write_report(options, machine=machine, benchmark=name, medians=found)
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    parser = bench_parser(name, COMMANDS[name].__doc__)
    add, unit = parser.add_argument, "words" if name == "first-token" else "tokens"
    lengths = LENGTHS[name]
    add("--words" if unit == "words" else "--lengths", dest="lengths", type=positive, nargs="+",
        default=lengths, help=f"in {unit} ({' '.join(map(str, lengths))})")  # fmt: skip
    add("--repeats", type=positive, default=REPEATS[name], help=f"rounds ({REPEATS[name]})")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    if name == "push":
        add("--vllm", action="store_true", help="engines in vLLM's CPU build (install_vllm)")
    return parser
