"""LoRA adapters: a prompt's KV belongs to one adapter, and an engine that has the adapter loaded is
preferred."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, running_engines

LONG = "all of this was said before. " * 200
ADAPTERS = ["sql", "poems", "law", "names"]


@pytest.fixture
async def ds() -> AsyncIterator[list[MockEngine]]:
    async with running_engines(usual_decode, 4) as engines:
        yield engines


async def started(
    start_router: StartRouter, ps: list[MockEngine], ds: list[MockEngine], **changes: Any
) -> Router:
    for engine in (*ps, *ds):
        engine.adapters = ADAPTERS
    usual = {"prefill_policy": "prefix", "decode_policy": "power_of_two"}
    router = await start_router(ps=ps, ds=ds, **{**usual, **changes})
    await eventually(lambda: all(one.adapters for one in router.gateway.fleet.engines))
    return router


async def ask_for(router: Router, adapter: str, prompt: str) -> None:
    assert (await router.complete(model=adapter, prompt=prompt)).status_code == 200


def engines_of(engines: Sequence[MockEngine], adapter: str) -> list[int]:
    """The places of the engines that got the adapter's requests."""
    return [
        at for at, one in enumerate(engines) for r in one.requests if r.json["model"] == adapter
    ]


@pytest.mark.parametrize("policy", ["prefix", "power_of_two", "least_loaded"])
@pytest.mark.parametrize("size", [10, 8000])
async def test_new_prompts_go_where_their_adapter_is_loaded(
    start_router: StartRouter, ps: list[MockEngine], ds: list[MockEngine], policy: str, size: int
) -> None:
    router = await started(start_router, ps, ds, prefill_policy=policy)
    for turn in range(6):
        for adapter in ADAPTERS:
            await ask_for(router, adapter, f"{turn} {adapter} question".ljust(size, "."))
    for engines in (ps, ds):
        for adapter in ADAPTERS:
            homes = engines_of(engines, adapter)
            assert len(homes) == 6
            assert len({*homes}) == 1, "each adapter stays where it is loaded"
    assert len({at for adapter in ADAPTERS for at in engines_of(ps, adapter)}) > 1


async def test_a_busy_engine_with_the_adapter_gives_way_to_idle_ones(
    start_router: StartRouter, ps: list[MockEngine], ds: list[MockEngine]
) -> None:
    router, release = await started(start_router, ps, ds), asyncio.Event()
    for engine in ps:
        engine.usual = answer_after(release, usual_prefill)
    running = []
    for number in range(4):
        running.append(asyncio.create_task(ask_for(router, "sql", f"{number} {LONG}")))
        await eventually(lambda: sum(len(p.requests) for p in ps) == len(running))
    assert sorted(engines_of(ps, "sql")) == [0, 1, 2, 3]
    release.set()
    await asyncio.gather(*running)


async def test_equal_prompts_of_two_adapters_are_two_prompts(
    start_router: StartRouter, ps: list[MockEngine], ds: list[MockEngine]
) -> None:
    router = await started(start_router, ps, ds)
    seen: list[int] = []

    async def look(request: Received, peer: Peer) -> None:
        seen.append(sum(engine.tokens_in_flight for engine in router.gateway.fleet.engines))
        await usual_prefill(request, peer)

    for engine in ps:
        engine.usual = look
    for adapter in ("sql", "poems", "m", "sql", "poems", "m"):
        await ask_for(router, adapter, LONG)
    whole = len(LONG) // 4 // TOKENS_PER_CHUNK * TOKENS_PER_CHUNK
    assert min(seen[:3]) > whole, "none was there before"
    assert [before - after for before, after in zip(seen[:3], seen[3:], strict=True)] == [whole] * 3


async def test_answers_without_cached_tokens_do_not_end_the_memory_of_an_adapter(
    start_router: StartRouter, ps: list[MockEngine], ds: list[MockEngine]
) -> None:
    async def computes_all(request: Received, peer: Peer) -> None:
        usage = {"prompt_tokens_details": {"cached_tokens": 0}, "prompt_tokens": 2000}
        await peer.answer({"kv_transfer_params": PARAMS, "usage": usage})

    for engine in ps:
        engine.usual = computes_all
    router = await started(start_router, ps, ds)
    for number in range(6):
        await ask_for(router, "sql", f"{number} {LONG}")
    assert len({*engines_of(ps, "sql")}) == 1
