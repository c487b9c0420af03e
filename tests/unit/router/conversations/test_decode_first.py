"""Decode first: a decoder that holds enough answers alone, and a rejection is never seen."""

import json
from typing import Any

import pytest

from router.fleet.engine import EngineRole
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import (
    KEPT,
    decoding,
    delta,
    rejecting,
    sse,
    stream,
    whole,
)
from tests.unit.router.conversations.test_turns import AGAIN, ASKED, chat, offered, turns
from tests.unit.router.engine_scripts import answering
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS

MARKER = delta({}, "cache_threshold")
REJECTIONS: dict[str, list[bytes]] = {
    "in the first chunk": [sse(MARKER), DONE],
    "after a role": [sse(delta({"role": "assistant", "content": ""})), sse(MARKER), DONE],
    "after an empty delta": [sse(delta({"role": "assistant"})), sse(delta({})), sse(MARKER), DONE],
    "as a stop reason": [
        sse({"choices": [{"index": 0, "delta": {}, "stop_reason": "cache_threshold",
                          "finish_reason": "abort"}]}),
        DONE,
    ],
    "in a text completion": [
        sse({"choices": [{"index": 0, "text": "", "finish_reason": "cache_threshold"}]}),
        DONE,
    ],
}  # fmt: skip


async def plain(router: Router, **fields: Any) -> str:
    answer = await chat(router, ASKED, conversation_id=None, **fields)
    return answer.text


def decode_first_outcomes(router: Router) -> dict[str, float]:
    names = ("answered", "rejected", "skipped")
    return {name: router.metric("decode_first_total", outcome=name) for name in names}


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_decoder_that_holds_enough_answers_alone(
    router: Router, p: MockEngine, d: MockEngine, streamed: bool
) -> None:
    text = await plain(router, cache_hit_threshold=0.5, stream=streamed)
    assert "fine" in text
    assert not p.requests
    assert d.last.json["cache_hit_threshold"] == 0.5
    assert "kv_transfer_params" not in d.last.json


@pytest.mark.parametrize("how", [*REJECTIONS, "whole"])
async def test_a_rejection_leads_to_both_legs_and_is_not_seen(
    router: Router, p: MockEngine, d: MockEngine, how: str
) -> None:
    d.usual = rejecting(*REJECTIONS.get(how, ()))
    text = await plain(router, cache_hit_threshold=0.5, stream=how != "whole")
    assert "fine" in text
    assert "cache_threshold" not in text
    assert text.count("assistant") == 1
    attempt, leg = d.requests
    assert attempt.json["cache_hit_threshold"] == 0.5
    assert p.last.json["cache_hit_threshold"] == 0
    assert leg.json["cache_hit_threshold"] == 0
    assert leg.json["kv_transfer_params"] == {**PARAMS, "retain": False}
    ids = {request.header("x-request-id") for request in (attempt, leg)}
    assert len(ids) == 2
    assert decode_first_outcomes(router) == {"answered": 0, "rejected": 1, "skipped": 0}


async def test_a_rejection_that_comes_byte_by_byte_is_recognised(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    content = b"".join(REJECTIONS["after a role"])

    async def slowly(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for start in range(0, len(content), 5):
            await peer.send(chunk(content[start : start + 5]))
        await peer.send(b"0\r\n\r\n")

    d.scripts = [slowly]
    assert "cache_threshold" not in await plain(router, cache_hit_threshold=1, stream=True)
    assert len(p.requests) == 1


async def test_an_answer_about_the_marker_is_no_rejection(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    d.usual = decoding({"content": 'finish_reason: "cache_threshold"'})
    for streamed in (True, False):
        assert "cache_threshold" in await plain(router, cache_hit_threshold=0.5, stream=streamed)
    assert not p.requests


@pytest.mark.parametrize("value", [-0.1, 1.1, 2, "0.5", True, [], {}])
async def test_a_threshold_that_is_no_share_is_a_bad_request(
    router: Router, p: MockEngine, d: MockEngine, value: object
) -> None:
    body = {"messages": ASKED, "cache_hit_threshold": value}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "cache_hit_threshold" in answer.json()["error"]["message"]
    assert not p.requests
    assert not d.requests


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity"])
async def test_a_threshold_that_is_no_json_is_a_bad_request(
    router: Router, d: MockEngine, value: bytes
) -> None:
    content = b'{"prompt": "x", "cache_hit_threshold": %s}' % value
    answer = await router.client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert not d.requests


@pytest.mark.parametrize(("value", "asked"), [(None, 0.8), (0.5, 0.5), (0, None)])
async def test_a_request_decides_over_the_operator(
    start_router: StartRouter, p: MockEngine, d: MockEngine, value: object, asked: float | None
) -> None:
    router = await start_router(decode_first_threshold=0.8)
    fields = {} if value is None else {"cache_hit_threshold": value}
    await plain(router, **fields)
    if asked is None:
        assert d.last.json["cache_hit_threshold"] == 0
        assert p.requests
    else:
        assert d.last.json["cache_hit_threshold"] == asked
        assert not p.requests


LONG = "x" * 5000


def computing(cached: int | None) -> Any:
    """A decoder that does not know the field, and may tell how little it had."""

    async def script(request: Received, peer: Peer) -> None:
        answer = whole(request, {"role": "assistant", "content": "fine"}, None)
        if cached is not None:
            answer["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        await peer.answer(answer)

    return script


async def ask_long(router: Router) -> None:
    messages = [{"role": "user", "content": LONG}]
    await chat(router, messages, conversation_id=None, cache_hit_threshold=0.5)


@pytest.mark.parametrize(("cached", "tries"), [(10, 1), (None, 3), (590, 6)])
async def test_an_engine_that_ignores_the_field_is_not_asked_again_for_long_prompts(
    router: Router, p: MockEngine, d: MockEngine, cached: int | None, tries: int
) -> None:
    d.usual = computing(cached)
    for _ in range(6):
        await ask_long(router)
    assert decode_first_outcomes(router) == {"answered": tries, "rejected": 0, "skipped": 6 - tries}
    assert len(p.requests) == 6 - tries
    await plain(router, cache_hit_threshold=0.5)
    assert decode_first_outcomes(router)["answered"] == tries + 1, "a short prompt may be tried"


async def test_an_engine_whose_cache_has_it_all_is_found_out_by_a_request_that_none_can_have(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    """Streams do not tell what came from the cache."""

    async def judges(request: Received, peer: Peer) -> None:
        if request.json.get("cache_hit_threshold") == 1 and len(request.json["prompt"]) == 1:
            choice = {"index": 0, "text": "", "finish_reason": "cache_threshold"}
            return await peer.answer({"id": "1", "choices": [choice]})
        await decoding()(request, peer)

    d.usual = judges
    (engine,) = router.gateway.fleet.usable_engines(EngineRole.DECODE)
    messages = [{"role": "user", "content": LONG}]
    fields: dict[str, Any] = {"conversation_id": None, "cache_hit_threshold": 0.5, "stream": True}
    for _ in range(3):
        await chat(router, messages, **fields)
    await eventually(lambda: engine.capabilities.supports_threshold is True)
    (trial,) = [r for r in d.requests if (r.header("x-request-id") or "").endswith("-trial")]
    assert (trial.json["model"], trial.json["max_tokens"]) == ("m", 1)
    await chat(router, messages, **fields)
    assert decode_first_outcomes(router) == {"answered": 4, "rejected": 0, "skipped": 0}
    assert not p.requests


async def test_an_engine_that_has_rejected_knows_the_field(router: Router, d: MockEngine) -> None:
    d.usual = rejecting()
    await ask_long(router)
    d.usual = computing(None)
    for _ in range(6):
        await ask_long(router)
    assert decode_first_outcomes(router) == {"answered": 6, "rejected": 1, "skipped": 0}


async def test_an_engine_may_say_itself_that_it_does_not_know_the_field(
    router: Router, d: MockEngine
) -> None:
    d.usual = computing(590)
    await ask_long(router)
    (engine,) = router.gateway.fleet.usable_engines(EngineRole.DECODE)
    await eventually(lambda: engine.capabilities.is_identity_known)
    d.identity, engine.capabilities.is_identity_known = {"capabilities": ["prefix_proof"]}, False
    await eventually(lambda: engine.capabilities.lists_capabilities)
    await ask_long(router)
    assert decode_first_outcomes(router)["skipped"] == 1


async def test_a_turn_goes_to_its_decoder_alone_once_that_is_known_to_judge(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(decode_first_turns=0.1)
    await chat(router, ASKED)
    (engine,) = router.gateway.fleet.usable_engines(EngineRole.DECODE)
    await chat(router, AGAIN)
    assert len(p.requests) == 2, "not known yet"
    await eventually(lambda: engine.capabilities.is_identity_known)
    d.identity = {"capabilities": {"cache_hit_threshold": True}}
    engine.capabilities.is_identity_known = False
    await eventually(lambda: engine.capabilities.lists_capabilities)
    await chat(router, ASKED, conversation_id="d")
    count = len(p.requests)
    await chat(router, AGAIN, conversation_id="d")
    assert len(p.requests) == count
    assert d.last.json["cache_hit_threshold"] == 0.1
    assert d.last.json["kv_transfer_params"] == {"retain": True}
    assert turns(router, "decoder_alone") == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_turn_that_its_decoder_rejects_is_still_pulled(
    start_router: StartRouter, p: MockEngine, d: MockEngine, streamed: bool
) -> None:
    router = await start_router(decode_first_turns=0.1)
    d.usual = rejecting(*REJECTIONS["after a role"])
    await chat(router, ASKED, cache_hit_threshold=0.5, stream=streamed)
    answer = await chat(router, AGAIN, stream=streamed)
    assert "cache_threshold" not in answer.text
    assert offered(p) == KEPT
    assert turns(router, "hit") == 1
    assert [r.json.get("cache_hit_threshold") for r in d.requests] == [0.5, 0, 0.1, 0]


async def test_a_request_that_only_a_decoder_can_answer_is_not_rejected(
    router: Router, d: MockEngine
) -> None:
    d.usual = rejecting()
    text = await plain(router, cache_hit_threshold=0.5, n=2)
    assert "fine" in text
    assert d.last.json["cache_hit_threshold"] == 0


async def test_an_error_of_the_decoder_asked_first_is_passed_on(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    d.scripts = [answering(400, {"error": {"message": "too long"}})]
    body = {"messages": ASKED, "cache_hit_threshold": 0.5, "stream": True}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
    assert not p.requests


async def test_events_before_the_answer_are_not_lost(router: Router) -> None:
    text = await plain(router, cache_hit_threshold=0.5, stream=True)
    said = {"role": "assistant", "content": "fine"}
    assert text == b"".join(stream(said, None, alone=False)).decode()
    first = json.loads(text.split("\n\n")[0].removeprefix("data: "))
    assert first["choices"][0]["delta"]["role"] == "assistant"
