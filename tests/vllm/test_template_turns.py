"""Turns of chats on stock vLLM with templates that change earlier text: every answer is that of one
vLLM alone, streamed or whole, and the KV of equal tokens is reused."""

import contextlib
import json
import logging
import random
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from tests.integration.processes import Server
from tests.integration.talk import turns
from tests.moving_templates import TEMPLATES
from tests.vllm.releases import BUILD, RELEASES, of_next
from tests.vllm.servers import STOCK, UNCACHED, Fleet, Kind

logger = logging.getLogger(__name__)
TRUSTS = ("--trust-request-chat-template",)
RETAINED_SECONDS = 20
"""A stock decode engine retains every answer, so that its cache would be full for 480 s."""
PLAIN = {"VLLM_PLUGINS": "none"}
"""Our plugin would add kv_transfer_params to the streams of 0.32."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
QUESTION = "What does a prefill engine do, and why? " * 6
PROMPT_TOKENS = "disagg_router_model_prompt_tokens_total"
OFFERED = "disagg_router_conversation_tokens_offered_total"


@pytest.fixture(scope="module", params=RELEASES)
def three(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """A stock prefill engine, a stock decode engine, and one vLLM alone."""
    engines = fleet if request.param == BUILD else of_next(fleet)
    retaining = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": RETAINED_SECONDS}
    decoder = {**STOCK, "kv_connector_extra_config": retaining}
    with engines.servers(
        Kind("template-p", STOCK, (UNCACHED, *TRUSTS), environment=PLAIN),
        Kind("template-d", decoder, TRUSTS, environment=PLAIN),
        Kind("template-alone", None, (UNCACHED, *TRUSTS), environment=PLAIN),
    ) as servers:
        yield servers


@pytest.fixture
def router(fleet: Fleet, three: list[Server]) -> Iterator[Server]:
    with router_of(fleet, three) as router:
        yield router


@pytest.fixture
def without_reuse(fleet: Fleet, three: list[Server]) -> Iterator[Server]:
    with router_of(fleet, three, "--conversation-unproven", "off") as router:
        yield router


def router_of(
    fleet: Fleet, three: list[Server], *arguments: str
) -> contextlib.AbstractContextManager[Server]:
    valid = str(RETAINED_SECONDS - 5)
    return fleet.router([three[0]], [three[1]], "--conversation-ttl", valid, *arguments)


def ask(server: Server, messages: list[Any], stream: bool, **fields: Any) -> dict[str, Any]:
    """Return the answer's message, read from a stream or whole."""
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 40}
    response = server.post("/v1/chat/completions", {**body, "stream": stream, **fields})
    assert response.status_code == 200, response.text
    assert 'token_ids":[' not in response.text
    if not stream:
        return {"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]}
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line[:7] == "data: {"]
    text = "".join(
        one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"]
    )
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "date"])
def test_turns_are_those_of_one_vllm_whatever_a_template_moves(
    router: Server, three: list[Server], name: str, stream: bool
) -> None:
    fields: dict[str, Any] = {"chat_template": TEMPLATES[name]}
    if name == "tools move":
        fields |= {"tools": [TOOL], "tool_choice": "none"}
    _, decoder, alone = three
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for number in range(4):
        answer = ask(router, messages, stream, **fields, conversation_id=f"{name} {stream}")
        assert answer == ask(alone, messages, stream=False, **fields), number
        messages.append(answer)
        if number == 1:  # a step of a tool loop, which its client tells as one
            messages[-1] = {"role": "assistant", "content": answer["content"], "tool_calls": [CALL]}
            messages.append({"role": "tool", "tool_call_id": "c1", "content": "found"})
        else:
            messages.append({"role": "user", "content": "And what does a decode engine do?"})
    reused = router.metrics().get(OFFERED, 0)
    if stream and "0.32" in decoder.get("/version").json()["version"]:
        assert reused == 0, "0.32 streams no kv_transfer_params"
    else:
        assert reused > 0, router.metrics()
    assert turns(router, "failed") == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_two_hundred_edited_conversations_are_those_of_one_vllm(
    router: Server, without_reuse: Server, three: list[Server]
) -> None:
    """Over all templates. The log has the share of the prompts' tokens that was reused, and what a
    turn costs with and without reuse (`--log-cli-level INFO`)."""
    rng, alone = random.Random(200), three[2]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    wrong = []
    for number in range(200):
        name = rng.choice([name for name in TEMPLATES if name != "date"])
        fields: dict[str, Any] = {"chat_template": TEMPLATES[name], "max_tokens": 16}
        if name == "tools move":
            fields |= {"tools": [TOOL], "tool_choice": "none"}
        messages: list[Any] = [{"role": "user", "content": f"{number}. {QUESTION}"}]
        for turn in range(3):
            answers = []
            for reuses in sorted(seconds, key=lambda _: rng.random()):
                began = time.perf_counter()
                asked = router if reuses else without_reuse
                answers.append(ask(asked, messages, False, **fields, conversation_id=f"{number}"))
                if turn:
                    seconds[reuses].append(time.perf_counter() - began)
            answer, other = answers
            right = ask(alone, messages, False, **fields)
            if not answer == other == right:
                wrong.append((number, name, turn))
            messages.append(answer)
            if rng.random() < 0.3:
                messages[-1] = {**answer, "tool_calls": [CALL]}
                messages.append({"role": "tool", "tool_call_id": "c1", "content": "found"})
            else:
                messages.append({"role": "user", "content": "And a decode engine? " * 3})
            if rng.random() < 0.2:
                edited = rng.randrange(len(messages))
                messages[edited] = {**messages[edited], "content": "Another text. " * 5}
    metrics = router.metrics()
    prompts = sum(value for name, value in metrics.items() if name.startswith(PROMPT_TOKENS))
    logger.info(
        "%.3f of %d prompt tokens offered, median turn %.1f ms, without reuse %.1f ms",
        metrics.get(OFFERED, 0) / prompts,
        prompts,
        *(1000 * median(found) for found in seconds.values()),
    )
    assert wrong == []
    assert metrics.get(OFFERED, 0) > 0
