"""What routing policies receive, when they are asked, and when they forget."""

import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.fleet.engine import MIN_SAMPLES, Engine, EngineRole
from router.routing.prefix_cache import PrefixAffinity
from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import KEPT, decoding, prefilling
from tests.unit.router.conversations.test_turns import AGAIN, ASKED, chat, turns
from tests.unit.router.engine_scripts import answering
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, running_engines

LONG = "all of this was said before. " * 200


@pytest.fixture
async def others() -> AsyncIterator[list[MockEngine]]:
    async with running_engines(prefilling(), 3) as engines:
        yield engines


def policy(router: Router, role: EngineRole) -> PrefixAffinity:
    routes = router.gateway.routes
    of_role = routes.prefill if role is EngineRole.PREFILL else routes.decode
    known = of_role["default"]
    assert isinstance(known, PrefixAffinity)
    return known


def engines_of(router: Router, role: EngineRole) -> list[Engine]:
    return [engine for engine in router.gateway.fleet.engines if engine.role is role]


def cached(tokens: int) -> Any:
    async def answer(request: Received, peer: Peer) -> None:
        details = {"prompt_tokens_details": {"cached_tokens": tokens}, "prompt_tokens": 1400}
        await peer.answer({"kv_transfer_params": PARAMS, "usage": details})

    return answer


async def test_who_was_sent_a_prompt_gets_what_extends_it(
    start_router: StartRouter, others: list[MockEngine]
) -> None:
    router = await start_router(ps=others, prefill_policy="prefix")
    for more in ("a", "b", "c", "d"):
        assert (await router.complete(prompt=LONG + more)).status_code == 200
    assert sorted(len(engine.requests) for engine in others) == [0, 0, 4]


async def test_rate_of_an_engine_is_learned_from_its_answers_and_forgotten_with_it(
    start_router: StartRouter, others: list[MockEngine]
) -> None:
    usage = {"prompt_tokens": 30_000, "prompt_tokens_details": {"cached_tokens": 10_000}}
    answer = answering(200, {"kv_transfer_params": PARAMS, "usage": usage})
    others[0].usual = answer
    router = await start_router(ps=others[:1])
    (engine,) = engines_of(router, EngineRole.PREFILL)
    begun = time.monotonic()
    for _ in range(MIN_SAMPLES):
        await router.complete(prompt=LONG)
    least = MIN_SAMPLES * 20_000 / (time.monotonic() - begun)
    metrics = (await router.client.get("/metrics")).text
    sample = re.compile(rf"engine_prefill_tokens_per_second\{{.*{engine.name}.*\}} (.+)")
    (rate,) = map(float, sample.findall(metrics))
    assert rate == pytest.approx(1 / engine.prefill_rate.token_seconds)
    assert rate > least / 2
    assert 'disagg_router_engines_needed{group="default",role="prefill"} 0.0' in metrics
    router.gateway.fleet.note_unreachable(engine, "gone")
    assert engine.prefill_rate.token_seconds == 0


async def test_answers_that_belie_a_belief_end_it(
    start_router: StartRouter, others: list[MockEngine]
) -> None:
    for engine in others:
        engine.usual = cached(0)
    router = await start_router(ps=others, prefill_policy="prefix")
    for _ in range(4):
        await router.complete(prompt=LONG)
    assert sorted(len(engine.requests) for engine in others) == [0, 0, 4]
    (holder,) = [engine for engine in others if engine.requests]
    assert not router.gateway.routes.index.bit(f"127.0.0.1:{holder.port}")


async def test_a_prefiller_is_loaded_with_what_it_must_compute(
    start_router: StartRouter, others: list[MockEngine]
) -> None:
    router = await start_router(ps=others, prefill_policy="prefix")
    seen: list[int] = []

    async def look(request: Received, peer: Peer) -> None:
        seen.append(
            sum(engine.tokens_in_flight for engine in engines_of(router, EngineRole.PREFILL))
        )
        await peer.answer({"kv_transfer_params": PARAMS})

    for engine in others:
        engine.usual = look
    await router.complete(prompt=LONG)
    await router.complete(prompt=LONG)
    whole = len(LONG) // 4 // TOKENS_PER_CHUNK * TOKENS_PER_CHUNK
    assert seen[0] - seen[1] == whole
    assert all(engine.tokens_in_flight == 0 for engine in router.gateway.fleet.engines)


async def test_a_request_whose_decode_leg_fails_leaves_nothing_open(
    start_router: StartRouter, others: list[MockEngine], d: MockEngine
) -> None:
    d.usual = answering(400, {"error": {"message": "no"}})
    router = await start_router(ds=[d, *others], prefill_policy="prefix", decode_policy="prefix")
    for number in range(6):
        await router.complete(prompt=f"{number}{LONG}")
    assert not policy(router, EngineRole.DECODE).num_unanswered


async def test_a_group_whose_last_engine_goes_has_no_policy(
    start_router: StartRouter, others: list[MockEngine]
) -> None:
    router = await start_router(ps=others)
    await router.complete()
    assert list(router.gateway.routes.prefill) == ["default"]
    for engine in router.gateway.fleet.engines:
        router.gateway.fleet.remove(engine.name)
    assert not router.gateway.routes.prefill


async def test_the_same_engines_are_the_same_tuple_whatever_happened_between(
    start_router: StartRouter, others: list[MockEngine]
) -> None:
    router = await start_router(ps=others)
    known = router.gateway.fleet
    await eventually(lambda: len(known.snapshot.by_model) == 2)
    (one,), (two,) = (known.snapshot.pools(name) for name in ("m", "other"))
    (anyone,) = known.snapshot.any_model
    assert one.prefillers is two.prefillers is anyone.prefillers
    engine = known.engines[0]
    known.note_unreachable(engine, "gone")
    await eventually(lambda: known.snapshot.pools("m")[0].prefillers is not one.prefillers)
    known.note_probe_passed(engine)
    await eventually(lambda: known.snapshot.pools("m")[0].prefillers is one.prefillers)


async def test_a_short_prompt_is_answered_by_a_decoder_alone(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(min_remote_prefill_tokens=20)
    assert (await router.complete(prompt="short")).status_code == 200
    assert (len(p.requests), len(d.requests)) == (0, 1)
    assert router.metric("decode_only_total", reason="short") == 1
    await router.complete(prompt="long enough " * 10)
    assert (len(p.requests), len(d.requests)) == (1, 2)
    await router.complete(prompt="short", n=2)
    assert router.metric("decode_only_total", reason="n") == 1


async def test_what_a_decoder_holds_makes_a_prompt_short(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(min_remote_prefill_tokens=300, decode_policy="prefix")
    await router.complete(prompt=LONG)
    await router.complete(prompt=LONG + "And now?")
    assert (len(p.requests), len(d.requests)) == (1, 2)
    await router.complete(prompt=LONG * 2)
    assert len(p.requests) == 2


async def test_a_short_turn_is_kept_and_gives_back_what_the_last_one_left(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.usual, d.usual = prefilling(), decoding()
    d.identity = {"capabilities": ["release"]}
    router = await start_router(min_remote_prefill_tokens=1000, decode_first_turns=0)
    await eventually(
        lambda: all(e.capabilities.supports_release for e in engines_of(router, EngineRole.DECODE))
    )
    await chat(router, ASKED)
    await chat(router, AGAIN)
    assert not p.requests
    assert (turns(router, "new"), turns(router, "decoder_alone")) == (1, 1)
    assert router.metric("conversation_kept_total", outcome="kept") == 2
    await eventually(lambda: router.metric("releases_total", outcome="done") == 1)
    told = [r.json for r in d.requests if r.path == "/disagg/release"]
    assert told == [{"kv_transfer_params": KEPT}]
