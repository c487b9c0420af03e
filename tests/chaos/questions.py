"""Requests with the one right answer to each, and the judgement of an answer."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_ext.reference.tiny_model import write_tiny_model
from router.commands.bench.load import MALFORMED, REFUSED, TIMEOUT, LoadExchange, request_bytes
from router.common.child_processes import ChildProcesses
from scripts.benchmarks.common import free_ports
from scripts.mock_engine import text_of
from tests.chaos.processes import (
    START_TIMEOUT_S,
    STOCK_START_TIMEOUT_S,
    Engine,
    EngineFleet,
    post,
)
from tests.chaos.scenarios import Engines, Mode
from tests.vllm.servers import ENVIRONMENT, SMALL, build_python

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FILLER = 1000
"""Characters of a prompt: more than a probe has, see `noting_requests`."""
REAL_CLIENTS, REAL_PAUSE_S = 4, 0.05
FIRST_ANSWER_TIMEOUT_S = 60.0
REAL_LENGTHS = (1, 31, 32, 33, 64, 100, 200, 257, 300)
REAL_TOKENS = {Engines.REFERENCE: 16, Engines.STOCK: 96}
READABLE = list(range(32, 127))
"""Tokens of the tiny model with a text of their own: streams of stock engines are continued behind
the text that the client has."""
CONNECTOR = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
# What an answer is.
OK = "ok"
WRONG = "WRONG"
"""Well-formed, and not the answer to this request: the worst."""
EVENT = "error event"
"""A stream that had begun ended with a well-formed error event."""
EARLY_EVENT = "error event at once"
CUT = "cut"
SHORT = "short"
GARBLED = "garbled"
NO_ANSWER = "no answer"
PROBLEMS = {REFUSED: "refused", TIMEOUT: "timeout", MALFORMED: GARBLED}


@dataclass(frozen=True, slots=True)
class Question:
    request: bytes
    is_streamed: bool
    expected: str


Questions = Callable[[], Question]


def mock_questions(name: str, mode: Mode, chunks: int, interval: float, seed: int) -> Questions:
    """Return a maker of chats, each with a nonce of its own that mock engines repeat."""
    numbers = itertools.count()
    rng = random.Random(f"{seed} {name} {mode}")

    def question() -> Question:
        nonce = f"{name}-{mode}-{next(numbers)}-{rng.randrange(10**9)}"
        content = f"{nonce} " + "".join(rng.choices("abcdefgh ", k=FILLER))
        is_streamed = mode is Mode.STREAMED
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": chunks,
            "seed": int(interval * 1e6),
            "stream": is_streamed,
        }
        request = request_bytes(CHAT, json.dumps(body).encode())
        return Question(request, is_streamed, "".join(text_of(nonce, chunks)))

    return question


def real_fleet(family: ChildProcesses, engines: Engines) -> EngineFleet:
    """One prefiller and two decoders with a tiny model, whose tokens depend on the whole prompt."""
    model = write_tiny_model(family.directory / "tiny-random")
    prefillers = [_real_engine("prefill", engines, model)]
    decoders = [_real_engine(f"decode {number}", engines, model) for number in range(2)]
    return EngineFleet(family, prefillers, decoders)


def _real_engine(role: str, engines: Engines, model: Path) -> Engine:
    """Without a prefix cache: what is not pulled is computed."""
    port, side_channel = free_ports(2)
    variables = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "all"),
    }
    if engines is Engines.STOCK:
        variables |= {**ENVIRONMENT, "VLLM_PLUGINS": "none"}
        command = [str(build_python()), "-m", "vllm.entrypoints.openai.api_server", *SMALL]
        transfer = {**CONNECTOR, "kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    else:
        command = [sys.executable, "-m", "engine_ext.reference.cli"]
        command += ["--num-threads", "1", "--shutdown-timeout", "0"]
        transfer = {**CONNECTOR, "kv_connector": "DisaggConnector"}
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    command += ["--model", str(model), "--served-model-name", "m", "--port", str(port)]
    command += ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer)]
    timeout = STOCK_START_TIMEOUT_S if engines is Engines.STOCK else START_TIMEOUT_S
    return Engine(f"{engines} {role}", command, port, timeout)


async def warm_up(engine: Engine) -> None:
    """vLLM compiles a kernel for its first log-probabilities, and stands still meanwhile. A router
    that asks for some would pay for that in the drill."""
    body = {"model": "m", "prompt": "warm", "max_tokens": 2, "logprobs": 1}
    await post(engine.port, COMPLETIONS, json.dumps(body).encode(), STOCK_START_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Oracle:
    """Prompts, and what one engine alone answers."""

    engines: Engines
    answers: Sequence[tuple[str, str]]

    @classmethod
    async def learn(cls, engine: Engine, engines: Engines, seed: int) -> Oracle:
        answers = []
        for number, length in enumerate(REAL_LENGTHS):
            rng = random.Random(f"{seed} {number}")
            prompt = "".join(rng.choices("abcdefghij klmnop", k=length))
            asked = _body(engines, prompt, False)
            answer = await post(engine.port, COMPLETIONS, asked, FIRST_ANSWER_TIMEOUT_S)
            answers.append((prompt, _text_in(answer["choices"][0])))
        return cls(engines, answers)

    def questions(self) -> Questions:
        """Return a maker of requests: prompts in turns, every second one streamed."""
        kinds = itertools.cycle(itertools.product(self.answers, (False, True)))

        def question() -> Question:
            (prompt, expected), is_streamed = next(kinds)
            request = request_bytes(COMPLETIONS, _body(self.engines, prompt, is_streamed))
            return Question(request, is_streamed, expected)

        return question


def _body(engines: Engines, prompt: str, is_streamed: bool) -> bytes:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": REAL_TOKENS[engines],
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_streamed,
    }
    if engines is Engines.STOCK:
        body["allowed_token_ids"] = READABLE
    else:
        body["return_token_ids"] = True
    return json.dumps(body).encode()


def judge(question: Question, got: LoadExchange) -> str:
    """Return what an answer is: OK, or one of the words above."""
    if got.problem in PROBLEMS:
        return PROBLEMS[got.problem]
    if got.status != 200:
        return f"status {got.status}" if got.status else NO_ANSWER
    try:
        if question.is_streamed:
            return _judge_stream(question.expected, bytes(got.body), not got.problem)
        if got.problem:
            return CUT
        text = _text_in(json.loads(got.body)["choices"][0])
    except (ValueError, KeyError, TypeError, IndexError):
        return GARBLED
    return OK if text == question.expected else WRONG


def _judge_stream(expected: str, body: bytes, is_complete: bool) -> str:
    """Raises ValueError, KeyError, TypeError or IndexError for what is no stream of chunks."""
    text, ending = "", CUT
    *events, _ = body.split(b"\n\n")
    for event in events:
        if not event.startswith(b"data: "):
            raise ValueError(event)
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            ending = OK
            break
        content = json.loads(data)
        if "error" in content:
            ending = EVENT if isinstance(content["error"]["message"], str) else GARBLED
            break
        text += "".join(_text_in(choice) for choice in content["choices"])
    if not expected.startswith(text):
        return WRONG
    if ending == EVENT:
        return EVENT if text else EARLY_EVENT
    if ending != OK or not is_complete:
        return CUT
    return OK if text == expected else SHORT


def _text_in(choice: dict[str, Any]) -> str:
    """Return token ids where they were asked for: several may look the same as text."""
    if choice.get("token_ids") is not None:
        return "".join(f"{token} " for token in choice["token_ids"])
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return str(message.get("content") or "")
