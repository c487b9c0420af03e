"""SGLang's prefill and decode engines: both legs at once, which meet in a room."""

import asyncio
import json
from itertools import count
from typing import Any

import httpx
import pytest

from router.fleet.kv_protocol import KvProtocol
from router.proxy import messages
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, raw
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.sglang_engine import (
    DECODE,
    MAX_ROOM,
    NULL,
    PREFILL,
    Rooms,
    SGLangEngine,
)

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_completion_tokens": 7}
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@pytest.fixture
def rooms() -> Rooms:
    return Rooms()


@pytest.fixture
def prefiller(p: MockEngine, rooms: Rooms) -> SGLangEngine:
    return SGLangEngine(p, PREFILL, rooms)


@pytest.fixture
def decoder(d: MockEngine, rooms: Rooms) -> SGLangEngine:
    return SGLangEngine(d, DECODE, rooms)


@pytest.fixture
async def sglang_router(
    start_router: StartRouter, prefiller: SGLangEngine, decoder: SGLangEngine
) -> Router:
    router = await start_router()
    await router.knows_its_engines()
    return router


async def ask_chat(router: Router, **fields: Any) -> httpx.Response:
    return await router.client.post("/v1/chat/completions", json=CHAT | fields)


def last_legs(*engines: SGLangEngine) -> list[dict[str, Any]]:
    return [engine.bodies[-1] for engine in engines]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_both_legs_meet_in_a_room_and_the_client_gets_the_decode_engines_answer(
    sglang_router: Router, prefiller: SGLangEngine, decoder: SGLangEngine, is_stream: bool
) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if is_stream else {}
    sampling = {"min_tokens": 3, "temperature": 0.5, "top_k": 4, "logprobs": 2, "echo": True}
    answer = await sglang_router.complete(stream=is_stream, **options, **sampling)
    assert answer.status_code == 200
    if is_stream:
        assert answer.content.count(b"data: ") == 3
    else:
        assert answer.json()["choices"][0]["text"] == "ab"
    chat = await ask_chat(sglang_router, stream=is_stream, **options)
    assert chat.status_code == 200
    if not is_stream:
        assert chat.json()["choices"][0]["message"]["content"] == "ab"
    for given_p, given_d in zip(prefiller.bodies, decoder.bodies, strict=True):
        assert given_p["stream"] is False
        assert "stream_options" not in given_p
        assert given_d["stream"] is is_stream
        shared = given_d.keys() - {"stream", "stream_options"}
        assert {name: given_p[name] for name in shared} == {name: given_d[name] for name in shared}
        assert given_d["bootstrap_host"] == "127.0.0.1"
        assert not {"kv_transfer_params", "cache_hit_threshold", "return_token_ids"} & shared
    completion, chat_leg = prefiller.bodies
    assert sampling.items() <= completion.items()
    assert (completion["max_tokens"], chat_leg["max_completion_tokens"]) == (7, 7)
    assert completion["bootstrap_room"] != chat_leg["bootstrap_room"]
    assert completion["rid"] != chat_leg["rid"]


async def test_prompts_of_a_list_meet_in_rooms_that_follow(
    sglang_router: Router, rooms: Rooms, decoder: SGLangEngine
) -> None:
    for prompt in (["x", "y"], [[1], [2]]):
        answer = await sglang_router.complete(prompt=prompt)
        assert answer.status_code == 200
        assert [one["index"] for one in answer.json()["choices"]] == [0, 1]
    first = decoder.bodies[0]["bootstrap_room"]
    assert [number - first for _, _, number, _ in [*rooms.rooms][:2]] == [0, 1]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_request_for_several_answers_is_refused_as_sglang_never_ends_it(
    sglang_router: Router, prefiller: SGLangEngine, decoder: SGLangEngine, is_stream: bool
) -> None:
    for answer in (
        await sglang_router.complete(n=2, stream=is_stream),
        await ask_chat(sglang_router, n=2, stream=is_stream),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"
    assert not prefiller.bodies
    assert not decoder.bodies
    assert (await sglang_router.complete(n=1)).status_code == 200


async def test_turn_of_a_conversation_is_served_without_reuse(
    sglang_router: Router, decoder: SGLangEngine
) -> None:
    for _ in range(2):
        answer = await ask_chat(sglang_router, conversation_id="c")
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "ab"
    assert "kv_transfer_params" not in decoder.bodies[-1]


@pytest.mark.parametrize("by", ["header", "routed_dp_rank", "data_parallel_rank"])
async def test_both_engines_meet_at_the_rank_that_the_client_names(
    start_router: StartRouter, p: MockEngine, d: MockEngine, by: str
) -> None:
    rooms = Rooms(dp_size=4)
    prefiller, decoder = SGLangEngine(p, PREFILL, rooms), SGLangEngine(d, DECODE, rooms)
    router = await start_router()
    await router.knows_its_engines()
    for rank in range(4):
        body: dict[str, Any] = {"model": "m", "prompt": "x"}
        headers = {}
        if by == "header":
            headers["X-data-parallel-rank"] = str(rank)
        else:
            body[by] = rank
        answer = await router.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        hints = [leg["disagg_prefill_dp_rank"] for leg in last_legs(prefiller, decoder)]
        assert hints == [rank, rank]
    for value in ("4", "-1"):
        headers = {"X-data-parallel-rank": value}
        body = {"model": "m", "prompt": "x"}
        answer = await router.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 400
    assert (await router.complete()).status_code == 200, "no rank was named"


async def test_rooms_and_rids_of_clients_do_not_reach_engines(
    sglang_router: Router, prefiller: SGLangEngine, decoder: SGLangEngine
) -> None:
    evil = {"bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 7, "rid": "evil"}
    body = {"model": "m", "prompt": "x", "disagg_prefill_dp_rank": 9, **evil}
    headers = {f"x-override-{name.replace('_', '-')}": str(value) for name, value in evil.items()}
    headers["x-override-disagg-prefill-dp-rank"] = "9"
    answer = await sglang_router.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    for engine in (prefiller, decoder):
        leg = engine.bodies[-1]
        assert not any(leg[name] == value for name, value in evil.items())
        assert "disagg_prefill_dp_rank" not in leg
        assert not [name for name, _ in engine.engine.last.headers if "override" in name]


async def test_rooms_are_below_the_limit_of_the_engines(
    sglang_router: Router, decoder: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = "router.proxy.kv_protocols.sglang.getrandbits"
    monkeypatch.setattr(largest, lambda bits: (1 << bits) - 1)
    assert (await sglang_router.complete(prompt=["x"] * 50)).status_code == 200
    assert decoder.bodies[-1]["bootstrap_room"] < MAX_ROOM - (1 << 60)


@pytest.mark.parametrize("alone", ["refuse", "decode"])
async def test_decode_engine_gets_nothing_without_a_prefill_engine(
    start_router: StartRouter,
    p: MockEngine,
    prefiller: SGLangEngine,
    decoder: SGLangEngine,
    alone: str,
) -> None:
    router = await start_router(without_prefiller=alone)
    await router.knows_its_engines()
    await p.stop()
    await eventually(lambda: not router.engine(p).is_usable)
    answer = await router.complete()
    assert answer.status_code == 503
    assert not decoder.bodies


@pytest.mark.parametrize("fails", [PREFILL, DECODE])
@pytest.mark.parametrize("how", ["500", "dies", "error event"])
async def test_failed_leg_aborts_the_other_at_once_and_the_next_attempt_has_a_new_room(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    rooms: Rooms,
    prefiller: SGLangEngine,
    decoder: SGLangEngine,
    fails: str,
    how: str,
) -> None:
    failing, waiting = (prefiller, decoder) if fails == PREFILL else (decoder, prefiller)
    seen: list[dict[str, Any]] = []
    content = {"object": "error", "message": "Decode handshake failed", "type": "500", "code": 500}
    event = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"error": content}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    script = {"500": answering(500, content), "dies": raw(b""), "error event": raw(head + event)}

    async def fail(request: Received, peer: Peer) -> None:
        seen.append(request.json)
        await eventually(lambda: waiting.legs)
        await script[how](request, peer)

    async with running_engine(fail) as p2, running_engine(fail) as d2:
        other = p2 if fails == PREFILL else d2
        SGLangEngine(other, fails, rooms)
        failing.engine.scripts = [fail]
        router = await start_router(
            ps=[p, p2] if fails == PREFILL else [p], ds=[d, d2] if fails == DECODE else [d]
        )
        await router.knows_its_engines()
        answer = await router.complete(stream=how == "error event")
    assert answer.status_code == 200
    assert b"error" not in answer.content
    (failed,) = seen
    await eventually(lambda: waiting.aborted == [failed["rid"]])
    first, second = waiting.bodies
    assert first["bootstrap_room"] == failed["bootstrap_room"] != second["bootstrap_room"]
    assert first["rid"] != second["rid"]
    await eventually(lambda: not waiting.legs)


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
async def test_client_that_disconnects_leaves_no_leg_that_waits(
    sglang_router: Router, p: MockEngine, decoder: SGLangEngine, prompt: object
) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def wait(request: Received, peer: Peer) -> None:
        came.set()
        await peer.wait_left()
        left.set()

    p.scripts = [wait]
    async with sglang_router.socket() as client:
        await client.send(post(json.dumps({"model": "m", "prompt": prompt}).encode()))
        await asyncio.wait_for(came.wait(), 5)
        await eventually(lambda: decoder.legs)
    await asyncio.wait_for(left.wait(), 5)
    await eventually(lambda: not decoder.legs)
    await sglang_router.settled()
    aborts = [[r.json for r in e.requests if "abort" in r.path] for e in (p, decoder.engine)]
    rid = decoder.bodies[0]["rid"]
    assert aborts == [[{"rid": rid}], [{"rid": rid}]]


async def test_abort_ends_no_leg_of_another_request(
    start_router: StartRouter,
    d: MockEngine,
    prefiller: SGLangEngine,
    decoder: SGLangEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang ends all rids that begin with the given one, and clients may share X-Request-Ids."""
    monkeypatch.setattr(messages, "_legs", count())
    router, number = await start_router(), 12
    await router.knows_its_engines()
    come = asyncio.Event()

    async def late(request: Received, peer: Peer) -> None:
        await come.wait()
        await decoder.answer(request, peer)

    async def ask() -> httpx.Response:
        body = {"model": "m", "prompt": "x"}
        headers = {"X-Request-Id": "one"}
        return await router.client.post("/v1/completions", json=body, headers=headers)

    d.scripts = [late] * number
    asking = [asyncio.create_task(ask()) for _ in range(number)]
    await eventually(lambda: len(prefiller.legs) == number)
    rids = [*prefiller.legs]
    assert not any(a != b and a.startswith(b) for a in rids for b in rids)
    come.set()
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_sglang_and_nixl_engines_of_one_group_are_no_pair(
    start_router: StartRouter, d: MockEngine, prefiller: SGLangEngine
) -> None:
    router = await start_router(ds=[d])
    await router.knows_its_engines()
    assert (await router.complete()).status_code == 503
    assert not prefiller.bodies
    assert not d.requests


# How the router finds out that an engine is one of SGLang.


@pytest.mark.parametrize("page", ["/server_info", "/get_server_info"])
async def test_bootstrap_port_is_read_from_either_page(
    start_router: StartRouter, p: MockEngine, d: MockEngine, rooms: Rooms, page: str
) -> None:
    prefiller = SGLangEngine(p, PREFILL, rooms, port=9001)
    decoder = SGLangEngine(d, DECODE, rooms, port=9002)
    for engine in (p, d):
        engine.pages[page] = engine.pages.pop("/server_info")
    router = await start_router()
    await router.knows_its_engines()
    assert (await router.complete()).status_code == 200
    assert [leg["bootstrap_port"] for leg in last_legs(prefiller, decoder)] == [9001, 9001]
    kinds = [engine.kv_protocol for engine in router.gateway.fleet.engines]
    assert kinds == [KvProtocol.SGLANG, KvProtocol.SGLANG]


async def test_configured_engines_without_a_page_have_the_configured_port(
    start_router: StartRouter, p: MockEngine, d: MockEngine, rooms: Rooms
) -> None:
    prefiller = SGLangEngine(p, PREFILL, rooms, port=9001)
    SGLangEngine(d, DECODE, rooms)
    p.pages, d.pages = {}, {}
    router = await start_router(kv_protocol="sglang", bootstrap_port=9001)
    await router.knows_its_engines()
    assert (await router.complete()).status_code == 200
    assert prefiller.bodies[-1]["bootstrap_port"] == 9001


async def test_engine_that_moves_no_kv_answers_alone(
    start_router: StartRouter, p: MockEngine, d: MockEngine, rooms: Rooms
) -> None:
    prefiller, decoder = SGLangEngine(p, NULL, rooms), SGLangEngine(d, NULL, rooms)
    router = await start_router(without_prefiller="decode")
    await router.knows_its_engines()
    for answer in (await router.complete(rid="mine"), await router.stream(rid="mine")):
        assert answer.status_code == 200
    assert not prefiller.bodies
    assert not {*BOOTSTRAP} & decoder.bodies[-1].keys()
