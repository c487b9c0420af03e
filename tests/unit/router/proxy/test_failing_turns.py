"""What a turn left is read once or given back, whatever fails of the next one."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest

from router.fleet.engine import EngineRole
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import KEPT, decoding, delta, prefilling, sse
from tests.unit.router.conversations.store_wrapper import StoreWrapper
from tests.unit.router.conversations.test_releases import CAPABLE, PAGE, given_back, knows_release
from tests.unit.router.conversations.test_turns import AGAIN, ASKED, chat, turns
from tests.unit.router.engine_scripts import answering, hanging, raw, reset
from tests.unit.router.harness import Router, post
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.proxy.failing import FAULTS, LIMITS, two_of


@pytest.fixture(autouse=True)
def retaining_engines(p: MockEngine, d: MockEngine) -> None:
    p.usual, d.usual = prefilling(), decoding()
    d.identity = CAPABLE


def offers(mocks: list[MockEngine]) -> list[Any]:
    """What prefillers were told to pull; each leg counts."""
    legs = [r.json["kv_transfer_params"] for mock in mocks for r in mock.requests if r.path != PAGE]
    return [params for params in legs if params["remote_block_ids"] is not None]


async def last_turn(router: Router) -> None:
    await chat(router, ASKED)
    await router.settled()
    for engine in router.gateway.fleet.usable_engines(EngineRole.DECODE):
        await knows_release(engine)


async def next_turn(router: Router, status: int = 200, **fields: Any) -> None:
    body = {"model": "m", "messages": AGAIN, "conversation_id": "c", **fields}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    await router.settled()


NEVER_READ = ("connect_refused", "connect_timeout", "connect", "dns", "tls")
PERHAPS_READ = ("stale", "disconnected", "engine_lost", "timeout", "broken_answer", "status_5xx")


@pytest.mark.parametrize("kind", [*NEVER_READ, *PERHAPS_READ, "overloaded", "answer_too_large"])
async def test_a_turn_is_offered_again_only_where_nobody_was_asked(
    start_router: StartRouter, p: MockEngine, d: MockEngine, kind: str
) -> None:
    limits: Any = LIMITS.get(kind, {})
    async with two_of(EngineRole.PREFILL, p, d, start_router, **limits) as asked:
        router = asked.router
        asked.other.usual = prefilling()
        await last_turn(router)
        router.gateway.routes._prefill_turn = 0  # the first one's again
        async with FAULTS[kind](asked):
            await next_turn(router, 502 if kind == "answer_too_large" else 200)
        assert offers(asked.ps) == [KEPT]
        was_read = kind in NEVER_READ
        assert given_back(d) == ([] if was_read else [KEPT])
        assert len(offers([asked.other])) == was_read
        if kind != "answer_too_large":
            assert turns(router, "hit" if was_read else "failed") == 1
        # With the turn it may be the turn that failed: the same one does without.
        legs = {"overloaded": (1, 1), "answer_too_large": (1, 0)}
        if kind in PERHAPS_READ or kind in legs:
            second = [r for r in p.requests if len(r.json["messages"]) == 3]
            elsewhere = [r for r in asked.other.requests if len(r.json["messages"]) == 3]
            assert (len(second), len(elsewhere)) == legs.get(kind, (2, 0))


@pytest.mark.parametrize("fault", ["reset", "500", "breaks inside its first event"])
async def test_a_decoder_that_fails_after_the_prefiller_read_costs_the_turn(
    start_router: StartRouter, p: MockEngine, d: MockEngine, fault: str
) -> None:
    """The prefill is done again, and its prefiller is offered nothing: what it read is gone."""
    faults: dict[str, Script] = {
        "reset": reset,
        "500": answering(500, {}),
        "breaks inside its first event": raw(STREAM_HEAD + chunk(b"data: {")),
    }
    async with running_engine(decoding()) as other:
        other.identity = CAPABLE
        router = await start_router(ds=[d, other])
        await last_turn(router)
        home = d if any(r.path != PAGE for r in d.requests) else other
        home.scripts = [faults[fault]] * 2
        await next_turn(router, stream="first event" in fault)
        assert offers([p]) == [KEPT]
        assert len(p.requests) > 2, "there was another prefill"
        assert given_back(d) == given_back(other) == []
        assert turns(router, "hit") == 1
        assert turns(router, "failed") == 0, "a turn is counted once"


async def test_a_prefillers_4xx_gives_the_turn_back(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    await last_turn(router)
    p.scripts = [answering(422, {"error": "no"})]
    await next_turn(router, 422)
    assert (offers([p]), given_back(d)) == ([KEPT], [KEPT])


async def test_a_request_that_is_refused_unread_leaves_the_turn_where_it_is(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    await last_turn(router)
    await next_turn(router, 400, conversation_stream="nonsense")
    await next_turn(router, 404, model="nobody's")
    assert given_back(d) == []
    await next_turn(router)
    assert offers([p]) == [KEPT]


async def test_a_turn_that_was_taken_and_cannot_be_planned_is_given_back(
    router: Router, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await last_turn(router)

    conversations, known = router.gateway.conversations, router.gateway.fleet.snapshot
    assert conversations is not None
    monkeypatch.setattr(conversations, "store", StoreWrapper(conversations.store))  # does I/O

    class Going:
        """There is somebody to ask, and when it comes to that there is nobody."""

        pools = Mock(side_effect=[known.pools("m"), ()])
        any_model, context_lengths = known.any_model, known.context_lengths
        by_model: Mapping[str, object] = {}

    monkeypatch.setattr(router.gateway.fleet, "snapshot", Going())
    await next_turn(router, 503)
    assert given_back(d) == [KEPT]


async def test_a_client_that_leaves_after_the_prefill_has_read_gives_nothing_back(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    await last_turn(router)
    reached = asyncio.Event()
    d.scripts = [hanging(asked=reached)]
    body = {"model": "m", "messages": AGAIN, "conversation_id": "c"}
    async with router.socket() as client:
        await client.send(post(json.dumps(body).encode(), "/v1/chat/completions"))
        await asyncio.wait_for(reached.wait(), 5)
    await router.settled()
    assert (offers([p]), given_back(d)) == ([KEPT], [])
    assert router.metric("releases_total", outcome="done") == 1, "the prefill is"


DEEP = b'{"choices": [{}], "kv_transfer_params": {"remote_x": 1}, "x": ' + b"[" * 300 + b"]" * 300
EVENT = sse(delta({"role": "assistant", "content": "hi"}))


@pytest.mark.parametrize("at_once", [True, False])
async def test_event_that_cannot_be_written_again_becomes_an_error(
    router: Router, d: MockEngine, at_once: bool
) -> None:
    seen = asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(EVENT))
        if not at_once:
            await seen.wait()
        await peer.send(chunk(b"data: %b}\n\n" % DEEP + DONE) + b"0\r\n\r\n")

    d.scripts = [script]
    body = {"model": "m", "messages": ASKED, "conversation_id": "c", "stream": True}
    async with router.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        blocks = []
        async for block in answer.aiter_bytes():
            blocks.append(block)
            seen.set()
    passed = b"".join(blocks)
    assert passed.startswith(EVENT + b'data: {"error"')
    assert passed.endswith(DONE)
    assert b"remote_x" not in passed


async def test_a_whole_answer_that_cannot_be_written_again_is_a_broken_one(
    router: Router, d: MockEngine
) -> None:
    d.usual = answering(200, DEEP + b"}")
    await next_turn(router, 502)


async def test_a_decoder_that_is_lost_after_a_rejection_is_replaced_and_asked_for_nothing(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Whoever comes after a rejection is told a threshold of 0, prefiller and decoders."""
    rejection = {"choices": [{"index": 0, "text": "", "finish_reason": "cache_threshold"}]}
    async with two_of(EngineRole.DECODE, p, d, start_router) as asked:
        d.scripts = [answering(200, rejection), answering(500, {})]
        assert (await asked.router.complete(cache_hit_threshold=0.5)).status_code == 200
        await asked.router.settled()
        said = [leg.json["cache_hit_threshold"] for leg in asked.legs(d)]
        assert said == [0.5, 0]
        after = asked.prefills() + asked.legs(asked.other)
        assert [leg.json["cache_hit_threshold"] for leg in after] == [0, 0, 0]
        assert len(asked.releases()) == 1
        assert asked.router.metric("decode_first_total", outcome="rejected") == 1
