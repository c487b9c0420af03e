"""disagg-router chat: what is asked, what is shown, and what ends it."""

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.commands.chat.command import RequestRoutes, shown
from router.commands.cli import main
from router.ui.engine_reports import hash_request_id
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter

USAGE = {
    "prompt_tokens": 132,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 96},
}
ROOT = Path(__file__).parents[4]


def chunk_of(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n" + DONE


async def talking(received: Received, peer: Peer) -> None:
    await peer.stream(chunk_of("Hel"), chunk_of("lo"), chunk_of("!", "stop"), LAST)


async def refusing(received: Received, peer: Peer) -> None:
    await peer.answer({"error": {"message": "the prompt is\ntoo long"}}, 400)


def chat_requests(engine: MockEngine) -> list[Received]:
    return [one for one in engine.requests if one.path == "/v1/chat/completions"]


async def run_chat(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["chat", *arguments])


async def test_one_message_is_answered_with_a_line_about_the_answer(
    start_router: StartRouter, p: MockEngine, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    d.usual = talking
    router = await start_router(ui=True)
    arguments = (f"{router.url}/v1/", "--model", "m", "--once", "Hi", "--max-tokens", "7")
    assert await run_chat(*arguments, "--api-key", "sk-1") == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello!\n"
    (line,) = captured.err.splitlines()
    assert re.match(r"TTFT [\d.]+ m?s, ", line)
    assert "96 of 132 prompt tokens from a cache" in line
    assert f"prefill 127.0.0.1:{p.port}, decode 127.0.0.1:{d.port}, KV offered" in line
    assert "resumed" not in line
    (request,) = chat_requests(d)
    assert request.json["messages"] == [{"role": "user", "content": "Hi"}]
    assert request.json["max_tokens"] == 7
    assert request.json["stream"] is True
    assert request.header("authorization") == "Bearer sk-1"


async def test_without_the_dashboard_the_engines_are_not_known_and_the_cure_is_named_once(
    start_router: StartRouter,
    d: MockEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d.usual = talking
    router = await start_router()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert await run_chat(router.url, "--model", "m") == 0
    first, hint, second = capsys.readouterr().err.splitlines()
    assert first.startswith("TTFT")
    assert second.startswith("TTFT")
    assert "start it with --ui" in hint


async def test_each_line_of_a_pipe_is_a_turn_of_one_conversation(
    start_router: StartRouter,
    d: MockEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d.usual = talking
    router = await start_router(ui=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/quit\nthree\n"))
    assert await run_chat(router.url, "--model", "m") == 0
    assert capsys.readouterr().out == "Hello!\nHello!\n"
    first, second = [one.json for one in chat_requests(d)]
    assert second["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "two"},
    ]
    assert first["messages"] == second["messages"][:1]


async def body_from(reader: asyncio.StreamReader) -> bytes:
    """Read a whole request: a server that closes with some of it unread resets the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head.lower())
    assert found is not None
    return await reader.readexactly(int(found[1]))


async def test_turns_have_the_id_of_their_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(json.loads(await body_from(reader)))
        answer = chunk_of("Hello") + LAST
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
        assert await run_chat(address, "--model", "m") == 0
        assert await run_chat(address, "--model", "m", "--once", "one") == 0
    names = [body["conversation_id"] for body in bodies]
    assert names[0] == names[1] != names[2]


async def test_a_refusal_is_one_line_and_code_1(
    start_router: StartRouter, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    d.usual = refusing
    router = await start_router()
    assert await run_chat(router.url, "--model", "m", "--once", "Hi") == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("disagg-router chat: error: 400 the prompt is too long (request ")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        (b"", "http://ROUTER: the connection was closed before the answer ended"),
        (b'data: {"error":{"message":"no\\u001b[31m blocks"}}\n\n' + DONE, r"no\x1b[31m blocks"),
    ],
)
async def test_an_answer_that_breaks_off_is_one_line_without_control_characters_and_code_1(
    rest: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_from(reader)
        head = "HTTP/1.1 200 OK\r\nx-request-id: r1\r\ncontent-type: text/event-stream\r\n"
        length = len(chunk_of("Hel")) + len(rest or b"more")
        writer.write(f"{head}content-length: {length}\r\n\r\n".encode() + chunk_of("Hel") + rest)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await run_chat(address, "--model", "m", "--once", "Hi") == 1
    captured = capsys.readouterr()
    assert captured.out == "Hel\n"
    (line,) = captured.err.splitlines()
    reason = reason.replace("ROUTER", address)
    assert line == f"disagg-router chat: error: the answer broke off: {reason} (request r1)"


def test_a_server_of_another_kind_is_one_line_and_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with knowing_server(dict(SUMMARY)) as address:  # it knows no POST
        assert main(["chat", address, "--model", "m", "--once", "Hi"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "disagg-router chat: error: 501 Unsupported method ('POST')"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x"], "is not a router"),
        (["http://x?a=b"], "is not a router"),
        (["--once", " "], "the message is empty"),
        (["--api-key", "a\nb"], "--api-key is not a key"),
        (["--max-tokens", "0"], "0 is not from 1"),
        (["--modle", "m"], "did you mean --model?"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["chat", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@given(st.text())
def test_no_answer_drives_the_terminal(text: str) -> None:
    for one in shown(text):
        assert one in "\n\t\u200c\u200d" or unicodedata.category(one) not in ("Cc", "Cf", "Cs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b]0;title\x07\r\x9b31m", r"\x1b]0;title\x07\r\x9b31m"),
        ("right\u202eleft", r"right\u202eleft"),
        ("a\n\tb\xa0«é»\u3000漢👨\u200d👩", "a\n\tb\xa0«é»\u3000漢👨\u200d👩"),
        ("\ud800", r"\ud800"),
    ],
)
def test_text_is_shown_and_control_characters_are_escaped(text: str, expected: str) -> None:
    assert shown(text) == expected


SUMMARY = {"prefiller": "", "decoder": "", "without_transfer": "", "resumes": 0, "ms": {}}


@contextmanager
def knowing_server(summary: dict[str, object]) -> Iterator[str]:
    """Serve as a router that knows the request "r", and as its engines, which report a READ."""
    asked_for: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_for.append(self.path)
            content: object = summary
            if self.path == "/disagg/leases":
                entry = {"what": "READ", "found_by": hash_request_id("r"), "blocks": 3, "bytes": 9,
                         "seconds": 0.1, "age_seconds": 0.1}  # fmt: skip
                content = {"ranks": [{"engine_id": "d", "transfers": [entry]}]}
            is_early = len(asked_for) == 1  # the router has not noted its end yet
            text = "the router has no request 'r'"
            data = json.dumps({"error": {"message": text}} if is_early else content).encode()
            self.send_response(404 if is_early else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            for role in ("prefiller", "decoder"):
                summary[role] = summary[role] and address
            yield address
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"prefiller": "x", "decoder": "x", "resumes": 1},
            ["prefill ADDRESS", "decode ADDRESS", "KV moved (3 blocks)",
             "resumed on another engine"],
        ),
        (
            {"decoder": "x", "without_transfer": "short_prompt", "resumes": 2},
            ["decode ADDRESS", "no KV moved (short prompt)", "resumed on another engine 2 times"],
        ),
    ],
)  # fmt: skip
def test_the_route_names_engines_transfer_and_resumes(
    changes: dict[str, object], expected: list[str]
) -> None:
    with knowing_server(SUMMARY | changes) as address:
        found = RequestRoutes(f"http://{address}").find("r")
    assert found == [part.replace("ADDRESS", address) for part in expected]


class Terminal:
    """A chat in a terminal of 60 columns."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **variables}
            command = [sys.executable, "-m", "router.commands.cli", "chat", *arguments]
            # A shell has background jobs ignore Ctrl-C, and what they start as well.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(sys.executable, command, environment)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        self.text = ""

    def until(self, pattern: str) -> None:
        """Read until the text since the last call has the pattern."""
        new, deadline = "", time.monotonic() + 30
        while not re.search(pattern, new):
            assert time.monotonic() < deadline, f"no {pattern!r} in {new!r}"
            new += self._read(0.2)
        self.text += new

    def write(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def ended(self, key: str = "") -> int:
        """Return the exit code. `key` is pressed again every ten seconds: readline may miss a
        signal that comes just before it begins to wait. Not sooner: an interpreter that ends, which
        takes seconds on a busy machine, is killed by it."""
        deadline = time.monotonic() + 30
        pressed = time.monotonic()
        while True:
            if key and time.monotonic() - pressed > 10:
                self.write(key)
                pressed = time.monotonic()
            self.text += self._read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, self.text

    def _read(self, seconds: float) -> str:
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        with suppress(OSError):  # the other side is closed
            return os.read(self._fd, 65536).decode(errors="replace")
        return ""


def converse(url: str) -> Terminal:
    """A conversation whose second answer is stopped, and one with Ctrl-C without an answer."""
    terminal = Terminal(url, "--model", "m")
    terminal.until("> ")
    terminal.write("one\n")
    terminal.until(r"Hello!\s+\S*TTFT[^>]*> ")
    terminal.write("endless\n")
    terminal.until("Hel")
    terminal.write("\x03")
    terminal.until(r"stopped[^>]*> ")
    terminal.write("/quti\n")
    terminal.until(r"did you mean /quit\?[^>]*> ")
    terminal.write("two\n")
    terminal.until(r"Hello!\s+\S*TTFT[^>]*> ")
    terminal.write("/new\n")
    terminal.until("> ")
    terminal.write("three\n")
    terminal.until(r"Hello!\s+\S*TTFT[^>]*> ")
    return terminal


async def test_ctrl_c_ends_the_answer_and_then_the_program(
    start_router: StartRouter, d: MockEngine
) -> None:
    async def endless_for_some(received: Received, peer: Peer) -> None:
        messages = received.json.get("messages")
        if not messages or messages[-1]["content"] != "endless":
            await talking(received, peer)
            return
        await peer.send(STREAM_HEAD + chunk(chunk_of("Hel")))
        await peer.wait_left(30)

    d.usual = endless_for_some
    router = await start_router(ui=True)
    terminal = await asyncio.to_thread(converse, router.url)
    terminal.write("\x03")
    assert await asyncio.to_thread(terminal.ended, "\x03") == 130
    assert "Traceback" not in terminal.text
    contents = [[turn["content"] for turn in one.json["messages"]] for one in chat_requests(d)]
    assert contents == [
        ["one"],
        ["one", "Hello!", "endless"],
        ["one", "Hello!", "endless", "Hel", "two"],
        ["three"],
    ]
    assert "\x1b[2mTTFT" in terminal.text
    about = terminal.text.split("TTFT", 1)[1].split("\x1b", 1)[0].splitlines()
    assert len(about) > 1, "a narrow terminal gets several lines"
    assert max(map(len, about)) < 60
