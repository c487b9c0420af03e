"""Engines that prefill and decode: nobody hands KV to itself."""

from __future__ import annotations

from tests.unit.router.conftest import StartRouter
from tests.unit.router.mock_engine import (
    MockEngine,
    Peer,
    Received,
    running_engine,
    usual_decode,
    usual_prefill,
)


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
