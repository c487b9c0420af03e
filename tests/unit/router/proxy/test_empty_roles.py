"""Requests while a role has no usable engine, with prompts that every policy reads."""

import contextlib
from typing import Any

import pytest

from router.fleet.engine import Engine, EngineRole, Intent
from tests.unit.router.engine_scripts import usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import running_engine

PROMPT = "A long system prompt that many users share. " * 200
POLICIES = ("round_robin", "least_loaded", "power_of_two", "session", "prefix")
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"prefill_policy": name, "decode_policy": name} for name in POLICIES},
    "push": {"transfer_mode": "push"},
    "limits": {"max_engine_requests": 4, "queue_timeout": 0.2},
    "decode_first": {"decode_first_threshold": 0.5},
    "hedged": {"decode_first_threshold": 0.5, "hedged_decoders": 2},
    "local_prefill": {"min_remote_prefill_tokens": 100},
    "heartbeat": {"stream_heartbeat": 0.1},
}
USUAL = {"prefill_policy": "prefix", "decode_policy": "prefix", "without_prefiller": "decode"}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_long_prompts_get_503_without_decode_engines_and_an_answer_without_prefill_engines(
    variant: str,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ps, ds = [
            [await stack.enter_async_context(running_engine(usual)) for _ in range(2)]
            for usual in (usual_prefill, usual_decode)
        ]
        settings = settings_for(p=ps, d=ds, **USUAL | VARIANTS[variant])
        router = await stack.enter_async_context(running_router(settings))
        fleet = router.gateway.fleet
        await eventually(lambda: not fleet.unavailable_roles())
        await router.complete(prompt=PROMPT)  # the policies remember the prompt

        async def check(role: EngineRole) -> None:
            await eventually(lambda: role in fleet.unavailable_roles())
            assert await statuses(router) == {503 if role is EngineRole.DECODE else 200}, role

        for role, mocks in ((EngineRole.DECODE, ds), (EngineRole.PREFILL, ps)):
            engines: list[Engine] = [router.engine(mock) for mock in mocks]
            for mock in mocks:
                mock.healthy = False
            await check(role)
            for mock in mocks:
                mock.healthy = True
            await eventually(lambda: not fleet.unavailable_roles())
            for engine in engines:
                fleet.set_intent(engine, Intent.DRAINING)
            await check(role)
            for engine in engines:
                fleet.remove(engine.name)
            await check(role)
            for engine, mock in zip(engines, mocks, strict=True):
                fleet.add(engine.spec)
                fleet.set_intent(router.engine(mock), Intent.SERVING)
            await eventually(lambda: not fleet.unavailable_roles())


async def statuses(router: Router) -> set[int]:
    """Return the statuses of a whole answer, a stream, several answers and a turn."""
    chat = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
    turn = {"x-session-id": "s"}
    answers = [
        await router.complete(prompt=PROMPT),
        await router.stream(prompt=PROMPT),
        await router.complete(prompt=PROMPT, n=2),
        await router.client.post("/v1/chat/completions", json=chat, headers=turn),
    ]
    return {503 if '"code":503' in answer.text else answer.status_code for answer in answers}
