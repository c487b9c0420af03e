"""Data-parallel ranks: each has a queue and a prefix cache of its own, and a header names it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.coordination.peers import PeerRouters
from router.fleet.engine import EngineRank
from router.fleet.fleet import ProcessIdentity
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, usual_prefill
from tests.unit.router.harness import Router, eventually

HEADER = "x-data-parallel-rank"
LONG = "all of this was said before. " * 200
OTHER = "this is another document, as long. " * 200


def page(count: int = 2, first: int = 0, size: int | None = None, push: bool = False) -> Any:
    """The identity page of an engine with `count` ranks on its machine, of `size` altogether."""
    ranks = [
        {
            "dp_rank": number,
            "remote_engine_id": f"p_dp{number}",
            "remote_host": "10.9.8.7",
            "remote_port": 5600 + number,
            "num_blocks": 100,
            "block_size": 16,
        }
        for number in range(first, first + count)
    ]
    modes = ["push"] if push else ["pull"]
    return {"capabilities": [], "transfer_modes": modes, "dp_size": size or count, "ranks": ranks}


def vllm_metrics(*ranks: int) -> bytes:
    lines = [
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="800"}} 1.0\n'
        for rank in ranks
    ]
    return "".join(lines).encode()


def ranks_of(router: Router, engine: MockEngine) -> list[EngineRank]:
    return list(router.engine(engine).ranks or ())


def named(engine: MockEngine) -> list[str | None]:
    """The ranks that the engine's requests named."""
    return [request.header(HEADER) for request in engine.requests]


async def started(start_router: StartRouter, **changes: Any) -> Router:
    router = await start_router(**{"prefill_policy": "prefix", **changes})
    await router.knows_its_engines()
    return router


@contextlib.asynccontextmanager
async def held(engine: MockEngine) -> AsyncIterator[None]:
    """Let the engine answer its legs only when the block ends."""
    release = asyncio.Event()
    engine.usual = answer_after(release, usual_prefill)
    try:
        yield
    finally:
        release.set()
        engine.usual = usual_prefill


async def test_prompt_goes_to_the_rank_that_has_its_beginning(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity = page()
    router = await started(start_router)
    async with held(p):
        first = asyncio.create_task(router.complete(prompt=LONG))
        await eventually(lambda: p.requests)
        second = asyncio.create_task(router.complete(prompt=OTHER))
        await eventually(lambda: len(p.requests) == 2)
        one, other = named(p)
        assert {one, other} == {"0", "1"}, "the busy rank is avoided"
        loads = {str(rank.header): rank.tokens_in_flight for rank in ranks_of(router, p)}
        assert loads[str(one)] > 1000
        assert sum(loads.values()) == router.engine(p).tokens_in_flight
    await asyncio.gather(first, second)
    for prompt in (LONG, OTHER, LONG, OTHER):
        assert (await router.complete(prompt=f"{prompt}And now?")).status_code == 200
    assert named(p)[2:] == [one, other, one, other]
    assert named(d) == [None] * 6, "an engine without ranks"
    assert not any(rank.in_flight or rank.tokens_in_flight for rank in ranks_of(router, p))


async def test_ranks_and_engines_without_ranks_are_compared(
    start_router: StartRouter, p: MockEngine, p2: MockEngine
) -> None:
    p.identity = page(3)
    router = await started(start_router, ps=[p, p2])
    async with held(p), held(p2):
        running = []
        for number in range(4):
            running.append(asyncio.create_task(router.complete(prompt=f"{number}{LONG}")))
            await eventually(lambda: len([*p.requests, *p2.requests]) == len(running))
    await asyncio.gather(*running)
    assert sorted(named(p), key=str) == ["0", "1", "2"]
    assert named(p2) == [None]


@pytest.mark.parametrize(
    ("identity", "metrics", "numbers"),
    [
        (page(), b"", [0, 1]),
        (None, vllm_metrics(0, 1), [0, 1]),
        (page(2, first=2, size=4), vllm_metrics(2, 3), [2, 3]),
        (page(2, size=4), vllm_metrics(0, 1, 2, 3), [0, 1, 2, 3]),
        (page(2, size=4), b"", []),
        (page(1), b"", []),
        (page(1, first=3, size=4), vllm_metrics(3), []),
        (None, vllm_metrics(0), []),
        ({"dp_size": 2, "ranks": [7, None]}, b"", []),
    ],
    ids=[
        "identity page",
        "stock vLLM",
        "second server of a hybrid deployment",
        "ranks on several machines behind one server",
        "only some ranks known",
        "one rank",
        "one rank of a deployment with a server for each",
        "stock vLLM with one rank",
        "strange page",
    ],
)
async def test_ranks_are_chosen_only_where_all_are_known(
    start_router: StartRouter, p: MockEngine, identity: Any, metrics: bytes, numbers: list[int]
) -> None:
    p.identity, p.pages["/metrics"] = identity, metrics
    router = await started(start_router)
    ranks = ranks_of(router, p)
    assert [rank.number for rank in ranks] == numbers
    assert [rank.header for rank in ranks] == [*range(len(numbers))], "each server counts from 0"
    assert len({rank.cache_tokens for rank in ranks}) <= 1
    assert (await router.complete(prompt=LONG)).status_code == 200
    assert named(p)[0] in {str(rank.header) for rank in ranks} | ({None} if not ranks else set())


async def test_a_rank_remembers_as_much_as_its_own_cache_holds(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.pages["/metrics"] = page(), vllm_metrics(0, 1)
    router = await started(start_router)
    assert [rank.cache_tokens for rank in ranks_of(router, p)] == [1600, 1600]
    assert router.engine(p).cache_tokens == 3200
    assert [rank.cache_tokens for rank in ranks_of(router, d)] == [6400, 6400]
    assert router.engine(d).cache_tokens == 12800


@pytest.mark.parametrize("policy", ["power_of_two", "least_loaded", "round_robin"])
async def test_policies_that_go_by_load_leave_the_rank_to_the_engine(
    start_router: StartRouter, p: MockEngine, d: MockEngine, policy: str
) -> None:
    p.identity, d.identity = page(), page()
    router = await started(start_router, prefill_policy=policy, decode_policy=policy)
    for _ in range(3):
        assert (await router.complete(prompt=LONG)).status_code == 200
    assert named(p) + named(d) == [None] * 6


async def test_a_client_may_choose_the_rank(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity = page()
    router = await started(start_router)
    body = {"model": "m", "prompt": LONG}
    for rank in ("1", "0", "7", "x"):
        answer = await router.client.post("/v1/completions", json=body, headers={HEADER: rank})
        assert answer.status_code == 200
    assert named(p) == named(d) == ["1", "0", "7", "x"]
    assert not any(rank.in_flight for rank in ranks_of(router, p))


async def test_decode_engines_rank_that_has_a_prompt_answers_alone(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    d.identity = page()
    router = await started(start_router, min_remote_prefill_tokens=300, decode_policy="prefix")
    for more in ("", "And now?", "And then?"):
        assert (await router.complete(prompt=LONG + more)).status_code == 200
    assert len(p.requests) == 1
    assert len(set(named(d))) == 1
    assert named(d)[0] is not None


async def test_a_push_names_the_same_rank_in_both_legs(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.identity = page(2, first=2, size=4, push=True), {"transfer_modes": ["push"]}
    p.pages["/metrics"] = vllm_metrics(2, 3)
    router = await started(start_router)
    for prompt in (LONG, LONG, OTHER, f"third {LONG}"):
        assert (await router.complete(prompt=prompt)).status_code == 200
        rank = int(p.last.header(HEADER) or "none")
        params = d.last.json["kv_transfer_params"]
        assert params["remote_engine_id"] == f"p_dp{rank + 2}"
    assert named(p)[0] == named(p)[1]


async def test_prompts_of_the_ranks_of_a_restarted_engine_are_forgotten(
    start_router: StartRouter, p: MockEngine
) -> None:
    p.identity = page()
    router = await started(start_router)
    await router.complete(prompt=LONG)
    index, name = router.gateway.routes.index, f"127.0.0.1:{p.port}#{named(p)[0]}"
    assert index.bit(name)
    router.gateway.fleet.note_unreachable(router.engine(p), "gone")
    assert index.bit(name), "it may be the same process"
    router.gateway.fleet.note_process(router.engine(p), ProcessIdentity(frozenset(["another"])))
    assert not index.bit(name)


async def test_routers_report_the_load_and_the_prompts_of_each_rank(
    start_router: StartRouter, p: MockEngine
) -> None:
    p.identity = page()
    one, other = [await started(start_router) for _ in range(2)]
    mine, theirs = (PeerRouters(r.gateway.routes.index) for r in (one, other))
    theirs.report(other.gateway.fleet.places())
    async with held(p):
        running = asyncio.create_task(one.complete(prompt=LONG))
        await eventually(lambda: p.requests)
        assert theirs.take(mine.report(one.gateway.fleet.places()), received=0.0)
        theirs.update(0.0)
    await running
    busy = int(named(p)[0] or "none")
    assert [rank.total_legs for rank in ranks_of(other, p)] == [int(n == busy) for n in range(2)]
    assert other.engine(p).total_legs == 1
    theirs.update(float("inf"))
    assert (await other.complete(prompt=f"{LONG}And now?")).status_code == 200
    assert named(p)[1] == named(p)[0]
