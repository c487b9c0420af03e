"""Turns through a real router to mock engines: what goes to whom, and what the client sees."""

import asyncio
import json
import time
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai
import pytest

from router.fleet.engine import EngineRole, Intent
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.redis_server import running_redis
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import (
    KEPT,
    PROOF,
    decoding,
    delta,
    prefilling,
    sse,
    stream,
)
from tests.unit.router.engine_scripts import answer_after, answering, reset, usual_decode
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, event

ASKED: list[Any] = [{"role": "user", "content": "how are you?"}]
SAID = {"role": "assistant", "content": "fine"}
AGAIN: list[Any] = [*ASKED, SAID, {"role": "user", "content": "and now?"}]
PLAIN = {"do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids"}
PLAIN |= {"remote_host", "remote_port"}


async def chat(
    router: Router, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": "m", "messages": messages, "conversation_id": "c", **fields}
    body = {name: value for name, value in body.items() if value is not None}
    answer = await router.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def offered(p: MockEngine) -> Any:
    """What the prefiller was told to pull."""
    params = p.last.json["kv_transfer_params"]
    return None if params["remote_block_ids"] is None else params


def turns(router: Router, outcome: str, reason: str = "") -> float:
    return router.metric("conversation_turns_total", outcome=outcome, reason=reason)


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_the_next_turns_prefiller_gets_the_decoders_params_verbatim(
    router: Router, p: MockEngine, d: MockEngine, fields: dict[str, Any]
) -> None:
    await chat(router, ASKED, **fields)
    assert offered(p) is None
    assert d.last.json["kv_transfer_params"] == {**PARAMS, "retain": True}
    assert turns(router, "new") == 1
    await chat(router, AGAIN, **fields)
    assert offered(p) == KEPT
    assert d.last.json["kv_transfer_params"] == {**PARAMS, "retain": True}
    assert turns(router, "hit") == 1
    assert router.metric("conversation_tokens_offered_total") == KEPT["remote_num_tokens"]
    for engine in (p, d):
        assert all("conversation_id" not in request.json for request in engine.requests)


async def test_a_turns_answer_has_the_limit_of_others(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(conversation_store="memory", max_answer_size=2000)
    d.usual = decoding({"content": "long" * 1000})
    body = {"model": "m", "messages": ASKED, "conversation_id": "c"}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 502


def two_ranks(first: int = 0) -> dict[str, Any]:
    where = {"remote_host": "10.1.1.1", "remote_port": 5601, "remote_engine_id": "decoder-1"}
    ranks = [{"dp_rank": rank, **where} for rank in range(first, first + 2)]
    return {"capabilities": [], "ranks": ranks}


@pytest.mark.parametrize(
    ("engine_id", "identity", "said", "expected"),
    [
        ("decoder-1_dp1", two_ranks(), None, "1"),
        ("decoder-1_dp0", two_ranks(), None, "0"),
        ("decoder-1_dp1", two_ranks(), "0", "0"),
        ("decoder-1_dp3", two_ranks(first=2), None, "1"),
        ("decoder-1_dp7", two_ranks(), None, None),
        ("decoder-1", two_ranks(), None, None),
        ("decoder-1_dp1", None, None, None),
    ],
    ids=[
        "its",
        "its first",
        "the client's",
        "its server's second",
        "one it has not",
        "none",
        "an engine's mere name",
    ],
)
async def test_a_turn_goes_to_the_rank_of_its_decoder_that_has_the_last_one(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    engine_id: str,
    identity: dict[str, Any] | None,
    said: str | None,
    expected: str | None,
) -> None:
    d.identity, d.usual = identity, decoding(kept={**KEPT, "remote_engine_id": engine_id})
    router = await start_router()
    (engine,) = router.gateway.fleet.usable_engines(EngineRole.DECODE)
    await eventually(lambda: engine.capabilities.is_identity_known)
    headers = None if said is None else {"x-data-parallel-rank": said}
    await chat(router, ASKED, headers)
    assert d.last.header("x-data-parallel-rank") == said
    await chat(router, AGAIN, headers)
    assert d.last.header("x-data-parallel-rank") == expected
    assert p.last.header("x-data-parallel-rank") == said
    await chat(router, ASKED, headers, conversation_id="another")
    assert d.last.header("x-data-parallel-rank") == said


async def test_of_many_turns_at_once_one_reuses(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    await chat(router, ASKED)
    d.usual = decoding(kept=None)
    await asyncio.gather(*(chat(router, AGAIN) for _ in range(50)))
    pulled = [r for r in p.requests if r.json["kv_transfer_params"]["remote_block_ids"] is not None]
    assert len(p.requests) == 51
    assert len(pulled) == 1
    assert turns(router, "hit") == 1


@pytest.mark.parametrize(
    "given",
    [
        {"x-conversation-id": "c"},
        {"X-Session-ID": "c"},
        {"x-session-affinity": "c"},
        {"x-correlation-id": "c"},
        {"X-Claude-Code-Session-Id": "c"},
        {"thread-id": "c"},
        {"session-id": "c"},
        {"X-OpenWebUI-Chat-Id": "c"},
    ],
)
async def test_an_id_may_come_in_other_ways(
    router: Router, p: MockEngine, d: MockEngine, given: dict[str, str]
) -> None:
    for messages in (ASKED, AGAIN):
        await chat(router, messages, given, conversation_id=None)
    assert offered(p) == KEPT
    (name,) = given
    forwarded = name != "x-conversation-id"
    assert (d.last.header(name.lower()) == "c") is forwarded


async def test_a_session_id_in_the_body_is_an_id_and_goes_on(router: Router, p: MockEngine) -> None:
    for messages in (ASKED, AGAIN):
        await chat(router, messages, conversation_id=None, session_id="s")
    assert offered(p) == KEPT
    assert p.last.json["session_id"] == "s"


async def test_a_header_need_not_begin_with_x(start_router: StartRouter, p: MockEngine) -> None:
    router = await start_router(conversation_ids=("my-chat", "header:talk"))
    for name in ("My-Chat", "Talk"):
        for messages in (ASKED, AGAIN):
            await chat(router, messages, {name: f"{name}-1"}, conversation_id=None)
        assert offered(p) == KEPT
        await chat(router, AGAIN, {name: f"{name}-2"}, conversation_id=None)
        assert offered(p) is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_prompt_cache_key_is_an_id(router: Router, p: MockEngine, path: str) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    for key, expected in (("c", None), ("c", KEPT), ("another", None)):
        messages = AGAIN if expected or key == "another" else ASKED
        body = {"model": "m", field: messages, "prompt_cache_key": key}
        answer = await router.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert offered(p) == expected


TITLE: list[Any] = [
    {"role": "system", "content": "Write a title."},
    {"role": "user", "content": "how are you? fine"},
]
SYSTEM_AND_ASKED: list[Any] = [{"role": "system", "content": "Be kind."}, *ASKED]
SUB_AGENT: list[Any] = [{"role": "user", "content": "look into the cellar"}]


async def test_prompts_that_share_an_id_do_not_evict_each_others_turns(
    router: Router, p: MockEngine
) -> None:
    for messages in (ASKED, TITLE, SUB_AGENT):
        await chat(router, messages)
        assert offered(p) is None
    for messages in (AGAIN, [*SUB_AGENT, SAID, *ASKED]):
        await chat(router, messages)
        assert offered(p) == KEPT
    assert turns(router, "hit") == 2
    assert turns(router, "new") == 3


@pytest.mark.parametrize("stored", ["memory", "redis"])
async def test_a_title_that_is_asked_for_beside_the_chat_costs_the_chat_nothing(
    start_router: StartRouter, p: MockEngine, stored: str
) -> None:
    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {}
        if stored == "redis":
            options = stack.enter_context(running_redis()).settings
        router = await start_router(**options)
        await asyncio.gather(chat(router, ASKED), chat(router, TITLE))
        await chat(router, AGAIN)
        assert offered(p) == KEPT


async def test_a_chat_that_begins_otherwise_leaves_the_other_its_turn(
    router: Router, p: MockEngine
) -> None:
    await chat(router, ASKED)
    await chat(router, [{**ASKED[0], "content": "?"}, SAID, *ASKED])
    assert offered(p) is None
    await chat(router, AGAIN)
    assert offered(p) == KEPT


@pytest.mark.parametrize(
    ("begin", "after"),
    [
        (ASKED, AGAIN),
        (ASKED, [*AGAIN[:2], {**AGAIN[2], "content": "when?"}]),
        (SYSTEM_AND_ASKED, SYSTEM_AND_ASKED),
    ],
    ids=["again", "last question edited", "first answer again"],
)
async def test_an_edited_chat_with_an_id_reuses_what_is_the_same(
    router: Router, p: MockEngine, begin: list[Any], after: list[Any]
) -> None:
    for messages in (begin, [*begin, *AGAIN[1:]], after):
        await chat(router, messages)
    assert turns(router, "cut", "history") == 1
    assert offered(p)["remote_num_tokens"] == 576


ID_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "x-openwebui-chat-id",
    "x-session-affinity",
    "x-correlation-id",
)


@pytest.mark.parametrize(
    "names",
    [
        *((name,) for name in ID_HEADERS),
        ("x-session-affinity", "x-correlation-id"),  # aiperf sends both, with one value
        ("x-session-id", "thread-id", "session-id", "x-session-affinity", "x-correlation-id"),
    ],
    ids="+".join,
)
async def test_request_ids_that_never_come_back_make_engines_retain_nothing(
    router: Router, d: MockEngine, names: tuple[str, ...]
) -> None:
    async def retained(number: int) -> bool:
        headers = dict.fromkeys(names, f"request-{number}")
        await chat(router, ASKED, headers, conversation_id=None)
        return bool(d.last.json["kv_transfer_params"]["retain"])

    assert [await retained(number) for number in range(12)] == [True] * 4 + [False] * 8
    await retained(11)
    assert await retained(12), "one came back"


async def test_single_questions_that_share_an_id_make_engines_retain_nothing(
    router: Router, p: MockEngine, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.conversations.conversations.getrandbits", lambda bits: 1)

    async def retained(*messages: Any) -> bool:
        await chat(router, [*messages], conversation_id=None, prompt_cache_key="application")
        return bool(d.last.json["kv_transfer_params"]["retain"])

    asked = [{"role": "user", "content": f"What is {number}?"} for number in range(68)]
    assert [await retained(question) for question in asked] == [True] * 64 + [False] * 4
    assert await retained(asked[0], SAID, *ASKED)
    assert offered(p) == KEPT
    assert await retained(*ASKED), "one was continued"


TURNS = {"capabilities": ["prefix_proof", "turns"]}


async def recognising(start_router: StartRouter, *engines: MockEngine) -> Router:
    """A router that knows that its engines retain and verify turns."""
    for engine in engines:
        engine.identity = TURNS
    router = await start_router()
    await eventually(lambda: router.gateway.fleet.snapshot.has_turns)
    return router


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_chat_without_an_id_is_recognised_where_engines_verify_turns(
    start_router: StartRouter, p: MockEngine, d: MockEngine, streamed: bool
) -> None:
    proven = {**KEPT, "prefix_proof": PROOF}
    p.usual, d.usual = prefilling(prefix_proof=PROOF), decoding(kept=proven)
    router = await recognising(start_router, p, d)
    for messages in (ASKED, AGAIN):
        await chat(router, messages, conversation_id=None, stream=streamed)
    assert offered(p) == proven
    router.gateway.records.flush()
    ended = {"endpoint": "/v1/chat/completions", "outcome": "ok", "status": "200"}
    assert router.metric("requests_total", flow="pull", **ended) == 2, "as any other chat"
    await chat(router, AGAIN, {"authorization": "Bearer mallory"}, conversation_id=None)
    assert offered(p) is None


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_tool_loop_of_messages_is_recognised_although_its_client_rewrites_the_arguments(
    start_router: StartRouter, p: MockEngine, d: MockEngine, streamed: bool
) -> None:
    proven = {**KEPT, "prefix_proof": PROOF}
    function = {"name": "look_up", "arguments": '{"word": "lease",  "pages": [1, 2]}'}
    call = {"id": "call-1", "index": 0, "type": "function", "function": function}
    p.usual = prefilling(prefix_proof=PROOF)
    d.usual = decoding({"content": None, "tool_calls": [call]}, proven)
    router = await recognising(start_router, p, d)
    used: dict[str, Any] = {"type": "tool_use", "id": "call-1", "name": "look_up"}
    used["input"] = {"pages": [1, 2], "word": "lease"}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": "a promise"}
    loop: list[Any] = list(ASKED)
    for number in range(3):
        body = {"model": "m", "max_tokens": 9, "messages": loop, "stream": streamed}
        answer = await router.client.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert offered(p) == (proven if number else None)
        loop += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("has_previous", [True, False])
@pytest.mark.parametrize("fields", [{}, {"prompt_cache_key": "c"}, {"instructions": "Be kind."}])
async def test_a_response_reuses_the_one_before_it(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    has_previous: bool,
    fields: dict[str, Any],
) -> None:
    proven = {**KEPT, "prefix_proof": PROOF}
    p.usual, d.usual = prefilling(prefix_proof=PROOF), decoding(kept=proven)
    router = await recognising(start_router, p, d)
    history: list[Any] = list(ASKED)
    previous: dict[str, Any] = {}
    for number in range(3):
        given = ASKED if has_previous else history
        body = {"model": "m", "input": given, **previous, **fields}
        answer = await router.client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert offered(p) == (proven if number else None)
        if has_previous:
            previous = {"previous_response_id": answer.json()["id"]}
        history += [*answer.json()["output"], *ASKED]


async def test_a_chat_without_an_id_is_not_reused_unverified(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await recognising(start_router, p, d)
    for messages in (ASKED, AGAIN):
        await chat(router, messages, conversation_id=None)
    assert offered(p) is None
    assert turns(router, "mismatch", "unproven") == 1


async def test_without_engines_that_verify_turns_a_chat_without_an_id_is_none(
    router: Router, d: MockEngine
) -> None:
    for messages in (ASKED, AGAIN):
        await chat(router, messages, conversation_id=None)
        assert not d.last.json["kv_transfer_params"]["retain"]
    assert turns(router, "new") == 0


async def test_single_questions_are_hardly_retained_and_chats_among_them_are_found(
    start_router: StartRouter, p: MockEngine, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.conversations.conversations.getrandbits", lambda bits: 1)
    p.usual = prefilling(prefix_proof=PROOF)
    d.usual = decoding(kept={**KEPT, "prefix_proof": PROOF})
    router = await recognising(start_router, p, d)

    async def retained(messages: list[Any]) -> bool:
        await chat(router, messages, conversation_id=None)
        return bool(d.last.json["kv_transfer_params"]["retain"])

    asked = [[{"role": "user", "content": f"What is {number}?"}] for number in range(36)]
    assert [await retained(messages) for messages in asked] == [True] * 32 + [False] * 4
    assert await retained([*asked[0], SAID, *ASKED]), "it was found"
    assert offered(p) is not None
    assert await retained([*ASKED]), "chats are continued here"


async def test_a_chat_is_recognised_by_its_messages_where_that_is_wanted(
    start_router: StartRouter, p: MockEngine
) -> None:
    router = await start_router(conversation_ids=("conversation_id", "prefix"))
    for messages in (ASKED, AGAIN):
        await chat(router, messages, conversation_id=None, stream=True)
    assert offered(p) == KEPT
    assert turns(router, "hit") == 1


async def test_another_callers_id_is_worth_nothing(router: Router, p: MockEngine) -> None:
    await chat(router, ASKED, {"authorization": "Bearer alice"})
    await chat(router, AGAIN, {"authorization": "Bearer mallory"})
    assert offered(p) is None
    await chat(router, AGAIN, {"authorization": "Bearer alice"})
    assert offered(p) == KEPT


async def test_the_decoders_params_are_not_for_the_client(router: Router, d: MockEngine) -> None:
    for alone in (False, True):
        d.usual = decoding(alone=alone)
        streamed = await chat(router, ASKED, stream=True)
        assert "kv_transfer_params" not in streamed.text
        events = streamed.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    whole = (await chat(router, ASKED)).json()
    assert "kv_transfer_params" not in whole
    assert whole["choices"][0]["message"]["content"] == "fine"
    assert whole["usage"]["total_tokens"] == 602
    d.usual = decoding({"disaggregated_params": {"a": 1}})  # beside the params that are taken
    assert "disaggregated" not in (await chat(router, ASKED)).text


async def test_text_that_speaks_of_params_passes_untouched(router: Router, d: MockEngine) -> None:
    text = 'say "kv_transfer_params": {"a": 1}'
    d.usual = decoding({"content": text})
    streamed = await chat(router, ASKED, stream=True)
    parts = [json.loads(e[6:]) for e in streamed.text.split("\n\n") if e.startswith("data: {")]
    said = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert said == text


async def test_a_stream_that_comes_byte_by_byte_is_kept_and_cleaned(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    whole = b"".join(stream(SAID, KEPT, alone=False))

    async def slowly(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for start in range(0, len(whole), 7):
            await peer.send(chunk(whole[start : start + 7]))
        await peer.send(b"0\r\n\r\n")

    d.scripts = [slowly]
    answer = await chat(router, ASKED, stream=True)
    assert "kv_transfer_params" not in answer.text
    await chat(router, AGAIN)
    assert offered(p) == KEPT


CHANGES: dict[str, tuple[list[Any], dict[str, Any], str, str]] = {
    "answer edited": ([*ASKED, {**SAID, "content": "bad"}, *ASKED], {}, "cut", "history"),
    "tools": (AGAIN, {"tools": [{"type": "function"}]}, "mismatch", "tools"),
    "model": (AGAIN, {"model": "other"}, "mismatch", "model"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_stock_prefiller_pulls_nothing_that_is_not_surely_the_same(
    router: Router, p: MockEngine, change: str
) -> None:
    messages, fields, outcome, reason = CHANGES[change]
    await chat(router, ASKED)
    await chat(router, messages, **fields)
    pulled = offered(p)
    assert turns(router, outcome, reason) == 1
    if outcome == "mismatch":
        assert pulled is None
    else:
        # 600 prompt tokens, less a margin of 16, in whole blocks of 16.
        assert pulled == {**KEPT, "remote_block_ids": [list(range(36))], "remote_num_tokens": 576}


async def test_stripped_reasoning_is_cut_back_to_the_prompt(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    d.usual = decoding({"reasoning_content": "hm"})
    for streamed in (True, False):
        await chat(router, ASKED, stream=streamed)
        await chat(router, AGAIN)
        assert offered(p)["remote_num_tokens"] == 576
    assert turns(router, "cut", "reasoning") == 2


@pytest.mark.parametrize("change", CHANGES)
async def test_engines_that_prove_the_prefix_decide_for_themselves(
    router: Router, p: MockEngine, d: MockEngine, change: str
) -> None:
    p.usual, d.usual = (
        prefilling(prefix_proof=PROOF),
        decoding(kept={**KEPT, "prefix_proof": PROOF}),
    )
    messages, fields, _, reason = CHANGES[change]
    await chat(router, ASKED)
    await chat(router, messages, **fields)
    if reason == "model":
        assert offered(p) is None, "the same tokens have other KV in another model"
    else:
        assert offered(p) == {**KEPT, "prefix_proof": PROOF}


@pytest.mark.parametrize(("unproven", "tokens"), [("whole", 633), ("prompt", 576), ("off", None)])
async def test_how_much_is_trusted_without_proof_is_the_operators_choice(
    start_router: StartRouter, p: MockEngine, unproven: str, tokens: int | None
) -> None:
    router = await start_router(conversation_unproven=unproven)
    await chat(router, ASKED)
    await chat(router, AGAIN)
    pulled = offered(p)
    assert (None if pulled is None else pulled["remote_num_tokens"]) == tokens


@pytest.mark.parametrize("proof", [None, PROOF])
async def test_a_turn_that_may_be_dropped_is_offered_to_prefillers_that_hear_of_it_alone(
    router: Router, p: MockEngine, d: MockEngine, proof: Any
) -> None:
    """A stock engine would read it without asking."""
    kept = {**KEPT, "prefix_proof": PROOF, "revocable": True}
    p.usual, d.usual = prefilling(prefix_proof=proof), decoding(kept=kept)
    await chat(router, ASKED)
    await chat(router, AGAIN)
    assert offered(p) == (kept if proof else None)


async def test_a_turn_goes_back_to_its_decoder(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, p2: MockEngine
) -> None:
    router = await start_router(ps=[p, p2], ds=[d, d2], prefill_policy="session")
    everyone = (d, d2, p, p2)
    for name in "abcdef":
        await chat(router, ASKED, conversation_id=name)
        first = [len(engine.requests) for engine in everyone]
        await chat(router, AGAIN, conversation_id=name)
        again = [len(engine.requests) for engine in everyone]
        for engine in everyone:
            engine.requests.clear()
        assert sorted(first) == [0, 0, 1, 1]
        assert again == [2 * count for count in first]
    assert turns(router, "hit") == 6


async def test_an_entry_whose_decoder_is_gone_is_dropped(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(ds=[d, d2])
    await chat(router, ASKED)
    lost = d if d.requests else d2
    lost.healthy = False
    await eventually(lambda: len(router.gateway.fleet.usable_engines(EngineRole.DECODE)) == 1)
    await chat(router, AGAIN)
    assert offered(p) is None
    assert turns(router, "decoder_gone") == 1


async def test_a_conversation_moves_on_from_a_decoder_that_drains(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    """It is not asked any more, and what it keeps is read from it all the same."""
    router = await start_router(ds=[d, d2])
    await chat(router, ASKED)
    home, next_home = (d, d2) if d.requests else (d2, d)
    router.gateway.fleet.set_intent(router.engine(home), Intent.DRAINING)
    await chat(router, AGAIN)
    assert offered(p) is not None
    assert next_home.requests
    assert len(home.requests) == 1
    assert turns(router, "hit") == 1


async def test_an_entry_from_before_its_decoder_was_lost_is_dropped(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    await chat(router, ASKED)
    d.healthy = False
    await eventually(lambda: router.gateway.fleet.unavailable_roles())
    d.healthy = True
    await eventually(lambda: not router.gateway.fleet.unavailable_roles())
    await chat(router, AGAIN)
    assert offered(p) is None
    assert turns(router, "decoder_gone") == 1


async def test_an_entry_of_another_engine_at_the_same_address_is_dropped(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    await chat(router, ASKED)
    d.usual = decoding(kept={**KEPT, "remote_engine_id": "decoder-2"})
    await chat(router, ASKED, conversation_id="another")
    await chat(router, AGAIN)
    assert offered(p) is None
    assert turns(router, "decoder_gone") == 1


async def test_the_ranks_of_one_engine_are_one_engine(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    for rank, name in enumerate("ab"):
        d.usual = decoding(kept={**KEPT, "remote_engine_id": f"decoder-1_dp{rank}"})
        await chat(router, ASKED, conversation_id=name)
    await chat(router, AGAIN, conversation_id="a")
    assert offered(p)["remote_engine_id"] == "decoder-1_dp0"


async def test_an_entry_that_is_too_old_is_not_used_and_counted(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    until = time.time() + 1
    d.usual = decoding(kept={**KEPT, "retained_until": until})
    await chat(router, ASKED)
    await eventually(lambda: time.time() > until)
    await chat(router, AGAIN)
    assert offered(p) is None
    assert turns(router, "expired") == 1


async def test_an_overloaded_decoder_is_left(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    release = asyncio.Event()
    router = await start_router(ds=[d, d2], affinity_load_floor=2, affinity_load_factor=1.0)
    await chat(router, ASKED)
    home = d if d.requests else d2
    engine = router.gateway.fleet.find_alive(f"127.0.0.1:{home.port}")
    assert engine is not None
    home.usual = answer_after(release, usual_decode)
    waiting: list[asyncio.Task[Any]] = []
    while engine.in_flight < 3:
        waiting.append(asyncio.create_task(router.complete()))
        count = len(waiting)
        await eventually(lambda n=count: sum(len(e.requests) for e in (d, d2)) > n)  # type: ignore[misc] # the default binds the loop's value
    await chat(router, AGAIN)
    assert offered(p) is None
    assert turns(router, "decoder_overloaded") == 1
    release.set()
    await asyncio.gather(*waiting)


async def test_a_failed_pull_is_tried_again_without_and_nobody_hears_of_it(
    router: Router, p: MockEngine
) -> None:
    await chat(router, ASKED)
    p.scripts = [answering(500, {"error": {"message": "load failed"}})]
    await chat(router, AGAIN)
    _, first, second = p.requests
    assert first.json["kv_transfer_params"]["remote_block_ids"] is not None
    assert second.json["kv_transfer_params"]["remote_block_ids"] is None
    assert first.header("x-request-id") != second.header("x-request-id")
    assert turns(router, "failed") == 1


async def test_a_leg_that_uses_an_entry_up_is_never_sent_twice(
    router: Router, p: MockEngine
) -> None:
    """A kept connection may die unseen; what is sent again elsewhere is a leg without reuse."""
    await chat(router, ASKED)
    p.scripts = [reset]
    await chat(router, AGAIN)
    pulls = [r for r in p.requests if r.json["kv_transfer_params"]["remote_block_ids"] is not None]
    assert len(pulls) == 1
    assert len(p.requests) == 3


async def test_several_answers_reuse_nothing_and_leave_the_entry(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    await chat(router, ASKED)
    await chat(router, AGAIN, n=2)
    assert "kv_transfer_params" not in d.last.json
    assert "conversation_id" not in d.last.json
    await chat(router, AGAIN)
    assert offered(p) == KEPT


async def test_stock_streams_bring_no_reuse_and_the_log_says_what_would(
    router: Router, p: MockEngine, d: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    d.usual = decoding(in_stream=False)
    for name in "abc":
        await chat(router, ASKED, conversation_id=name, stream=True)
    await chat(router, AGAIN, conversation_id="a", stream=True)
    assert offered(p) is None
    (said,) = [r.getMessage() for r in caplog.records if "conversation_stream exact" in r.message]
    assert str(d.port) in said
    assert router.metric("conversation_kept_total", outcome="not_offered") == 4


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_engines_that_offer_no_turns_are_named_once_and_what_would_help(
    router: Router,
    p: MockEngine,
    d: MockEngine,
    fields: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    d.usual = decoding(kept=None)
    for engine in (p, d):
        router.engine(engine).capabilities.note_identity(
            {"capabilities": ["prefix_proof", "release"]}
        )
    for name in "abcde":
        await chat(router, ASKED, conversation_id=name, **fields)
    said = [r.getMessage() for r in caplog.records if r.name == "disagg_router.proxy"]
    assert len(said) == 2, "one for each engine"
    for line in said:
        assert '"bidirectional_kv_xfer": true' in line
        assert "exact" not in line
        assert str(p.port) in line or str(d.port) in line


async def test_engines_that_offer_turns_are_not_warned_of(
    router: Router, p: MockEngine, d: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    identity: dict[str, object] = {"capabilities": ["prefix_proof", "release", "turns"]}
    for engine in (p, d):
        router.engine(engine).capabilities.note_identity(identity)
    await chat(router, ASKED)
    assert "bidirectional" not in caplog.text


@pytest.mark.parametrize("how", ["setting", "field", "header"])
async def test_exact_streams_are_made_from_whole_answers_and_reused(
    start_router: StartRouter, p: MockEngine, d: MockEngine, how: str
) -> None:
    d.usual = decoding({"tool_calls": [TOOL_CALL]}, in_stream=False)
    router = await start_router(conversation_stream="exact" if how == "setting" else "auto")
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k") as client:
        answer = await client.chat.completions.create(
            model="m",
            messages=ASKED,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"conversation_id": "c"}
            | ({"conversation_stream": "exact"} if how == "field" else {}),
            extra_headers={"x-conversation-stream": "exact"} if how == "header" else {},
        )
        parts = [part async for part in answer]
    assert d.last.json["stream"] is False
    assert "stream_options" not in d.last.json
    assert "conversation_stream" not in d.last.json
    said = [part.choices[0].delta for part in parts if part.choices]
    assert "".join(part.content or "" for part in said) == "fine"
    (call,) = [call for part in said for call in part.tool_calls or []]
    assert call.function is not None
    assert call.function.arguments == "{}"
    assert parts[-1].usage is not None
    assert parts[-1].usage.total_tokens == 602
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "stop"
    said_again = [*ASKED, {**SAID, "tool_calls": [TOOL_CALL]}, *ASKED]
    await chat(router, said_again, {"authorization": "Bearer k"}, conversation_stream="auto")
    assert offered(p) is not None


TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_tool_calls_that_are_streamed_in_pieces_are_recognised_when_they_come_back(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    pieces = [
        {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 1, "id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": " 1}"}},
    ]

    async def calls(request: Received, peer: Peer) -> None:
        parts = [delta({"role": "assistant", "content": None})]
        parts += [delta({"tool_calls": [piece]}) for piece in pieces]
        parts.append(delta({}, "tool_calls", kv_transfer_params=KEPT))
        await peer.stream(*map(sse, parts), DONE)

    d.scripts = [calls]
    await chat(router, ASKED, stream=True)
    first, second = (
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in (("1", "f", '{"a": 1}'), ("2", "g", "{}"))
    )
    said = {"role": "assistant", "content": None, "tool_calls": [first, second]}
    results = [{"role": "tool", "tool_call_id": id, "content": "5"} for id in "12"]
    await chat(router, [*ASKED, said, *results])
    assert turns(router, "cut", "rendering") == 1, "as it was said, but rendered by the template"
    assert offered(p)["remote_num_tokens"] == 576


async def test_a_mode_that_does_not_exist_is_a_bad_request(router: Router) -> None:
    body = {"messages": ASKED, "conversation_id": "c", "conversation_stream": "magic"}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "conversation_stream" in answer.json()["error"]["message"]


async def test_a_mode_is_checked_without_a_conversation_too(router: Router, p: MockEngine) -> None:
    for mode in ("magic", "", ["exact"]):
        body = {"messages": ASKED, "conversation_stream": mode}
        answer = await router.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
    assert not p.requests


async def test_ids_are_consumed_of_requests_that_bring_their_own_params(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(trust_client_kv_params=True)
    await chat(router, ASKED, kv_transfer_params=PARAMS, conversation_stream="auto")
    assert d.last.json["kv_transfer_params"] == PARAMS
    assert {"conversation_id", "conversation_stream"}.isdisjoint(d.last.json)


@pytest.mark.parametrize("streamed", [True, False])
async def test_params_that_say_why_an_answer_ended_are_nothing_to_pull(
    router: Router, p: MockEngine, d: MockEngine, streamed: bool
) -> None:
    """A preempted turn: the decoder has begun to answer, and then rejects."""
    d.usual = decoding(kept={"cache_hit_rate": 0.25, "cache_hit_threshold": 0.5})
    answer = await chat(router, ASKED, stream=streamed)
    assert "cache_hit_rate" not in answer.text
    await chat(router, AGAIN)
    assert offered(p) is None
    assert router.metric("conversation_kept_total", outcome="not_offered") == 2


@pytest.mark.parametrize("value", [None, "", 5, True, [], {"id": "x"}, "x" * 100_000, "\x00 é\n"])
async def test_whatever_a_conversation_id_is_the_request_is_answered(
    router: Router, p: MockEngine, value: object
) -> None:
    body = {"model": "m", "messages": ASKED, "conversation_id": value}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert "conversation_id" not in p.last.json


async def test_without_a_store_nothing_is_kept_and_ids_are_still_consumed(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(conversation_store="off")
    for messages in (ASKED, AGAIN):
        await chat(router, messages)
    assert offered(p) is None
    assert d.last.json["kv_transfer_params"] == {**PARAMS, "retain": False}
    assert "conversation_id" not in d.last.json


async def test_plain_requests_ask_a_decoder_to_keep_nothing(router: Router, d: MockEngine) -> None:
    await router.complete()
    assert d.last.json["kv_transfer_params"] == {**PARAMS, "retain": False}


async def test_a_broken_stream_leaves_nothing(router: Router, p: MockEngine, d: MockEngine) -> None:
    async def breaks(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("a")))
        peer.reset()

    d.scripts = [breaks]
    answer = await chat(router, ASKED, stream=True)
    assert "error" in answer.text
    await chat(router, AGAIN)
    assert offered(p) is None
