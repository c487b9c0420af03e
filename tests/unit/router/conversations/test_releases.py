"""KV that nobody will read is given back at once: a prefill's, and a last turn's on its decoder."""

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from router.conversations.store import MemoryStore
from router.fleet.engine import Engine, EngineRole
from router.proxy.relay import TurnTail
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk, is_release
from tests.redis_server import running_redis
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import KEPT, PROOF, decoding, prefilling, stream
from tests.unit.router.conversations.store_wrapper import StoreWrapper
from tests.unit.router.conversations.test_turns import AGAIN, ASKED, SAID, chat, offered, turns
from tests.unit.router.engine_scripts import answering, hanging, reset
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import PARAMS, running_engine

PAGE = "/disagg/release"
CAPABLE = {"capabilities": ["cache_hit_threshold", "release"]}


async def heard(router: Router, role: EngineRole) -> Engine:
    """The engine of that role, once the router knows that it has the page."""
    (engine,) = router.gateway.fleet.usable_engines(role)
    await knows_release(engine)
    return engine


async def knows_release(engine: Engine) -> None:
    """It is asked again, for it may be answering as it would have before."""

    def has_the_page() -> bool:
        engine.capabilities.is_identity_known &= engine.capabilities.supports_release
        return engine.capabilities.supports_release

    await eventually(has_the_page)


def given_back(engine: MockEngine) -> list[Any]:
    return [r.json["kv_transfer_params"] for r in engine.requests if r.path == PAGE]


async def missing(request: Received, peer: Peer) -> None:
    await peer.answer({"error": {"message": "no such page"}}, 404)


@pytest.mark.parametrize("prefiller", ["ours", "ours, without the page", "stock"])
@pytest.mark.parametrize("conversation", [True, False])
async def test_a_client_that_leaves_before_the_decoders_first_byte_releases_the_prefill(
    router: Router, p: MockEngine, d: MockEngine, prefiller: str, conversation: bool
) -> None:
    proof: dict[str, Any] = {} if prefiller == "stock" else {"prefix_proof": PROOF}
    p.usual = prefilling(**proof)
    reached = asyncio.Event()
    d.scripts = [hanging(asked=reached)]
    body = {"model": "m", "messages": ASKED} | ({"conversation_id": "c"} if conversation else {})
    async with router.socket() as client:
        await client.send(post(json.dumps(body).encode(), "/v1/chat/completions"))
        await asyncio.wait_for(reached.wait(), 5)
        if "without" in prefiller:
            p.scripts = [missing]
    await eventually(lambda: router.metric("releases_total", outcome="done") == 1)
    assert given_back(p) == ([{**PARAMS, **proof}] if proof else [])
    by_decoder = [r for r in d.requests if is_release(r)]
    if prefiller == "ours":
        assert by_decoder == []
        return
    (release,) = by_decoder
    assert release.path == "/v1/completions"
    assert release.json["kv_transfer_params"] == {**PARAMS, **proof, "retain": False}
    expected = "m" if proof else "disagg-router/released"
    assert release.json["model"] == expected, "without proof: a model that it does not serve"


async def test_a_decoder_that_rejects_or_fails_releases_the_prefill(
    router: Router, d: MockEngine
) -> None:
    d.scripts = [answering(400, {"error": {"message": "no"}})]
    assert (await router.complete()).status_code == 400
    await eventually(lambda: is_release(d.last))


async def test_a_prefill_that_was_read_is_not_released(router: Router, d: MockEngine) -> None:
    for streamed in (True, False):
        await chat(router, ASKED, stream=streamed)
        await router.complete(stream=streamed)
    await router.settled()
    assert not any(map(is_release, d.requests))


@pytest.mark.parametrize("case", ["decoder_alone", "mismatch", "hit"])
async def test_a_turn_that_nobody_pulls_is_given_back_to_its_decoder(
    start_router: StartRouter, d: MockEngine, case: str
) -> None:
    router = await start_router(decode_first_turns=0.1 if case == "decoder_alone" else 0)
    d.identity = {"capabilities": ["cache_hit_threshold", "release"]}
    await heard(router, EngineRole.DECODE)
    await chat(router, ASKED)
    await chat(router, AGAIN, model="m" if case != "mismatch" else "other")
    assert turns(router, case, "model" if case == "mismatch" else "") == 1
    wanted = 0 if case == "hit" else 1
    await router.settled()
    assert router.metric("releases_total", outcome="done") == wanted
    assert given_back(d) == [KEPT] * wanted


async def test_a_release_that_meets_a_closed_connection_is_told_on_a_new_one(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    """Told twice is told once."""
    proven = prefilling(prefix_proof=PROOF)
    p.usual, p.scripts, d.scripts = (
        proven,
        [proven, reset],
        [answering(400, {"error": {"message": "no"}})],
    )
    assert (await router.complete()).status_code == 400
    await eventually(lambda: router.metric("releases_total", outcome="done") == 1)
    assert given_back(p) == [{**PARAMS, "prefix_proof": PROOF}] * 2


async def test_a_prefiller_whose_decoder_fails_is_told_itself(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    p.usual = prefilling(prefix_proof=PROOF)
    d.scripts = [reset, reset]
    assert (await router.complete()).status_code == 503
    await router.settled()
    assert given_back(p) == [{**PARAMS, "prefix_proof": PROOF}] * 2, "the kept connection was stale"
    assert not any(map(is_release, d.requests))


async def test_a_turn_that_another_replaces_or_pushes_out_is_given_back(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(conversation_max_entries=1)
    d.identity = CAPABLE
    await heard(router, EngineRole.DECODE)
    both = asyncio.Barrier(2)

    async def together(request: Received, peer: Peer) -> None:
        kept = {**KEPT, "remote_request_id": request.header("x-request-id")}
        await both.wait()
        await decoding(kept=kept)(request, peer)

    d.scripts = [together, together]
    await asyncio.gather(*(chat(router, ASKED) for _ in range(2)))
    await eventually(lambda: len(given_back(d)) == 1)
    names = {r.header("x-request-id") for r in d.requests if r.path != PAGE}
    (lost,) = given_back(d)
    assert lost["remote_request_id"] in names
    await chat(router, ASKED, conversation_id="another")
    await eventually(lambda: len(given_back(d)) == 2)
    assert {params["remote_request_id"] for params in given_back(d)} == names


async def test_a_turn_that_cannot_be_stored_is_given_back(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(conversation_max_bytes=10)
    d.identity = CAPABLE
    await heard(router, EngineRole.DECODE)
    for streamed in (True, False):
        await chat(router, ASKED, stream=streamed)
    await eventually(lambda: given_back(d) == [KEPT, KEPT])
    assert router.metric("conversation_kept_total", outcome="not_kept") == 2


async def test_a_turn_whose_prefill_fails_or_is_left_is_given_back(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    d.identity = CAPABLE
    await heard(router, EngineRole.DECODE)
    breaks = answering(500, {"error": {"message": "load failed"}})
    reached = asyncio.Event()
    waits = hanging(asked=reached)
    for name, script in (("fails", breaks), ("left", waits)):
        await chat(router, ASKED, conversation_id=name)
        p.scripts = [script]
        if name == "fails":
            await chat(router, AGAIN, conversation_id=name)
        else:
            body = {"model": "m", "messages": AGAIN, "conversation_id": name}
            async with router.socket() as client:
                await client.send(post(json.dumps(body).encode(), "/v1/chat/completions"))
                await asyncio.wait_for(reached.wait(), 5)
    await eventually(lambda: given_back(d) == [KEPT, KEPT])


async def test_a_turn_whose_decoder_is_overloaded_is_given_back_by_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(ds=[d, d2], affinity_load_floor=1, affinity_load_factor=1)
    d.identity = d2.identity = CAPABLE
    await chat(router, ASKED)
    home = d if d.requests else d2
    engine = router.gateway.fleet.find_alive(f"127.0.0.1:{home.port}")
    assert engine is not None
    await knows_release(engine)
    engine.add_load(5, 0)
    await chat(router, AGAIN)
    assert (offered(p), turns(router, "decoder_overloaded")) == (None, 1)
    await eventually(lambda: given_back(home) == [KEPT])
    engine.add_load(-5, 0)


@pytest.mark.parametrize("alone", [True, False])
def test_a_client_sees_done_only_when_the_answer_is_over(alone: bool) -> None:
    """Then its turn is kept, and the next one, which it may send at once, finds it."""
    tail = TurnTail()
    client = b"".join(tail.passing(event, False) for event in stream(SAID, KEPT, alone))
    assert tail.params == KEPT
    assert b"fine" in client
    assert DONE not in client
    assert tail.passing(b"", True) == b""
    whole = client + tail.last
    assert whole.count(DONE) == 1
    assert whole.endswith(DONE)


async def test_an_answer_whose_client_leaves_at_its_end_is_kept(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    seen, gone = asyncio.Event(), asyncio.Event()

    async def never_ends(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + b"".join(map(chunk, stream(SAID, KEPT, alone=False))))
        with contextlib.suppress(ConnectionError):
            while not seen.is_set():
                await peer.send(chunk(b": still here\n\n"))
                await asyncio.sleep(0.005)
            await peer.wait_left()
        gone.set()

    d.scripts = [never_ends]
    body = {"model": "m", "messages": ASKED, "conversation_id": "c", "stream": True}
    async with router.socket() as client:
        await client.send(post(json.dumps(body).encode(), "/v1/chat/completions"))
        await asyncio.wait_for(client.reader.readuntil(b"fine"), 5)
        seen.set()
    await asyncio.wait_for(gone.wait(), 5)
    await eventually(lambda: router.metric("conversation_kept_total", outcome="kept"))
    await chat(router, AGAIN)
    assert offered(p) == KEPT


async def test_an_answer_whose_client_leaves_while_it_is_being_stored_is_kept(
    router: Router, p: MockEngine
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow(StoreWrapper):
        async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
            asked.set()
            await go_on.wait()
            return await super().put(key, value, seconds)

    conversations = router.gateway.conversations
    assert conversations is not None
    conversations.store = Slow(MemoryStore(10, 100_000))
    body = {"model": "m", "messages": ASKED, "conversation_id": "c"}
    async with router.socket() as client:
        await client.send(post(json.dumps(body).encode(), "/v1/chat/completions"))
        await asyncio.wait_for(asked.wait(), 5)
    await eventually(lambda: not router.gateway.tasks.running)
    go_on.set()
    await eventually(lambda: router.metric("conversation_kept_total", outcome="kept"))
    await chat(router, AGAIN)
    assert offered(p) == KEPT


@pytest.mark.parametrize("is_overloaded", [True, False])
async def test_no_release_goes_to_an_overloaded_engine_or_beyond_the_retry_budget(
    start_router: StartRouter, d: MockEngine, is_overloaded: bool
) -> None:
    """Every decode engine answers 503 with Retry-After, or 500 while the budget is used up."""
    error = {"error": {"message": "no"}}
    d.usual = answering(503, error, retry_after="5") if is_overloaded else answering(500, error)
    async with contextlib.AsyncExitStack() as stack:
        others = [await stack.enter_async_context(running_engine(d.usual)) for _ in range(3)]
        router = await start_router(ds=[d, *others])
        while not is_overloaded and router.gateway.budget.take(time.monotonic()):
            pass
        assert (await router.complete()).status_code >= 500
        await router.settled()
        for engine in (d, *others):
            is_after_answer = [is_release(request) for request in engine.requests][-1:]
            assert is_after_answer in ([], [False])


@pytest.mark.parametrize("kind", ["chats", "text", "chats in Redis"])
async def test_conversation_that_its_client_ends_is_released_and_forgotten(
    start_router: StartRouter, p: MockEngine, d: MockEngine, kind: str
) -> None:
    """Two chats under one id, or a text; only the tenant that has used the id may end it."""
    mine, path = {"authorization": "Bearer mine"}, "/v1/conversations/an%2Fid"
    other = [{"role": "user", "content": "a title, please"}]
    d.identity = CAPABLE
    stored: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if kind == "chats in Redis":
            stored = stack.enter_context(running_redis()).settings
        router = await start_router(**stored)
        await heard(router, EngineRole.DECODE)
        for messages in (ASKED, other) if "chats" in kind else ():
            await chat(router, messages, mine, conversation_id="an/id")
        if kind == "text":
            body = {"model": "m", "prompt": "how are you?", "conversation_id": "an/id"}
            await router.client.post("/v1/completions", json=body, headers=mine)
        refused = await router.client.delete(path, headers={"authorization": "Bearer other"})
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == "Conversation with id 'an/id' not found."
        assert given_back(d) == []
        ended = await router.client.delete(path, headers=mine)
        assert ended.json() == {"id": "an/id", "object": "conversation.deleted", "deleted": True}
        await eventually(lambda: given_back(d) == [KEPT] * (1 if kind == "text" else 2))
        assert d.last.header("authorization") == "Bearer mine"
        assert (await router.client.delete(path, headers=mine)).status_code == 404
        await chat(router, AGAIN, mine, conversation_id="an/id")
        assert (offered(p), turns(router, "hit")) == (None, 0)
        if kind == "chats in Redis":
            stack.close()
            assert (await router.client.delete(path, headers=mine)).status_code == 503
