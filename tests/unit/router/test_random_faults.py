"""Whatever engines and clients do at random, an answer is whole or its client gets an error, and
nothing leaks."""

import asyncio
import re
from random import Random
from typing import Any

import pytest

from router.proxy.heartbeat import COMMENT
from scripts.mock_engine import MockEngine, Peer, Received, Script
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import fails, refuses
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.test_hedging import REJECTION
from tests.unit.router.test_preemption_return import OURS, all_of_it, hands_back
from tests.unit.router.test_resume import WORDS, computes, dies_after, texts_of

ABLE = OURS | {"capabilities": [*OURS["capabilities"], "cache_hit_threshold"]}
REQUESTS, AT_ONCE = 60, 10
HOW = ("reset", "half", "error", "abort", "finish", "ends")


def decodes(random: Random) -> Script:
    async def script(request: Received, peer: Peer) -> None:
        if not request.path.startswith("/v1/"):
            return await peer.answer({"released": True})
        is_stream, fate = request.json.get("stream"), random.random()
        number = random.randrange(1, 4)
        begun = request.json.get("kv_transfer_params", {}).get("begun", {})
        if request.json.get("cache_hit_threshold") and fate < 0.5:
            return await peer.stream(*REJECTION) if is_stream else await all_of_it(request, peer)
        if fate < 0.6:
            return await all_of_it(request, peer)
        if fate < 0.75:
            return await hands_back(max(number, begun.get("spoken", 0)))(request, peer)
        if fate < 0.8:
            return await fails(request, peer)
        if fate < 0.83:
            return await refuses(request, peer)
        if is_stream:
            return await dies_after(number, random.choice(HOW))(request, peer)
        peer.reset()

    return script


def prefills(random: Random) -> Script:
    async def script(request: Received, peer: Peer) -> None:
        if not request.path.startswith("/v1/"):
            return await peer.answer({"released": True})
        await (fails if random.random() < 0.1 else computes)(request, peer)

    return script


async def asks(router: Router, random: Random) -> str:
    """What came of it."""
    is_stream, patience = random.random() < 0.7, random.choice((0.002, 0.01, 20, 20, 20))
    body: dict[str, Any] = {"model": "m", "prompt": "x", "max_tokens": 7, "stream": is_stream}
    if random.random() < 0.3:
        body["cache_hit_threshold"] = 0.5
    if random.random() < 0.2:
        body["conversation_id"] = str(random.randrange(4))
    try:
        async with asyncio.timeout(patience):
            answer = await router.client.post("/v1/completions", json=body)
    except TimeoutError:
        assert patience < 1, "an answer that never ends"
        return "left"
    if answer.status_code != 200:
        return str(answer.status_code)
    if not is_stream:
        (choice,) = answer.json()["choices"]
        assert choice["text"] == "".join(WORDS)
        return "whole"
    assert "token_ids" not in answer.text
    assert "cache_threshold" not in answer.text
    if '"error"' in answer.text:
        said = re.findall(r'"text":"([^"]*)"', answer.text)
        assert said == WORDS[: len(said)]
        return "cut"
    assert texts_of(answer.text.replace(COMMENT.decode(), "")) == WORDS, repr(answer.text)
    return "whole"


@pytest.mark.parametrize("seed", range(4))
async def test_an_answer_is_whole_or_its_client_is_told(
    start_router: StartRouter, p: MockEngine, d: MockEngine, seed: int
) -> None:
    random = Random(seed)
    p.usual, d.usual = prefills(random), decodes(random)
    async with (
        running_engine(p.usual) as p2,
        running_engine(d.usual) as d2,
        running_engine(d.usual) as d3,
    ):
        for engine in (p, p2, d, d2, d3):
            engine.identity = ABLE
        router = await start_router(
            ps=[p, p2],
            ds=[d, d2, d3],
            hedged_decoders=2,
            max_engine_requests=8,
            queue_size=100,
            conversation_store="memory",
            stream_heartbeat=0.1,
        )
        fleet = router.gateway.fleet.engines
        await eventually(lambda: all(engine.capabilities.is_identity_known for engine in fleet))
        came: list[str] = []
        for _ in range(0, REQUESTS, AT_ONCE):
            came += await asyncio.gather(*(asks(router, random) for _ in range(AT_ONCE)))
        await router.settled()
        assert came.count("whole") > REQUESTS / 4
        assert router.gateway.memory.resume_buffers.size == 0
        assert not router.gateway.tasks.running
        assert [(one.in_flight, one.kv_leases, one.admitted) for one in fleet] == [(0, 0, 0)] * 5
