"""Engines that come and go while requests run, and what the router says of its sources."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.fleet.engine import EngineRole, Health, Intent
from router.server.router_state import state_of
from router.settings import Settings, load
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.engine_scripts import usual_decode, usual_prefill
from tests.unit.router.fleet.sources.api_server import api_server, kubeconfig, pod
from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import event, running_engines
from tests.unit.router.test_settings import ENGINES, FLAGS, problems

CLIENTS = 12


async def slow_decode(request: Received, peer: Peer) -> None:
    """Streams that are long enough for engines to leave meanwhile."""
    if not request.json.get("stream"):
        return await usual_decode(request, peer)
    await peer.send(STREAM_HEAD)
    for _ in range(6):
        await peer.send(chunk(event("a")))
        await asyncio.sleep(0.05)
    await peer.send(chunk(DONE) + b"0\r\n\r\n")


def write(path: Path, ps: list[MockEngine], ds: list[MockEngine], **fields: object) -> None:
    """As an operator does: a new file takes the old one's place."""
    entries = [
        {"url": f"http://127.0.0.1:{engine.port}", "role": role, **fields}
        for role, engines in (("prefill", ps), ("decode", ds))
        for engine in engines
    ]
    path.with_suffix(".new").write_text(json.dumps({"engines": entries}))
    path.with_suffix(".new").rename(path)


def discovering(**changes: object) -> Settings:
    return settings_for(p=[], d=[], **changes)


@pytest.fixture
async def ps() -> AsyncIterator[list[MockEngine]]:
    async with running_engines(usual_prefill, 3) as engines:
        yield engines


@pytest.fixture
async def ds() -> AsyncIterator[list[MockEngine]]:
    async with running_engines(slow_decode, 3) as engines:
        yield engines


def known_ports(router: Router) -> set[int]:
    return {engine.spec.address.port for engine in router.gateway.fleet.engines}


async def ask_all_the_time(router: Router, told: Counter[str], has_ended: asyncio.Event) -> None:
    number = 0
    while not has_ended.is_set():
        number += 1
        if number % 2:
            answer = await router.complete()
            told[f"{answer.status_code}"] += 1
        else:
            streamed = await router.stream()
            is_whole = streamed.text.count('"text":"a"') + streamed.text.count('"text": "a"') == 6
            is_whole = is_whole and streamed.text.endswith("data: [DONE]\n\n")
            told[f"{streamed.status_code} {'whole' if is_whole else streamed.text}"] += 1


@pytest.mark.slow
async def test_scaling_up_and_down_fails_no_request(
    tmp_path: Path, ps: list[MockEngine], ds: list[MockEngine]
) -> None:
    path = tmp_path / "engines.yaml"
    write(path, ps[:1], ds[:1])
    told: Counter[str] = Counter()
    has_ended = asyncio.Event()
    async with running_router(discovering(engines_file=path)) as router:
        clients = [
            asyncio.create_task(ask_all_the_time(router, told, has_ended)) for _ in range(CLIENTS)
        ]
        everyone = {engine.port for engine in (*ps, *ds)}
        write(path, ps, ds)
        await eventually(lambda: known_ports(router) == everyone)
        await eventually(lambda: all(engine.requests for engine in (*ps, *ds)))
        leaving = router.engine(ds[0])
        await eventually(lambda: leaving.in_flight > 2)
        write(path, ps[2:], ds[2:])
        await eventually(lambda: leaving.intent is Intent.DRAINING)
        had = leaving.in_flight
        await eventually(lambda: known_ports(router) == {ps[2].port, ds[2].port})
        asked = len(ds[0].requests), len(ds[2].requests)
        await eventually(lambda: len(ds[2].requests) > asked[1] + 2 * CLIENTS)
        has_ended.set()
        await asyncio.gather(*clients)
        assert had > 0, "streams ran there when it was to leave"
        assert len(ds[0].requests) == asked[0], "nothing new came to it"
    assert set(told) == {"200", "200 whole"}, told
    assert min(told.values()) > CLIENTS


async def test_removed_engines_leave_no_metrics(
    tmp_path: Path, ps: list[MockEngine], ds: list[MockEngine]
) -> None:
    path = tmp_path / "engines.yaml"
    write(path, ps[:2], ds[:1])
    async with running_router(discovering(engines_file=path)) as router:

        async def told() -> str:
            return (await router.client.get("/metrics")).text

        gone = f'engine="127.0.0.1:{ps[1].port}"'
        assert (await told()).count(gone) == 5
        assert router.metric("source_engines", source="file") == 3
        write(path, ps[:1], ds[:1])
        await eventually(lambda: known_ports(router) == {ps[0].port, ds[0].port})
        assert gone not in await told()
        assert router.metric("source_engines", source="file") == 2
        engine = router.engine(ps[0])
        path.write_text(
            f"engines: [{{url: 'http://127.0.0.1:{ps[0].port}', role: both, draining: true}}]"
        )
        await eventually(lambda: engine.role is EngineRole.BOTH)
        labels = {"engine": engine.name, "role": "both"}
        assert router.metric("engine_draining", **labels) == 1
        assert f'engine="{engine.name}",role="prefill"' not in await told(), "it is that no more"


async def test_a_file_that_breaks_later_is_reported_and_removes_no_engines(
    tmp_path: Path, ps: list[MockEngine], ds: list[MockEngine]
) -> None:
    path = tmp_path / "engines.yaml"
    write(path, ps[:1], ds[:1])
    async with running_router(discovering(engines_file=path)) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        assert (await router.client.get("/ready")).json() == {"status": "ready"}
        assert router.metric("source_trouble", source="file") == 0
        path.write_text("engines: [{url: nonsense, role: prefill}]")
        await eventually(lambda: router.metric("source_trouble", source="file"))
        answer = await router.client.get("/ready")
        assert answer.status_code == 200, "it serves those that it knows"
        assert "nonsense" in answer.json()["sources"]["file"]
        told_at = router.metric("source_told_timestamp_seconds", source="file")
        assert (await router.complete()).status_code == 200
        write(path, ps[:1], ds[1:2])
        await eventually(lambda: ds[1].port in known_ports(router))
        assert router.metric("source_told_timestamp_seconds", source="file") > told_at
        assert router.metric("source_trouble", source="file") == 0


async def test_pods_are_engines(tmp_path: Path, ps: list[MockEngine], ds: list[MockEngine]) -> None:
    """From the settings to an answer. A router whose API server is away stays up, not ready, and is
    ready when that comes."""
    (tmp_path / "token").write_text("secret")
    async with api_server() as server:
        config = kubeconfig(tmp_path / "config", server.port, tmp_path / "token")
        settings = discovering(
            kubernetes_config=config,
            kubernetes_namespace="other",
            kubernetes_prefill_selector="app=vllm",
            kubernetes_decode_selector="app=vllm",
            kubernetes_port="http",
        )
        for role, engine in (("prefill", ps[0]), ("decode", ds[0])):
            labels = {"llm-d.ai/role": role}
            server.put(pod(role, "127.0.0.1", labels=labels, ports={"http": engine.port}))
        await server.stop()
        async with running_router(settings) as router:
            answer = await router.client.get("/ready")
            assert answer.status_code == 503
            assert set(answer.json()["sources"]) == {"kubernetes:prefill", "kubernetes:decode"}
            assert (await router.complete()).status_code == 503
            await server.start()
            troubles = router.state.registry.problems
            await eventually(
                lambda: not router.gateway.fleet.unavailable_roles() and not troubles(), 10
            )
            assert {e.role for e in router.gateway.fleet.engines} == {
                EngineRole.PREFILL,
                EngineRole.DECODE,
            }
            assert (await router.client.get("/ready")).json() == {"status": "ready"}
            assert (await router.complete()).status_code == 200
            assert server.asked[-1]["path"] == "/api/v1/namespaces/other/pods"


async def test_requests_at_start_wait_for_the_first_reports(
    tmp_path: Path, ps: list[MockEngine], ds: list[MockEngine]
) -> None:
    (tmp_path / "token").write_text("secret")
    async with api_server() as server:
        for role, engine in (("prefill", ps[0]), ("decode", ds[0])):
            labels = {"llm-d.ai/role": role}
            server.put(pod(role, "127.0.0.1", labels=labels, ports={"http": engine.port}))
        settings = discovering(
            kubernetes_config=kubeconfig(tmp_path / "config", server.port, tmp_path / "token"),
            kubernetes_prefill_selector="a",
            kubernetes_decode_selector="a",
            kubernetes_port="http",
        )
        async with running_router(settings) as router:
            assert (await router.complete()).status_code == 200


async def test_an_engine_that_drains_in_the_file_serves_again_when_it_does_not(
    tmp_path: Path, ps: list[MockEngine], ds: list[MockEngine]
) -> None:
    path = tmp_path / "engines.yaml"
    write(path, ps[:1], ds[:1])
    async with running_router(discovering(engines_file=path)) as router:
        engine = router.engine(ds[0])
        await eventually(lambda: engine.health is Health.HEALTHY)
        write(path, ps[:1], ds[:1], draining=True)
        await eventually(lambda: engine.intent is Intent.DRAINING)
        assert (await router.complete()).status_code == 503
        write(path, ps[:1], ds[:1])
        await eventually(lambda: engine.intent is Intent.SERVING)
        assert (await router.complete()).status_code == 200
        assert router.engine(ds[0]) is engine


# Settings.


def test_flags_may_lack_what_comes_from_elsewhere() -> None:
    load({"engines_file": "x.yaml"})
    load({"prefiller_dns": "p.svc:1", "decoder_dns": ["_http._tcp.d.svc", "d.svc:2"]})
    load({"kubernetes_prefill_selector": "a=b", "kubernetes_decode_selector": "c in (d, e),!f"})
    of_prefillers = {name: ENGINES[name] for name in ("prefiller_hosts", "prefiller_ports")}
    load(of_prefillers | {"decoder_dns": "d.svc:1"})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prefiller-dns", "p.svc:1"], "no decode engine: --decode http://HOST:PORT"),
        (["--kubernetes-decode-selector", "a=b"], "no prefill engine: --prefill http://HOST:PORT"),
        (["--engines-file", "x", "--prefiller-hosts", "p"], "--prefiller-ports is missing"),
        ([*FLAGS, "--decoder-dns", "d.svc"], "--decoder-dns"),
        ([*FLAGS, "--decoder-dns", "10.0.0.1:80"], "--decoder-dns"),
        ([*FLAGS, "--decoder-dns", "d.svc:0"], "--decoder-dns"),
        ([*FLAGS, "--decoder-dns", "d.svc:\u0663"], "--decoder-dns"),
        ([*FLAGS, "--kubernetes-port", "\u0663"], "--kubernetes-port"),
        ([*FLAGS, "--decoder-dns", "http://d:80"], "--decoder-dns"),
        ([*FLAGS, "--decoder-dns", "_http._tcp.d:80"], "--decoder-dns"),
        ([*FLAGS, "--kubernetes-decode-selector", ""], "--kubernetes-decode-selector"),
        ([*FLAGS, "--kubernetes-decode-selector", "a&b"], "--kubernetes-decode-selector"),
        ([*FLAGS, "--kubernetes-namespace", "../x"], "--kubernetes-namespace"),
        ([*FLAGS, "--kubernetes-port", "0"], "--kubernetes-port"),
        ([*FLAGS, "--kubernetes-port", "70000"], "--kubernetes-port"),
        ([*FLAGS, "--kubernetes-port", "HTTP"], "--kubernetes-port"),
        ([*FLAGS, "--engines-file", "/nowhere.yaml"], "--engines-file /nowhere.yaml: No such"),
        (
            ["--workers=2", "--conversation-store=off", "--engines-file=/nowhere.yaml"],
            "--engines-file /nowhere.yaml: No such",
        ),
        ([*FLAGS, "--engines-file", "/dev/zero"], "--engines-file /dev/zero: is not a regular"),
        (
            [
                *FLAGS,
                "--kubernetes-decode-selector=a",
                "--kubernetes-config=/nowhere",
            ],
            "--kubernetes-config",
        ),
    ],
)
def test_a_source_that_cannot_work_is_one_line_at_start(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    (line,) = problems(capsys, *arguments)
    assert line.startswith("disagg-router: error: ")
    assert complaint in line


@pytest.mark.parametrize(
    ("missing", "flags", "extra"),
    [
        ("dns", ["--decoder-dns", "d.svc:1"], ".[dns]"),
        ("lightkube", ["--kubernetes-decode-selector", "a"], ".[kubernetes]"),
    ],
)
def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    flags: list[str],
    extra: str,
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == missing:
            monkeypatch.setitem(sys.modules, name, None)
    for name in ("dns", "kubernetes", "pod_api"):
        monkeypatch.delitem(sys.modules, f"router.fleet.sources.{name}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    (line,) = problems(capsys, *FLAGS, *flags)
    assert f"pip install '{extra}'" in line
    assert flags[0].split("-")[2] in line


def test_a_restarted_router_uses_the_saved_list_of_a_broken_file(tmp_path: Path) -> None:
    """One of several workers, that is: those who live must not end for it."""
    from router.server.app import build

    path = tmp_path / "engines.yaml"
    path.write_text("[")
    app = build(load({"engines_file": path}))
    assert state_of(app).gateway.fleet.engines == ()
    assert "engines.yaml" in state_of(app).registry.problems()["file"]
