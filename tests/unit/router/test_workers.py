"""Several processes on one port, and what answers when a loop does not."""

import asyncio
import contextlib
import os
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from router.commands.cli import main
from router.telemetry.metrics_server import (
    LivenessServer,
    collect_worker_metrics,
    merge_expositions,
    metrics_socket,
    serve_in_thread,
    serve_worker_metrics,
)
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.redis_server import running_redis
from tests.unit.router.conversations.engines import decoding, prefilling
from tests.unit.router.engine_scripts import streaming_until
from tests.unit.router.harness import eventually
from tests.unit.router.mock_engine import event
from tests.unit.router.processes import (
    RouterProcess,
    lives,
    router_process,
    serving_router,
    until_refused,
)

FAMILY = ("--workers=2", "--conversation-store=off", "--port=0", "--health-interval=0.1")
CHAT = [{"role": "user", "content": "how are you?"}]
NEXT_TURN = [*CHAT, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "good"}]
BODY = {"model": "m", "prompt": "x"}


@contextlib.asynccontextmanager
async def family(
    p: MockEngine, d: MockEngine, *arguments: str
) -> AsyncIterator[tuple[RouterProcess, list[int]]]:
    """A router of two workers that have found their engines; and the processes of these."""
    async with router_process(p, d, *FAMILY, *arguments) as router:
        pids = [
            int((await router.until(rf"worker {number} is process (\d+)")).group(1))
            for number in (0, 1)
        ]
        router.url = (await router.until(r"disagg-router on (http://\S+)")).group(1)
        for _ in "pdpd":
            await router.until("is healthy")
        yield router, pids


@pytest.mark.slow
async def test_workers_share_a_port_and_tell_one_set_of_figures(
    p: MockEngine, d: MockEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("long" * 20)).mkdir()
    monkeypatch.setenv("TMPDIR", str(long))  # its names do not fit into a socket's address
    async with family(p, d) as (router, _), httpx.AsyncClient(base_url=router.url) as client:
        for _ in range(32):
            async with httpx.AsyncClient(base_url=router.url) as other:  # a connection of its own
                assert (await other.post("/v1/completions", json=BODY)).status_code == 200
        text = (await client.get("/metrics")).text
    assert _values(text, "disagg_router_requests_total") == [32]
    assert _values(text, "disagg_router_request_seconds_count") == [32]
    assert _values(text, "disagg_router_workers") == [2]
    assert _values(text, "disagg_router_engine_healthy") == [1, 1]
    assert len({request.connection for request in d.requests}) >= 2, "both workers had a share"


def _values(text: str, name: str) -> list[float]:
    """Of all samples with just this name, whatever their labels."""
    lines = [x for x in text.splitlines() if x.startswith((f"{name} ", f"{name}{{"))]
    return [float(line.rpartition(" ")[2]) for line in lines]


@pytest.mark.slow
async def test_a_worker_that_dies_is_replaced(p: MockEngine, d: MockEngine) -> None:
    async with family(p, d) as (router, pids):
        for _ in range(8):
            async with httpx.AsyncClient(base_url=router.url) as client:
                await client.post("/v1/completions", json=BODY)
        assert await requests_counted(router.url) == 8
        os.kill(pids[0], signal.SIGKILL)
        await router.until("worker 0 ended with status -9 and is restarted")
        new = int((await router.until(r"worker 0 is process (\d+)")).group(1))
        assert new not in pids
        for _ in "pd":
            await router.until("is healthy")
        for _ in range(8):
            async with httpx.AsyncClient(base_url=router.url) as client:
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        assert await requests_counted(router.url) == 16
        router.process.terminate()
        assert await router.ended() == 0


async def requests_counted(url: str) -> float:
    async with httpx.AsyncClient(base_url=url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    counted = [one for one in lines if one.startswith("disagg_router_requests_total{")]
    return sum(float(one.split()[-1]) for one in counted)


@pytest.mark.slow
async def test_a_worker_that_starts_answers_nothing_before_it_knows_its_engines(
    p: MockEngine, d: MockEngine
) -> None:
    """Its connections wait in the listener: a client would be told that no engine is healthy."""

    async def ask(url: str) -> int:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return (await client.post("/v1/completions", json=BODY)).status_code

    async def list_late(_: Received, peer: Peer) -> None:
        await asyncio.sleep(0.5)
        await peer.answer({"object": "list", "data": [{"id": "m"}]})

    async with family(p, d) as (router, pids):
        d.listing = list_late
        os.kill(pids[0], signal.SIGKILL)
        await router.until("worker 0 ended with status -9 and is restarted")
        asked = [ask(router.url) for _ in range(16)]
        assert await asyncio.gather(*asked) == [200] * 16


def test_counters_of_workers_that_have_ended_are_added_to_those_that_run(tmp_path: Path) -> None:
    """Gauges describe the present: only running workers have them."""

    def page(count: int) -> bytes:
        return f"# TYPE a_total counter\na_total {count}\n# TYPE b gauge\nb {count}\n".encode()

    def figures() -> list[str]:
        lines = collect_worker_metrics(tmp_path).decode().splitlines()
        return [line for line in lines if not line.startswith("#")]

    with serve_worker_metrics(metrics_socket(tmp_path, 0, 1), lambda: page(100)):
        for pid in (2, 3, 4):
            with serve_worker_metrics(metrics_socket(tmp_path, 1, pid), lambda: page(5)):
                assert figures() == [f"a_total {100 + 5 * (pid - 1)}.0", "b 105.0"]
            assert figures() == [f"a_total {100 + 5 * (pid - 1)}.0", "b 100.0"]
    assert figures() == ["a_total 115.0"]


@pytest.mark.slow
async def test_a_signal_to_the_family_lets_running_streams_end(
    p: MockEngine, d: MockEngine
) -> None:
    go_on = asyncio.Event()
    d.scripts = [streaming_until(go_on, event("a"), event("b"), DONE)]
    async with (
        family(p, d, "--shutdown-delay=0.2") as (router, pids),
        httpx.AsyncClient(base_url=router.url) as client,
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer,
    ):
        blocks = answer.aiter_bytes()
        assert await anext(blocks) == event("a")
        router.process.terminate()
        await router.until("shutting down")
        await until_refused(router.url)
        go_on.set()
        assert b"".join([block async for block in blocks]) == event("b") + DONE
        assert await router.ended() == 0
    assert not any(lives(pid) for pid in pids)


async def test_workers_die_with_their_supervisor(p: MockEngine, d: MockEngine) -> None:
    async with family(p, d) as (router, pids):
        router.process.kill()
        await eventually(lambda: not any(lives(pid) for pid in pids))


@pytest.mark.slow
async def test_a_second_signal_ends_the_family_at_once(p: MockEngine, d: MockEngine) -> None:
    async with family(p, d, "--shutdown-delay=60") as (router, pids):
        router.process.terminate()
        await router.until("shutting down")
        router.process.terminate()
        assert await router.ended() == 128 + signal.SIGTERM
        assert not any(lives(pid) for pid in pids)


async def test_a_port_in_use_is_noticed_by_a_family_too(p: MockEngine, d: MockEngine) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        async with router_process(p, d, *FAMILY, f"--port={port}") as router:
            assert await router.ended() == 1
    assert f"cannot listen on 127.0.0.1:{port}" in router.lines[-1]


def test_workers_refuse_a_store_that_they_cannot_share(capsys: pytest.CaptureFixture[str]) -> None:
    engines = "--prefiller-hosts=p --prefiller-ports=1 --decoder-hosts=d --decoder-ports=2"
    assert main([*engines.split(), "--workers=4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--workers 4" in line
    assert "set --conversation-store to a Redis URL, or to off" in line


@pytest.mark.slow
@pytest.mark.parametrize("key", [(), ("--conversation-store-key=of the operator's",)])
async def test_workers_reuse_each_others_turns_with_a_key_and_without(
    p: MockEngine, d: MockEngine, key: tuple[str, ...]
) -> None:
    p.usual, d.usual = prefilling(), decoding()
    with running_redis() as redis:
        store = [f"--conversation-store={redis.url}", "--conversation-store-timeout=10"]
        store.append(f"--conversation-store-password={redis.password}")
        store.append("--conversation-unproven=whole")  # the mock engines report no token ids
        async with family(p, d, *store, *key) as (router, _):
            for number in range(16):
                body: dict[str, object] = {"model": "m", "conversation_id": str(number)}
                for messages in (CHAT, NEXT_TURN):
                    body |= {"messages": messages}
                    async with httpx.AsyncClient(base_url=router.url, timeout=20) as client:
                        answer = await client.post("/v1/chat/completions", json=body)
                        assert answer.status_code == 200
            async with httpx.AsyncClient(base_url=router.url) as client:
                text = (await client.get("/metrics")).text
            warned = [line for line in router.lines if "no --conversation-store-key" in line]
    turns = "disagg_router_conversation_turns_total"
    assert f'{turns}{{outcome="new",reason=""}} 16.0' in text
    assert f'{turns}{{outcome="hit",reason=""}} 16.0' in text
    assert len(warned) == (0 if key else 1)
    assert len({request.connection for request in d.requests}) >= 2, "both workers had a share"


async def test_a_blocked_loop_does_not_fail_liveness() -> None:
    server = LivenessServer("127.0.0.1", 0, lambda: b"figures 1\n")
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with serve_in_thread(server), ThreadPoolExecutor(1) as thread:
        # This thread is the loop's, and it stands still until the answer is there.
        assert thread.submit(_get, f"{url}/health").result(5) == b'{"status":"ok"}'
        assert thread.submit(_get, f"{url}/metrics").result(5) == b"figures 1\n"


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        content: bytes = answer.read()
        return content


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), FAMILY[:2]])
async def test_liveness_has_a_port_of_its_own(
    p: MockEngine, d: MockEngine, workers: tuple[str, ...]
) -> None:
    async with router_process(p, d, "--port=0", "--liveness-port=0", *workers) as router:
        url = (await router.until(r"liveness on (http://\S+)")).group(1)
        for _ in "pd":
            await router.until("is healthy")
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert "disagg_router_requests_in_flight" in (await client.get("/metrics")).text
            assert (await client.head("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 404
        router.process.terminate()
        assert await router.ended() == 0


async def test_a_router_whose_loop_stands_still_is_alive(p: MockEngine, d: MockEngine) -> None:
    arguments = ("--port=0", "--liveness-port=0")
    module = "tests.unit.router.blocked_router"
    async with router_process(p, d, *arguments, module=module) as router:
        alive = (await router.until(r"liveness on (http://\S+)")).group(1)
        serving = (await router.until(r"disagg-router on (http://\S+)")).group(1)
        async with httpx.AsyncClient(timeout=httpx.Timeout(5, read=0.5)) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.get(f"{serving}/health")
            assert (await client.get(f"{alive}/health")).json() == {"status": "ok"}
            assert "disagg_router_requests" in (await client.get(f"{alive}/metrics")).text


async def test_a_liveness_port_in_use_is_one_line_and_exit_code_1(
    p: MockEngine, d: MockEngine
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with router_process(p, d, "--port=0", f"--liveness-port={port}") as router:
            assert await router.ended() == 1
    assert router.lines[-1].startswith(f"disagg-router: error: cannot listen on 127.0.0.1:{port}")


def test_figures_add_up_and_health_is_the_worst_seen() -> None:
    health = "# TYPE disagg_router_engine_healthy gauge\ndisagg_router_engine_healthy"
    one = f'# TYPE a counter\na_total{{x="1"}} 2\n{health} 1\n'
    other = f'# TYPE a counter\na_total{{x="1"}} 3\na_total{{x="2"}} 1\n{health} 0\n'
    for name in ("disagg_router_source_trouble", "disagg_router_source_engines"):
        one += f"# TYPE {name} gauge\n{name} 1\n"
        other += f"# TYPE {name} gauge\n{name} 0\n"
    lines = merge_expositions([one, other]).decode().splitlines()
    assert 'a_total{x="1"} 5.0' in lines
    assert 'a_total{x="2"} 1.0' in lines
    assert "disagg_router_engine_healthy 0.0" in lines
    assert "disagg_router_source_trouble 1.0" in lines
    assert "disagg_router_source_engines 0.0" in lines


async def test_access_lines_of_a_burst_are_whole(p: MockEngine, d: MockEngine) -> None:
    async with (
        serving_router(p, d, "--shutdown-delay=0") as router,
        httpx.AsyncClient(base_url=router.url, timeout=20) as client,
    ):
        answers = await asyncio.gather(
            *[client.post("/v1/completions", json=BODY) for _ in range(64)]
        )
        router.process.terminate()
        assert await router.ended() == 0
    told = [line for line in router.lines if " INFO request " in line]
    assert len(told) == len(answers)
    assert all("outcome=ok" in line and "total_ms=" in line for line in told)
