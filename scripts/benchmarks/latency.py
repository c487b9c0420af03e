"""Times to the first token through real engines, one request at a time.

    python scripts/bench.py multiturn     a conversation's second turn, by length of its history
    python scripts/bench.py push          push mode beside pull mode, by length of the prompt
    python scripts/bench.py first-token   a prefiller's own first token, handed over or not

Each command starts reference engines and routers, or measures running ones (--url). The cases take
turns, so that the machine's mood is the same for all, and figures are medians. See COMMAND --help.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from router.commands.bench.load import Client, LoadExchange, request_bytes
from router.commands.demo.engines import (
    ENGINES,
    VLLM_ABSENT,
    VLLM_ON_CPU,
    find_vllm,
    side_channel_variables,
)
from router.common.child_processes import ChildEndedError, ChildProcess, ChildProcesses
from scripts.benchmarks.common import BenchError, Sample, describe, free_ports, report_progress
from scripts.benchmarks.contestants import our_command

START_TIMEOUT_S = 120.0
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
CHAT_MODEL = Path.home() / ".cache/disagg-router/chat-1/SmolLM2-135M-Instruct"
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
    """A router or an engine on 127.0.0.1, or wherever `url` is."""

    url: str
    model: str = MODEL

    async def ask(self, path: str, body: Body, on_body: Callable[[bytes], object]) -> LoadExchange:
        """Send a request and read its answer. Raises BenchError."""
        client = self._client()
        request = request_bytes(path, json.dumps({"model": self.model, **body}).encode())
        exchange = await client.send(request, ANSWER_TIMEOUT_S, on_body)
        client.close()
        if exchange.status != 200 or exchange.problem:
            raise BenchError(f"{self.url} answered {exchange.status} {exchange.problem}")
        return exchange

    async def get(self, path: str) -> str:
        client = self._client()
        exchange = await client.send(f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode(), 30.0)
        client.close()
        return exchange.body.decode() if exchange.status == 200 else ""

    async def metric(self, name: str) -> float:
        """Return the sum of the samples whose name begins so."""
        lines = (await self.get("/metrics")).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def wait_until_ready(self, path: str, child: ChildProcess) -> None:
        latest = time.monotonic() + START_TIMEOUT_S
        while not await self._answers(path):
            child.check()
            if time.monotonic() > latest:
                raise BenchError(f"{child.name} is not ready after {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.1)

    async def _answers(self, path: str) -> bool:
        client = self._client()
        request = f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode()
        status = (await client.send(request, 5.0)).status
        client.close()
        return status == 200

    def _client(self) -> Client:
        host, _, port = self.url.removeprefix("http://").rstrip("/").rpartition(":")
        return Client(host, int(port))


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
    body = {
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }
    answer = Answer([])
    await server.ask("/v1/completions", body, partial(answer.read, time.monotonic()))
    return answer


async def chat(server: Server, text: str) -> Answer:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "min_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    answer = Answer([])
    await server.ask("/v1/chat/completions", body, partial(answer.read, time.monotonic()))
    return answer


def words_of(seed: str, count: int) -> list[int]:
    """Return random token ids."""
    return random.Random(seed).choices(range(1, VOCABULARY), k=count)


# Engines and routers that a command starts.


@dataclass
class Launcher:
    family: ChildProcesses
    model: str = ""

    def make_tiny_model(self, positions: int) -> None:
        self.model = str(self.family.directory / MODEL)
        make = [sys.executable, "-m", "engine_ext.reference.tiny_model", self.model]
        make += ["--max-positions", str(positions)]
        self.family.start("model", make, "").process.wait()

    def use_chat_model(self, directory: str) -> None:
        """Raises BenchError if the model is not there and cannot be made."""
        self.model = directory
        if not Path(directory).is_dir():
            make = [sys.executable, "-m", "engine_ext.reference.chat_model", directory]
            if self.family.start("model", make, "").process.wait():
                raise BenchError(f"the chat model could not be made in {directory}")

    async def engine(
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
        program = [sys.executable, "-m", "engine_ext.reference.cli", "--num-threads", "1"]
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
        child = self.family.start(
            name,
            command,
            f"http://127.0.0.1:{port}",
            environment=environment,
        )
        server = Server(child.url)
        await server.wait_until_ready("/health", child)
        return server

    async def router(self, name: str, prefill: Server, decode: Server, *flags: str) -> Server:
        (port,) = free_ports(1)
        prefillers, decoders = ([int(one.url.rpartition(":")[2])] for one in (prefill, decode))
        command = our_command(port, prefillers, decoders, ("--target-itl", "0", *flags))
        child = self.family.start(name, command, f"http://127.0.0.1:{port}")
        server = Server(child.url)
        await server.wait_until_ready("/ready", child)
        return server


# Commands. Each yields a row of figures, in milliseconds, for each length.


async def multiturn(options: argparse.Namespace, launcher: Launcher) -> dict[int, Row]:
    """Measure a second turn with reuse, without, by the decoder alone, and by one engine alone."""
    if options.url:
        named = dict(given.split("=", 1) for given in options.url)
        router, alone = (Server(named[name], options.model) for name in ("router", "alone"))
    else:
        longest = max(options.lengths)
        launcher.make_tiny_model(longest + 2 * ANSWER_TOKENS + SECOND_TURN_TOKENS + 1024)
        prefill = await launcher.engine("prefill", "--no-enable-prefix-caching")
        decode = await launcher.engine("decode", "--enable-prefix-caching")
        alone = await launcher.engine("alone", "--enable-prefix-caching")
        router = await launcher.router("router", prefill, decode, "--decode-first-turns", "0")

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
    transfer: Body = {"kv_connector": "DisaggPushConnector"}
    if options.late:
        transfer["kv_connector_extra_config"] = {"push_while_computing": False}
    prefill, decode = [
        await launcher.engine(
            name, "--no-enable-prefix-caching", transfer=transfer, in_vllm=options.vllm
        )
        for name in ("prefill", "decode")
    ]
    routers = {
        mode: await launcher.router(f"router-{mode}", prefill, decode, "--transfer-mode", mode)
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
            return (await prefill.ask("/v1/completions", body, lambda piece: None)).ended

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
    if options.url:
        named = dict(given.split("=", 1) for given in options.url)
        servers = {name: Server(url, options.model) for name, url in named.items()}
    else:
        launcher.use_chat_model(options.chat_model)
        prefill, decode, alone = [
            await launcher.engine(name) for name in ("prefill", "decode", "alone")
        ]
        servers = {"one_engine": alone}
        for name, choice in (("sampled_again", "decoder"), ("handed_over", "auto")):
            servers[name] = await launcher.router(name, prefill, decode, "--first-token", choice)

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
        columns = {name: [row[name] for row in rows[1:]] for name in rows[1]}
        found[length] = {name: statistics.median(values) for name, values in columns.items()}
        spreads = {name: Sample(values).spread for name, values in columns.items()}
        texts = (f"{name} {found[length][name]:.1f} ({spreads[name]:.0%})" for name in columns)
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
    report_progress(", ".join(f"{key} {value}" for key, value in describe().items()))
    print(f"{'tokens' if name != 'first-token' else 'words':>7}  medians, and spreads in brackets")
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"bench-{name}-"))
        family = ChildProcesses(Path(directory))
        stack.callback(family.stop)
        try:
            found = asyncio.run(COMMANDS[name](options, Launcher(family)))
        except (BenchError, ChildEndedError) as error:
            print(f"bench {name}: error: {error}", file=sys.stderr)
            return 1
    if options.json is not None:
        report = {"machine": describe(), "command": sys.argv, "medians": found}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=COMMANDS[name].__doc__)
    add, unit = parser.add_argument, "words" if name == "first-token" else "tokens"
    lengths = list(LENGTHS[name])
    add(f"--{'words' if unit == 'words' else 'lengths'}", "--histories", dest="lengths", type=int,
        nargs="+", default=lengths, help=f"in {unit} ({' '.join(map(str, lengths))})")  # fmt: skip
    add("--repeats", type=int, default=REPEATS[name], help=f"rounds ({REPEATS[name]})")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    if name == "push":
        add("--vllm", action="store_true", help="engines in vLLM's CPU build (install_vllm)")
        add("--late", action="store_true", help="write nothing while a prompt is computed")
        return parser
    names = {"multiturn": "router=URL alone=URL", "first-token": "NAME=URL ..."}[name]
    add("--url", nargs="+", metavar="NAME=URL", help=f"running servers instead: {names}")
    add("--model", default=MODEL, help="the model's name there")
    if name == "first-token":
        add("--chat-model", default=str(CHAT_MODEL), metavar="DIR", help="the demo's by default")
    return parser
