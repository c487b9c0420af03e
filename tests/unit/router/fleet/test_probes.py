"""Frozen engines, busy ones, names that do not resolve; and what becomes of the prober itself."""

import asyncio
import contextlib
import gc
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.fleet import engine_probe, probes
from router.fleet.engine import Engine, Health
from router.fleet.engine_probe import EngineProbe, ProbePace
from router.fleet.metrics_page import MAX_METRICS_BYTES
from router.fleet.probes import Prober
from router.http_client.connecting import ConnectAttempt
from router.settings import Settings
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk, is_release
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, hang, usual_decode
from tests.unit.router.harness import Router, eventually
from tests.unit.router.http_client.test_connect import no_descriptor_left
from tests.unit.router.mock_engine import event, running_engine
from tests.unit.router.proxy.failing import deaf

# As they are by default, which settings for tests are not.
DEFAULTS = {
    name: Settings.model_fields[name].default
    for name in ("health_interval", "health_timeout", "health_failures", "connect_timeout")
}
ENDED = 15.0
"""Three times the sum of the default timeouts in seconds, far from any other timeout."""
STREAM = {"model": "m", "prompt": "x", "stream": True}


@contextlib.asynccontextmanager
async def lone_engine() -> AsyncIterator[tuple[MockEngine, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.unit.router.fleet.lone_engine", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 20))
        yield MockEngine(usual_decode, port=port), process
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.slow
async def test_a_frozen_engine_is_found_and_its_legs_end(
    start_router: StartRouter, d: MockEngine
) -> None:
    """With the default settings: a unary leg goes elsewhere, a stream ends."""
    async with lone_engine() as (lone, process):
        router = await start_router(ds=[lone, d], **DEFAULTS)
        await router.knows_its_engines()
        engine = router.engine(lone)
        async with router.client.stream("POST", "/v1/completions", json=STREAM) as answer:
            events = answer.aiter_lines()
            assert (await anext(events)).startswith("data:")
            assert engine.in_flight == 1
            await router.complete()  # at `d`: the next one is the lone engine's again
            unary = asyncio.create_task(router.complete())
            await eventually(lambda: engine.in_flight == 2)
            process.send_signal(signal.SIGSTOP)
            frozen = time.monotonic()
            await eventually(lambda: engine.health is Health.UNHEALTHY)
            last = [line async for line in events][-2:]
            took = time.monotonic() - frozen
        assert '"code":503' in "".join(last)
        assert (await unary).status_code == 200
        assert took < ENDED
        assert [is_release(leg) for leg in d.requests].count(False) == 2
        assert engine.in_flight == 0


async def test_legs_end_at_a_frozen_engine_that_refuses_connections(
    start_router: StartRouter, d: MockEngine
) -> None:
    """Its backlog is full, so that probes cannot even connect: that is silence too."""
    router = await start_router(health_interval=0.1, health_timeout=0.3, engine_idle_connections=0)
    d.scripts = [hang]
    asking = asyncio.create_task(router.complete())
    await eventually(lambda: d.requests)
    d.stop_listening()
    async with deaf(d.port):
        answer = await asyncio.wait_for(asking, 10)
    assert answer.status_code == 503
    assert router.metric("upstream_errors_total", role="decode", kind="engine_lost") == 1


@pytest.mark.parametrize("is_alone", [True, False])
async def test_legs_of_the_only_engine_get_three_times_as_many_probes(
    start_router: StartRouter, d: MockEngine, is_alone: bool
) -> None:
    async with running_engine(usual_decode) as other:
        router = await start_router(ds=[d] if is_alone else [d, other], health_failures=2)
        await router.knows_its_engines()
        d.scripts, other.scripts = [hang], [hang]
        asking = asyncio.create_task(router.complete())
        await eventually(lambda: d.requests or other.requests)
        busy = router.engine(d if d.requests else other)
        d.scripts, other.scripts = [], []
        for _ in range(5 if is_alone else 1):  # no probe comes between: nothing is awaited
            router.gateway.fleet.note_probe_failed(busy, "silent", is_silent=True)
        assert busy.in_flight == 1
        assert (busy.health is Health.UNHEALTHY) == is_alone
        router.gateway.fleet.note_probe_failed(busy, "silent", is_silent=True)
        await eventually(lambda: busy.in_flight == 0)
        assert (await asking).status_code == (503 if is_alone else 200)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_legs_of_a_refusing_engine_fail_after_a_silent_grace_period(
    start_router: StartRouter, d: MockEngine, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """It listens no more: it drains, or its core has died and nothing will ever come."""
    monkeypatch.setattr(probes, "LEG_GRACE_S", 0.5)
    router = await start_router(health_interval=0.05, engine_idle_connections=0)

    async def leaves(request: Received, peer: Peer) -> None:
        if not goes_on:
            return await peer.wait_left()
        await peer.send(STREAM_HEAD)
        for _ in range(30):
            await peer.send(chunk(event("a")))
            await asyncio.sleep(0.05)
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    d.scripts = [leaves]
    asking = asyncio.create_task(router.complete(stream=goes_on))
    await eventually(lambda: d.requests)
    d.stop_listening()
    answer = await asyncio.wait_for(asking, 10)
    if goes_on:
        assert answer.content == event("a") * 30 + DONE
    else:
        assert answer.status_code == 503
        assert router.metric("upstream_errors_total", role="decode", kind="engine_lost") == 1


async def test_a_busy_engine_that_answers_no_probe_keeps_its_stream(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(health_interval=0.05, health_timeout=0.3)
    engine = router.engine(d)

    async def streams(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for _ in range(30):
            await peer.send(chunk(event("a")))
            await asyncio.sleep(0.05)
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    d.scripts, d.is_busy = [streams], True
    answer = await router.stream()
    assert answer.content == event("a") * 30 + DONE
    assert (engine.health, engine.failed_probes) == (Health.HEALTHY, 0)
    await eventually(lambda: engine.health is Health.UNHEALTHY)


@pytest.mark.parametrize("is_slow", [True, False])
async def test_an_unresolved_name_makes_no_engine_unhealthy(
    start_router: StartRouter,
    p: MockEngine,
    monkeypatch: pytest.MonkeyPatch,
    is_slow: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither one without an address nor a resolver that takes its time. The log says it once."""
    p.identity = {"capabilities": ["release"]}
    changes = {"health_interval": 0.03, "health_timeout": 0.1, "request_timeout": 0.5}
    router = await start_router(engine_idle_connections=0, **changes)
    engines = router.gateway.fleet.engines
    await eventually(lambda: all(e.capabilities.is_identity_known for e in engines))
    capabilities = [engine.capabilities for engine in engines]

    async def never(*_: object) -> list[str]:
        await asyncio.Event().wait()
        return []

    if is_slow:
        monkeypatch.setattr(ConnectAttempt, "_resolve", never)
    for engine in engines:
        engine.pool.host = "nowhere.invalid"
    await asyncio.sleep(0.6)
    assert (await router.client.get("/ready")).status_code == 200
    answer = await router.complete()
    assert answer.status_code == 503
    assert "name cannot be resolved" in answer.json()["error"]["message"]
    assert [engine.capabilities for engine in engines] == capabilities
    assert all(e.is_available and not e.lost_at and not e.breaker.failures for e in engines)
    logged = [record.getMessage() for record in caplog.records if "not probed" in record.message]
    assert len(logged) == len(engines), logged


async def test_probes_without_a_file_descriptor_make_no_engine_unhealthy(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(engine_idle_connections=0, health_interval=0.03)
    engines = router.gateway.fleet.engines
    await eventually(lambda: all(e.capabilities.is_identity_known and e.models for e in engines))
    capabilities = [engine.capabilities for engine in engines]
    # No probe is under way while files run out, at neither end: a closed file is one to use.
    pools = [engine.pool for engine in engines]
    await eventually(
        lambda: not any((p.open_connections, d.open_connections, *(x.open_count for x in pools)))
    )
    gc.collect()
    with no_descriptor_left():
        before = p.probes, d.probes
        await asyncio.sleep(0.3)
        assert sum((p.probes, d.probes)) - sum(before) <= 2, "there were none"
    assert all(e.health is Health.HEALTHY and not e.failed_probes for e in engines)
    assert [engine.capabilities for engine in engines] == capabilities
    assert (await router.complete()).status_code == 200


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_an_engine_keeps_its_models_when_it_stops_reporting_them(
    router: Router, d: MockEngine, status: int
) -> None:
    await router.knows_its_engines()
    engine, prober = router.engine(d), router.state.prober
    known = engine.models
    contents: list[dict[str, Any]] = [{}, {"data": []}, {"data": [{"id": 7}, "m", None]}]
    for content in contents:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(d, "answer", lambda r, peer, c=content: peer.answer(c, status))
            await prober.fetch_models(engine)
    assert engine.models == known


async def test_an_engine_that_restarts_with_other_models_serves_those(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(without_prefiller="decode")
    await router.knows_its_engines()
    engine = router.engine(d)
    d.models, d.healthy = ["new"], False
    await eventually(lambda: engine.health is Health.UNHEALTHY)
    d.healthy = True
    await eventually(lambda: engine.models == frozenset({"new"}) and engine.is_available)
    assert (await router.complete(model="new")).status_code == 200
    assert (await router.complete(model="nobody's")).status_code == 404


# Each data-parallel rank of vLLM reports the blocks of all ranks together.
CACHES = {
    b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'
    b'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0\n': 16_000,
    b'sglang:max_total_num_tokens{model_name="m"} 5000\n': 5000,
    b'vllm:cache_config_info{block_size="auto",num_gpu_blocks="None"} 1.0\n': 0,
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="' + b"9" * 5000 + b'"} 1\n': 0,
    b"\xff\xfe no metrics": 0,
}


@pytest.mark.parametrize(("metrics", "tokens"), CACHES.items())
async def test_size_of_a_cache_is_read_from_the_metrics_of_an_engine_without_identity_page(
    start_router: StartRouter, p: MockEngine, d: MockEngine, metrics: bytes, tokens: int
) -> None:
    p.pages["/metrics"] = metrics
    router = await start_router()
    await router.knows_its_engines()
    assert router.engine(p).cache_tokens == tokens
    assert router.engine(d).cache_tokens == 0


HISTOGRAM = b'vllm:e2e_request_latency_seconds_bucket{engine="0",le="%d",model_name="m"} 12.0\n'


async def test_metrics_of_megabytes_are_read(start_router: StartRouter, p: MockEngine) -> None:
    p.pages["/metrics"] = HISTOGRAM % 1 * 100_000 + next(iter(CACHES))
    assert len(p.pages["/metrics"]) > 4 * 1024 * 1024
    router = await start_router()
    await router.knows_its_engines()
    assert router.engine(p).cache_tokens == 16_000


async def test_metrics_that_are_too_large_to_be_read_are_logged(
    start_router: StartRouter, p: MockEngine, d: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    p.pages["/metrics"] = HISTOGRAM % 1 * 250_000 + next(iter(CACHES))
    router = await start_router()
    await router.knows_its_engines()
    assert router.engine(p).cache_tokens == 0
    assert f"the cache size and ranks of 127.0.0.1:{p.port} are unknown" in caplog.text
    assert f"more than {MAX_METRICS_BYTES} bytes" in caplog.text
    assert f"ranks of 127.0.0.1:{d.port} are unknown" not in caplog.text


async def test_size_of_a_cache_is_read_from_the_identity_page(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    ranks = [{"num_blocks": 100, "block_size": 16}, {"num_blocks": 50, "block_size": 16}]
    p.identity, d.identity = {"ranks": ranks}, {"ranks": [{"num_blocks": "many"}, 7]}
    router = await start_router()
    await router.knows_its_engines()
    assert router.engine(p).cache_tokens == 2400
    assert router.engine(d).cache_tokens == 0


async def prober_problem(router: Router) -> tuple[int, Any]:
    answer = await router.client.get("/ready")
    return answer.status_code, answer.json().get("reasons", {}).get("prober")


def prober_task() -> asyncio.Task[Any]:
    return next(t for t in asyncio.all_tasks() if "Prober.run" in repr(t.get_coro()))


async def test_a_router_whose_prober_was_ended_is_not_ready(router: Router) -> None:
    task = prober_task()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await prober_problem(router) == (503, "failed: CancelledError: ")
    assert (await router.complete()).status_code == 200, "engines are asked all the same"


async def test_a_router_whose_prober_raised_is_not_ready(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("a bug")

    task = prober_task()
    monkeypatch.setattr(Prober, "_supervise", fails)
    await asyncio.wait([task], timeout=5)
    assert await prober_problem(router) == (503, "failed: RuntimeError: a bug")


async def test_a_probe_task_that_failed_or_was_cancelled_is_restarted(
    router: Router, p: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> bool:
        raise RuntimeError("a bug")

    prober: Any = router.state.prober
    with monkeypatch.context() as patched:
        patched.setattr(Prober, "probe", fails)
        await asyncio.sleep(0.2)
    for watch in prober._probes.values():
        watch.task.cancel()
    before = p.probes
    await eventually(lambda: p.probes > before + 1)
    assert prober.problem() == ""


async def test_a_stuck_probe_task_is_reported(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober: Any = router.state.prober
    for watch in prober._probes.values():
        watch.task.cancel()
        watch.task = asyncio.create_task(asyncio.sleep(60))
        watch.probed_at -= 1000
    status, reason = await prober_problem(router)
    assert status == 503
    assert reason.startswith("does not probe 127.0.0.1:")
    for watch in prober._probes.values():
        watch.task.cancel()


async def test_an_engine_for_both_roles_is_one_engine(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async def both(request: Received, peer: Peer) -> None:
        if request.json.get("kv_transfer_params", {}).get("do_remote_decode"):
            await answering(200, {"kv_transfer_params": {"remote_x": 1}})(request, peer)
        else:
            await usual_decode(request, peer)

    d.usual = both
    router = await start_router(ps=[p, d], ds=[d])
    assert len(router.gateway.fleet.engines) == 2
    answers = [await router.complete() for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert len(p.requests) == 4, "nobody hands KV to itself"
    assert len(d.requests) == 4


async def test_idle_engines_of_a_large_fleet_are_probed_less_often_until_a_request_comes(
    start_router: StartRouter, p: MockEngine, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "MAX_QUIET_PROBES_PER_S", 0.01)  # two engines are a large fleet
    router = await start_router(identified=True, engine_idle_age=60)
    before = p.probes + d.probes
    await asyncio.sleep(0.5)
    assert p.probes + d.probes <= before + 2
    d.scripts = [hang]
    async with asyncio.TaskGroup() as running:
        waiting = running.create_task(router.complete())
        seen = d.probes
        await eventually(lambda: d.probes > seen + 3)
        assert router.state.prober.problem() == ""
        waiting.cancel()


async def test_an_engine_with_requests_is_probed_at_once_only_if_it_is_silent(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(identified=True)
    await router.knows_its_engines()
    engine = router.engine(d)
    quiet = EngineProbe(engine, 1.0, ProbePace(), interval=60)
    watching = asyncio.create_task(quiet.watch())
    await asyncio.sleep(0)
    engine.pool.reads += 1
    quiet.check()
    await asyncio.sleep(0)
    assert not watching.done(), "it has answered since the last probe"
    quiet.check()
    assert await watching is None, "it was silent since the last check"


async def test_models_are_read_again_when_the_bytes_of_their_list_change(
    start_router: StartRouter, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_probe, "REFETCH_AFTER_S", 0.05)
    router = await start_router(identified=True)
    await router.knows_its_engines()
    engine, listed, read = router.engine(d), 0, []
    usual, fetch = d.answer, Prober.fetch_models

    async def count(request: Received, peer: Peer) -> None:
        nonlocal listed
        listed += request.path == "/v1/models"
        await usual(request, peer)

    async def note(self: Prober, of: Engine, *timeout: float) -> None:
        read.append(of)
        await fetch(self, of, *timeout)

    monkeypatch.setattr(d, "answer", count)
    await eventually(lambda: listed > 2)
    monkeypatch.setattr(Prober, "fetch_models", note)
    seen = listed
    await eventually(lambda: listed > seen + 3)
    assert engine not in read, "the same bytes are nothing new"
    d.models = ["m", "new"]
    await eventually(lambda: engine.models == frozenset(("m", "new")))


def test_quiet_probes_that_are_due_at_once_begin_in_several_ticks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment = 100.0
    monkeypatch.setattr(engine_probe, "now", lambda: moment)
    pace = ProbePace()
    pace.most = 2
    assert [pace.allows() for _ in range(4)] == [True, True, False, False]
    moment += 2 * engine_probe.TICK_S
    assert pace.allows()


async def test_first_probes_begin_in_batches(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "BATCH_SIZE", 1)
    monkeypatch.setattr(probes, "BATCH_INTERVAL_S", 0.6)
    started = time.monotonic()
    router = await start_router()
    assert time.monotonic() - started > 0.6, "the second engine waits for its turn"
    assert (await router.complete()).status_code == 200
