"""Turns on stock engines, which match KV by position: the router offers what tokens prove."""

import json
import random
from typing import Any

import pytest

from scripts.mock_engine import MockEngine, Peer, Received, is_release
from tests.moving_templates import TEMPLATES
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.stock_engines import BLOCK, StockPair
from tests.unit.router.engine_scripts import fails
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import running_engine

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LONG = "a question of many words that fills some blocks of the cache " * 12
SECRET_FIELDS = ('token_ids":[', 'token_ids": [', "kv_transfer_params", "remote_host")


def question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def start_pair(
    start_router: StartRouter, p: MockEngine, d: MockEngine, pair: StockPair, **settings: Any
) -> Router:
    p.usual, d.usual = pair.prefill, pair.decode
    return await start_router(**{"conversation_unproven": "tokens"} | settings)


async def chat_turn(router: Router, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Return the answer's message. A client sees no ids that it has not asked for."""
    body = {"model": "m", "messages": messages, "conversation_id": "c", **fields}
    answer = await router.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert not any(name in answer.text for name in SECRET_FIELDS)
    if not fields.get("stream"):
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message
    said: dict[str, Any] = {"role": "assistant", "content": None}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            if "tool_calls" in delta:
                said["tool_calls"] = [dict(call) for call in delta["tool_calls"]]
            said["content"] = delta.get("content") or said["content"]
    return said


async def proven(router: Router) -> None:
    """Wait until the prompts that were tokenized for comparison are compared."""
    await eventually(lambda: not router.gateway.tasks.background)


async def ask_twice(router: Router, first: dict[str, Any]) -> None:
    messages = [first]
    messages += [await chat_turn(router, messages), question("and now?")]
    await proven(router)
    await chat_turn(router, messages)


def last_leg(engine: MockEngine) -> Any:
    """Return the body of the last request leg. A release of unread KV may arrive before or after
    the decode leg."""
    return next(one for one in reversed(engine.requests) if not is_release(one)).json


def outcomes(router: Router, *names: str) -> list[float]:
    pairs = [(name.partition(" ")[0], name.partition(" ")[2]) for name in names]
    return [
        router.metric("conversation_turns_total", outcome=outcome, reason=reason)
        for outcome, reason in pairs
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "outcome"),
    [
        ("appends", "hit"),
        ("thought at the end", "cut rendering"),
        ("thought in steps", "cut rendering"),
        ("date", "mismatch rendering"),
    ],
)
async def test_second_question_reads_the_blocks_that_its_tokens_begin_with(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    template: str,
    outcome: str,
    stream: bool,
) -> None:
    pair = StockPair(template)
    router = await start_pair(start_router, p, d, pair)
    messages = [question(LONG)]
    messages += [await chat_turn(router, messages, stream=stream), question("and now?")]
    await proven(router)
    if template == "date":  # known to differ from one rendering to the next
        outcome = "mismatch unproven"
    await chat_turn(router, messages, stream=stream)
    assert pair.wrong == []
    assert outcomes(router, outcome) == [1]
    if outcome == "hit":
        assert pair.read == pair.held > 0
    elif outcome.startswith("cut"):
        assert 0 < pair.read < pair.held
        assert pair.read % BLOCK == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", ["thought in steps", "tools move"])
async def test_question_after_a_tool_loop_reads_no_kv_of_other_tokens(
    start_router: StartRouter, p: MockEngine, d: MockEngine, template: str, stream: bool
) -> None:
    pair = StockPair(template)
    router = await start_pair(start_router, p, d, pair)
    fields = {"tools": [TOOL], "stream": stream}
    messages = [question(LONG)]
    for _ in range(3):
        messages.append(await chat_turn(router, messages, **fields))
        messages.append({"role": "tool", "tool_call_id": "c", "content": "found " * 40})
        messages.append(await chat_turn(router, messages, **fields))
        messages.append(question("and now?"))
        await proven(router)
    assert pair.wrong == []
    assert pair.read > 0


async def test_reasoning_is_tokenized_under_the_name_that_tokenize_reads(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    pair = StockPair("appends")
    router = await start_pair(start_router, p, d, pair)
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    await chat_turn(router, [question(LONG), answer, question("and now?")])
    await proven(router)
    tokenized = {"role": "assistant", "content": "yes", "reasoning": "hm"}
    assert pair.tokenized[-1]["messages"][1] == tokenized
    assert last_leg(d)["messages"][1] == answer


async def test_ids_of_the_prompt_are_the_prompt_of_both_legs(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """So a date that changes between two renderings changes neither leg."""
    pair = StockPair("appends")
    router = await start_pair(start_router, p, d, pair)
    messages = [question(LONG)]
    messages += [await chat_turn(router, messages), question("and now?")]
    await proven(router)
    await chat_turn(router, messages)
    ids = p.last.json["kv_transfer_params"]["prompt_token_ids"]
    assert ids == d.last.json["kv_transfer_params"]["prompt_token_ids"] == pair.prompts[-1]


@pytest.mark.parametrize("fault", ["404", "other ids", "no ids of the answer", "reasons"])
async def test_without_proven_ids_no_kv_is_offered(
    start_router: StartRouter, p: MockEngine, d: MockEngine, fault: str
) -> None:
    pair = StockPair("appends")
    pair.tokenize_status = 404 if fault == "404" else 200
    pair.tokenizes_wrongly = fault == "other ids"
    pair.says_ids = fault != "no ids of the answer"
    fields: dict[str, Any] = {"documents": [{"text": "x"}]} if fault == "reasons" else {}
    router = await start_pair(start_router, p, d, pair)
    messages = [question(LONG)]
    messages += [await chat_turn(router, messages, **fields), question("and now?")]
    await proven(router)
    await chat_turn(router, messages, **fields)
    assert (pair.read, pair.wrong) == (0, [])
    assert outcomes(router, "mismatch unproven") == [1]


async def test_engine_that_computes_another_prompt_than_it_was_given_is_not_decoded_from(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """An old release that ignores the ids, and a template that changes between two renderings."""
    pair = StockPair("appends")
    router = await start_pair(start_router, p, d, pair, without_prefiller="decode")
    messages = [question(LONG)]
    messages += [await chat_turn(router, messages), question("and now?")]
    await proven(router)
    pair.takes_ids, pair.changes = False, [9]
    await chat_turn(router, messages)
    assert last_leg(d)["kv_transfer_params"] == {"retain": True}
    assert router.metric("decode_only_total", reason="tokens_differ") == 1


async def test_ids_of_the_prefill_engine_are_checked_whatever_the_decode_engine_retains(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Streams of vLLM 0.32 retain nothing, but may read what a whole answer has left."""
    pair = StockPair("appends")
    pair.streams_params = False
    router = await start_pair(start_router, p, d, pair, without_prefiller="decode")
    for number in range(3):
        await chat_turn(router, [question(LONG)], stream=True, conversation_id=str(number))
    messages = [question(LONG)]
    messages += [await chat_turn(router, messages), question("and now?")]
    await proven(router)
    pair.takes_ids, pair.changes = False, [9]
    await chat_turn(router, messages, stream=True)
    assert last_leg(d)["kv_transfer_params"] == {"retain": True}
    assert router.metric("decode_only_total", reason="tokens_differ") == 1


async def test_engines_that_change_token_ids_read_nothing(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    pair = StockPair("appends")
    router = await start_pair(start_router, p, d, pair)
    first, second = list(range(100, 140)), [*range(120, 136), *range(900, 940)]
    for prompt in (first, second):
        asked = {"model": "m", "prompt": prompt, "conversation_id": "c", "max_tokens": 10}
        cut = {"truncate_prompt_tokens": 20, "truncation_side": "left"}
        answer = await router.client.post("/v1/completions", json={**asked, **cut})
        assert answer.status_code == 200
    assert (pair.read, pair.wrong) == (0, [])


async def test_turn_whose_legs_computed_different_prompts_is_not_reused(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Midnight between the legs of the first turn: its KV is of the day before."""
    pair = StockPair("appends")

    async def decode_a_day_later(request: Received, peer: Peer) -> None:
        pair.changes = [2]
        await pair.decode(request, peer)

    pair.changes = [1]
    router = await start_pair(start_router, p, d, pair)
    d.usual = decode_a_day_later
    await ask_twice(router, question(LONG))
    assert pair.read == 0


async def test_ids_that_are_missing_prove_nothing(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    pair = StockPair("appends")
    pair.untold = [7] * 48
    router = await start_pair(start_router, p, d, pair)
    await ask_twice(router, question(LONG))
    assert pair.read == 0


@pytest.mark.parametrize("part", [{"image_url": "http://x/cat.png"}, {"uuid": "u"}])
async def test_part_of_a_message_that_may_be_an_image_proves_nothing(
    start_router: StartRouter, p: MockEngine, d: MockEngine, part: dict[str, str]
) -> None:
    """vLLM goes by the keys of a part, too, and an image's placeholder ids are those of any."""
    pair = StockPair("appends")
    router = await start_pair(start_router, p, d, pair)
    asked = {"role": "user", "content": [{"type": "text", "text": LONG, **part}]}
    await ask_twice(router, asked)
    assert pair.read == 0


async def test_ids_of_one_group_are_not_the_prompt_in_another(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """During an upgrade two groups serve one model, with other templates."""
    pair, newer = StockPair("appends"), StockPair("thought at the end")
    async with running_engine(newer.prefill) as p2, running_engine(newer.decode) as d2:
        for number, engine in enumerate((p, d, p2, d2)):
            engine.identity = identity_in("aa" if engine in (p, d) else "bb", f"engine-{number}")
        router = await start_pair(start_router, p, d, pair, ps=[p, p2], ds=[d, d2])
        await router.knows_its_engines()
        number = 0
        while not d.requests:
            number += 1
            messages = [question(f"{number} {LONG}")]
            messages.append(await chat_turn(router, messages, conversation_id=str(number)))
            await proven(router)

        async def broken(request: Received, peer: Peer) -> None:
            await (pair.prefill if request.path == "/tokenize" else fails)(request, peer)

        p.usual = broken
        newer.prompts.clear()
        messages.append(question("and now?"))
        await chat_turn(router, messages, conversation_id=str(number))
        assert newer.prompts == [newer.render({"messages": messages})]


def identity_in(group: str, engine_id: str) -> dict[str, Any]:
    where = {"remote_engine_id": engine_id, "remote_host": "10.9.8.7", "remote_port": 5600}
    rank = {"compatibility_hash": group, "tp_size": 1, "block_size": BLOCK, **where}
    return {"versions": {}, "ranks": [rank], "transfer_modes": ["pull"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("declined", [False, 0, "false", "off"])
async def test_ids_that_the_client_declines_do_not_reach_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine, declined: object, stream: bool
) -> None:
    router = await start_pair(start_router, p, d, StockPair("appends"))
    await chat_turn(router, [question(LONG)], stream=stream, return_token_ids=declined)


async def test_ids_that_the_client_asks_for_reach_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    pair = StockPair("appends")
    router = await start_pair(start_router, p, d, pair)
    body = {"model": "m", "messages": [question(LONG)], "conversation_id": "c"}
    whole = await router.client.post(CHAT, json={**body, "return_token_ids": True})
    assert whole.json()["prompt_token_ids"] == pair.prompts[-1]
    assert whole.json()["choices"][0]["token_ids"]
    streamed = await router.client.post(
        CHAT, json={**body, "return_token_ids": True, "stream": True}
    )
    assert streamed.text.count('"token_ids"') == 2


async def test_engines_that_retain_nothing_are_not_asked_for_ids_for_ever(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    pair = StockPair("appends")
    pair.retains = False
    router = await start_pair(start_router, p, d, pair)
    for number in range(4):
        await chat_turn(router, [question(LONG)], conversation_id=str(number))
    assert [bool(one.json.get("return_token_ids")) for one in d.requests] == [True] * 3 + [False]


@pytest.mark.parametrize("template", TEMPLATES)
async def test_no_edited_conversation_reads_kv_of_other_tokens(
    start_router: StartRouter, p: MockEngine, d: MockEngine, template: str
) -> None:
    """40 conversations of each kind: edits, tools that come and go, other template arguments."""
    rng, pair = random.Random(template), StockPair(template)
    router = await start_pair(start_router, p, d, pair)
    for number in range(40):
        fields: dict[str, Any] = {"conversation_id": f"c{number}", "stream": rng.random() < 0.5}
        messages: list[Any] = [question(f"{rng.random()} {LONG}")]
        for _ in range(4):
            if rng.random() < 0.2:
                fields["tools"] = [TOOL] if "tools" not in fields else []
            answer = await chat_turn(router, messages, **fields)
            messages.append(answer)
            if answer.get("tool_calls"):
                messages.append({"role": "tool", "tool_call_id": "c", "content": "found " * 40})
            else:
                messages.append(question("and " * rng.randrange(1, 60)))
            if rng.random() < 0.2:
                edited = rng.randrange(len(messages))
                messages[edited] = {**messages[edited], "content": "edited " * 30}
    assert pair.wrong == []
    assert template == "date" or pair.read > 0


async def test_another_engine_of_the_group_tokenizes_as_well(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    pair = StockPair("appends")
    async with running_engine(pair.prefill) as other:
        p.usual, d.usual = pair.prefill, pair.decode
        router = await start_router(ps=[p, other], conversation_unproven="tokens")
        messages = [question(LONG)]
        messages += [await chat_turn(router, messages), question("and now?")]
        await proven(router)
        await chat_turn(router, messages)
        assert {bool(p.requests), bool(other.requests)} == {True}
        assert outcomes(router, "hit") == [1]
