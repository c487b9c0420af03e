"""What commands ask of a router, and what of it they wait for: never longer than they said."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from router.commands import drain, router_client, status
from router.commands.bench import command as bench
from router.commands.console import CommandError
from router.commands.router_client import ask_router

PATIENCE = 0.4
# Each drop comes well before a single read would be given up.
DROP = PATIENCE / 8
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


@contextlib.contextmanager
def dripping(said: bytes, drop: bytes) -> Iterator[str]:
    """A server that says so much at once, and then a drop, and a drop, as long as one listens."""
    over = threading.Event()

    def drip(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.recv(65536)
            client.sendall(said)
            while not over.wait(DROP):
                client.sendall(drop)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                client, _ = listener.accept()
                threads.append(threading.Thread(target=drip, args=(client,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=serve)]
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(5)


DRIPS = {
    "nothing": (b"", b""),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x-more: of it\r\n"),
    "a header": (HEAD, b"x"),
    "the body": (HEAD + b"\r\n", b"y"),
}


@pytest.mark.parametrize("what", DRIPS)
def test_an_answer_in_drops_is_given_up_in_time(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "ANSWER_TIMEOUT_S", PATIENCE)
    with (
        dripping(*DRIPS[what]) as url,
        pytest.raises(CommandError, match=r"http://127\.0\.0\.1:\d+: no answer in 0\.4 s"),
    ):
        ask_router("GET", url)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (status.main, ["{}"]),
        (bench.main, ["{}"]),
        (drain.main, ["http://127.0.0.1:1", "--admin", "{}"]),
    ],
    ids=["status", "bench", "drain"],
)
def test_a_command_says_so_in_a_line(
    main: Callable[[list[str]], int],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(router_client, "ANSWER_TIMEOUT_S", PATIENCE)
    with dripping(*DRIPS["headers"]) as url:
        assert main([one.format(url) for one in arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert ": no answer in" in line


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "MAX_ROUTER_ANSWER_BYTES", 10_000)
    with (
        dripping(HEAD + b"\r\n", bytes(4096)) as url,
        pytest.raises(CommandError, match="more than 10000 bytes"),
    ):
        ask_router("GET", url)


@pytest.mark.parametrize("what", [*DRIPS, "an error"])
def test_an_answer_to_the_load_in_drops_has_failed_in_time(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chunked = b"HTTP/1.1 500 Oh\r\ntransfer-encoding: chunked\r\n\r\n"
    drips = DRIPS | {"an error": (chunked, b"1\r\nx\r\n")}
    with dripping(*drips[what]) as url:
        arguments = [url, "--model", "m", "--requests", "1", "--timeout", str(PATIENCE), "--json"]
        assert bench.main(arguments) == 1
    assert '"failed": 1' in capsys.readouterr().out


@pytest.mark.parametrize("url", ["http://u:pa55@127.0.0.1:1", "http://u:pa/pa55@127.0.0.1:1"])
def test_password_in_a_url_is_not_printed(capsys: pytest.CaptureFixture[str], url: str) -> None:
    with contextlib.suppress(SystemExit):
        status.main([url])
    printed = capsys.readouterr()
    assert "//***@127.0.0.1:1" in printed.err
    assert "pa55" not in printed.err + printed.out
