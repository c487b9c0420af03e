"""An engine that was silent or unlisted for a moment keeps the prefixes that the router knows."""

import contextlib

import pytest

from router.fleet.engine import Health
from router.routing.prompt_chunks import hash_chunks
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import usual_prefill
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import running_engine

PROMPT = "A long system prompt that many users share. " * 200


def show_process(engine: MockEngine, evidence: str, process: str) -> None:
    """Let the engine's pages name its process, in the way that `evidence` says."""
    if evidence == "engine id":
        place = {"remote_engine_id": process, "remote_host": "10.9.8.7", "remote_port": 5600}
        engine.identity = {"capabilities": [], "ranks": [place]}
    elif evidence == "start time":
        engine.pages["/metrics"] = f"process_start_time_seconds {process}\n".encode()


def is_remembered(router: Router, name: str) -> bool:
    index = router.gateway.routes.index
    return index.longest(hash_chunks({"model": "m", "prompt": PROMPT}), index.bit(name)).depth > 0


@pytest.mark.parametrize("how", ["silent", "unlisted"])
@pytest.mark.parametrize("evidence", ["engine id", "start time", "none"])
@pytest.mark.parametrize("restarts", [True, False])
async def test_engine_that_returns_keeps_its_prompts_unless_it_has_restarted(
    start_router: StartRouter, how: str, evidence: str, restarts: bool
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ps = [await stack.enter_async_context(running_engine(usual_prefill)) for _ in range(3)]
        for mock in ps:
            show_process(mock, evidence, "1")
        router = await start_router(ps=ps, prefill_policy="prefix")
        await router.knows_its_engines()
        await router.complete(prompt=PROMPT)
        (warm,) = [mock for mock in ps if mock.requests]
        engine = router.engine(warm)
        if restarts:
            show_process(warm, evidence, "2")
        if how == "silent":
            warm.healthy = False
            await eventually(lambda: engine.health is Health.UNHEALTHY)
            warm.healthy = True
        else:
            router.gateway.fleet.remove(engine.name)
            router.gateway.fleet.add(engine.spec)
        await eventually(lambda: router.engine(warm).is_available)
        assert is_remembered(router, engine.name) == (not restarts or evidence == "none")
        if not restarts:
            for _ in range(6):
                await router.complete(prompt=PROMPT)
            asked = [mock for mock in ps for one in mock.requests if one.json["prompt"] == PROMPT]
            assert asked == [warm] * 7
