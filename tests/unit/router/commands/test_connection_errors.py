"""Every command names a server that does not answer, and the reason, in the same words."""

import asyncio
import contextlib
import errno
import os
import socket
import ssl

import httpx
import pytest

from router.commands.bench.load import CLOSED, Client
from router.commands.connection_errors import no_answer
from router.commands.console import CommandError
from router.commands.doctor.checks import connect
from router.commands.router_client import send
from router.http_client.errors import AnswerTimeoutError
from tests.conftest import find_free_ports

URL = "http://h:1"


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (None, "no answer in 2.5 s"),
        (TimeoutError(), "no answer in 2.5 s"),
        (httpx.ReadTimeout(""), "no answer in 2.5 s"),
        (AnswerTimeoutError("late"), "no answer in 2.5 s"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "connection refused"),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 101] x"), None),
        (OSError(errno.EHOSTUNREACH, "x"), "no route to host"),
        (socket.gaierror(-2, "x"), "the name cannot be resolved"),
        (ssl.SSLError(1, "WRONG_VERSION_NUMBER"), "no TLS connection: "),
        (httpx.RemoteProtocolError("gone"), CLOSED),
        (RuntimeError("two\nlines"), "two lines"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_reason_is_in_plain_words(cause: Exception | None, reason: str | None) -> None:
    said = no_answer(URL, cause, 2.5)
    assert said.startswith(f"{URL}: {reason or os.strerror(111).lower()}")
    assert "\n" not in said


async def test_all_clients_find_the_same_reason() -> None:
    """A name may have several addresses, whose errors the libraries put together differently."""
    (port,) = find_free_ports(1)
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(CommandError) as failed:
            await send("GET", f"http://{host}:{port}/x")
        assert str(failed.value) == f"http://{host}:{port}/x: connection refused"
        assert await connect(host, port) == "connection refused"
        exchange = await Client(host, port).send(b"", 5.0)
        assert no_answer(URL, exchange.error, 5.0) == f"{URL}: connection refused"


async def test_server_that_hangs_up_is_named() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CommandError) as failed:
            await send("GET", url)
    assert str(failed.value) == f"{url}: {CLOSED}"
