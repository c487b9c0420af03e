"""Reference engines with a tiny model, whose every token depends on every token of the prompt."""

import itertools
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_ext.reference.tiny_model import write_tiny_model
from router.common.child_processes import Family
from scripts.chaos_bench import control
from scripts.chaos_bench.answers import Ask, text_in
from scripts.chaos_bench.fleet import Engine, Fleet, free_port
from scripts.chaos_bench.load import Asks

COMPLETIONS = "/v1/completions"
LENGTHS = (1, 31, 32, 33, 64, 100, 200, 257, 300)
TOKENS = 16
CLIENTS = 4
PAUSE = 0.05
"""Between two requests of a client: the machine is to have time left."""
CONNECTOR = {
    "kv_connector": "DisaggConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def reference_fleet(family: Family) -> Fleet:
    model = write_tiny_model(family.directory / "tiny-random")
    prefillers = [_engine("real prefill", model)]
    return Fleet(family, prefillers, [_engine(f"real decode {n}", model) for n in range(2)])


def _engine(name: str, model: Path) -> Engine:
    """Without a prefix cache: what is not pulled is computed."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "engine_ext.reference.cli", "--port", str(port)),
        *("--model", str(model), "--served-model-name", "m", "--num-threads", "1"),
        *("--shutdown-timeout", "0"),
        *("--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(CONNECTOR)),
    ]
    variables = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "all"),
    }
    given = [f"{variable}={value}" for variable, value in variables.items()]
    return Engine(name, ["env", *given, *command], port)


@dataclass(frozen=True, slots=True)
class Oracle:
    """Prompts, and what one engine alone says to them."""

    answers: Sequence[tuple[str, str]]

    @classmethod
    async def learn(cls, engine: Engine, seed: int) -> "Oracle":
        answers = []
        for number, length in enumerate(LENGTHS):
            rng = random.Random(f"{seed} {number}")
            prompt = "".join(rng.choices("abcdefghij klmnop", k=length))
            said = await control.post(engine.port, COMPLETIONS, _body(prompt, False))
            answers.append((prompt, text_in(said["choices"][0])))
        return cls(answers)

    def asks(self) -> Asks:
        """Prompts by turns, every second one streamed."""
        kinds = itertools.cycle(itertools.product(self.answers, (False, True)))
        return lambda: self._ask(*next(kinds))

    def first(self) -> Ask:
        return self._ask(self.answers[0], False)

    def _ask(self, known: tuple[str, str], is_streamed: bool) -> Ask:
        prompt, expected = known
        return Ask(COMPLETIONS, _body(prompt, is_streamed), is_streamed, expected)


def _body(prompt: str, is_streamed: bool) -> bytes:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": is_streamed,
    }
    return json.dumps(body).encode()
