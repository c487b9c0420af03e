"""Hedged requests: one of several decode engines answers, the other legs leave nothing behind."""

import asyncio
import contextlib
import functools
import json
from time import monotonic as now
from typing import Any

import pytest

from router.proxy import hedging
from router.settings import Settings
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import KEPT, decoding, delta, prefilling, sse, stream
from tests.unit.router.conversations.test_decode_first import MARKER
from tests.unit.router.engine_scripts import (
    answer_after,
    answering,
    fails,
    streaming,
    streaming_until,
)
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import event, running_engine
from tests.unit.router.test_resume import (
    CAPABILITIES,
    OURS,
    WORDS,
    computes,
    dies_after,
    legs,
    texts_of,
    to_the_end,
)

KNOWS = OURS | {"capabilities": [*CAPABILITIES, "cache_hit_threshold"]}
REJECTION = [sse(delta({"role": "assistant"})), sse(MARKER), DONE]


@pytest.fixture
def ds(d: MockEngine, d2: MockEngine, d3: MockEngine) -> list[MockEngine]:
    """Three decoders that know the threshold."""
    engines = [d, d2, d3]
    for engine in engines:
        engine.identity, engine.usual = KNOWS, to_the_end
    return engines


@pytest.fixture
def start_router(start_router: StartRouter, p: MockEngine, ds: list[MockEngine]) -> StartRouter:
    p.identity, p.usual = KNOWS, computes

    return functools.partial(start_router, ds=ds, hedged_decoders=3, identified=True)


async def rejects(request: Received, peer: Peer) -> None:
    """Whatever has a threshold."""
    if request.json.get("cache_hit_threshold"):
        await peer.stream(*REJECTION)
    else:
        await to_the_end(request, peer)


async def says_nothing(request: Received, peer: Peer) -> None:
    """Until it is left."""
    await peer.send(STREAM_HEAD + chunk(sse(delta({"role": "assistant"}))))
    await peer.wait_left()


async def is_silent(request: Received, peer: Peer) -> None:
    await peer.wait_left()


async def hedges(router: Router) -> dict[str, float]:
    await router.settled()
    counts = router.gateway.metrics.scattered.counts()
    return {str(outcome): count for (outcome,), count in counts.items()}


async def words_of(router: Router, **fields: Any) -> list[str]:
    answer = await router.stream(**({"cache_hit_threshold": 0.5} | fields))
    assert answer.status_code == 200, answer.text
    assert "cache_threshold" not in answer.text
    assert "token_ids" not in answer.text
    return texts_of(answer.text)


@pytest.mark.parametrize("others", [says_nothing, is_silent, rejects])
@pytest.mark.parametrize("winner", [0, 1, 2])
async def test_the_first_that_accepts_answers_and_the_others_are_left(
    router: Router, p: MockEngine, ds: list[MockEngine], winner: int, others: Script
) -> None:
    for number, engine in enumerate(ds):
        engine.scripts = [to_the_end if number == winner else others]
    assert await words_of(router) == WORDS
    await router.settled()
    assert not legs(p)
    asked_of = [leg for engine in ds for leg in legs(engine)]
    assert [leg.json["cache_hit_threshold"] for leg in asked_of] == [0.5] * 3
    assert len({leg.header("x-request-id") for leg in asked_of}) == 3
    counted = await hedges(router)
    assert counted.pop("won") == 1
    assert sum(counted.values()) == 2, counted
    assert router.metric("decode_first_total", outcome="answered") == 1
    assert not any(engine.failed_probes for engine in router.gateway.fleet.engines)
    assert all(router.engine(engine).breaker.allows_requests for engine in ds)
    assert router.gateway.memory.resume_buffers.size == 0


async def test_where_all_reject_both_legs_follow_and_nothing_is_seen(
    router: Router, p: MockEngine, ds: list[MockEngine]
) -> None:
    for engine in ds:
        engine.usual = rejects
    assert await words_of(router) == WORDS
    assert len(legs(p)) == 1
    thresholds = [leg.json["cache_hit_threshold"] for engine in ds for leg in legs(engine)]
    assert sorted(thresholds) == [0, 0.5, 0.5, 0.5]
    assert await hedges(router) == {"rejected": 3}
    assert router.metric("decode_first_total", outcome="rejected") == 1


async def test_of_two_that_accept_in_one_turn_of_the_loop_one_answers(
    router: Router, ds: list[MockEngine]
) -> None:
    together = asyncio.Barrier(3)

    async def at_once(request: Received, peer: Peer) -> None:
        await together.wait()
        with contextlib.suppress(ConnectionError):
            await to_the_end(request, peer)

    for _ in range(20):
        for engine in ds:
            engine.scripts = [at_once]
        assert await words_of(router) == WORDS
    assert await hedges(router) == {"won": 20, "stopped": 40}


@pytest.mark.parametrize("fields", [{"stream": False}, {"cache_hit_threshold": 0}, {"n": 2}])
async def test_one_decoder_is_asked_where_more_would_compute(
    router: Router, ds: list[MockEngine], fields: dict[str, Any]
) -> None:
    answer = await router.complete(**({"stream": True, "cache_hit_threshold": 0.5} | fields))
    assert answer.status_code == 200
    assert sum(len(legs(engine)) for engine in ds) == 1
    assert not await hedges(router)


@pytest.mark.parametrize("capabilities", [CAPABILITIES, None])
async def test_an_engine_that_may_not_know_the_threshold_is_not_asked(
    start_router: StartRouter, ds: list[MockEngine], capabilities: list[str] | None
) -> None:
    ds[0].identity = None if capabilities is None else OURS | {"capabilities": capabilities}
    router = await start_router()
    for _ in range(4):
        ds[1].scripts, ds[2].scripts = [says_nothing], [to_the_end]
        assert await words_of(router) == WORDS
    assert not legs(ds[0])
    assert await hedges(router) == {"won": 4, "stopped": 4}


async def test_no_more_are_asked_than_the_setting_says(
    start_router: StartRouter, ds: list[MockEngine]
) -> None:
    router = await start_router(hedged_decoders=2, decode_first_threshold=0.8)
    assert texts_of((await router.stream()).text) == WORDS
    assert sum(len(legs(engine)) for engine in ds) == 2
    settings = router.gateway.settings.model_dump(exclude_unset=True)
    assert Settings.model_fields["hedged_decoders"].default == 0
    with pytest.raises(ValueError, match="hedged_decoders"):
        Settings(**(settings | {"hedged_decoders": 9}))


@pytest.mark.parametrize(
    "absurd",
    [
        fails,
        streaming(sse({"error": {"message": "no KV"}}), DONE),
        streaming(DONE),
        streaming(),
        streaming(sse(delta({"role": "assistant"}))),
        dies_after(0),
    ],
)
async def test_what_is_no_answer_does_not_win(
    router: Router, p: MockEngine, ds: list[MockEngine], absurd: Script
) -> None:
    has_failed = asyncio.Event()
    ds[0].scripts, ds[1].scripts, ds[2].scripts = (
        [absurd],
        [answer_after(has_failed, to_the_end)],
        [rejects],
    )
    answer = asyncio.create_task(words_of(router))
    await eventually(lambda: ds[0].requests and not router.engine(ds[0]).in_flight)
    has_failed.set()
    assert await answer == WORDS
    assert not legs(p)
    assert await hedges(router) == {"won": 1, "failed": 1, "rejected": 1}


async def test_whoever_failed_is_not_asked_for_what_the_others_reject(
    router: Router, p: MockEngine, ds: list[MockEngine]
) -> None:
    ds[0].usual, ds[1].usual, ds[2].usual = fails, rejects, fails
    assert await words_of(router) == WORDS
    assert [len(legs(engine)) for engine in (p, *ds)] == [1, 1, 2, 1]


async def test_where_all_fail_it_is_one_failure_of_the_request(
    start_router: StartRouter, p: MockEngine, ds: list[MockEngine]
) -> None:
    router = await start_router(hedged_decoders=2)
    ds[0].usual = ds[1].usual = fails
    assert await words_of(router) == WORDS
    assert len(legs(p)) == 1
    assert len(legs(ds[2])) == 1
    assert await hedges(router) == {"failed": 2}
    assert router.metric("retries_total", role="decode", kind="status_5xx") == 1


async def test_legs_that_were_asked_on_a_chance_are_no_failures_of_the_request(
    start_router: StartRouter, ds: list[MockEngine]
) -> None:
    """Four that fail one after the other would end it."""
    async with running_engine(fails) as fourth, running_engine(to_the_end) as fifth:
        fourth.identity = KNOWS  # the fifth one is not asked on a chance
        for engine in ds:
            engine.usual = fails
        router = await start_router(ds=[*ds, fourth, fifth], hedged_decoders=4)
        assert await words_of(router) == WORDS
        assert await hedges(router) == {"failed": 4}
        assert len(legs(fifth)) == 1


async def test_a_refusal_by_all_is_the_clients_answer(
    start_router: StartRouter, p: MockEngine, ds: list[MockEngine]
) -> None:
    refuses = answering(400, {"error": {"message": "too long", "code": 400}})
    router = await start_router()
    for engine in ds:
        engine.usual = refuses
    answer = await router.stream(cache_hit_threshold=0.5)
    assert answer.status_code == 400
    assert "too long" in answer.text
    ds[0].usual = to_the_end
    assert await words_of(router) == WORDS
    assert not legs(p)


async def test_a_frozen_decoder_holds_nothing_up_once_another_has_rejected(
    start_router: StartRouter, p: MockEngine, ds: list[MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedging, "OTHER_LEGS_TIMEOUT_S", 0.1)
    router = await start_router()
    ds[0].usual = ds[1].usual = rejects
    ds[2].scripts = [is_silent]
    assert await words_of(router) == WORDS
    assert len(legs(p)) == 1
    assert await hedges(router) == {"rejected": 2, "stopped": 1}


async def test_a_client_that_leaves_leaves_nobody_behind(
    router: Router, ds: list[MockEngine]
) -> None:
    for engine in ds:
        engine.scripts = [is_silent]
    body = {"model": "m", "prompt": "x", "stream": True, "cache_hit_threshold": 1}
    answer = asyncio.create_task(router.client.post("/v1/completions", json=body))
    await eventually(lambda: all(engine.requests for engine in ds))
    answer.cancel()
    assert await hedges(router) == {"stopped": 3}
    assert router.metric("client_disconnects_total", stage="decode") == 1
    assert router.metric("retries_total", role="decode", kind="disconnected") == 0


async def test_the_winners_stream_goes_on_elsewhere_when_it_dies(
    router: Router, p: MockEngine, ds: list[MockEngine]
) -> None:
    ds[0].scripts, ds[1].scripts, ds[2].scripts = [rejects], [dies_after(2)], [says_nothing]
    assert await words_of(router) == WORDS
    (prefill,) = legs(p)
    assert prefill.json["kv_transfer_params"]["begun"]["spoken"] == 2
    assert router.metric("resumes_total", kind="broken_answer", outcome="resumed") == 1
    await router.settled()
    assert router.gateway.memory.resume_buffers.size == 0


async def test_engines_that_are_full_are_not_asked_besides(
    start_router: StartRouter, p: MockEngine, ds: list[MockEngine]
) -> None:
    router = await start_router(max_engine_requests=1, queue_size=0)
    is_over = asyncio.Event()
    ds[0].scripts = [streaming_until(is_over, event("a"), event("b") + DONE)]
    first = asyncio.create_task(router.stream())  # at the first decoder alone
    await eventually(lambda: ds[0].requests and not router.engine(p).admitted)
    ds[1].scripts, ds[2].scripts = [says_nothing], [to_the_end]
    assert await words_of(router) == WORDS
    assert len(legs(ds[0])) == 1
    is_over.set()
    assert (await first).status_code == 200
    assert await hedges(router) == {"won": 1, "stopped": 1}
    await router.settled()
    assert [router.engine(engine).admitted for engine in ds] == [0, 0, 0]


async def test_whoever_waits_for_a_place_does_not_get_the_winners(
    start_router: StartRouter, ds: list[MockEngine]
) -> None:
    router = await start_router(max_engine_requests=1)
    somebody_waits, is_served = asyncio.Event(), asyncio.Event()

    async def wins(request: Received, peer: Peer) -> None:
        await somebody_waits.wait()
        await peer.send(STREAM_HEAD + chunk(event("a")))
        await is_served.wait()
        await peer.send(chunk(event("b") + DONE) + b"0\r\n\r\n")

    ds[0].scripts, ds[1].scripts, ds[2].scripts = [is_silent], [wins], [is_silent]
    first = asyncio.create_task(router.stream(cache_hit_threshold=0.5))
    await eventually(lambda: all(engine.requests for engine in ds))
    # It needs a decoder, and no prefiller.
    second = asyncio.create_task(router.complete(best_of=2))
    admission = router.gateway.admission
    assert admission is not None
    await eventually(lambda: admission.depth == 1)
    somebody_waits.set()
    assert (await second).status_code == 200
    assert len(ds[1].requests) == 1
    is_served.set()
    assert (await first).status_code == 200
    await router.settled()
    assert [router.engine(engine).admitted for engine in ds] == [0, 0, 0]


async def test_nobody_is_asked_besides_while_the_retry_budget_is_spent(
    router: Router, ds: list[MockEngine]
) -> None:
    while router.gateway.budget.take(now()):
        pass
    assert await words_of(router) == WORDS
    assert sum(len(legs(engine)) for engine in ds) == 1
    assert not await hedges(router)


@pytest.mark.parametrize("alone", [False, True])
async def test_what_a_loser_keeps_of_a_turn_is_given_back_and_the_winners_is_kept(
    router: Router, p: MockEngine, ds: list[MockEngine], alone: bool
) -> None:
    p.usual = prefilling()
    is_decided = asyncio.Event()

    async def answers_whole(request: Received, peer: Peer) -> None:
        kept = KEPT | {"remote_request_id": request.header("x-request-id")}
        said = {"role": "assistant", "content": "fine"}
        # Both have all of it in the router's socket when that comes to look.
        await peer.stream(*stream(said, kept, alone))

    async def released(request: Received, peer: Peer) -> None:
        if request.path == "/disagg/release":
            is_decided.set()
            await peer.answer({})
        else:
            await answers_whole(request, peer)

    for engine in ds:
        engine.usual = released
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    body |= {"conversation_id": "c", "cache_hit_threshold": 0.5}
    answer = await router.client.post("/v1/chat/completions", json=body)
    assert answer.text.count("fine") == 1
    await router.settled()
    given = {
        leg.json["kv_transfer_params"]["remote_request_id"]
        for engine in ds
        for leg in engine.requests
        if leg.path == "/disagg/release"
    }
    names = {leg.header("x-request-id") for engine in ds for leg in legs(engine)}
    assert len(given) == 2
    assert given < names
    assert router.metric("conversation_kept_total", outcome="kept") == 1


async def test_a_turn_is_asked_where_the_last_one_is_and_nowhere_else(
    router: Router, p: MockEngine, ds: list[MockEngine]
) -> None:
    p.usual = prefilling()
    for engine in ds:
        engine.usual = decoding()
    messages = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"model": "m", "stream": True, "conversation_id": "c"}
    await router.client.post("/v1/chat/completions", json=body | {"messages": messages})
    messages += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "and?"}]
    body |= {"messages": messages, "cache_hit_threshold": 0.5}
    await router.client.post("/v1/chat/completions", json=body)
    first, second = (leg for engine in ds for leg in legs(engine))
    assert first.header("host") == second.header("host")
    assert not await hedges(router)


async def test_a_chat_is_told_its_role_once(
    router: Router, p: MockEngine, ds: list[MockEngine]
) -> None:
    ds[0].usual, ds[1].usual, ds[2].usual = rejects, decoding(), says_nothing
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    answer = await router.client.post(
        "/v1/chat/completions", json=body | {"cache_hit_threshold": 1}
    )
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    roles = [json.loads(event)["choices"][0]["delta"].get("role") for event in events]
    assert [role for role in roles if role] == ["assistant"]
    assert not legs(p)
