"""Conversations through the router, over real engines: what a turn reuses, and that it is right."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import Launcher, Server, metric, wait_for

BOTH_WAYS = {"bidirectional_kv_xfer": True}
COMPUTED = "disagg_engine_prompt_tokens_computed_total"
TURNS = "disagg_router_conversation_turns_total"


@pytest.fixture(scope="module")
def prefiller(launcher: Launcher) -> Iterator[Server]:
    """Without a prefix cache of its own: what it does not pull, it computes, and counts."""
    with launcher.engine("prefill", "--no-enable-prefix-caching", extra=BOTH_WAYS) as server:
        yield server


@pytest.fixture(scope="module")
def decoder(launcher: Launcher) -> Iterator[Server]:
    with launcher.engine("decode", extra=BOTH_WAYS) as server:
        yield server


@pytest.fixture(scope="module")
def router(launcher: Launcher, prefiller: Server, decoder: Server) -> Iterator[Server]:
    with launcher.router([prefiller], [decoder]) as server:
        yield server


@dataclass(frozen=True)
class Talk:
    """A conversation over /v1/completions in token ids, which can be repeated as they were said."""

    router: Server
    name: str
    stream: bool = False
    options: dict[str, Any] | None = None

    def say(self, prompt: list[int], **fields: Any) -> Answer:
        body = {"conversation_id": self.name, **(self.options or {}), **fields}
        if self.stream:
            return streamed(self.router, prompt, **body)
        return complete(self.router, prompt, **body)


def streamed(server: Server, prompt: list[int], **fields: Any) -> Answer:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        **fields,
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    assert "kv_transfer_params" not in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    lines = response.text.replace("data: [DONE]", "").split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.strip()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return Answer(
        tuple(token for choice in choices for token in choice.get("token_ids") or ()),
        tuple(p for c in choices if c.get("logprobs") for p in c["logprobs"]["token_logprobs"]),
        "".join(choice["text"] for choice in choices),
    )


def turns(router: Server, outcome: str) -> float:
    samples = router.metrics().items()
    wanted = f'outcome="{outcome}"'
    return sum(value for name, value in samples if name.startswith(TURNS) and wanted in name)


MODES: dict[str, Any] = {
    "whole": {},
    "streamed": {"stream": True},
    "exact": {"stream": True, "options": {"conversation_stream": "exact"}},
}


@pytest.mark.parametrize("mode", MODES)
def test_three_turns_prefill_only_what_is_new(
    router: Server, prefiller: Server, alone: Server, mode: str
) -> None:
    talk = Talk(router, f"three-{mode}", **MODES[mode])
    prompt, hits = tokens_of(1100, list(MODES).index(mode)), turns(router, "hit")
    for number in range(3):
        before = metric(prefiller, COMPUTED)
        answer = talk.say(prompt)
        assert differences([complete(alone, prompt)], [answer]) == []
        computed = metric(prefiller, COMPUTED) - before
        assert computed == 1100 if number == 0 else computed <= 51
        prompt += [*answer.tokens, *tokens_of(50, 100 + number)]
    assert turns(router, "hit") - hits == 2
    wait_for(lambda: metric(prefiller, "disagg_engine_blocks_delayed") == 0, "P's blocks are freed")
