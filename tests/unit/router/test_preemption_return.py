"""A decode engine without room for the whole answer returns it, and another one continues."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from engine_ext.common.resume_payload import ResumePayload, decode_token_ids, encode_token_ids
from router.fleet.engine import CircuitState
from router.http_client.answer_limits import MemoryBudget
from router.openai.answers import read_generated_tokens
from router.proxy.resume_buffer import ResumeBuffer
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, fails, hang, refuses
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.test_resume import (
    CAPABILITIES,
    LAST,
    PROMPT,
    RENDERS,
    WORDS,
    computes,
    dies_after,
    error_in,
    from_the_beginning_to,
    legs,
    texts_of,
    word_event,
)

OURS = {"capabilities": [*CAPABILITIES, "hand_back"], "renders": RENDERS}
BACK = {"finish_reason": "cache_threshold", "stop_reason": "preempted"}
REFUSED = {"finish_reason": "cache_threshold", "stop_reason": "cache_hit_rate=0.1<0.5"}


def params_of(request: Received) -> dict[str, Any]:
    params: dict[str, Any] = request.json.get("kv_transfer_params") or {}
    return params


def event_of(request: Received, choice: dict[str, Any]) -> bytes:
    content = json.loads(word_event(request, 0).decode().partition("data: ")[2])
    content["choices"][0] |= choice
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def tokens_in(request: Received) -> list[int]:
    begun = params_of(request).get("begun", {})
    ids = list(decode_token_ids(begun.get("output_token_ids", "")))
    assert ids == list(range(len(ids)))
    assert not ids or list(decode_token_ids(begun["prompt_token_ids"])) == PROMPT
    return ids


def answer_so_far(count: int, more: dict[str, Any], begun: object = None) -> dict[str, Any]:
    choice = {"index": 0, "text": "".join(WORDS[:count]), "stop_reason": None, **more}
    params = {} if begun is None else {"kv_transfer_params": {"begun": begun}}
    return {"id": "a", "object": "text_completion", "created": 1, "choices": [choice], **params}


def resumed_from(count: int) -> dict[str, Any]:
    logprobs = tuple(((number, -0.5),) for number in range(count))
    return ResumePayload(tuple(PROMPT), tuple(range(count)), 0, logprobs).to_wire()


async def all_of_it(request: Received, peer: Peer) -> None:
    """From wherever it begins, to the end."""
    if not request.json.get("stream"):
        assert "spoken" not in params_of(request).get("begun", {})
        tokens_in(request)
        return await peer.answer(answer_so_far(len(WORDS), {"finish_reason": LAST}))
    await from_the_beginning_to(len(WORDS), request, peer)
    await peer.send(chunk(DONE) + b"0\r\n\r\n")


def hands_back(number: int, begun: object = ...) -> Script:
    """Having said so many words, if it may."""

    async def script(request: Received, peer: Peer) -> None:
        if not params_of(request).get("hand_back"):
            return await all_of_it(request, peer)
        if not request.json.get("stream"):
            told_of = resumed_from(number) if begun is ... else begun
            return await peer.answer(answer_so_far(number, BACK, told_of))
        if number:
            await from_the_beginning_to(number, request, peer)
        else:
            await peer.send(STREAM_HEAD)
        held_back = {"text": "held back", **BACK}
        await peer.send(chunk(event_of(request, held_back)) + chunk(DONE) + b"0\r\n\r\n")

    return script


@pytest.fixture
async def d2() -> AsyncIterator[MockEngine]:
    async with running_engine(all_of_it) as engine:
        engine.identity = OURS
        yield engine


@pytest.fixture
def start_router(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> StartRouter:
    p.identity, d.identity = OURS, d.identity or OURS
    p.usual, d.usual = computes, all_of_it

    return functools.partial(start_router, ds=[d, d2], identified=True)


async def answered(router: Router, stream: bool, **fields: Any) -> list[str]:
    if stream:
        answer = await router.stream(**fields)
        assert "token_ids" not in answer.text
        return texts_of(answer.text)
    answer = await router.complete(**fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == LAST
    assert "kv_transfer_params" not in answer.json()
    return [word if word == WORDS[-1] else f"{word} " for word in choice["text"].split(" ")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [1, 3])
async def test_another_decoder_goes_on(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine, number: int, stream: bool
) -> None:
    d.scripts = d2.scripts = [hands_back(number)]  # whoever is asked first
    assert await answered(router, stream, logprobs=0) == WORDS
    _, again = legs(p)
    assert again.json["max_tokens"] == number + 1
    begun = params_of(again)["begun"]
    if stream:
        assert begun == {
            "prompt_token_ids": encode_token_ids(PROMPT),
            "output_token_ids": encode_token_ids(list(range(number))),
            "spoken": number,
        }
    else:
        assert begun == resumed_from(number)
    assert [len(legs(d)), len(legs(d2))] == [1, 1]
    (second,) = (one for one in legs(d, d2) if params_of(one).get("begun") == begun)
    assert second.json["cache_hit_threshold"] == 0
    assert params_of(second)["hand_back"] is True
    assert params_of(second)["remote_host"], "where P has it"
    assert router.metric("resumes_total", kind="preempted", outcome="resumed") == 1
    assert router.metric("upstream_errors_total", role="decode", kind="preempted") == 0
    assert {engine.breaker.circuit for engine in router.gateway.fleet.engines} == {
        CircuitState.CLOSED
    }
    assert router.gateway.memory.resume_buffers.size == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_only_decoder_goes_on_with_its_own(
    start_router: StartRouter, d: MockEngine, stream: bool
) -> None:
    router = await start_router(ds=[d])
    d.scripts = [hands_back(2)]
    assert await answered(router, stream) == WORDS
    assert len(legs(d)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_is_asked_last_is_to_find_room(
    router: Router, d: MockEngine, d2: MockEngine, stream: bool
) -> None:
    """However often it was handed back: --max-resumes is 2."""
    d.usual = d2.usual = hands_back(3)
    for _ in range(3):
        assert await answered(router, stream) == WORDS
    asked = [params_of(one)["hand_back"] for one in legs(d, d2)]
    assert (asked.count(True), asked.count(False)) == (6, 3)
    # A stream has gone on where something came of it.
    resumed = router.metric("resumes_total", kind="preempted", outcome="resumed")
    assert resumed == (3 if stream else 6)


@pytest.mark.parametrize("stream", [False, True])
async def test_it_costs_neither_the_budget_nor_the_moves_of_real_failures(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, stream: bool
) -> None:
    router = await start_router()
    budget = router.gateway.budget
    budget.take = lambda now: False  # type: ignore[method-assign]
    d.scripts = d2.scripts = [hands_back(1), hands_back(2)]
    assert await answered(router, stream) == WORDS
    del budget.take
    d.scripts = d2.scripts = [hands_back(1), hands_back(2), dies_after(3), dies_after(4)]
    async with running_engine(all_of_it) as d3, running_engine(all_of_it) as d4:
        d3.identity = d4.identity = OURS
        d3.scripts = d4.scripts = d.scripts
        router = await start_router(ds=[d, d2, d3, d4])
        assert texts_of((await router.stream()).text) == WORDS
        assert router.metric("resumes_total", kind="preempted", outcome="resumed") == 2
        assert router.metric("resumes_total", kind="broken_answer", outcome="resumed") == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_has_said_nothing_is_prefilled_anew(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine, stream: bool
) -> None:
    d.scripts = d2.scripts = [hands_back(0)]
    assert await answered(router, stream) == WORDS
    first, again = legs(p)
    assert again.json["max_tokens"] == first.json["max_tokens"] == 1
    assert [len(legs(d)), len(legs(d2))] == [1, 1]
    assert router.gateway.memory.resume_buffers.size == 0


@pytest.mark.parametrize(
    "begun",
    [
        None,
        [],
        {},
        resumed_from(2) | {"spoken": 2},
        resumed_from(2) | {"output_token_ids": '"}'},
        resumed_from(2) | {"output_token_ids": 5},
        resumed_from(2) | {"output_token_ids": "AAA"},
        resumed_from(0),
    ],
)
async def test_what_makes_no_sense_is_not_gone_on_with(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine, begun: object
) -> None:
    d.scripts = d2.scripts = [hands_back(2, begun)]
    assert await answered(router, stream=False) == WORDS
    assert all("begun" not in params_of(one) for one in legs(p))
    assert router.gateway.memory.resume_buffers.size == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_answer_that_nobody_has_seen_begins_anew_where_nobody_goes_on(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine, role: str
) -> None:
    d.scripts = d2.scripts = [hands_back(2)]
    if role == "prefill":
        p.scripts = [computes, refuses]
    else:
        d.scripts.append(refuses)
    assert await answered(router, stream=False) == WORDS
    *_, last = (one for one in legs(d, d2) if not params_of(one)["hand_back"])
    assert len(tokens_in(last)) < 2, "it was not told what was handed back"
    assert router.gateway.memory.resume_buffers.size == 0


async def test_without_room_for_what_was_said_it_begins_anew(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(max_resume_memory=10)
    d.scripts = d2.scripts = [hands_back(4)]
    assert await answered(router, stream=False) == WORDS
    assert router.gateway.memory.resume_buffers.size == 0


async def test_a_stream_that_is_not_kept_is_not_to_be_handed_back(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(max_resume_memory=10)
    d.usual = d2.usual = hands_back(3)
    assert await answered(router, stream=True) == WORDS
    assert [params_of(one)["hand_back"] for one in legs(d, d2)] == [False]


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        # Engines may hand back unless they are told not to: nobody would go on with these.
        ({"n": 2}, False),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt_logprobs": 0}, False),
        ({"best_of": 2}, False),
        ({"echo": True}, False),
        ({}, True),
    ],
)
async def test_who_cannot_move_is_not_to_be_handed_back(
    router: Router, d: MockEngine, d2: MockEngine, fields: dict[str, Any], asked: bool
) -> None:
    for stream in (False, True):
        assert (await router.complete(**fields, stream=stream)).status_code == 200
    assert [params_of(one).get("hand_back") for one in legs(d, d2)] == [asked] * 2


async def test_nothing_is_asked_of_one_that_does_not_offer_it(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d.identity = d2.identity = OURS | {"capabilities": CAPABILITIES}
    router = await start_router()
    for stream in (False, True):
        assert await answered(router, stream) == WORDS
    assert all("hand_back" not in params_of(one) for one in legs(d, d2))


def always_hands_back(request: Received, peer: Peer) -> Awaitable[None]:
    """Whatever it is asked."""
    if not request.json.get("stream"):
        return peer.answer(answer_so_far(2, BACK, resumed_from(2)))
    return peer.stream(event_of(request, {"text": "", **BACK}), DONE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("capabilities", [OURS["capabilities"], []])
async def test_what_nobody_asked_to_have_back_is_no_answer(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, capabilities: list[str], stream: bool
) -> None:
    """An engine may be configured to, and its page be unread still; or it does not listen."""
    d.identity = d2.identity = OURS | {"capabilities": capabilities}
    router = await start_router(max_resumes=0)
    d.scripts = d2.scripts = [always_hands_back]
    assert await answered(router, stream) == WORDS
    assert [len(legs(d)), len(legs(d2))] == [1, 1]
    assert router.metric("upstream_errors_total", role="decode", kind="status_5xx") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_that_always_hand_back_are_not_asked_for_ever(
    router: Router, d: MockEngine, d2: MockEngine, stream: bool
) -> None:
    d.usual = d2.usual = always_hands_back
    answer = await router.complete(stream=stream)
    assert answer.status_code == 503, answer.text
    assert len(legs(d, d2)) < 8
    assert router.gateway.memory.resume_buffers.size == 0


async def test_what_another_router_asked_to_have_back_it_gets(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(trust_client_kv_params=True)
    d.scripts = d2.scripts = [always_hands_back]
    answer = await router.complete(kv_transfer_params={"hand_back": True})
    assert answer.json()["choices"][0]["finish_reason"] == "cache_threshold"


async def test_without_resumes_nothing_is_handed_back(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(max_resumes=0)
    d.usual = d2.usual = hands_back(3)
    for stream in (False, True):
        assert await answered(router, stream) == WORDS
    assert [params_of(one)["hand_back"] for one in legs(d, d2)] == [False] * 2


async def test_a_client_cannot_ask_for_it(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(max_resumes=0)
    assert await answered(router, stream=False, kv_transfer_params={"hand_back": True}) == WORDS
    (asked,) = legs(d, d2)
    assert params_of(asked)["hand_back"] is False


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_to_begin_that_nobody_asked_for_is_no_answer(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, stream: bool
) -> None:
    """By the engine's own threshold, of a request that has said nothing."""

    async def refuses(request: Received, peer: Peer) -> None:
        if stream:
            return await peer.stream(event_of(request, {"text": "", **REFUSED}), DONE)
        await peer.answer(answer_so_far(0, REFUSED))

    router = await start_router()
    d.usual = d2.usual = refuses
    answer = await router.complete(stream=stream)
    assert answer.status_code == 502
    assert "applied a cache threshold that the router did not set" in answer.text
    assert len(legs(d, d2)) == 2
    assert router.metric("resumes_total", kind="preempted", outcome="resumed") == 0


async def test_a_clients_own_stop_string_is_none(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    stops = answering(200, answer_so_far(2, {"finish_reason": "stop", "stop_reason": "preempted"}))
    router = await start_router()
    d.usual = d2.usual = stops
    answer = await router.complete(stop="preempted")
    assert answer.json()["choices"][0]["stop_reason"] == "preempted"
    assert len(legs(d, d2)) == 1


@pytest.mark.parametrize("begun", [None, resumed_from(2)])
async def test_one_that_has_called_a_tool_is_known_by_what_it_tells(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, begun: object
) -> None:
    calls = answering(200, answer_so_far(2, BACK | {"finish_reason": "tool_calls"}, begun))
    router = await start_router()
    d.scripts = d2.scripts = [calls]
    answer = await router.complete(stop="preempted")
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == ("tool_calls" if begun is None else LAST)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_prefiller_the_decoder_computes_what_was_handed_back(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine, stream: bool
) -> None:
    p.scripts, d.scripts = [computes, fails], [hands_back(2)]
    d2.scripts = d.scripts
    assert await answered(router, stream) == WORDS
    (second,) = (one for one in legs(d, d2) if len(tokens_in(one)) == 2)
    assert "remote_host" not in params_of(second)


async def test_a_client_that_leaves_meanwhile_leaves_nothing(
    router: Router, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    p.scripts, d.scripts = [computes, hang], [hands_back(2)]
    d2.scripts = d.scripts
    asking = asyncio.create_task(router.complete())
    await eventually(lambda: router.gateway.memory.resume_buffers.size > 0)
    asking.cancel()
    await eventually(lambda: router.gateway.memory.resume_buffers.size == 0)
    await router.settled()


async def test_a_refusal_in_mid_answer_is_gone_on_with_too(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    """By an engine that judges what it has preempted."""

    async def refuses(request: Received, peer: Peer) -> None:
        await from_the_beginning_to(2, request, peer)
        await peer.send(chunk(event_of(request, {"text": "", **REFUSED})) + chunk(DONE))
        await peer.send(b"0\r\n\r\n")

    router = await start_router()
    d.scripts = d2.scripts = [refuses]
    assert await answered(router, stream=True) == WORDS


async def test_an_engine_that_hands_back_for_ever_does_not_hold_a_stream_for_ever(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    async def never_ends(request: Received, peer: Peer) -> None:
        first = len(tokens_in(request))
        await from_the_beginning_to(max(1, first), request, peer)
        await peer.send(chunk(event_of(request, {"text": "", **BACK})) + chunk(DONE))
        await peer.send(b"0\r\n\r\n")

    router = await start_router()
    d.usual = d2.usual = never_ends
    answer = await router.stream()
    assert error_in(answer.text)["code"] == 503
    assert len(legs(d, d2)) == 4
    assert router.metric("resumes_total", kind="status_5xx", outcome="given_up") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("flow", ["alone", "push", "first", "turn", "exact"])
async def test_in_every_plan(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, flow: str, stream: bool
) -> None:
    plans: dict[str, dict[str, Any]] = {
        "alone": {"min_remote_prefill_tokens": 1000},
        "push": {"transfer_mode": "push"},
        "first": {"decode_first_threshold": 0.5},
        "turn": {"conversation_store": "memory"},
        "exact": {"conversation_store": "memory", "conversation_stream": "exact"},
    }
    fields = {"conversation_id": "c"} if flow in ("turn", "exact") else {}
    if flow == "push":
        rank = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 1}
        p.identity = d.identity = d2.identity = OURS | {"transfer_modes": ["push"], "ranks": [rank]}
    router = await start_router(**plans[flow])
    d.scripts = d2.scripts = [hands_back(2)]
    if flow == "exact" and stream:
        answer = await router.stream(**fields)
        assert "".join(WORDS) in answer.text
    else:
        assert await answered(router, stream, **fields) == WORDS
    begun = [one for one in legs(d, d2) if len(tokens_in(one)) == 2]
    assert len(begun) == 1
    assert router.gateway.memory.resume_buffers.size == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_answer_is_found_out_too(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, stream: bool
) -> None:
    async def at_length(request: Received, peer: Peer) -> None:
        if stream:
            return await hands_back(2)(request, peer)
        answer = answer_so_far(2, BACK | {"logprobs": ["x" * 1000] * 1000}, resumed_from(2))
        await peer.answer(answer)

    router = await start_router()
    d.scripts = d2.scripts = [at_length]
    assert await answered(router, stream) == WORDS


async def test_many_at_once_are_each_their_own(
    router: Router, d: MockEngine, d2: MockEngine
) -> None:
    d.scripts = d2.scripts = [hands_back(1 + i % 4) for i in range(20)]
    got = await asyncio.gather(*(answered(router, bool(i % 2)) for i in range(30)))
    assert got == [WORDS] * 30
    assert router.gateway.memory.resume_buffers.size == 0


def test_a_resume_buffer_that_takes_what_was_handed_back_counts_it_once() -> None:
    room = MemoryBudget(400)
    buffer = ResumeBuffer(room, {}, 2)
    wire = json.dumps({"begun": resumed_from(3)}).encode()
    for _ in range(2):
        begun = read_generated_tokens(wire)
        assert begun is not None
        assert buffer.take_returned(begun)
    assert json.loads(buffer.begun()) == resumed_from(3)
    assert buffer.num_tokens == 3
    buffer.close()
    assert room.size == 0
