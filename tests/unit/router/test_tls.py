"""TLS towards clients and towards engines: who is believed, and what happens as files change."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.common.tls import client_context, expiry_of, server_context
from router.fleet.engine import Health
from router.server.app import build
from router.server.client_connection import MAX_EXCESS_CONNECTIONS
from router.server.tls_handshake import HANDSHAKE_TIMEOUT_S
from router.settings import Settings, SettingsError, load
from scripts.mock_engine import STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.certificates import Authority, Signed
from tests.unit.router.engine_scripts import usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually, post, running_router, settings_for
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.processes import RouterProcess, router_process, serving_router
from tests.unit.router.test_hostile import peak_of, port_of

SAID = 'disagg_router_file_trouble{file="tls"} 1.0'
ENDS = re.compile(r'^disagg_router_certificate_end_timestamp_seconds{file="tls"} (.+)$', re.M)
COUNTED = "disagg_router_client_connections 1.0"
RUNNING = re.compile(r"^disagg_router_requests_in_flight [1-9]", re.MULTILINE)
BODY = {"model": "m", "prompt": "hello", "max_tokens": 7}


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def first(ca: Authority) -> Signed:
    return ca.sign("first")


@pytest.fixture(scope="module")
def second(ca: Authority) -> Signed:
    return ca.sign("second", days=3)


# Towards clients: a process of its own.


def name_shown(port: int, context: ssl.SSLContext) -> str:
    """Whose certificate a new handshake is shown."""
    with (
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as over,
    ):
        shown: Any = over.getpeercert()
        return str(dict(part[0] for part in shown["subject"])["commonName"])


async def until_shown(router: RouterProcess, context: ssl.SSLContext, name: str) -> None:
    port = int(router.url.rpartition(":")[2])
    async with asyncio.timeout(60):
        while await asyncio.to_thread(name_shown, port, context) != name:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def until_metrics_have(client: httpx.AsyncClient, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in (await client.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def until_its_end_is_told(client: httpx.AsyncClient, own: Signed) -> None:
    end = expiry_of(own.certificate.read_bytes())
    async with asyncio.timeout(10):
        while float(ENDS.findall((await client.get("/metrics")).text)[0]) != end:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--workers=2", "--conversation-store=off"]])
async def test_clients_are_served_over_tls_and_a_new_certificate_is_taken_while_they_are(
    p: MockEngine,
    d: MockEngine,
    ca: Authority,
    first: Signed,
    second: Signed,
    tmp_path: Path,
    options: list[str],
) -> None:
    used = first.put(tmp_path)
    given = [f"--tls-certfile={used.certificate}", f"--tls-keyfile={used.key}", *options]
    trusting = ca.trusting()
    async with (
        serving_router(p, d, *given, "--liveness-port=0") as router,
        httpx.AsyncClient(base_url=router.url, verify=trusting) as client,
    ):
        assert router.url.startswith("https://")
        assert (await client.post("/v1/completions", json=BODY)).json()["id"] == "cmpl-1"
        streamed = await client.post("/v1/completions", json=BODY | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        liveness = next(line for line in router.lines if "liveness on" in line).split()[-1]
        async with httpx.AsyncClient() as plain:
            assert (await plain.get(f"{liveness}/health")).status_code == 200
            with pytest.raises(httpx.HTTPError):
                await plain.get(router.url.replace("https", "http") + "/health")
        await until_shown(router, trusting, "first")
        if options:
            await until_metrics_have(client, "workers 2.0")
        await until_its_end_is_told(client, first)

        # Half of a new pair, or nonsense, changes nothing, and is said.
        used.certificate.write_bytes(second.certificate.read_bytes())
        await router.until("the certificate stays as it is")
        await until_shown(router, trusting, "first")
        await until_metrics_have(client, SAID)
        used.key.write_bytes(second.key.read_bytes())
        await until_shown(router, trusting, "second")
        await until_its_end_is_told(client, second)

        # Who is connected goes on, and nobody is cut off.
        assert (await client.post("/v1/completions", json=BODY)).is_success
        used.certificate.unlink()
        await router.until("the certificate stays as it is")
        await until_shown(router, trusting, "second")
        first.put(tmp_path)
        await until_shown(router, trusting, "first")
        router.process.send_signal(signal.SIGTERM)
        assert await router.ended() == 0


@pytest.mark.slow
async def test_a_worker_that_dies_while_a_file_is_broken_ends_no_other(
    p: MockEngine, d: MockEngine, ca: Authority, first: Signed, tmp_path: Path
) -> None:
    used = first.put(tmp_path)
    given = [f"--tls-certfile={used.certificate}", f"--tls-keyfile={used.key}"]
    given += ["--workers=2", "--conversation-store=off"]
    async with (
        serving_router(p, d, *given) as router,
        httpx.AsyncClient(base_url=router.url, verify=ca.trusting()) as client,
    ):
        await until_metrics_have(client, "workers 2.0")
        used.key.write_text("nonsense")
        line = next(line for line in router.lines if "worker 1 is process" in line)
        os.kill(int(line.split()[-1]), signal.SIGKILL)
        await router.until(r"ERROR --tls-certfile")
        await router.until(r"ended with status 75")
        assert router.process.returncode is None
        first.put(tmp_path)
        await router.until(r"is healthy")


@pytest.mark.slow
async def test_a_handshake_that_is_not_finished_ends_soon(
    p: MockEngine, d: MockEngine, first: Signed
) -> None:
    given = [f"--tls-certfile={first.certificate}", f"--tls-keyfile={first.key}"]
    async with serving_router(p, d, *given) as router:

        async def wait(begun: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(router))
            writer.write(begun)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S + 5):
            await asyncio.gather(wait(b""), wait(b"\x16\x03\x01"))


@pytest.fixture
async def sealed(p: MockEngine, d: MockEngine, first: Signed) -> AsyncIterator[Router]:
    """In this process, and with few connections."""
    files = {"tls_certfile": first.certificate, "tls_keyfile": first.key}
    settings = settings_for(p=[p], d=[d], max_connections=2, **files)
    async with running_router(settings) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        yield router


async def test_a_handshake_that_is_not_finished_counts_as_a_connection(
    ca: Authority, sealed: Router
) -> None:
    def counted() -> float:
        return sealed.metric("client_connections")

    async with contextlib.AsyncExitStack() as stack:
        most = 2 + MAX_EXCESS_CONNECTIONS
        begun = [await stack.enter_async_context(sealed.socket()) for _ in range(most)]
        await eventually(lambda: counted() == most)
        async with sealed.socket() as beyond:
            with contextlib.suppress(ConnectionError):
                assert await beyond.until_closed() == b""
        assert sealed.metric("refusals_total", reason="connections") == 1
        assert counted() == most
        begun.pop().writer.close()
        await eventually(lambda: counted() < most)
        crowded = await asyncio.to_thread(talk_tls, sealed.port, ca.trusting(), [post(b"{}")])
        assert crowded.startswith(b"HTTP/1.1 503")
    await eventually(lambda: not counted())
    answer = await asyncio.to_thread(talk_tls, sealed.port, ca.trusting(), [LAST])
    assert answer.startswith(b"HTTP/1.1 200")


async def test_handshakes_that_come_to_nothing_are_counted_by_what_became_of_them(
    monkeypatch: pytest.MonkeyPatch, sealed: Router, ca: Authority, stranger: Authority
) -> None:
    def counted(reason: str) -> float:
        return sealed.metric("tls_failures_total", reason=reason)

    with pytest.raises(ssl.SSLError):
        await asyncio.to_thread(name_shown, sealed.port, stranger.trusting())
    await eventually(lambda: counted("refused") == 1)
    async with sealed.socket() as plain:
        await plain.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await plain.until_closed() == b""
    await eventually(lambda: counted("refused") == 2)
    async with sealed.socket():
        await eventually(lambda: sealed.metric("client_connections") == 1)
    await eventually(lambda: counted("disconnected") == 1)
    with monkeypatch.context() as short:
        short.setattr("router.server.tls_handshake.HANDSHAKE_TIMEOUT_S", 0.1)
        async with sealed.socket() as silent:
            assert await silent.until_closed() == b""
    await eventually(lambda: counted("timeout") == 1)
    assert counted("refused") == 2
    assert counted("disconnected") == 1
    answer = await asyncio.to_thread(talk_tls, sealed.port, ca.trusting(), [LAST])
    assert answer.startswith(b"HTTP/1.1 200")


LAST = post(b'{"prompt":"x"}', headers=b"connection: close\r\n")


def talk_tls(port: int, context: ssl.SSLContext, requests: list[bytes], step: int = 0) -> bytes:
    """All that is answered. The requests are in one write with the handshake's last; with a `step`,
    the whole of it so many bytes at a time."""
    came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
    over = context.wrap_bio(came, goes, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send() -> None:
            data = goes.read()
            for at in range(0, len(data), step or len(data) or 1):
                plain.sendall(data[at : at + (step or len(data))])

        while True:
            try:
                over.do_handshake()
                break
            except ssl.SSLWantReadError:
                send()
                came.write(plain.recv(65536))
        for request in requests:
            over.write(request)
        send()
        answer = b""
        while True:
            try:
                piece = over.read(65536)
            except ssl.SSLWantReadError:
                came.write(data) if (data := plain.recv(65536)) else came.write_eof()
            except ssl.SSLError:
                return answer
            else:
                if not piece:
                    return answer
                answer += piece


@pytest.mark.parametrize("step", [0, 7])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_requests_right_behind_a_handshake_are_answered_in_order(
    ca: Authority, sealed: Router, version: ssl.TLSVersion, step: int
) -> None:
    context = ca.trusting()
    context.minimum_version = context.maximum_version = version
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    asked = [post(b'{"prompt":"x"}'), health, LAST]
    answers = await asyncio.to_thread(talk_tls, sealed.port, context, asked, step)
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.index(b'"cmpl-1"') < answers.index(b'"status":"ok"') < answers.rindex(b"cmpl-1")
    await eventually(lambda: not sealed.metric("client_connections"))


async def test_who_is_refused_while_he_still_sends_reads_why(ca: Authority, sealed: Router) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"

    def send() -> bytes:
        context = ca.trusting()
        with (
            socket.create_connection(("127.0.0.1", sealed.port), 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as over,
        ):
            over.sendall(head)
            for _ in range(40):
                over.sendall(b"x" * 65536)
                time.sleep(0.05)  # longer than TLS listens after its good-bye
            return over.recv(65536)

    answer = await asyncio.to_thread(send)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    await eventually(lambda: not sealed.metric("client_connections"))


async def test_who_leaves_at_any_point_of_a_handshake_is_counted_no_more(
    ca: Authority, sealed: Router
) -> None:
    def leave(after: int) -> None:
        came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        over = ca.trusting().wrap_bio(came, goes, server_hostname="127.0.0.1")
        linger = struct.pack("ii", 1, 0)  # a reset
        with socket.create_connection(("127.0.0.1", sealed.port), 10) as plain:
            for _ in range(after):
                try:
                    over.do_handshake()
                    over.write(LAST)
                except ssl.SSLWantReadError:
                    plain.sendall(goes.read())
                    came.write(plain.recv(65536))
            plain.sendall(goes.read())
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    for after in [0, 1, 2, 3] * 5:
        await asyncio.to_thread(leave, after)
    await eventually(lambda: not sealed.metric("client_connections"))


@pytest.mark.slow
async def test_who_says_no_good_bye_keeps_no_router_from_ending(
    p: MockEngine, d: MockEngine, ca: Authority, first: Signed
) -> None:
    given = [f"--tls-certfile={first.certificate}", f"--tls-keyfile={first.key}"]
    async with serving_router(p, d, *given, "--shutdown-delay=0") as router:
        context = ca.trusting()
        with socket.create_connection(("127.0.0.1", port_of(router)), 5) as plain:
            over = await asyncio.to_thread(context.wrap_socket, plain, server_hostname="127.0.0.1")
            started = asyncio.get_running_loop().time()
            router.process.send_signal(signal.SIGTERM)
            assert await router.ended() == 0
            assert asyncio.get_running_loop().time() - started < 8
            over.close()


@pytest.mark.slow
async def test_an_unfinished_handshake_keeps_no_router_from_ending(
    p: MockEngine, d: MockEngine, first: Signed
) -> None:
    given = [f"--tls-certfile={first.certificate}", f"--tls-keyfile={first.key}"]
    async with serving_router(p, d, *given, "--shutdown-delay=0", "--liveness-port=0") as router:
        liveness = next(line for line in router.lines if "liveness on" in line).split()[-1]
        with socket.create_connection(("127.0.0.1", port_of(router)), 5):
            async with httpx.AsyncClient(base_url=liveness) as client, asyncio.timeout(10):
                while COUNTED not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            started = asyncio.get_running_loop().time()
            router.process.send_signal(signal.SIGTERM)
            assert await router.ended() == 0
            assert asyncio.get_running_loop().time() - started < HANDSHAKE_TIMEOUT_S


async def test_nothing_older_than_tls_1_2_is_spoken(
    p: MockEngine, d: MockEngine, ca: Authority, first: Signed
) -> None:
    given = [f"--tls-certfile={first.certificate}", f"--tls-keyfile={first.key}"]
    async with serving_router(p, d, *given) as router:
        port = int(router.url.rpartition(":")[2])
        old, modern = ca.trusting(), ca.trusting()
        old.set_ciphers("DEFAULT:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(name_shown, port, old)
        modern.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await asyncio.to_thread(name_shown, port, modern) == "first"


async def test_with_an_authority_for_clients_nobody_else_comes_in(
    p: MockEngine, d: MockEngine, ca: Authority, stranger: Authority, first: Signed
) -> None:
    given = [f"--tls-certfile={first.certificate}", f"--tls-keyfile={first.key}"]
    given.append(f"--tls-client-ca={ca.certificate}")
    async with serving_router(p, d, *given) as router:
        client, wrong = ca.sign("client", "DNS:client"), stranger.sign("client", "DNS:client")
        for own, is_in in ((client, True), (wrong, False), (None, False)):
            async with httpx.AsyncClient(base_url=router.url, verify=ca.trusting(own)) as asks:
                if is_in:
                    assert (await asks.post("/v1/completions", json=BODY)).is_success
                else:
                    with pytest.raises(httpx.HTTPError):
                        await asks.get("/health")


def broken(kind: str, first: Signed, second: Signed, at: Path) -> list[str]:
    key = at / "key.pem"
    match kind:
        case "missing":
            return [f"--tls-certfile={at / 'none.pem'}"]
        case "no fit":
            return [f"--tls-certfile={first.certificate}", f"--tls-keyfile={second.key}"]
        case "no key":
            return [f"--tls-certfile={first.certificate}"]
        case "nonsense":
            key.write_text("nonsense")
            return [f"--tls-certfile={key}"]
        case "encrypted":
            key.write_text(
                "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIGj\n-----END ENCRYPTED PRIVATE KEY-----"
            )
            return [f"--tls-certfile={first.certificate}", f"--tls-keyfile={key}"]
        case "directory":
            return [f"--tls-certfile={at}"]
        case "client ca":
            key.write_text("nonsense")
            return [
                f"--tls-certfile={first.certificate}",
                f"--tls-keyfile={first.key}",
                f"--tls-client-ca={key}",
            ]
        case "engine ca":
            return [f"--engine-ca-file={at / 'none.pem'}"]
        case "engine pair":
            return [f"--engine-certfile={first.certificate}", f"--engine-keyfile={second.key}"]
    return ["--tls-keyfile=x"]


@pytest.mark.parametrize(
    "kind",
    ["missing", "no fit", "no key", "nonsense", "encrypted", "directory", "client ca", "engine ca",
     "engine pair", "key alone"],
)  # fmt: skip
async def test_files_of_ours_that_are_broken_at_start_are_one_line(
    kind: str, first: Signed, second: Signed, tmp_path: Path
) -> None:
    given = broken(kind, first, second, tmp_path)
    flags = {n[2:].replace("-", "_"): v for n, _, v in (flag.partition("=") for flag in given)}
    engines = {f"{role}_{what}": v for role in ("prefiller", "decoder")
               for what, v in (("hosts", "127.0.0.1"), ("ports", "1"))}  # fmt: skip

    def start() -> None:
        settings = load(engines | flags)
        settings.served_tls()
        build(settings)

    with pytest.raises(SettingsError) as caught:
        start()
    (problem,) = caught.value.problems
    assert problem.startswith(given[-1].partition("=")[0]) or "--" in problem
    assert "\n" not in problem


async def test_and_exit_code_2(p: MockEngine, d: MockEngine, tmp_path: Path) -> None:
    async with router_process(p, d, "--port=0", f"--tls-certfile={tmp_path / 'x'}") as router:
        assert await router.ended() == 2
        assert len(router.lines) == 1
        assert "No such file" in router.lines[0]


# Towards engines.


@contextlib.asynccontextmanager
async def before_tls(
    context: ssl.SSLContext, **changes: Any
) -> AsyncIterator[tuple[Router, MockEngine, MockEngine]]:
    """A router and its engines, which speak TLS with this context."""
    async with (
        running_engine(usual_prefill, context) as p,
        running_engine(usual_decode, context) as d,
    ):
        settings = Settings(
            prefiller_hosts=("https://127.0.0.1",),
            prefiller_ports=(p.port,),
            decoder_hosts=("https://127.0.0.1",),
            decoder_ports=(d.port,),
            health_interval=0.05,
            **changes,
        )
        async with running_router(settings) as router:
            yield router, p, d


async def is_ready(router: Router) -> bool:
    await eventually(
        lambda: all(e.health is not Health.UNKNOWN for e in router.gateway.fleet.engines)
    )
    return (await router.client.get("/ready")).status_code == 200


async def test_engines_are_spoken_to_over_tls_probes_too(ca: Authority, first: Signed) -> None:
    async with before_tls(ca.serving(first), engine_ca_file=ca.certificate) as (
        router,
        p,
        d,
    ):
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        for fields in ({}, {"stream": True}, {"prompt": "x" * 300_000}):
            answer = await router.complete(**fields)
            assert answer.status_code == 200, answer.text
        assert len(p.requests) == len(d.requests) == 3
        assert p.probes
        assert p.connections < 6, "connections are kept, over TLS too"


@pytest.mark.parametrize("wrong", ["authority", "system's", "name", "expired", "no tls"])
async def test_an_engine_that_is_not_who_it_should_be_gets_nothing(
    ca: Authority, stranger: Authority, first: Signed, wrong: str
) -> None:
    trusted: dict[str, Any] = {"engine_ca_file": ca.certificate}
    own = first
    match wrong:
        case "authority":
            own = stranger.sign("forged")
        case "system's":
            trusted = {}
        case "name":
            own = ca.sign("other", "DNS:other.example")
        case "expired":
            own = ca.sign("expired", days=-1)
    context: Any = None if wrong == "no tls" else ca.serving(own)
    async with before_tls(context, **trusted) as (router, p, d):
        assert not await is_ready(router)
        reasons = (await router.client.get("/ready")).json()["reasons"]
        why = "no connection" if wrong == "no tls" else "TlsError"  # it waits for more, as we do
        assert why in reasons["prefill"], reasons
        answer = await router.complete()
        assert answer.status_code == 503
        assert not p.requests
        assert not d.requests


async def test_a_certificate_may_be_for_a_name_that_all_engines_have(ca: Authority) -> None:
    own = ca.sign("engines", "DNS:engines.example")
    given = {"engine_ca_file": ca.certificate, "engine_tls_name": "engines.example"}
    async with before_tls(ca.serving(own), **given) as (router, *_):
        assert await is_ready(router)
        assert (await router.complete()).status_code == 200


async def test_engines_may_ask_for_the_routers_certificate(
    ca: Authority, first: Signed, tmp_path: Path
) -> None:
    own = ca.sign("router", "DNS:router").put(tmp_path)
    context = ca.serving(first, wants_clients=True)
    given = {
        "engine_ca_file": ca.certificate,
        "engine_certfile": own.certificate,
        "engine_keyfile": own.key,
    }
    async with before_tls(context, **given) as (router, *_):
        assert await is_ready(router)
        assert (await router.complete()).status_code == 200
        assert set(router.state.watched_files) == {"engine_tls"}
    del given["engine_certfile"], given["engine_keyfile"]
    async with before_tls(context, **given) as (router, p, _):
        assert not await is_ready(router)
        assert not p.requests


async def test_a_tls_failure_is_the_engines_and_another_is_asked(
    ca: Authority, stranger: Authority, first: Signed
) -> None:
    bad = ca.serving(stranger.sign("forged"))
    good = ca.serving(first)
    async with (
        running_engine(usual_prefill, bad) as p1,
        running_engine(usual_prefill, good) as p2,
        running_engine(usual_decode, good) as d,
    ):
        settings = Settings(
            prefiller_hosts=("https://127.0.0.1",) * 2,
            prefiller_ports=(p1.port, p2.port),
            decoder_hosts=("https://127.0.0.1",),
            decoder_ports=(d.port,),
            engine_ca_file=ca.certificate,
            health_interval=0.05,
        )
        async with running_router(settings) as router:
            await eventually(lambda: not router.gateway.fleet.unavailable_roles())
            for _ in range(4):
                assert (await router.complete()).status_code == 200
            assert not p1.requests
            forged = router.engine(p1)
            await eventually(lambda: forged.health is Health.UNHEALTHY)
            assert "certificate verify failed" in forged.reason.lower()


async def test_an_engine_of_a_file_may_change_to_tls_and_back(
    ca: Authority, first: Signed, tmp_path: Path
) -> None:
    def write(scheme: str, p: int, d: int) -> Path:
        path, fresh = tmp_path / "engines.yaml", tmp_path / "fresh"
        entries = [
            {"url": f"{scheme}://127.0.0.1:{port}", "role": role}
            for port, role in ((p, "prefill"), (d, "decode"))
        ]
        fresh.write_text(json.dumps({"engines": entries}))
        fresh.replace(path)
        return path

    async with (
        running_engine(usual_prefill, ca.serving(first)) as p,
        running_engine(usual_decode, ca.serving(first)) as d,
    ):
        settings = Settings(
            engines_file=write("http", p.port, d.port),
            engine_ca_file=ca.certificate,
            health_interval=0.05,
            health_timeout=0.5,
        )
        async with running_router(settings) as router:
            assert not await is_ready(router)
            write("https", p.port, d.port)
            await eventually(lambda: not router.gateway.fleet.unavailable_roles(), 10)
            assert (await router.complete()).status_code == 200
            assert {e.spec.url[:8] for e in router.gateway.fleet.engines} == {"https://"}


@pytest.mark.slow
@pytest.mark.parametrize("side", ["client", "engine"])
async def test_streams_that_nobody_reads_are_held_back_over_tls_too(
    ca: Authority, first: Signed, p: MockEngine, d: MockEngine, side: str
) -> None:
    """What TLS buffers by itself is bounded: 32 readers that stall cost less than 64 MiB."""

    async def endless(_: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        block = chunk(b"data: " + b"x" * 65_000 + b"\n\n")
        with contextlib.suppress(ConnectionError, RuntimeError):
            while True:
                await peer.send(block)

    async with contextlib.AsyncExitStack() as stack:
        given = ["--stream-idle-timeout=2", f"--engine-ca-file={ca.certificate}"]
        if side == "client":
            given += [f"--tls-certfile={first.certificate}", f"--tls-keyfile={first.key}"]
            d.usual = endless
        else:
            secured = running_engine(endless, ca.serving(first))
            decoder = await stack.enter_async_context(secured)
            given += ["--decoder-hosts=https://127.0.0.1", f"--decoder-ports={decoder.port}"]
            given += ["--without-prefiller=refuse"]
        router = await stack.enter_async_context(serving_router(p, d, *given))
        tls = ca.trusting() if side == "client" else None
        before = peak_of(router)
        request = post(b'{"prompt":"x","stream":true}')
        for _ in range(32):
            opened = asyncio.open_connection("127.0.0.1", port_of(router), ssl=tls, limit=4096)
            _, writer = await opened
            stack.callback(writer.close)
            writer.write(request)
        async with httpx.AsyncClient(base_url=router.url, verify=tls or False) as client:
            async with asyncio.timeout(30):
                while RUNNING.search((await client.get("/metrics")).text):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert peak_of(router) - before < 64 * 1024 * 1024


async def test_a_client_that_leaves_is_noticed_over_tls(
    ca: Authority, first: Signed, p: MockEngine, d: MockEngine
) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def mute(_: Received, peer: Peer) -> None:
        entered.set()
        await peer.wait_left()
        left.set()

    d.scripts.append(mute)
    given = [f"--tls-certfile={first.certificate}", f"--tls-keyfile={first.key}"]
    async with serving_router(p, d, *given) as router:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port_of(router), ssl=ca.trusting(), server_hostname="127.0.0.1"
        )
        writer.write(post(b'{"prompt":"x"}'))
        async with asyncio.timeout(10):
            await entered.wait()
            writer.transport.abort()
            await left.wait()


# The contexts.


def test_engines_are_checked_unless_somebody_changes_the_code(ca: Authority) -> None:
    for context in (
        client_context(None, ()).context,
        client_context(ca.certificate, ()).context,
    ):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_clients_are_asked_for_nothing_unless_there_is_an_authority(
    ca: Authority, first: Signed
) -> None:
    pair = (first.certificate, first.key)
    assert server_context(pair, None).context.verify_mode is ssl.CERT_NONE
    assert server_context(pair, ca.certificate).context.verify_mode is ssl.CERT_REQUIRED
