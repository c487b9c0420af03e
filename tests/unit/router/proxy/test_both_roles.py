"""Engines of both roles: two of them share a request, or one does both legs alone."""

import math
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from router.commands.status import parse_metrics
from router.commands.why import story
from router.coordination.demand import EngineDemand
from router.coordination.role_balance import RoleKeeper, state_of
from router.fleet.engine import BOTH, DECODE, MIN_SAMPLES, PREFILL, Engine
from router.fleet.kv_facts import RankFacts
from router.fleet.step_model import StepModel
from router.fleet.views import build_fleet_view
from router.proxy.queued_prefill import QueuedPrefill
from router.routing.local_prefill import MAX_TRIALS
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import KEPT, decoding, prefilling
from tests.unit.router.conversations.test_releases import CAPABLE, given_back, knows_release
from tests.unit.router.conversations.test_turns import AGAIN, ASKED, chat, turns
from tests.unit.router.engine_scripts import answering, usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS, running_engine


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


STEP_MODEL = {"base_ms": 10.0, "token_us": 50.0, "token_context_ns": 1.0, "context_ns": 30.0}
PROMPT = "a few words " * 3000  # 9,000 tokens
RANK = {
    "num_blocks": 100_000,
    "block_size": 16,
    "max_step_tokens": 2048,
    "target_itl_ms": 50.0,
    "step_model": STEP_MODEL | {"mixing": 0.1},
}


@pytest.fixture
async def both(start_router: StartRouter, p: MockEngine) -> AsyncIterator["Both"]:
    """A router with two engines of both roles, which report `RANK`."""
    p.usual, p.identity = either, {"capabilities": [], "ranks": [RANK]}
    async with running_engine(either) as other:
        other.identity = {"capabilities": [], "ranks": [RANK]}
        router = await start_router(ps=[p, other], ds=[p, other], target_itl=0.05, ui=True)
        await router.knows_its_engines()
        yield Both(router, p, other, RoleKeeper(router.gateway.fleet, 0.05))


class Both(NamedTuple):
    router: Router
    p: MockEngine
    other: MockEngine
    keeper: RoleKeeper

    @property
    def engines(self) -> list[Engine]:
        return [self.router.engine(self.p), self.router.engine(self.other)]

    async def retain_turns(self, look: Callable[[], None] = lambda: None) -> None:
        """Let both engines retain turns, and call `look` with each request."""

        async def retaining(request: Received, peer: Peer) -> None:
            look()
            params = request.json.get("kv_transfer_params") or {}
            await (prefilling() if params.get("do_remote_decode") else decoding())(request, peer)

        for mock, engine in zip((self.p, self.other), self.engines, strict=True):
            mock.usual, mock.identity = retaining, {**CAPABLE, "ranks": [RANK]}
            await knows_release(engine)

    async def prompt(self, text: str = PROMPT, name: str = "a") -> tuple[int, int]:
        """Send a prompt; return how many requests each engine got for it."""
        before = len(self.p.requests), len(self.other.requests)
        headers = {"x-request-id": name}
        body = {"model": "m", "prompt": text, "max_tokens": 7, "stream": True}
        answer = await self.router.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        return len(self.p.requests) - before[0], len(self.other.requests) - before[1]


async def test_an_idle_engine_of_a_free_group_does_both_legs(both: Both) -> None:
    both.keeper.update(0.0)
    assert [one.preferred_role for one in both.engines] == ["both", "both"]
    assert "0.10 weight reads" in both.engines[0].role_reason
    assert sorted(await both.prompt(name="idle")) == [0, 1]
    assert both.router.metric("decode_only_total", reason="cheapest") == 1
    page = await both.router.client.get("/ui/requests/idle")
    assert "  no KV transfer: prompt and answer on one engine cost least" in story(page.json())


async def test_metrics_and_the_admin_view_show_which_role_each_engine_prefers(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "disagg_router.fleet")
    router, fleet = both.router, both.router.gateway.fleet
    group = fleet.engines[0].group

    def preferred() -> list[str]:
        text = router.gateway.metrics.exposition().decode()
        return sorted(
            re.findall(r'_engine_preferred_role{.*preferred="(\w+)",reason="mix.*"} 1', text)
        )

    both.keeper.update(0.0)
    assert preferred() == ["both", "both"]
    assert router.metric("role_changes_total", group=group) == 0
    view = build_fleet_view(fleet, router.state.registry).engines[0]
    assert (view.preferred_role, view.step_limit_ms, view.mixing) == ("both", 45.0, 0.1)
    cheap = "mixing prompts and answers costs little"
    assert view.role_reason == f"{cheap}: 0.10 weight reads per step"
    status = parse_metrics(router.gateway.metrics.exposition().decode())
    assert [one.form_reasons for one in status.groups] == [(cheap,)]
    for engine in both.engines:
        engine.capabilities.step_model = StepModel.parse(STEP_MODEL | {"mixing": 1.0})
    weights = [pool.weight for pool in fleet.snapshot.any_model]
    both.keeper.update(2.0)
    assert preferred() == ["decode", "prefill"]
    # A group keeps its share of the traffic when its engines move.
    assert [pool.weight for pool in fleet.snapshot.any_model] == weights == [2]
    assert router.metric("role_changes_total", group=group) == 2
    views = build_fleet_view(fleet, router.state.registry).engines
    assert sorted(str(one.preferred_role) for one in views) == ["decode", "prefill"]
    assert "prompts need 0.00 engines" in views[0].role_reason
    assert views[0].mixing == 1.0
    fleet.cool_down(both.engines[0], 30.0)  # it gets nothing now
    assert len(preferred()) == 1
    view = build_fleet_view(fleet, router.state.registry).engines[0]
    assert (view.preferred_role, view.role_reason) == (None, "")
    both.keeper.update(4.0)  # and the other one has no choice
    assert preferred() == []
    assert caplog.messages[-1].endswith(" now prefers both legs: it is the only usable engine")


async def test_a_busy_engine_of_a_free_group_leaves_the_prompt_to_another(both: Both) -> None:
    both.keeper.update(0.0)
    busy, idle = both.engines
    busy.add_local_prefill(3.0, 100_000)
    idle.add_load(20, 1_500_000)  # and its cache is full
    assert await both.prompt() == (1, 0)
    idle.add_load(-10, -900_000)  # it has room, but its steps are long
    busy.add_local_prefill(-3.0, -100_000)
    busy.add_load(20, 1_550_000)
    assert sorted(await both.prompt("other words " * 3000)) == [0, 1]
    assert both.router.metric("decode_only_total", reason="cheapest") == 2
    busy.add_load(-20, -1_550_000)
    idle.add_load(-10, -600_000)


async def test_an_engine_that_has_just_failed_is_not_the_cheapest(both: Both) -> None:
    both.keeper.update(0.0)
    failing, other = both.engines
    other.add_local_prefill(1.0, 10_000)
    assert await both.prompt() == (1, 0)
    failing.failed_recently = True
    assert await both.prompt("other words " * 3000) == (0, 1)
    other.add_local_prefill(-1.0, -10_000)


async def test_an_engine_that_has_not_measured_its_steps_gets_its_part_of_a_free_group(
    both: Both,
) -> None:
    new, known = both.engines
    new.capabilities.step_model = None  # it has restarted
    both.keeper.update(0.0)
    assert [one.preferred_role for one in both.engines] == ["both", "both"]
    known.add_local_prefill(3.0, 100_000)
    queued: list[float] = []

    async def look(request: Received, peer: Peer) -> None:
        queued.append(new.local_prefill_s)
        await either(request, peer)

    both.p.usual = look
    assert await both.prompt() == (1, 0)
    assert queued[0] > 0.4
    known.add_local_prefill(-3.0, -100_000)


async def test_without_a_small_mixing_penalty_each_engine_prefers_a_role(both: Both) -> None:
    for engine in both.engines:
        engine.capabilities.step_model = StepModel.parse(STEP_MODEL | {"mixing": 1.0})
    both.keeper.update(0.0)
    roles = {engine.name: engine.preferred_role for engine in both.engines}
    assert sorted(roles.values()) == ["decode", "prefill"]
    (pool,) = both.router.gateway.fleet.snapshot.any_model
    assert [one.preferred_role for one in pool.prefillers] == ["prefill"]
    assert [one.preferred_role for one in pool.decoders] == ["decode"]
    assert not pool.is_free
    prefers_prompts = pool.prefillers[0]
    prefers_prompts.add_load(30, 300_000)  # old answers, which are no queue of prompts
    decoder = pool.decoders[0]
    decoder.add_load(1, 900_000)  # no time for a prompt of its own
    assert await both.prompt() == (1, 1)
    prefers_prompts.add_load(-30, -300_000)
    decoder.add_load(-1, -900_000)
    fleet = both.router.gateway.fleet
    fleet.cool_down(prefers_prompts, 30.0)
    (pool,) = fleet.snapshot.any_model
    assert pool.prefillers == pool.decoders
    assert pool.prefillers[0].preferred_role == "decode"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_prefers_the_other_role_takes_over_from_one_that_fails(
    both: Both, role: str
) -> None:
    for engine in both.engines:
        engine.capabilities.step_model = None
        engine.capabilities.trial_prefills = MAX_TRIALS
    both.keeper.update(0.0)
    failing = next(e for e in both.engines if e.preferred_role == role)
    mock = next(one for one in (both.p, both.other) if one.port == failing.spec.address.port)
    mock.usual = answering(500, {})
    answer = await both.router.complete(prompt=PROMPT)
    assert answer.status_code == 200
    assert both.router.metric("retries_total", role=role, kind="status_5xx") == 1


async def test_a_prefill_leg_is_load_of_prompts_and_not_of_answers(both: Both) -> None:
    seen: list[tuple[int, int]] = []

    async def look(request: Received, peer: Peer) -> None:
        engines = both.engines
        seen.append(
            (sum(e.total_tokens for e in engines), sum(e.local_prefill_tokens for e in engines))
        )
        await either(request, peer)

    both.p.usual = both.other.usual = look
    await both.prompt()
    (contexts, queued) = seen[0]
    assert contexts == 0
    assert queued > 9000 * 0.9
    (contexts, queued) = seen[1]
    assert contexts > 9000 * 0.9
    assert queued == 0
    await both.router.settled()
    for engine in both.engines:
        assert (engine.total_legs, engine.total_tokens, engine.total_local_prefill[1]) == (0, 0, 0)
    assert sum(engine.offered_prefill_s for engine in both.engines) > 0


async def test_an_engine_that_prefers_prompts_computes_them_in_full_steps(both: Both) -> None:
    fleet, (p, other) = both.router.gateway.fleet, both.engines
    fleet.prefer_roles({p.name: (PREFILL, ""), other.name: (DECODE, "")}, frozenset())
    other.add_load(1, 1_590_000)  # it has no room to compute prompts
    queued: list[float] = []

    async def look(request: Received, peer: Peer) -> None:
        queued.append(p.local_prefill_s)
        await either(request, peer)

    both.p.usual = look
    await both.prompt("one prompt " * 3000)
    p.add_load(1, 1000)  # an answer that it has from before
    await both.prompt("other words " * 3000)
    p.add_load(-1, -1000)
    other.add_load(-1, -1_590_000)
    assert 0 < 1.2 * queued[0] < queued[1]


async def test_prefix_index_follows_an_engine_that_moves_back_and_forth(
    start_router: StartRouter, p: MockEngine
) -> None:
    p.usual, p.identity = either, {"capabilities": [], "ranks": [RANK]}
    async with (
        running_engine(either) as p2,
        running_engine(either) as d,
        running_engine(either) as e,
    ):
        mocks = [p, p2, d, e]
        for mock in mocks:
            mock.identity = p.identity
        router = await start_router(
            ps=mocks, ds=mocks, prefill_policy="prefix", decode_policy="prefix"
        )
        await router.knows_its_engines()
        engines, index = [router.engine(mock) for mock in mocks], router.gateway.routes.index

        async def divide(num_prefillers: int) -> None:
            roles = [PREFILL] * num_prefillers + [DECODE] * (4 - num_prefillers)
            named = zip(engines, roles, strict=True)
            preferred = {engine.name: (role, "") for engine, role in named}
            router.gateway.fleet.prefer_roles(preferred, frozenset())
            assert (await router.complete(prompt=PROMPT)).status_code == 200

        for chunk in range(3):
            await divide(2)
            index.add(engines[1].name, [chunk])
            assert index.longest([chunk], index.bit(engines[1].name)).depth == 1
            await divide(1)  # its own cache soon loses what it computed
            assert index.longest([chunk], index.bit(engines[1].name)).depth == 0


async def test_the_prefix_index_learns_the_cache_of_an_engine_whose_role_the_operator_changes(
    start_router: StartRouter, p: MockEngine
) -> None:
    """Its pages are read again after the change; until then its cache has an assumed size."""
    p.usual, p.identity = either, {"capabilities": [], "ranks": [RANK]}
    async with running_engine(either) as d, running_engine(either) as e:
        d.identity = e.identity = p.identity
        policies = {"prefill_policy": "prefix", "decode_policy": "prefix"}
        router = await start_router(ps=[p, d, e], ds=[p, d, e], **policies)
        await router.knows_its_engines()
        engine, index = router.engine(d), router.gateway.routes.index
        d.identity = {"capabilities": []}
        spec = replace(engine.spec, role=DECODE)
        router.gateway.fleet.change_spec(engine, spec)
        await router.knows_its_engines()
        assert (await router.complete(prompt=PROMPT)).status_code == 200
        assert (engine.cache_tokens, index.bit(engine.name) > 0) == (0, True)
        d.identity = p.identity

        def is_reported() -> bool:
            engine.capabilities.is_identity_known &= engine.cache_tokens > 0
            return engine.capabilities.is_identity_known

        await eventually(is_reported)
        assert (await router.complete(prompt=PROMPT)).status_code == 200
        for chunk in range(2500):  # more than of the assumed size, and less than of its own
            index.add(engine.name, [chunk])
        assert index.longest([0], index.bit(engine.name)).depth == 1


async def test_an_engine_that_prefers_prompts_by_now_ends_its_conversations(both: Both) -> None:
    """It computes the next prompt from its own cache, which is not offered to it, and lets its
    lease go; the engine that decodes has the conversation from then on."""

    await both.retain_turns()
    fleet, (p, other) = both.router.gateway.fleet, both.engines
    fleet.prefer_roles({p.name: (PREFILL, ""), other.name: (DECODE, "")}, frozenset())
    other.add_load(1, 1_590_000)  # it has no room to compute prompts
    await chat(both.router, ASKED)
    fleet.prefer_roles({p.name: (DECODE, ""), other.name: (PREFILL, "")}, frozenset())
    other.add_load(-1, -1_590_000)
    p.add_load(1, 1_590_000)
    await chat(both.router, AGAIN)
    p.add_load(-1, -1_590_000)
    await both.router.settled()
    prefill, decode = both.other.requests[-2:], both.p.requests[-1]
    assert prefill[0].json["kv_transfer_params"]["remote_block_ids"] is None
    assert given_back(both.other) == [KEPT]
    assert decode.json["kv_transfer_params"]["do_remote_prefill"]
    assert turns(both.router, "hit") == 1


async def test_prompts_at_a_prefill_engine_beside_engines_of_both_roles_are_no_answers(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.usual = either
    router = await start_router(ps=[p, d], ds=[d])
    engine = router.engine(p)
    engine.add_load(1, 8192)
    for number in range(MIN_SAMPLES):
        engine.note_prefill(number, number + 0.5, 8192)
    state = state_of(engine)
    assert (state.role, state.contexts, state.own_contexts) == (PREFILL, 0, 0)
    assert state.offered_s == pytest.approx(0.5 * MIN_SAMPLES)
    assert state.queued_s == pytest.approx(0.5)
    engine.add_load(-1, -8192)
    assert state_of(router.engine(d)).role is BOTH


async def test_the_data_parallel_ranks_of_an_engine_of_both_roles_work_at_the_same_time(
    both: Both,
) -> None:
    engine = both.engines[0]
    before = state_of(engine)
    both.router.gateway.fleet.note_ranks(engine, [RankFacts(0, 800_000), RankFacts(1, 800_000)])
    demand = EngineDemand(0.05)
    demand.read([engine], 0.0)
    queued = [QueuedPrefill({engine, rank}, 20.0, 1000, 20.0) for rank in engine.ranks or ()]
    state = state_of(engine)
    assert (state.queued_s, state.offered_s - before.offered_s, state.num_ranks) == (20.0, 20.0, 2)
    # Half of its time for the prompts of 40 s, and all of it for what is queued.
    needed = demand.read([engine], 40.0)[engine.group, PREFILL]
    assert needed == pytest.approx((1 - math.exp(-40 / 60)) * (0.5 / 0.8 + 20 / 20))
    for one in queued:
        one.end()


async def test_the_bytes_of_an_image_are_no_work(both: Both) -> None:
    seen: list[int] = []

    async def look(request: Received, peer: Peer) -> None:
        seen.extend(e.total_tokens + e.local_prefill_tokens for e in both.engines)
        await either(request, peer)

    both.p.usual = both.other.usual = look
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 2**21}}
    body = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
    answer = await both.router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert 1000 < max(seen) < 2000


async def test_what_an_engine_of_both_roles_reads_from_the_last_turn_is_no_work(both: Both) -> None:
    queued: list[int] = []

    def look() -> None:
        queued.append(sum(engine.local_prefill_tokens for engine in both.engines))

    await both.retain_turns(look)
    fleet, (p, other) = both.router.gateway.fleet, both.engines
    fleet.prefer_roles({p.name: (PREFILL, ""), other.name: (DECODE, "")}, frozenset())
    asked = [{"role": "user", "content": PROMPT}]
    p.add_local_prefill(3.0, 100_000)  # so the other one computes the prompt, and only that one
    await chat(both.router, asked)
    p.add_local_prefill(-3.0, -100_000)
    assert len(queued) == 1
    other.add_load(1, 1_590_000)  # it has no room to compute prompts
    await chat(both.router, [*asked, AGAIN[1], {"role": "user", "content": "and " * 9000}])
    other.add_load(-1, -1_590_000)
    assert both.p.requests[-1].json["kv_transfer_params"]["remote_block_ids"]
    assert queued[0] - 100_000 > 9000 * 0.9
    assert 9000 * 0.9 < queued[1] < 9000 * 1.2  # of 18,000


async def test_a_prompt_that_one_engine_computes_and_answers_counts_for_the_limits_of_engines(
    start_router: StartRouter, p: MockEngine
) -> None:
    """`max_engine_prefill_tokens` holds until the first token, and each request counts once."""
    p.usual, p.identity = either, {"capabilities": [], "ranks": [RANK]}
    async with running_engine(either) as other:
        other.identity = p.identity
        limits = {"max_engine_requests": 10, "max_engine_prefill_tokens": 10_000}
        router = await start_router(ps=[p, other], ds=[p, other], **limits)
        await router.knows_its_engines()
        RoleKeeper(router.gateway.fleet, 0.05).update(0.0)
        engines, seen = [router.engine(p), router.engine(other)], []

        async def look(request: Received, peer: Peer) -> None:
            seen.append(sorted((one.admitted, one.admitted_tokens > 8000) for one in engines))
            await either(request, peer)

        p.usual = other.usual = look
        assert (await router.complete(prompt=PROMPT)).status_code == 200
        assert router.metric("decode_only_total", reason="cheapest") == 1
        assert seen == [[(0, False), (1, True)]]
        await router.settled()
