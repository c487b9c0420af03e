"""Engines that prefill and decode: nobody hands KV to itself."""

from __future__ import annotations

from tests.unit.router.conftest import StartRouter
from tests.unit.router.mock_engine import (
    PARAMS,
    MockEngine,
    Peer,
    Received,
    running_engine,
    usual_decode,
    usual_prefill,
)
from tests.unit.router.test_engine_answers import answering


async def either(request: Received, peer: Peer) -> None:
    params = request.json.get("kv_transfer_params") or {}
    await (usual_prefill if params.get("do_remote_decode") else usual_decode)(request, peer)


async def test_the_only_engine_does_it_alone(start_router: StartRouter, p: MockEngine) -> None:
    p.usual = either
    router = await start_router(ps=[p], ds=[p])
    assert len(router.gateway.fleet.engines) == 1
    assert (await router.complete()).status_code == 200
    assert "kv_transfer_params" not in p.last.json
    assert router.metric("decode_only_total", reason="same_engine") == 1


async def test_of_two_one_prefills_and_the_other_decodes(
    start_router: StartRouter, p: MockEngine
) -> None:
    p.usual = either
    async with running_engine(either) as other:
        router = await start_router(ps=[p, other], ds=[p, other])
        for _ in range(6):
            before = len(p.requests), len(other.requests)
            assert (await router.complete()).status_code == 200
            assert (len(p.requests), len(other.requests)) == (before[0] + 1, before[1] + 1)


async def test_the_one_that_prefilled_for_another_decodes_by_itself_where_it_is_the_last(
    start_router: StartRouter, p: MockEngine
) -> None:
    async def no_prefill(request: Received, peer: Peer) -> None:
        params = request.json.get("kv_transfer_params") or {}
        await (answering(500, {}) if params.get("do_remote_decode") else either)(request, peer)

    async with running_engine(either) as other:
        p.usual = no_prefill
        router = await start_router(ps=[p, other], ds=[p, other], health_interval=5)
        for _ in range(4):
            assert (await router.complete(x=1)).status_code == 200
        legs = [r.json.get("kv_transfer_params") for r in other.requests if "x" in r.json]
        assert any(params and params.get("do_remote_decode") for params in legs)
        own = PARAMS["remote_engine_id"]
        assert not any(params and params.get("remote_engine_id") == own for params in legs)
        assert router.metric("decode_only_total", reason="same_engine")
        await router.settled()
