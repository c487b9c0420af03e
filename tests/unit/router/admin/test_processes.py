"""The admin API of a router as a process, or as several; and the command that drains engines."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.engine_scripts import answer_after, usual_decode, usual_prefill
from tests.unit.router.harness import eventually
from tests.unit.router.mock_engine import event, running_engine
from tests.unit.router.processes import RouterProcess, router_process, serving_router
from tests.unit.router.test_settings import FLAGS, problems
from tests.unit.router.test_workers import family

TOKEN = "0123456789abcdef"
# Engines, clients and routers of a test share the machine: a probe may have to wait.
PATIENT = ("--health-timeout=20", "--connect-timeout=20")
ADMIN = ("--admin-port=0", f"--admin-token={TOKEN}", "--no-access-log", "--warm-up=off", *PATIENT)
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default one takes 30 ms to make
BODY = {"model": "m", "prompt": "x"}
CLIENTS = 6
WORKERS = (1, 2)


@contextlib.asynccontextmanager
async def administered(
    p: MockEngine, d: MockEngine, workers: int, *arguments: str
) -> AsyncIterator[tuple[RouterProcess, httpx.AsyncClient]]:
    """A router process, or a family of them, and a client of its admin API."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with contextlib.AsyncExitStack() as stack:
        if workers == 1:
            starting = serving_router(p, d, *ADMIN, *arguments)
            router = await stack.enter_async_context(starting)
        else:
            router, _ = await stack.enter_async_context(family(p, d, *ADMIN, *arguments))
        url = admin_of(router)
        yield (
            router,
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, headers=headers, timeout=100, verify=PLAIN)
            ),
        )


def admin_of(router: RouterProcess) -> str:
    [line] = [line for line in router.lines if "admin API on " in line]
    return line.split()[-1]


def name_of(mock: MockEngine) -> str:
    return f"127.0.0.1:{mock.port}"


async def drain(
    router: RouterProcess, *arguments: str, token: str = TOKEN
) -> asyncio.subprocess.Process:
    """The command, under way."""
    variables = {"DISAGG_ROUTER_ADMIN_URL": admin_of(router), "DISAGG_ROUTER_ADMIN_TOKEN": token}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.commands.cli", "drain", *arguments),
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def exit_of(command: asyncio.subprocess.Process) -> tuple[int, str, str]:
    async with asyncio.timeout(80):
        out, err = await command.communicate()
    assert command.returncode is not None
    return command.returncode, out.decode(), err.decode()


async def ask_anew(router: RouterProcess) -> int:
    """On a connection of its own: it may be any worker's."""
    async with httpx.AsyncClient(base_url=router.url, timeout=100, verify=PLAIN) as client:
        return (await client.post("/v1/completions", json=BODY)).status_code


async def until_true(condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    """As `eventually`, for what has to be asked for."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 # another process has no event to set
            await asyncio.sleep(0.05)


async def slow_decode(request: Received, peer: Peer) -> None:
    if not request.json.get("stream"):
        return await usual_decode(request, peer)
    await peer.send(STREAM_HEAD)
    for _ in range(5):
        await peer.send(chunk(event("a")))
        await asyncio.sleep(0.05)
    await peer.send(chunk(DONE) + b"0\r\n\r\n")


async def ask_all_the_time(url: str, told: Counter[str], has_ended: asyncio.Event) -> None:
    number = 0
    while not has_ended.is_set():
        number += 1
        async with httpx.AsyncClient(base_url=url, timeout=100, verify=PLAIN) as client:
            stream = bool(number % 2)
            answer = await client.post("/v1/completions", json=BODY | {"stream": stream})
            is_whole = not stream or (
                answer.text.count('"text": "a"') == 5 and answer.text.endswith("data: [DONE]\n\n")
            )
            told[f"{answer.status_code} {stream}" if is_whole else answer.text] += 1
        await asyncio.sleep(0.05)  # the engines and the command have to get a word in


async def drain_and_stop(router: RouterProcess, engine: MockEngine) -> None:
    """As an operator does, who is told when it may be stopped."""
    code, _, errors = await exit_of(await drain(router, f"http://{name_of(engine)}"))
    assert (code, errors) == (0, "")
    await engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
async def test_scaling_by_hand_under_load_costs_no_client_anything(workers: int) -> None:
    """1+1, 3+3, 1+1: engines are added, drained by the command, and then stopped."""
    async with contextlib.AsyncExitStack() as stack:
        ps = [await stack.enter_async_context(running_engine(usual_prefill)) for _ in range(3)]
        ds = [await stack.enter_async_context(running_engine(slow_decode)) for _ in range(3)]
        router, api = await stack.enter_async_context(administered(ps[0], ds[0], workers))
        told: Counter[str] = Counter()
        has_ended = asyncio.Event()
        clients = [
            asyncio.create_task(ask_all_the_time(router.url, told, has_ended))
            for _ in range(CLIENTS)
        ]
        for role, engines in (("prefill", ps), ("decode", ds)):
            for engine in engines[1:]:
                entry = {"url": f"http://{name_of(engine)}", "role": role}
                assert (await api.post("/admin/engines", json=entry)).status_code == 201
        await eventually(lambda: all(e.requests for e in (*ps, *ds)), 60)
        await asyncio.gather(*[drain_and_stop(router, e) for e in (ps[0], ds[0], ps[1], ds[1])])
        before = len(ds[2].requests)
        await eventually(lambda: len(ds[2].requests) > before + CLIENTS, 60)
        for engine in (ps[1], ds[1]):
            assert (await api.delete(f"/admin/engines/{name_of(engine)}")).status_code == 204
        has_ended.set()
        await asyncio.gather(*clients)
        assert set(told) == {"200 True", "200 False"}, told
        for engine in (ps[0], ds[0], ps[1], ds[1]):
            await engine.start(engine.port)  # for running_engine to stop


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
async def test_a_prefiller_is_drained_when_what_it_holds_was_read(
    p: MockEngine, d: MockEngine, p2: MockEngine, workers: int
) -> None:
    go_on = asyncio.Event()
    async with administered(p, d, workers) as (router, api):
        await api.post("/admin/engines", json={"url": f"http://{name_of(p2)}", "role": "prefill"})
        d.usual = answer_after(go_on, usual_decode)
        asking = [asyncio.create_task(ask_anew(router)) for _ in range(8)]
        await eventually(lambda: len(d.requests) == 8, 60)
        held = len(p.requests)
        command = await drain(router, name_of(p), "--wait")
        assert command.stdout is not None
        async with asyncio.timeout(60):
            line = (await command.stdout.readline()).decode()
        assert line == f"{name_of(p)} drains: 0 running, {held} KV leases\n"
        told = (await api.get(f"/admin/engines/{name_of(p)}")).json()
        assert (told["holding"], told["drained"]) == (held, False)
        assert command.returncode is None
        go_on.set()
        code, out, errors = await exit_of(command)
        assert (code, out, errors) == (0, f"{name_of(p)} is drained\n", "")
        assert [await one for one in asking] == [200] * 8


@pytest.mark.slow
async def test_a_worker_that_is_started_again_drains_still(
    p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    async with administered(p, d, 2) as (router, api):
        entry = {"url": f"http://{name_of(d2)}", "role": "decode"}
        assert (await api.post("/admin/engines", json=entry)).status_code == 201
        await api.post(f"/admin/engines/{name_of(d)}/drain")
        await api.put("/admin/groups/default", json={"weight": 0.5})
        pids = [int(line.split()[-1]) for line in router.lines if " is process " in line]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(40):
            for _ in pids:
                await router.until(r"worker \d is process")

        async def everybody_answers() -> bool:
            engines = (await api.get("/admin/engines")).json()
            healths = {engine["health"] for engine in engines["engines"]}
            return engines["workers"]["answered"] == 2 and healths == {"healthy"}

        await until_true(everybody_answers)
        told = (await api.get(f"/admin/engines/{name_of(d)}")).json()
        assert (told["intent"], told["drained"], told["sources"]) == ("draining", True, ["flags"])
        [group] = (await api.get("/admin/groups")).json()["groups"]
        assert (group["weight"], group["weighed_by"]) == (0.5, "admin")
        before = len(d.requests)
        assert [await ask_anew(router) for _ in range(12)] == [200] * 12
        assert len(d.requests) == before
        assert len(d2.requests) == 12


@pytest.mark.slow
async def test_a_worker_that_is_started_again_knows_what_a_file_said_that_is_broken_now(
    p: MockEngine, d: MockEngine, d2: MockEngine, d3: MockEngine, tmp_path: Path
) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text(listing(d))
    async with administered(p, d, 2, f"--engines-file={file}") as (router, api):

        async def all_know(*engines: MockEngine) -> bool:
            told = (await api.get("/admin/engines")).json()
            listed = {e["name"] for e in told["engines"] if e["sources"][-1:] == ["file"]}
            is_whole = told["workers"]["answered"] == 2
            is_well = {e["health"] for e in told["engines"]} == {"healthy"}
            return is_whole and is_well and listed == {name_of(one) for one in engines}

        file.write_text(listing(d, d2))
        await until_true(partial(all_know, d, d2))
        await api.post(f"/admin/engines/{name_of(d)}/drain")
        file.write_text("engines: [{url: broken}]")
        await router.until("source file: .*engine 1: ")
        pids = [int(line.split()[-1]) for line in router.lines if " is process " in line]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(40):
            for _ in pids:
                await router.until(r"worker \d is process")
        await until_true(partial(all_know, d, d2))
        assert [await ask_anew(router) for _ in range(6)] == [200] * 6
        assert len(d2.requests) >= 6
        async with httpx.AsyncClient(base_url=router.url, verify=PLAIN) as client:
            ready = await client.get("/ready")
        assert (ready.status_code, "engine 1" in ready.json()["sources"]["file"]) == (200, True)
        file.write_text(listing(d, d3))
        await until_true(partial(all_know, d, d3))


def listing(*engines: MockEngine) -> str:
    entries = [{"url": f"http://{name_of(engine)}", "role": "decode"} for engine in engines]
    return json.dumps({"engines": entries})


@pytest.mark.slow
async def test_nobody_is_drained_while_a_worker_stands_still(p: MockEngine, d: MockEngine) -> None:
    """It may have legs there of which nobody knows."""
    async with administered(p, d, 2) as (router, api):
        pid = next(int(line.split()[-1]) for line in router.lines if "worker 0 is process" in line)
        os.kill(pid, signal.SIGSTOP)
        try:
            told = (await api.post(f"/admin/engines/{name_of(d)}/drain")).json()
            assert (told["intent"], told["drained"]) == ("draining", False)
            command = await drain(router, name_of(d), "--timeout=2")
            code, _, errors = await exit_of(command)
            assert (code, "not every worker" in errors) == (1, True)
        finally:
            os.kill(pid, signal.SIGCONT)

        async def is_drained() -> bool:
            return bool((await api.get(f"/admin/engines/{name_of(d)}")).json()["drained"])

        await until_true(is_drained)


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
async def test_a_hangup_reads_settings_again(
    tmp_path: Path, p: MockEngine, d: MockEngine, workers: int
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("group-weights: {default: 3}\n")
    async with administered(p, d, workers, f"--config={file}") as (router, api):

        async def weight() -> tuple[float, str]:
            [group] = (await api.get("/admin/groups")).json()["groups"]
            return group["weight"], group["weighed_by"]

        assert await weight() == (3.0, "settings")
        file.write_text("group-weights: {default: 5}\nkeep-alive-timeout: 7\n")
        router.process.send_signal(signal.SIGHUP)
        await router.until("settings changed: --group-weights")
        await router.until("settings that need a restart: --keep-alive-timeout")
        assert await weight() == (5.0, "settings")
        await api.put("/admin/groups/default", json={"weight": 0.25})
        file.write_text("group-weights: {default: 6}\n")
        answer = await api.post("/admin/reload")
        assert answer.json() == {"applied": ["group_weights"], "needs_restart": []}
        assert await weight() == (0.25, "admin"), "until it is taken back"
        await api.delete("/admin/groups/default")
        assert await weight() == (6.0, "settings")
        file.write_text("group-weights: {default: -1}\n")
        router.process.send_signal(signal.SIGHUP)
        await router.until("settings are unchanged: group-weights")
        assert (await api.post("/admin/reload")).status_code == 400
        assert await weight() == (6.0, "settings")
        assert await ask_anew(router) == 200
        router.process.terminate()
        assert await router.ended() == 0


@pytest.mark.slow
async def test_a_family_without_an_admin_api_reads_settings_again(
    tmp_path: Path, p: MockEngine, d: MockEngine
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("")
    async with family(p, d, f"--config={file}") as (router, _):
        file.write_text("group-weights: default=5\n")
        router.process.send_signal(signal.SIGHUP)
        await router.until("settings changed: --group-weights")

        async def is_there() -> bool:
            async with httpx.AsyncClient(base_url=router.url) as client:
                return 'group_weight{group="default"} 5.0' in (await client.get("/metrics")).text

        await until_true(is_there)
        router.process.terminate()
        assert await router.ended() == 0


@pytest.mark.parametrize("workers", WORKERS)
async def test_a_router_ends_with_its_terminal(p: MockEngine, d: MockEngine, workers: int) -> None:
    """SIGHUP of a terminal that is gone is no wish for a reload."""
    engines = f"--prefiller-hosts=127.0.0.1 --prefiller-ports={p.port} "
    engines += f"--decoder-hosts=127.0.0.1 --decoder-ports={d.port} --port=0 --shutdown-delay=0"
    more = [f"--workers={workers}", "--conversation-store=off"]
    command = [sys.executable, "-m", "router.commands.cli", *engines.split(), *more]
    process, terminal = await asyncio.to_thread(_in_a_terminal, command)
    try:
        async with asyncio.timeout(40):
            seen = b""
            while b"is healthy" not in seen:
                seen += await asyncio.to_thread(os.read, terminal, 4096)
        os.close(terminal)
        await eventually(lambda: process.poll() is not None, 20)
    finally:
        process.kill()
        process.wait()


def _in_a_terminal(command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """With a session of its own, whose terminal is there as long as the other end is open. The
    tests themselves may run under nohup, which ignores SIGHUP for all that they start."""
    master, slave = pty.openpty()
    launch = ["env", "--default-signal=HUP", "setsid", "--ctty", "--wait", *command]
    process = subprocess.Popen(launch, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    return process, master


# Who is let in.


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--admin-port=1", "--admin-host=0.0.0.0"], "--admin-host 0.0.0.0 can be reached"),
        (["--admin-port=1", "--admin-host=::"], "--admin-host :: can be reached by others"),
        (["--admin-port=1", "--admin-host=example"], "can be reached by others"),
        (["--admin-port=1", "--admin-token=short"], "--admin-token: too short"),
        (
            ["--admin-port=1", "--admin-token=two words, that are long"],
            "--admin-token: not a token",
        ),
        (["--admin-port=1", "--admin-token-file=/nowhere"], "--admin-token-file /nowhere: No such"),
        (["--admin-port=x"], "--admin-port"),
        ([f"--admin-token={TOKEN}", "--admin-token-file=x"], "are both set"),
        (["--group-weights", "blue"], "--group-weights"),
        (["--group-weights", "blue=-1"], "--group-weights"),
        (["--group-weights", "blue=nan"], "--group-weights"),
        (["--group-weights", "blue=1_0"], "--group-weights"),
        (["--group-weights", "=1"], "--group-weights"),
        (["--group-weights", "blue=1", "blue=2"], "names a group twice"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    [line] = problems(capsys, *FLAGS, *arguments)
    assert complaint in line
    assert "that are long" not in line


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
async def test_an_admin_port_in_use_is_one_line(p: MockEngine, d: MockEngine, workers: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("--port=0", f"--admin-port={port}", f"--workers={workers}")
        async with router_process(p, d, *arguments, "--conversation-store=off") as router:
            assert await router.ended() == 1
    [line] = router.lines
    assert line.startswith(f"disagg-router: error: cannot listen on 127.0.0.1:{port}")


@pytest.mark.slow
async def test_the_token_is_asked_for_on_the_wire(p: MockEngine, d: MockEngine) -> None:
    async with administered(p, d, 1) as (router, api):
        async with httpx.AsyncClient(base_url=str(api.base_url)) as stranger:
            assert (await stranger.get("/admin/engines")).status_code == 401
        assert (await api.get("/admin/engines")).status_code == 200
        async with httpx.AsyncClient(base_url=router.url) as client:
            assert (await client.get("/admin/engines")).status_code == 404, "not on that port"
        code, _, errors = await exit_of(await drain(router, name_of(d), token="wrong-and-so-on"))
        assert (code, "answers 401" in errors) == (1, True)
        assert not any(TOKEN in line for line in router.lines)


# The command's other ends.


@pytest.mark.slow
async def test_the_command_says_what_it_cannot_do(p: MockEngine, d: MockEngine) -> None:
    async with administered(p, d, 1) as (router, api):
        code, out, errors = await exit_of(await drain(router, "127.0.0.1:1"))
        assert (code, out) == (1, "")
        assert f"; there are {name_of(p)}, {name_of(d)}" in errors
        dead = find_closed_port()
        both = ("--admin", f"http://127.0.0.1:{dead}", "--admin", str(api.base_url))
        code, _, errors = await exit_of(await drain(router, name_of(d), *both))
        assert code == 1
        failed, done = errors.splitlines()
        assert f"http://127.0.0.1:{dead}/" in failed
        assert ": connection refused" in failed
        assert done.endswith(f"succeeded only at {str(api.base_url).rstrip('/')}")
        told = (await api.get(f"/admin/engines/{name_of(d)}")).json()
        assert told["intent"] == "draining", "the other one was told all the same"
        code, out, _ = await exit_of(await drain(router, name_of(d), "--resume"))
        assert (code, out) == (0, f"{name_of(d)} serves\n")
        assert await ask_anew(router) == 200
        code, out, _ = await exit_of(await drain(router, name_of(d), "--no-wait"))
        assert (code, out) == (0, f"{name_of(d)} drains\n")


def find_closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


@pytest.mark.slow
async def test_a_drain_that_takes_too_long_is_given_up_and_goes_on(
    p: MockEngine, d: MockEngine
) -> None:
    go_on = asyncio.Event()
    d.scripts = [answer_after(go_on, usual_decode)]
    async with administered(p, d, 1) as (router, api):
        asking = asyncio.create_task(ask_anew(router))
        await eventually(lambda: d.requests, 60)
        code, _, errors = await exit_of(await drain(router, name_of(d), "--timeout=1"))
        assert (code, "1 running, 0 KV leases, after 1 s" in errors) == (1, True)
        command = await drain(router, name_of(d))
        assert command.stdout is not None
        await asyncio.wait_for(command.stdout.readline(), 60)
        await api.post(f"/admin/engines/{name_of(d)}/resume")
        code, _, errors = await exit_of(command)
        assert (code, "serves again" in errors) == (1, True)
        go_on.set()
        assert await asking == 200


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [""],
        ["x"],
        ["host:0"],
        ["ftp://host:1"],
        ["http://host:1/path"],
        ["host:1", "--timeout=0"],
        ["host:1", "--timeout=nan"],
        ["host:1", "--timeout=x"],
        ["host:1", "--admin=nowhere"],
        ["host:1", "--admin=http://"],
        ["host:1", "--no-such-flag"],
        ["host:1", "--migrate", "--resume"],
    ],
)
def test_wrong_usage_of_drain_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    [line] = problems(capsys, "drain", *arguments)
    assert line.startswith("disagg-router drain: error: ")


def test_a_trace_that_cannot_be_read_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("--prefill-tokens-per-second=9", "--decode-step-ms=9", "--kv-tokens=9")
    [line] = problems(capsys, "plan", "/nowhere", *costs)
    assert line == "disagg-router plan: error: /nowhere: No such file or directory"


def test_a_token_file_that_cannot_be_read_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_ROUTER_ADMIN_TOKEN_FILE", "/nowhere")
    [line] = problems(capsys, "drain", "host:1")
    assert "DISAGG_ROUTER_ADMIN_TOKEN_FILE /nowhere: No such file" in line
