"""A decode engine computes a prompt itself where it keeps --target-itl and is sooner.

The numbers of the rule are tested in routing/test_local_prefill.py.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import fails, streaming_until, usual_decode
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import event

STEP_MODEL = {"base_ms": 10.0, "token_us": 50.0, "token_context_ns": 1.0, "context_ns": 30.0}
RANK = {"num_blocks": 10_000, "block_size": 16, "max_step_tokens": 256, "step_model": STEP_MODEL}
PROMPT = "a few words " * 50  # 150 tokens


def identity_with(*capabilities: str, **changes: Any) -> dict[str, Any]:
    return {"capabilities": [*capabilities], "ranks": [RANK | changes]}


@pytest.fixture
async def start_judged(start_router: StartRouter, d: MockEngine) -> StartRouter:
    """Start a router that knows the time of its decode engines' steps."""
    d.identity = d.identity or identity_with()

    async def start(**changes: Any) -> Router:
        router = await start_router(**({"target_itl": 0.05} | changes))
        await router.knows_its_engines()
        return router

    return start


@pytest.fixture
async def held(d: MockEngine) -> AsyncIterator[asyncio.Event]:
    """The decode engine sends no first token before this is set."""
    first_token = asyncio.Event()

    async def answer(request: Received, peer: Peer) -> None:
        if not request.json.get("stream"):
            return await usual_decode(request, peer)
        await peer.send(STREAM_HEAD)
        await first_token.wait()
        await peer.send(chunk(event("a")) + chunk(event("b")) + chunk(DONE) + b"0\r\n\r\n")

    d.usual = answer
    yield first_token
    first_token.set()


def sooner(router: Router) -> float:
    return router.metric("decode_only_total", reason="sooner")


async def test_an_idle_decode_engine_answers_a_prompt_of_one_step_alone(
    start_judged: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_judged()
    assert (await router.complete(prompt=PROMPT)).status_code == 200
    assert (len(p.requests), len(d.requests), sooner(router)) == (0, 1, 1)
    # A prefill engine computes this in one step, the decode engine in sixteen.
    await router.complete(prompt=PROMPT * 27)
    assert (len(p.requests), len(d.requests), sooner(router)) == (1, 2, 1)
    await router.settled()


@pytest.mark.parametrize(
    "changes",
    [
        {"target_itl": 0},
        {"target_itl": 0.015},  # less than a step of 150 tokens takes
    ],
)
async def test_the_prefill_engine_computes_what_breaks_the_target(
    start_judged: StartRouter, p: MockEngine, changes: dict[str, Any]
) -> None:
    router = await start_judged(**changes)
    await router.complete(prompt=PROMPT)
    assert (len(p.requests), sooner(router)) == (1, 0)


@pytest.mark.parametrize("unknown", ["max_step_tokens", "num_blocks"])
async def test_an_engine_that_does_not_report_itself_gets_its_prompts_computed(
    start_router: StartRouter, p: MockEngine, d: MockEngine, unknown: str
) -> None:
    d.identity = identity_with(**{unknown: None})
    router = await start_router(target_itl=0.05)
    await router.knows_its_engines()
    await router.complete(prompt=PROMPT)
    assert (len(p.requests), sooner(router)) == (1, 0)


async def test_an_engine_measures_its_steps_with_one_prompt_at_a_time(
    start_router: StartRouter, p: MockEngine, d: MockEngine, held: asyncio.Event
) -> None:
    d.identity = identity_with(step_model=None)
    router = await start_router(target_itl=0.05)
    await router.knows_its_engines()
    await router.complete(prompt="too short to show the time of a token")
    asking = [asyncio.create_task(router.stream(prompt=PROMPT)) for _ in range(3)]
    await eventually(lambda: len(d.requests) == 4)
    assert (len(p.requests), router.metric("decode_only_total", reason="trial")) == (3, 1)
    held.set()
    await asyncio.gather(*asking)
    await router.complete(prompt=PROMPT)
    assert (len(p.requests), router.metric("decode_only_total", reason="trial")) == (3, 2)
    router.engine(d).capabilities.trial_prefills = 1000  # all in vain
    await router.complete(prompt=PROMPT)
    assert len(p.requests) == 4
    await router.settled()


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_hit_threshold": 0},
        {"prompt": None, "prompt_embeds": "eA=="},
        {"n": 2},
    ],
)
async def test_the_rule_does_not_judge_requests_that_something_else_decides(
    start_judged: StartRouter, p: MockEngine, d: MockEngine, fields: dict[str, Any]
) -> None:
    router = await start_judged()
    await router.complete(**({"prompt": PROMPT} | fields))
    assert sooner(router) == 0
    await router.settled()


async def test_requests_of_one_instant_count_each_other(
    start_judged: StartRouter, p: MockEngine, d: MockEngine, held: asyncio.Event
) -> None:
    """Together the prompts of five or more fill a step for too long, since they wait for it."""
    d.identity = identity_with(max_step_tokens=8192)
    router = await start_judged()
    asking = [asyncio.create_task(router.stream(prompt=PROMPT)) for _ in range(12)]
    await eventually(lambda: len(d.requests) + len(p.requests) >= 12 and len(d.requests) == 12)
    alone = sooner(router)
    assert 0 < alone < 6
    assert len(p.requests) == 12 - alone
    assert router.engine(d).local_prefill_tokens == alone * 150
    held.set()
    await asyncio.gather(*asking)
    assert router.engine(d).local_prefill_s == pytest.approx(0)
    await router.settled()


async def test_a_decode_engine_with_first_tokens_takes_the_next_prompt(
    start_judged: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """A prompt counts as queued until its first token, and as context until the answer ends."""
    end = asyncio.Event()
    d.usual = streaming_until(end, event("a"), DONE)
    router = await start_judged()
    asking = asyncio.create_task(router.stream(prompt=PROMPT))
    await eventually(lambda: len(d.requests) == 1 and not router.engine(d).local_prefill_tokens)
    assert router.engine(d).total_tokens > 100
    end.set()
    await asking
    await router.settled()


async def test_a_queue_at_the_prefill_engine_sends_a_long_prompt_to_the_decode_engine(
    start_judged: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_judged()
    router.engine(p).add_load(1, 20_000)
    await router.complete(prompt=PROMPT * 27)
    router.engine(p).add_load(-1, -20_000)
    assert (len(p.requests), sooner(router)) == (0, 1)


async def test_the_decode_engine_with_the_least_work_gets_the_prompt(
    start_judged: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    d2.identity = identity_with()
    router = await start_judged(ds=[d, d2])
    for busy, idle in ((d, d2), (d2, d)):
        before = len(idle.requests)
        router.engine(busy).add_local_prefill(0.4, 100)
        for _ in range(2):  # the policy prefers each engine in turn
            await router.complete(prompt=PROMPT)
        router.engine(busy).add_local_prefill(-0.4, -100)
        assert len(idle.requests) == before + 2
    assert (len(p.requests), sooner(router)) == (0, 4)


async def test_a_failed_decode_engine_is_replaced_by_another_that_computes_the_prompt(
    start_judged: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    d.usual, d2.identity = fails, identity_with()
    router = await start_judged(ds=[d, d2])
    router.engine(d2).add_local_prefill(0.1, 1)
    assert (await router.complete(prompt=PROMPT)).status_code == 200
    router.engine(d2).add_local_prefill(-0.1, -1)
    assert (len(p.requests), len(d.requests), len(d2.requests)) == (0, 1, 1)
    await router.settled()


async def test_without_a_prefill_engine_the_setting_for_that_case_decides(
    start_judged: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_judged(without_prefiller="refuse")
    router.gateway.fleet.remove(router.engine(p).name)
    assert (await router.complete(prompt=PROMPT)).status_code == 503
    assert (len(d.requests), sooner(router)) == (0, 0)


@pytest.mark.parametrize("mode", ["push", "auto"])
async def test_a_prompt_that_is_computed_locally_is_not_pushed(
    start_judged: StartRouter, p: MockEngine, d: MockEngine, mode: str
) -> None:
    p.identity = {"transfer_modes": ["push"]}
    d.identity = identity_with() | {"transfer_modes": ["push"]}
    router = await start_judged(transfer_mode=mode)
    await router.complete(prompt=PROMPT)
    assert (len(p.requests), sooner(router)) == (0, 1)


async def test_a_request_stays_at_the_engine_where_it_has_a_slot(
    start_judged: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, held: asyncio.Event
) -> None:
    """Another engine with less work may have no room."""
    d2.identity = identity_with()
    router = await start_judged(ds=[d, d2], max_engine_requests=1)
    router.engine(d2).add_local_prefill(0.4, 0)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(router.stream(prompt=PROMPT))
        await eventually(lambda: d.requests)
        # It would be sooner at `d`, which has no room.
        assert (await router.complete(prompt=PROMPT)).status_code == 200
        assert len(d.requests) == 1
        held.set()
    assert asking.result().status_code == 200
    router.engine(d2).add_local_prefill(-0.4, 0)
    await router.settled()


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "word " * 20_000}}
ANSWERED = {"role": "assistant", "content": "I write it."}
UNJUDGED_CHATS: dict[str, dict[str, Any]] = {
    "tool_calls": {"messages": [ANSWERED | {"tool_calls": [CALL]}]},
    "reasoning": {"messages": [ANSWERED | {"reasoning_content": "word " * 20_000}]},
    "documents": {"messages": [ANSWERED], "documents": [{"text": "word " * 20_000}]},
    "chat_template_kwargs": {"messages": [ANSWERED], "chat_template_kwargs": {"a": "w " * 50_000}},
    "media": {
        "messages": [
            {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "v"}}]}
        ]
    },
}


@pytest.mark.parametrize("chat", UNJUDGED_CHATS.values(), ids=list(UNJUDGED_CHATS))
async def test_the_prefill_engine_computes_chats_that_are_long_by_more_than_their_text(
    start_judged: StartRouter, p: MockEngine, chat: dict[str, Any]
) -> None:
    router = await start_judged()
    body = {"model": "m", "max_tokens": 5} | chat
    assert (await router.client.post("/v1/chat/completions", json=body)).status_code == 200
    assert (len(p.requests), sooner(router)) == (1, 0)


async def test_an_engine_that_has_just_failed_gets_no_prompt_although_it_looks_idle(
    start_judged: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d.usual, d2.identity = fails, identity_with()
    router = await start_judged(ds=[d, d2])
    router.engine(d2).add_load(1, 200)
    for _ in range(4):
        assert (await router.complete(prompt=PROMPT)).status_code == 200
    router.engine(d2).add_load(-1, -200)
    assert len(d.requests) == 1


async def test_a_session_stays_at_its_decode_engine(
    start_judged: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d2.identity = identity_with()
    router = await start_judged(ds=[d, d2], decode_policy="session")
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 3}
    for number in range(4):
        headers = {"x-session-id": "s"}
        await router.client.post("/v1/completions", json=body, headers=headers)
        home = d if d.requests else d2
        if not number:
            router.engine(home).add_load(1, 300)
    router.engine(home).add_load(-1, -300)
    assert len(home.requests) == 4


async def test_the_rank_that_a_client_names_is_judged(
    start_judged: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    d.identity = {
        "capabilities": [],
        "dp_size": 2,
        "ranks": [RANK | {"dp_rank": n} for n in (0, 1)],
    }
    router = await start_judged()
    engine = router.engine(d)
    assert engine.ranks is not None
    for busy in (engine.ranks[1], engine):
        busy.add_local_prefill(10.0, 100_000)
    headers, body = {"x-data-parallel-rank": "1"}, {"model": "m", "prompt": PROMPT, "max_tokens": 3}
    await router.client.post("/v1/completions", json=body, headers=headers)
    assert (len(p.requests), sooner(router)) == (1, 0)
    for busy in (engine.ranks[1], engine):
        busy.add_local_prefill(-10.0, -100_000)


async def test_short_prompts_are_no_trials(start_router: StartRouter, d: MockEngine) -> None:
    d.identity = identity_with(step_model=None)
    router = await start_router(target_itl=0.05, min_remote_prefill_tokens=64)
    await router.knows_its_engines()
    for _ in range(3):
        await router.complete(prompt="hello")
    assert router.engine(d).capabilities.trial_prefills == 0
    await router.complete(prompt=PROMPT)
    assert router.metric("decode_only_total", reason="trial") == 1


async def test_a_page_of_metrics_may_be_anything(start_router: StartRouter, d: MockEngine) -> None:
    """The router would read the page for hours if the time were quadratic."""
    d.pages["/metrics"] = b"vllm:cache_config_info{" + b"a" * 900_000 + b"} 1\n"
    router = await start_router()
    await router.knows_its_engines()
    assert (await router.complete()).status_code == 200
