"""Push: both legs run at once and share ids, and the failure of one leg ends the other."""

import asyncio
from typing import Any

import pytest

from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import decoding, prefilling
from tests.unit.router.conversations.test_turns import ASKED, chat
from tests.unit.router.engine_scripts import (
    answer_after,
    answering,
    hang,
    usual_decode,
    usual_prefill,
)
from tests.unit.router.harness import eventually, post
from tests.unit.router.mock_engine import PARAMS, USUAL

WHERE = {
    "remote_engine_id": "p-1",
    "remote_host": "10.9.8.7",
    "remote_port": 5600,
    "tp_size": 2,
    "pp_size": 1,
}
IDENTITY: dict[str, Any] = {
    "capabilities": ["release"],
    "transfer_modes": ["push"],
    "ranks": [{"dp_rank": 0, **WHERE}],
}


@pytest.fixture(autouse=True)
def pushing_engines(p: MockEngine, d: MockEngine) -> None:
    p.identity, d.identity = IDENTITY, {"transfer_modes": ["push"], "capabilities": []}


def legs(engine: MockEngine) -> list[Received]:
    """Return the legs that an engine got, without probes and releases."""
    return [r for r in engine.requests if r.path == "/v1/completions"]


async def test_both_legs_are_sent_at_once_with_shared_ids(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router, both = await start_router(identified=True), asyncio.Barrier(2)
    p.usual, d.usual = answer_after(both, usual_prefill), answer_after(both, usual_decode)
    for streamed in (True, False):
        assert (await router.complete(stream=streamed)).status_code == 200
        (given_p, given_d) = (e.last.json["kv_transfer_params"] for e in (p, d))
        leg_id = p.last.header("x-request-id")
        assert d.last.header("x-request-id") == leg_id
        transfer_id = given_p.pop("transfer_id")
        assert given_p["do_remote_decode"] is True
        assert given_d == WHERE | {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": leg_id,
            "transfer_id": transfer_id,
            "retain": False,
        }
    labels = {"endpoint": "/v1/completions", "flow": "push", "status": "200", "outcome": "ok"}
    await eventually(lambda: router.metric("requests_total", **labels) == 2)


async def test_decoder_learns_that_the_prefiller_verifies_prefixes(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Otherwise the decoder would retain each turn until it expires."""
    p.identity = {**IDENTITY, "capabilities": ["prefix_proof"]}
    router = await start_router(identified=True)
    assert (await router.complete()).status_code == 200
    assert d.last.json["kv_transfer_params"]["proves_prefix"] is True


@pytest.mark.parametrize("mode", ["auto", "pull", "push"])
@pytest.mark.parametrize("engines_push", [True, False])
async def test_transfer_mode_follows_the_setting_or_the_engines(
    start_router: StartRouter, p: MockEngine, d: MockEngine, mode: str, engines_push: bool
) -> None:
    if not engines_push:
        p.identity = {**IDENTITY, "transfer_modes": ["pull"]}
        d.identity = {"transfer_modes": ["pull"]}
    router = await start_router(transfer_mode=mode, identified=True)
    assert (await router.complete()).status_code == 200
    was_pushed = "remote_block_ids" not in d.last.json["kv_transfer_params"]
    assert was_pushed == (mode == "push" or (mode == "auto" and engines_push))


async def test_address_of_an_unknown_prefiller_is_learned_from_a_pull(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity = d.identity = None
    router = await start_router(transfer_mode="push")
    assert (await router.complete()).status_code == 200
    assert d.last.json["kv_transfer_params"]["remote_block_ids"] == PARAMS["remote_block_ids"]
    assert (await router.complete()).status_code == 200
    told = d.last.json["kv_transfer_params"]
    assert "remote_block_ids" not in told
    assert told["remote_engine_id"] == PARAMS["remote_engine_id"]


async def test_ranks_of_a_prefiller_take_turns_unless_the_client_chooses(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    ranks = [
        {"dp_rank": rank, **WHERE, "remote_engine_id": f"p_dp{rank}", "remote_port": 5600 + rank}
        for rank in range(2)
    ]
    p.identity = {**IDENTITY, "ranks": ranks}
    router = await start_router(identified=True)
    seen = set()
    for _ in range(2):
        assert (await router.complete()).status_code == 200
        rank = p.last.header("x-data-parallel-rank")
        assert d.last.header("x-data-parallel-rank") is None
        assert d.last.json["kv_transfer_params"]["remote_engine_id"] == f"p_dp{rank}"
        seen.add(rank)
    assert seen == {"0", "1"}
    body = {"model": "m", "prompt": "x"}
    headers = {"x-data-parallel-rank": "1"}
    answer = await router.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert p.last.header("x-data-parallel-rank") == "1"
    assert d.last.json["kv_transfer_params"]["remote_port"] == 5601


@pytest.mark.parametrize("fails", ["prefill", "decode"])
async def test_failed_leg_ends_the_other_and_both_are_retried_elsewhere(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    p2: MockEngine,
    d2: MockEngine,
    fails: str,
) -> None:
    asked, left = asyncio.Event(), asyncio.Event()
    breaks = answer_after(asked, answering(500, {"error": {"message": "no"}}))

    async def waits(request: Received, peer: Peer) -> None:
        asked.set()
        await peer.wait_left()
        left.set()

    p2.identity, d2.identity = IDENTITY, d.identity
    router = await start_router(ps=[p, p2], ds=[d, d2], identified=True)
    everyone = [*router.gateway.fleet.engines]
    broken, waiting = (p, d) if fails == "prefill" else (d, p)
    broken.usual, waiting.scripts = breaks, [waits]
    first = {f"127.0.0.1:{e.port}" for e in (p, d)}
    for engine in everyone:
        engine.tokens_in_flight = 0 if engine.name in first else 1
    assert (await router.complete()).status_code == 200
    await asyncio.wait_for(left.wait(), 5)
    ids = [r.header("x-request-id") for e in (p, p2) for r in legs(e)]
    assert len(ids) == len(set(ids)) == 2, "a new one for each attempt"
    asked_for = [r.json["kv_transfer_params"] for e in (d, d2) for r in legs(e)]
    transfers = [params["transfer_id"] for params in asked_for if "transfer_id" in params]
    assert len(set(transfers)) == len(transfers) >= 1
    for engine in everyone:
        engine.tokens_in_flight = 0


async def test_a_turn_whose_prefill_leg_ends_after_the_answer_is_counted(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    may_end, usual = asyncio.Event(), prefilling()
    p.usual, d.usual = answer_after(may_end, usual), decoding()
    router = await start_router(conversation_store="memory", identified=True)
    await chat(router, ASKED)
    router.gateway.records.flush()
    assert not router.metric("conversation_turns_total", outcome="new", reason="")
    may_end.set()
    await eventually(
        lambda: router.metric("conversation_turns_total", outcome="new", reason="") == 1
    )


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_client_gets_the_4xx_of_either_leg(
    start_router: StartRouter, p: MockEngine, d: MockEngine, who: str
) -> None:
    router = await start_router(identified=True)
    (p if who == "prefill" else d).scripts = [
        answering(422, {"error": {"message": "no such thing"}})
    ]
    (d if who == "prefill" else p).scripts = [hang]
    answer = await router.complete()
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, "no such thing")


async def test_client_that_disconnects_cancels_both_legs(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(identified=True)
    asked, left = asyncio.Barrier(3), asyncio.Barrier(3)

    async def waits(request: Received, peer: Peer) -> None:
        await asked.wait()
        await peer.wait_left()
        await left.wait()

    p.scripts, d.scripts = [waits], [waits]
    async with router.socket() as client:
        await client.send(post(b'{"prompt": "x"}'))
        await asyncio.wait_for(asked.wait(), 5)
    await asyncio.wait_for(left.wait(), 5)


async def test_kv_is_released_if_the_decoder_fails(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router, answered = await start_router(identified=True), asyncio.Event()
    proven = {**PARAMS, "prefix_proof": {"hashes": []}}

    async def prefills(request: Received, peer: Peer) -> None:
        await peer.answer(USUAL | {"kv_transfer_params": proven})
        answered.set()

    async def breaks(request: Received, peer: Peer) -> None:
        await answered.wait()
        await eventually(lambda: router.metric("prefill_seconds_count") == 1)
        await peer.answer({"error": {"message": "no"}}, 500)

    p.scripts, d.scripts = [prefills], [breaks]
    assert (await router.complete()).status_code == 502
    await eventually(lambda: [r for r in p.requests if r.path == "/disagg/release"])


@pytest.mark.parametrize("turns", range(8))
async def test_client_that_disconnects_just_after_a_decoder_failed_leaves_no_prefill_leg_behind(
    start_router: StartRouter, p: MockEngine, d: MockEngine, turns: int
) -> None:
    """The disconnect comes in any of the next iterations of the loop."""
    fails = asyncio.Event()
    fail = answer_after(fails, answering(500, {"error": {"message": "no"}}))
    p.scripts, d.scripts = [hang], [fail]
    router = await start_router(identified=True)
    async with router.socket() as client:
        await client.send(post(b'{"model": "m", "prompt": "x"}'))
        await eventually(lambda: p.requests and d.requests)
        fails.set()
        async with asyncio.timeout(5):
            while router.engine(d).in_flight:  # noqa: ASYNC110 # it must see the very turn
                await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in router.gateway.tasks.running:
            task.cancel()
        await router.settled()
