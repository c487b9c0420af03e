"""Several engines, dead ones among them; and the endpoints that speak of them."""

import asyncio
import contextlib
from collections import Counter

import pytest

from router.fleet.engine import EngineRole
from router.fleet.engine_probe import MAX_ANSWER_BYTES
from scripts.mock_engine import MockEngine, Peer, Received, is_release
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import running_engine


async def test_each_engine_has_its_turn(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(ps=[p, p2], ds=[d, d2])
    await eventually(lambda: p2.probes and d2.probes)
    for _ in range(6):
        await router.complete()
    assert [len(engine.requests) for engine in (p, p2, d, d2)] == [3, 3, 3, 3]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_unreachable_engine_is_skipped(
    start_router: StartRouter, p: MockEngine, d: MockEngine, role: str
) -> None:
    usual, engine = (usual_prefill, p) if role == "prefill" else (usual_decode, d)
    async with running_engine(usual) as other:
        engines = {"ps" if role == "prefill" else "ds": [engine, other]}
        router = await start_router(**engines, health_interval=60)
        await eventually(lambda: other.probes and engine.probes)
        await eventually(lambda: len(router.gateway.fleet.usable_engines(EngineRole(role))) == 2)
        await engine.stop()
        answers = [await router.complete() for _ in range(4)]
        assert Counter(answer.status_code for answer in answers) == {200: 4}
        assert [is_release(request) for request in other.requests].count(False) == 4
        errors = router.metric("upstream_errors_total", role=role, kind="connect_refused")
        assert errors == 1, "it was tried once and then left alone"
        name = f"127.0.0.1:{engine.port}"
        assert router.metric("engine_healthy", role=role, engine=name) == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_a_healthy_engine_of_a_role_it_is_a_503_that_names_the_role(
    router: Router, p: MockEngine, d: MockEngine, role: str
) -> None:
    await (p if role == "prefill" else d).stop()
    answer = await router.complete()
    assert answer.status_code == 503
    await eventually(lambda: router.gateway.fleet.unavailable_roles())
    await router.settled()
    p.requests.clear()
    answer = await router.complete()
    assert answer.status_code == 503
    name = f"127.0.0.1:{(p if role == 'prefill' else d).port}"
    text = f"no {role} engine is healthy for the model `m`: {name} is unhealthy"
    assert answer.json()["error"]["message"] == text
    assert not p.requests, "P is not asked for nothing"


async def test_a_recovered_engine_is_used_again(router: Router, p: MockEngine) -> None:
    await p.stop()
    await eventually(lambda: router.gateway.fleet.unavailable_roles())
    assert (await router.client.get("/ready")).status_code == 503
    await p.start(p.port)
    await eventually(lambda: not router.gateway.fleet.unavailable_roles())
    assert (await router.complete()).status_code == 200


async def test_one_failed_probe_is_tolerated_and_two_are_not(router: Router, d: MockEngine) -> None:
    engine = router.gateway.fleet.engines[1]
    router.gateway.fleet.note_probe_failed(engine, "slow")
    assert not router.gateway.fleet.unavailable_roles()
    d.healthy = False
    await eventually(lambda: router.gateway.fleet.unavailable_roles())
    assert "/health returned 503" in (await router.client.get("/ready")).text


@pytest.mark.parametrize(
    "identity",
    [
        b"[" * 100_000,
        b"no json",
        b"7",
        b'{"capabilities": 7}',
        b'{"capabilities": [[], {}]}',
        b"x" * (MAX_ANSWER_BYTES + 1),
    ],
)
async def test_no_answer_of_an_engine_ends_the_probing(
    router: Router, p: MockEngine, d: MockEngine, identity: bytes
) -> None:
    p.identity = identity
    await eventually(
        lambda: router.gateway.fleet.engines[0].capabilities.is_identity_known or p.probes > 3
    )
    before = p.probes, d.probes
    await eventually(lambda: p.probes > before[0] + 1 and d.probes > before[1] + 1)
    assert not router.gateway.fleet.unavailable_roles()
    d.healthy = False
    await eventually(lambda: router.gateway.fleet.unavailable_roles())


async def test_a_probe_has_one_deadline_for_all_of_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """It answers a byte at a time, each of them in time."""
    has_ended = asyncio.Event()
    dripping: list[asyncio.Task[None] | None] = []

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dripping.append(asyncio.current_task())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while not has_ended.is_set() and not writer.is_closing():
            writer.write(b"x")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(has_ended.wait(), 0.05)
        writer.transport.abort()

    router = await start_router(ps=[p], ds=[d], health_timeout=0.3)
    port = d.port
    await d.stop()
    async with await asyncio.start_server(drip, "127.0.0.1", port):
        await eventually(
            lambda: "TimeoutError" in "".join(router.gateway.fleet.unavailable_roles().values())
        )
        has_ended.set()
        await asyncio.gather(*filter(None, dripping))


async def test_engines_that_were_not_probed_yet_are_used(p: MockEngine, d: MockEngine) -> None:
    p.healthy = d.healthy = True
    settings = settings_for(p=[p], d=[d])
    async with running_router(settings) as router:
        assert (await router.complete()).status_code == 200


async def test_healthcheck_answers_like_an_example_proxy(router: Router, p: MockEngine) -> None:
    found = await router.client.get("/healthcheck")
    counts = {"prefill_instances": 1, "decode_instances": 1}
    assert (found.status_code, found.json()) == (200, {"status": "ok", **counts})
    await p.stop()
    await eventually(lambda: router.gateway.fleet.unavailable_roles())
    found = await router.client.get("/healthcheck")
    assert (found.status_code, found.json()["prefill_instances"]) == (200, 0)


async def test_liveness_and_readiness(router: Router, p: MockEngine) -> None:
    assert (await router.client.get("/health")).status_code == 200
    assert (await router.client.head("/health")).status_code == 200
    ready = await router.client.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    p.healthy = False
    await eventually(lambda: router.gateway.fleet.unavailable_roles())
    ready = await router.client.get("/ready")
    assert ready.status_code == 503
    assert list(ready.json()["reasons"]) == ["prefill"]
    assert (await router.client.get("/health")).status_code == 200
    p.healthy = True
    await eventually(lambda: not router.gateway.fleet.unavailable_roles())
    router.gateway.tasks.is_draining = True
    assert (await router.client.get("/ready")).json()["reasons"] == {"router": "shutting down"}


@pytest.mark.parametrize("alone", ["refuse", "decode"])
async def test_models_are_those_that_a_request_is_served_with(
    start_router: StartRouter, p: MockEngine, d: MockEngine, alone: str
) -> None:
    p.models, d.models = ["m", "only-p"], ["m", "only-d"]
    router = await start_router(without_prefiller=alone)
    await eventually(lambda: all(e.models for e in router.gateway.fleet.engines))

    async def listed() -> list[str]:
        models = (await router.client.get("/v1/models")).json()
        assert models["object"] == "list"
        return [model["id"] for model in models["data"]]

    def expected(*names: str) -> list[str]:
        return [name for name in names if alone == "decode" or name == "m"]

    assert await listed() == expected("m", "only-d")
    for name in ("m", "only-p", "only-d"):
        status = 200 if name in await listed() else 503
        assert (await router.complete(model=name)).status_code == status
    unknown = await router.complete(model="nobody's")
    assert unknown.status_code == 404
    assert unknown.json()["error"] == {
        "message": "The model `nobody's` does not exist. "
        "Models that are served: m, only-d, only-p.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    await p.stop()
    assert await listed() == (["m", "only-d"] if alone == "decode" else [])
    await d.stop()
    answer = await router.client.get("/v1/models")
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"


async def test_metrics_carry_our_prefix_alone(router: Router) -> None:
    await router.complete()
    answer = await router.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = [line for line in answer.text.splitlines() if not line.startswith("#")]
    assert samples
    assert all(line.startswith("disagg_router_") for line in samples)
    for stage in ("prefill", "decode_first_byte", "time_to_first_byte", "request"):
        assert f"disagg_router_{stage}_seconds_count 1.0" in samples


async def test_the_version_and_the_documentation(router: Router) -> None:
    version = (await router.client.get("/version")).json()["version"]
    document = (await router.client.get("/openapi.json")).json()
    assert document["info"]["version"] == version
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert "stream" in schema["properties"]
        assert {"200", "400", "413", "502", "503", "504"} <= set(operation["responses"])


async def test_requests_in_flight_are_counted(router: Router, p: MockEngine) -> None:
    async def script(request: Received, peer: Peer) -> None:
        assert router.metric("requests_in_flight") == 1
        name = f"127.0.0.1:{p.port}"
        assert router.metric("engine_requests_in_flight", role="prefill", engine=name) == 1
        await usual_prefill(request, peer)

    p.scripts = [script]
    assert (await router.complete()).status_code == 200
    assert router.metric("requests_in_flight") == 0
