"""Decode first through the router, over real engines: one hop, or a rejection nobody sees."""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.integration.oracle import complete, differences, text_of, tokens_of
from tests.integration.processes import Launcher, Server, freed, metric, wait_for

ASKED = "disagg_engine_prompt_tokens_total"
COMPUTED = "disagg_engine_prompt_tokens_computed_total"
LEASES = "disagg_engine_kv_leases_active"
REJECTED = 'disagg_engine_requests_finished_total{reason="cache_threshold"}'


@pytest.fixture(scope="module")
def asking_router(launcher: Launcher, prefiller: Server, decoder: Server) -> Iterator[Server]:
    """Asks the decoder first for everybody."""
    with launcher.router([prefiller], [decoder], "--decode-first-threshold", "0.5") as server:
        yield server


def outcome(router: Server, name: str) -> float:
    return router.metrics().get(f'disagg_router_decode_first_total{{outcome="{name}"}}', 0)


def rejections(decoder: Server) -> float:
    return decoder.metrics().get(REJECTED, 0)


def said(server: Server, path: str, stream: bool, seed: int, **fields: Any) -> str:
    """The text of an answer, which shows nothing of a rejection."""
    prompt = {"prompt": text_of(900, seed)}
    chat = {"messages": [{"role": "user", "content": text_of(900, seed)}]}
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"stream": stream, **(chat if "chat" in path else prompt), **fields}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert "cache_threshold" not in response.text
    assert "cache_hit" not in response.text
    choices = [choice for chunk in chunks_of(response.text, stream) for choice in chunk["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    roles = [c["delta"]["role"] for c in choices if "role" in c.get("delta", {})]
    assert roles == (["assistant"] if stream and "chat" in path else [])
    return "".join(map(text_in, choices))


def chunks_of(text: str, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        return [json.loads(text)]
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def text_in(choice: dict[str, Any]) -> str:
    holder = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return holder.get("content") or ""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["request", "operator"])
def test_a_miss_takes_both_legs_and_a_hit_one_hop(
    router: Server,
    asking_router: Server,
    prefiller: Server,
    decoder: Server,
    alone: Server,
    path: str,
    stream: bool,
    by: str,
) -> None:
    asked = router if by == "request" else asking_router
    fields = {"cache_hit_threshold": 0.5} if by == "request" else {}
    seed = 2 * ("chat" in path) + stream + (10 if by == "request" else 20)
    right = said(alone, path, stream, seed)
    counts = outcome(asked, "rejected"), outcome(asked, "answered"), rejections(decoder)
    before = metric(prefiller, ASKED)

    assert said(asked, path, stream, seed, **fields) == right
    assert metric(prefiller, ASKED) - before >= 900, "P computed what D had not"
    wait_for(lambda: freed(prefiller), "P's blocks are freed")

    before = metric(prefiller, ASKED)
    computed = metric(decoder, COMPUTED)
    assert said(asked, path, stream, seed, **fields) == right
    assert metric(prefiller, ASKED) == before, "P was not asked"
    assert metric(decoder, COMPUTED) - computed <= 32, "D had it but for the last block"
    wanted = counts[0] + 1, counts[1] + 1, counts[2] + 1
    assert (outcome(asked, "rejected"), outcome(asked, "answered"), rejections(decoder)) == wanted


def test_the_decoder_is_left_without_blocks_by_a_rejection(router: Server, decoder: Server) -> None:
    free = "disagg_engine_blocks_free"
    total, rejected = metric(decoder, "disagg_engine_blocks"), rejections(decoder)
    body = {"model": "tiny", "prompt": tokens_of(600, 3), "cache_hit_threshold": 0.9}
    assert decoder.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 0
    assert rejections(decoder) == rejected + 1
    held = metric(decoder, "disagg_engine_blocks_delayed")
    wait_for(lambda: metric(decoder, free) + held == total, "nothing is held")


def test_a_turn_goes_to_the_decoder_that_holds_it_and_to_nobody_else(
    router: Server, prefiller: Server, alone: Server
) -> None:
    said(router, "/v1/completions", False, 30, cache_hit_threshold=0.5)
    turns = 'disagg_router_conversation_turns_total{outcome="decoder_alone",reason=""}'
    prompt, before_it = tokens_of(1100, 31), router.metrics().get(turns, 0)
    for number in range(3):
        before = metric(prefiller, ASKED)
        answer = complete(router, prompt, conversation_id="held")
        assert differences([complete(alone, prompt)], [answer]) == []
        assert (metric(prefiller, ASKED) == before) is (number > 0)
        prompt += [*answer.tokens, *tokens_of(50, 32 + number)]
    assert router.metrics()[turns] == before_it + 2


def test_a_decoder_keeps_the_last_turn_only(router: Server, decoder: Server) -> None:
    """Once the router has heard that it can be told so."""
    names = (f"one-lease-{number}" for number in count())

    def keeps_one() -> bool:
        name, leases = next(names), metric(decoder, LEASES)
        prompt = tokens_of(400, 50)
        first = complete(router, prompt, conversation_id=name)
        longer = [*prompt, *first.tokens, 1, 2, 3]
        complete(router, longer, conversation_id=name)
        return metric(decoder, LEASES) == leases + 1

    wait_for(keeps_one, "the turn before the last is given back", 60)


def test_a_turn_that_its_decoder_rejects_is_pulled(
    router: Server, prefiller: Server, decoder: Server, alone: Server
) -> None:
    """No prompt is in a cache to its last token: what asks for all of it is rejected."""
    prompt = tokens_of(1000, 40)
    fields: dict[str, Any] = {"conversation_id": "rejected", "cache_hit_threshold": 1}
    first = complete(router, prompt, **fields)
    longer = [*prompt, *first.tokens, *tokens_of(50, 41)]
    before, rejected = metric(prefiller, COMPUTED), rejections(decoder)
    second = complete(router, longer, **fields)
    assert differences([complete(alone, longer)], [second]) == []
    assert metric(prefiller, COMPUTED) - before <= 51
    assert rejections(decoder) == rejected + 1
