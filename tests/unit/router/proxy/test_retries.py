"""The table of failures: what it says, and what happens on real sockets."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from router.fleet.engine import LEGS, CircuitState, Engine, EngineRole, Health, Intent
from router.fleet.fleet import Fleet
from router.http_client import pool as pool_module
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError
from router.proxy.gateway import RetryBudget
from router.proxy.retry import MAX_FAILED_LEGS, RULES, Mark, Next, Situation, decide
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, raw, reset, usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.http_client.test_connect import no_descriptor_left
from tests.unit.router.mock_engine import PARAMS, USUAL, event
from tests.unit.router.proxy.failing import FAULTS, LIMITS, LOST, two_of
from tests.unit.router.test_stalled_clients import endless

NOTHING_SENT = {"connect_refused", "connect_timeout", "connect", "dns", "tls"}
OUR_OWN = {"local", "answer_too_large", "reader_stalled"}
NOTHING_DONE = NOTHING_SENT | {"unserved_model"}
UNPROVEN = {
    "connect",
    "dns",
    "engine_lost",
    "overloaded",
    "stale",
    "preempted",
    "migrated",
    "kv_differs",
    "kv_load",
    "no_kv",
    "unserved_model",
}
FREE = NOTHING_DONE | {"stale", "preempted", "migrated"}
# What a client is told when there is nobody else to ask.
TOLD = {"local": 503, "answer_too_large": 502}


def kinds_of(error: type[Any]) -> set[str]:
    return {error.kind}.union(*(kinds_of(below) for below in error.__subclasses__()))


def test_every_failure_is_in_the_table_and_nothing_else() -> None:
    kinds = kinds_of(UpstreamError) | kinds_of(EngineError)
    assert kinds - {UpstreamError.kind} == set(RULES), "the root of them is never raised itself"


STARTED = Situation(has_started=True)
RESUMABLE = Situation(has_started=True, can_resume=True)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("leg", LEGS)
def test_started_stream_that_no_engine_can_resume_ends(kind: str, leg: EngineRole) -> None:
    assert decide(kind, leg, STARTED).next is Next.END


@pytest.mark.parametrize("kind", RULES)
def test_started_stream_resumes_on_another_decode_engine(kind: str) -> None:
    what = decide(kind, EngineRole.DECODE, RESUMABLE).next
    assert what is (Next.GIVE_UP if kind in OUR_OWN else Next.RESUME)
    assert decide(kind, EngineRole.PREFILL, RESUMABLE).next is RULES[kind].prefill
    unseen = Situation(can_resume=True)
    assert decide(kind, EngineRole.DECODE, unseen).next is RULES[kind].decode


@pytest.mark.parametrize("kind", RULES)
def test_retry_before_the_first_byte_depends_on_what_may_have_been_read(kind: str) -> None:
    prefill, decode = (decide(kind, leg, Situation()) for leg in LEGS)
    if kind in OUR_OWN:
        assert (prefill.next, decode.next) == (Next.GIVE_UP, Next.GIVE_UP)
    elif kind in NOTHING_DONE:
        assert (prefill.next, decode.next) == (Next.ELSEWHERE, Next.ELSEWHERE)
    else:
        assert prefill.next is (Next.AGAIN if kind == "stale" else Next.ELSEWHERE)
        assert decode.next is Next.AFRESH
    for decision in (prefill, decode):
        assert decision.blames_engine == (kind not in OUR_OWN | UNPROVEN)
        assert decision.is_free == (kind in FREE)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("leg", LEGS)
def test_late_or_often_failed_request_gives_up(kind: str, leg: EngineRole) -> None:
    late = decide(kind, leg, Situation(is_late=True))
    assert late.gives_up
    assert not late.blames_engine
    often = decide(kind, leg, Situation(num_failed=MAX_FAILED_LEGS - 1))
    assert often.gives_up or often.mark in (Mark.NONE, Mark.PREEMPTED)


@pytest.mark.parametrize("kind", RULES)
def test_failure_to_read_the_last_turn_does_not_count_against_the_prefill_engine(kind: str) -> None:
    decision = decide(kind, EngineRole.PREFILL, Situation(offered_turn=True))
    assert not decision.blames_engine or RULES[kind].is_free
    assert decision.spends_turn == (not RULES[kind].is_free or kind == "stale")


def test_engine_that_returned_an_answer_is_avoided_only_while_returns_are_left() -> None:
    allowed = decide("preempted", EngineRole.DECODE, Situation(returns_left=1))
    assert allowed.mark is Mark.PREEMPTED
    assert decide("preempted", EngineRole.DECODE, Situation()).mark is Mark.FAILED


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("role", LEGS)
async def test_a_failure_before_the_first_byte_does_what_the_table_says(
    start_router: StartRouter, p: MockEngine, d: MockEngine, role: EngineRole, kind: str
) -> None:
    limits: Any = LIMITS.get(kind, {})
    async with two_of(role, p, d, start_router, **limits) as asked, FAULTS[kind](asked):
        router, rule = asked.router, RULES[kind]
        capabilities = asked.engine.capabilities
        answer = await router.complete()
        await router.settled()
        what = rule.prefill if role is EngineRole.PREFILL else rule.decode
        goes_on = what is not Next.GIVE_UP
        assert answer.status_code == (200 if goes_on else TOLD[kind])
        assert router.metric("upstream_errors_total", role=role, kind=kind) == 1

        reached = 0 if kind in NOTHING_SENT else 1
        # A connection that was stale is no reason to leave the engine.
        elsewhere = 0 if not goes_on or kind == "stale" else 1
        again = 1 if kind == "stale" else 0
        assert len(asked.legs(asked.first)) == reached + again
        assert len(asked.legs(asked.other)) == elsewhere
        if role is EngineRole.DECODE:
            assert len(asked.prefills()) == (2 if what is Next.AFRESH else 1)
            releases = [r.json["kv_transfer_params"] for r in asked.releases()]
            is_released = what in (Next.AFRESH, Next.GIVE_UP)
            assert releases == [PARAMS | {"retain": False}] * is_released
        else:
            assert len(asked.decodes()) == goes_on
            assert not asked.releases()
        ids = [leg.header("x-request-id") for leg in asked.prefills() + asked.decodes()]
        assert len(set(ids)) == len(ids)

        engine = asked.engine
        assert engine.breaker.failures == (rule.blames_engine and kind != "connect_refused")
        assert engine.is_cooling == (kind == "overloaded")
        is_gone = kind == "connect_refused"
        assert (engine.health is Health.UNHEALTHY) == is_gone
        assert (engine.capabilities is not capabilities) == is_gone, "what was capabilities stays"
        others = [one for one in router.gateway.fleet.engines if one is not engine]
        assert all(one.is_available and not one.breaker.failures for one in others)


@pytest.mark.parametrize("role", LEGS)
async def test_an_engine_that_resets_a_kept_connection_late_is_blamed_and_not_asked_again(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    monkeypatch: pytest.MonkeyPatch,
    role: EngineRole,
) -> None:
    async with two_of(role, p, d, start_router) as asked:

        async def resets_late(request: Received, peer: Peer) -> None:
            monkeypatch.setattr(pool_module, "STALE_WITHIN_S", 0.0)
            peer.reset()

        asked.first.scripts = [resets_late]
        assert (await asked.router.complete()).status_code == 200
        await asked.router.settled()
        assert (len(asked.legs(asked.first)), len(asked.legs(asked.other))) == (1, 1)
        assert asked.engine.breaker.failures == 1
        labels = {"role": role, "kind": "disconnected"}
        assert asked.router.metric("upstream_errors_total", **labels) == 1


@pytest.mark.parametrize("role", LEGS)
async def test_without_a_descriptor_the_client_is_told_and_no_engine_is_condemned(
    start_router: StartRouter, p: MockEngine, d: MockEngine, role: EngineRole
) -> None:
    async with two_of(role, p, d, start_router) as asked, asked.router.socket() as client:
        router = asked.router
        capabilities = [engine.capabilities for engine in router.gateway.fleet.engines]
        for engine in router.gateway.fleet.engines:
            if engine.role is role:
                engine.pool.close()
        mocks = (asked.first, asked.other)
        await eventually(lambda: not any(mock.open_connections for mock in mocks))
        with no_descriptor_left():
            await client.send(post(b'{"model": "m", "prompt": "x"}'))
            head, body = await client.answer()
        assert b" 503 " in head.splitlines()[0]
        assert "one of its own limits" in json.loads(body)["error"]["message"]
        await router.settled()
        assert not asked.legs(asked.first) + asked.legs(asked.other)
        unreleased = router.metric("releases_total", outcome="failed")
        assert unreleased == (role is EngineRole.DECODE), "nor can anybody be told of the blocks"
        engines = router.gateway.fleet.engines
        assert all(engine.is_available and not engine.breaker.failures for engine in engines)
        assert all(e.capabilities is known for e, known in zip(engines, capabilities, strict=True))
        assert (await router.complete()).status_code == 200


class Breaks:
    """Sends an event, waits until the client has it, and then does its worst."""

    def __init__(self, then: Script) -> None:
        self.seen = asyncio.Event()
        self._then = then

    async def __call__(self, request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("a")))
        await self.seen.wait()
        await self._then(request, peer)


async def cuts(request: Received, peer: Peer) -> None:
    peer.close()


async def babbles(request: Received, peer: Peer) -> None:
    await peer.send(b"zz\r\n")
    await peer.wait_left()


async def falls_silent(request: Received, peer: Peer) -> None:
    await peer.wait_left()


@pytest.mark.parametrize(
    ("kind", "then", "code"),
    [
        ("broken_answer", cuts, 502),
        ("broken_answer", babbles, 502),
        ("timeout", falls_silent, 504),
        ("engine_lost", falls_silent, 503),
    ],
)
async def test_a_failure_after_the_first_byte_ends_the_stream_and_asks_nobody_else(
    start_router: StartRouter, p: MockEngine, d: MockEngine, kind: str, then: Script, code: int
) -> None:
    idle = {"stream_idle_timeout": 0.2} if kind == "timeout" else {}
    async with two_of(EngineRole.DECODE, p, d, start_router, **idle) as asked:
        breaks = Breaks(then)
        d.scripts = [breaks]
        body = {"model": "m", "prompt": "x", "stream": True}
        async with asked.router.client.stream("POST", "/v1/completions", json=body) as answer:
            blocks = answer.aiter_bytes()
            assert await anext(blocks) == event("a")
            breaks.seen.set()
            if kind == "engine_lost":
                asked.engine.pool.fail_legs(LOST)
            last = b"".join([block async for block in blocks])
        assert answer.status_code == 200
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
        await asked.router.settled()
        assert (len(asked.prefills()), len(asked.decodes())) == (1, 1)
        assert not asked.releases(), "the decoder has read"
        assert asked.engine.breaker.failures == RULES[kind].blames_engine
        assert asked.engine.health is Health.HEALTHY


async def test_a_client_that_stops_reading_ends_its_stream_and_blames_nobody(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async with two_of(EngineRole.DECODE, p, d, start_router, stream_idle_timeout=0.3) as asked:
        d.scripts = [endless]
        async with asked.router.socket() as client:
            await client.send(post(b'{"prompt": "x", "stream": true}'))
            assert b" 200 " in await client.head()
            await asked.router.settled()
        kind = "reader_stalled"
        assert asked.router.metric("upstream_errors_total", role="decode", kind=kind) == 1
        assert (len(asked.decodes()), asked.engine.breaker.failures) == (1, 0)
        assert not asked.releases()


async def test_a_stream_that_breaks_inside_its_first_event_is_tried_elsewhere_unseen(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async with two_of(EngineRole.DECODE, p, d, start_router) as asked:
        d.scripts = [raw(STREAM_HEAD + chunk(event("broken")[:20]))]
        answer = await asked.router.stream()
        assert answer.content == event("a") + event("b") + DONE
        assert len(asked.prefills()) == 2


@pytest.mark.parametrize("then", [answering(400, {"error": {}}), reset])
async def test_after_that_the_next_prefill_is_released_if_nobody_reads_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine, then: Script
) -> None:
    """The first byte of the decoder before says nothing of the second one's."""
    async with two_of(EngineRole.DECODE, p, d, start_router) as asked:
        d.scripts = [raw(STREAM_HEAD + chunk(event("broken")[:20]))]
        asked.router.engine(asked.other).pool.close()
        asked.other.scripts = [then]
        assert (await asked.router.stream()).status_code in (400, 503)
        await asked.router.settled()
        assert (len(asked.prefills()), len(asked.releases())) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("body", ["drips", "never ends", "never begins"])
@pytest.mark.parametrize("role", LEGS)
async def test_a_5xx_is_known_by_its_head(
    start_router: StartRouter, p: MockEngine, d: MockEngine, role: EngineRole, body: str
) -> None:
    async def fails(request: Received, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while body != "never begins":
                await peer.send(chunk(b"x" * (1 if body == "drips" else 65536)))
                await asyncio.sleep(0.02 if body == "drips" else 0)
            await peer.wait_left()

    async with two_of(role, p, d, start_router) as asked:
        asked.first.scripts = [fails]
        answer = await asyncio.wait_for(asked.router.complete(), 10)
        assert answer.status_code == 200
        assert asked.router.metric("upstream_errors_total", role=role, kind="status_5xx") == 1


@pytest.mark.parametrize("odd", [b'"usage": {"a": 1e999}', b'"usage": {"a": "\xff"}'])
@pytest.mark.parametrize("params", [b'{"prefix_proof": {}, "a": 1e999}', b'{"a": 1e999}'])
async def test_what_only_a_lenient_reader_takes_passes_as_it_came(
    router: Router, p: MockEngine, d: MockEngine, params: bytes, odd: bytes
) -> None:
    p.scripts = [answering(200, b'{"kv_transfer_params": %b, %b}' % (params, odd))] * 2
    assert (await router.complete(conversation_id="c")).status_code == 200
    assert params[:-1] in d.last.body


@pytest.mark.parametrize("how", ["remove", "drain", "unreachable", "open"])
async def test_a_decoder_that_left_while_the_prefiller_worked_is_not_asked(
    start_router: StartRouter, p: MockEngine, d: MockEngine, how: str
) -> None:
    async with two_of(EngineRole.DECODE, p, d, start_router) as asked:
        fleet, engine = asked.router.gateway.fleet, asked.engine

        async def meanwhile(request: Received, peer: Peer) -> None:
            if how == "remove":
                fleet.remove(engine.name)
            elif how == "drain":
                fleet.set_intent(engine, Intent.DRAINING)
            elif how == "unreachable":
                fleet.note_unreachable(engine, "gone")
            else:
                open_circuit(fleet, engine)
            await usual_prefill(request, peer)

        p.scripts = [meanwhile]
        assert (await asked.router.complete()).status_code == 200
        assert (len(d.requests), len(asked.other.requests)) == (0, 1)


async def test_an_engine_that_is_removed_ends_its_legs_and_one_that_drains_does_not(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async with two_of(EngineRole.DECODE, p, d, start_router) as asked:
        fleet, go_on = asked.router.gateway.fleet, asyncio.Event()

        async def slow(request: Received, peer: Peer) -> None:
            await go_on.wait()
            await peer.answer(USUAL | {"slow": True})

        d.scripts = [slow]
        asking = asyncio.create_task(asked.router.complete())
        await eventually(lambda: d.requests)
        fleet.set_intent(asked.engine, Intent.DRAINING)
        go_on.set()
        assert (await asking).json() == USUAL | {"slow": True}

        asked.other.scripts = [falls_silent]
        asking = asyncio.create_task(asked.router.complete())
        await eventually(lambda: asked.other.requests)
        fleet.remove(asked.router.engine(asked.other).name)
        assert (await asking).status_code == 503
        assert len(d.requests) == 1, "it drains"


def open_circuit(fleet: Fleet, engine: Engine) -> None:
    opened = engine.breaker.times_opened
    while engine.breaker.times_opened == opened:
        fleet.note_leg_failed(engine, "broken")


async def test_one_request_tries_a_half_open_engine_whoever_else_is_under_way(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Not those that were planned before, nor after a leg of before has ended there."""
    async with two_of(EngineRole.DECODE, p, d, start_router) as asked:
        fleet, engine = asked.router.gateway.fleet, asked.engine
        old = Breaks(cuts)
        d.scripts = [old]
        streaming = asyncio.create_task(asked.router.stream())
        await eventually(lambda: d.requests)
        prefill = asyncio.Event()

        async def waits(request: Received, peer: Peer) -> None:
            await prefill.wait()
            await usual_prefill(request, peer)

        p.usual, d.usual = waits, falls_silent
        asking = [asyncio.create_task(asked.router.complete()) for _ in range(6)]
        await eventually(lambda: len(p.requests) == 7)
        open_circuit(fleet, engine)
        fleet._end_pause(engine, engine.breaker.times_opened)
        prefill.set()
        await eventually(lambda: len(d.requests) == 2)
        trial = engine.breaker.trial
        assert trial is not None
        streaming.cancel()
        await eventually(lambda: engine.in_flight == 1)
        assert engine.breaker.trial is trial, "the old leg's end is not the trial's"
        await eventually(lambda: sum(task.done() for task in asking) == 5)
        assert len(d.requests) == 2
        d.usual = usual_decode  # and answers the release of the KV
        for task in asking:
            task.cancel()
        await eventually(lambda: engine.breaker.trial is None)
        assert engine.breaker.circuit is CircuitState.HALF_OPEN, (
            "its client left: nothing was shown"
        )
        assert engine.is_available


async def test_the_timer_of_a_pause_that_is_over_does_not_end_the_next_one(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async with two_of(EngineRole.DECODE, p, d, start_router) as asked:
        fleet, engine = asked.router.gateway.fleet, asked.engine
        open_circuit(fleet, engine)
        first = engine.breaker.times_opened
        engine.breaker.record_success()
        open_circuit(fleet, engine)
        fleet._end_pause(engine, first)
        assert engine.breaker.circuit is CircuitState.OPEN
        fleet._end_pause(engine, engine.breaker.times_opened)
        assert engine.is_available


@pytest.mark.parametrize("given", [b"99999999999999999999", b"-1", b"soon", b""])
async def test_an_absurd_retry_after_cools_for_a_while_at_most(
    start_router: StartRouter, p: MockEngine, d: MockEngine, given: bytes
) -> None:
    async with two_of(EngineRole.PREFILL, p, d, start_router) as asked:
        p.scripts = [answering(429, {}, retry_after=given.decode())]
        assert (await asked.router.complete()).status_code == 200
        assert asked.engine.is_cooling
        assert len(asked.legs(asked.other)) == 1


async def test_a_429_without_a_time_is_the_answer(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async with two_of(EngineRole.PREFILL, p, d, start_router) as asked:
        p.scripts = [answering(429, {"error": "busy"})]
        assert (await asked.router.complete()).status_code == 429
        assert not asked.engine.is_cooling
        p.scripts = []
        p.usual = answering(200, {"kv_transfer_params": PARAMS}, retry_after="30")
        await asked.router.complete()
        await asked.router.complete()
        assert not asked.engine.is_cooling, "a time on a 200 says nothing"


async def test_a_request_whose_time_is_over_in_a_connect_blames_nobody(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    limits = {"request_timeout": 0.3, "connect_timeout": 10}
    async with two_of(EngineRole.PREFILL, p, d, start_router, **limits) as asked:
        async with FAULTS["connect"](asked):
            capabilities = asked.engine.capabilities
            # Ends the connect of the first engine; then another client's time is over in one.
            await asked.router.complete()
        async with FAULTS["connect_timeout"](asked):
            answers = [await asked.router.complete() for _ in range(4)]
        assert {answer.status_code for answer in answers} <= {200, 504}
        assert 504 in {answer.status_code for answer in answers}
        assert (asked.engine.breaker.failures, asked.engine.health) == (0, Health.HEALTHY)
        assert asked.engine.capabilities is capabilities


@pytest.mark.parametrize("stage", ["prefill", "decode", "stream"])
async def test_a_request_whose_time_is_over_blames_nobody_and_asks_nobody_else(
    start_router: StartRouter, p: MockEngine, d: MockEngine, stage: str
) -> None:
    role = EngineRole.PREFILL if stage == "prefill" else EngineRole.DECODE
    async with two_of(role, p, d, start_router, request_timeout=0.3) as asked:
        script = Breaks(falls_silent)
        asked.first.scripts = [script if stage == "stream" else falls_silent]
        answer = await asked.router.stream()
        if stage == "stream":
            assert json.loads(answer.content.split(b"data: ")[-1])["error"]["code"] == 504
        else:
            assert answer.status_code == 504
        assert asked.engine.breaker.failures == 0
        assert not asked.other.requests


async def test_two_clients_with_one_request_id_have_legs_of_their_own(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    headers = {"x-request-id": "mine"}
    body = {"model": "m", "prompt": "x"}
    asked = [router.client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    answers = await asyncio.gather(*asked)
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    ids = [leg.header("x-request-id") for leg in p.requests + d.requests]
    assert len(set(ids)) == 4


@pytest.mark.slow
async def test_an_outage_of_all_prefillers_costs_a_fifth_more_legs(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    broken = answering(500, {"error": {"message": "CUDA died"}})
    async with two_of(EngineRole.PREFILL, p, d, start_router) as asked:
        p.usual = asked.other.usual = broken
        asked.router.gateway.budget = RetryBudget(window=3600)  # however slow this machine is
        for _ in range(12):
            answers = await asyncio.gather(*(asked.router.complete() for _ in range(50)))
            assert {answer.status_code for answer in answers} == {502}
        assert 600 < len(asked.prefills()) <= 720
