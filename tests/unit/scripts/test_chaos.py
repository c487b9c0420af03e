"""What chaos says may be believed: how answers are judged, who is missed, and that nobody stays."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from scripts.chaos_bench import answers, client
from scripts.chaos_bench.answers import Ask, Received, judge
from scripts.chaos_bench.asks import mock_asks
from scripts.chaos_bench.client import Client, Result
from scripts.chaos_bench.faults import Fault
from scripts.chaos_bench.fleet import free_port
from scripts.chaos_bench.mock_engine import Connection, Engine
from scripts.chaos_bench.outcome import left_alone, summary
from scripts.chaos_bench.report import table
from scripts.chaos_bench.scenarios import Mode, scenarios
from scripts.chaos_bench.sockets import unread

PROGRAM = Path(__file__).resolve().parents[3] / "scripts" / "chaos.py"


def whole(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def said(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "it died", "type": "BadGatewayError"}}\n\n'


def judged(is_streamed: bool, body: bytes, is_complete: bool = True, status: int = 200) -> str:
    ask = Ask("/", b"", is_streamed, "a/0 a/1 ")
    return judge(ask, Received(status, bytearray(body), is_complete))


@pytest.mark.parametrize(
    ("body", "is_complete", "kind"),
    [
        (whole("a/0 a/1 "), True, answers.OK),
        (whole("b/0 b/1 "), True, answers.WRONG),
        (whole("a/0 "), True, answers.WRONG),
        (whole("a/0 a/1 ")[:20], False, answers.CUT),
        (b"<nonsense", True, answers.GARBLED),
        (b"[]", True, answers.GARBLED),
    ],
)
def test_a_whole_answer_is_right_only_if_it_is_ours(
    body: bytes, is_complete: bool, kind: str
) -> None:
    assert judged(False, body, is_complete) == kind


@pytest.mark.parametrize(
    ("body", "is_complete", "kind"),
    [
        (said("a/0 ") + said("a/1 ") + DONE, True, answers.OK),
        (said("a/0 ") + said("b/1 ") + DONE, True, answers.WRONG),
        (said("b/0 ") + ERROR, True, answers.WRONG),
        (said("a/0 ") + ERROR, True, answers.EVENT),
        (said("a/0 ") + ERROR + DONE, True, answers.EVENT),
        (ERROR, True, answers.EARLY_EVENT),
        (said("a/0 ") + DONE, True, answers.SHORT),
        (said("a/0 ") + said("a/1 "), True, answers.CUT),
        (said("a/0 ") + said("a/1 ")[:9], False, answers.CUT),
        (said("a/0 ") + said("a/1 ") + DONE, False, answers.CUT),
        (b"<nonsense\n\n", True, answers.GARBLED),
        (b'data: {"error": "it died"}\n\n', True, answers.GARBLED),
    ],
)
def test_a_stream_is_right_only_to_its_end(body: bytes, is_complete: bool, kind: str) -> None:
    assert judged(True, body, is_complete) == kind


def test_a_status_is_a_failure_of_its_own_kind() -> None:
    assert judged(False, b"", status=503) == "status 503"
    assert judge(Ask("/", b"", False, ""), Received()) == answers.NO_ANSWER


def missed(name: str, mode: Mode, *results: Result) -> list[str]:
    fine = Result(answers.OK, 0.0, 0.2)
    return summary(scenarios()[name], mode, [fine, *results], 0.0, 3.0, None).missed


@pytest.mark.parametrize("name", ["kill-p", "kill-d", "freeze-d", "real-kill-d"])
def test_an_error_event_is_an_error(name: str) -> None:
    """Of a broken decoder's stream, too: another goes on with it."""
    event = Result(answers.EVENT, 0.0, 1.0)
    assert missed(name, Mode.STREAMED, event) == ["1 error event"]


def test_waiting_for_the_thaw_is_no_answer_to_a_freeze() -> None:
    thawed = Result(answers.OK, 0.0, 9.2, silence=9.0)
    assert missed("freeze-d", Mode.UNARY, thawed) == ["a client waited 9.2 s"]
    assert "a stream stood still for 9.0 s" in missed("freeze-d", Mode.STREAMED, thawed)


@pytest.mark.parametrize("name", scenarios())
def test_a_wrong_answer_is_never_forgiven(name: str) -> None:
    for mode in Mode:
        assert missed(name, mode, Result(answers.WRONG, 0.0, 0.2)) == ["1 WRONG"]


def test_nothing_but_failures_is_missed_even_without_an_aim() -> None:
    failed = [Result("status 502", 0.0, 0.1)]
    assert summary(scenarios()["rubbish-d"], Mode.UNARY, failed, 0.0, 3.0, None).missed


def test_who_is_passed_over_is_left_alone_and_a_later_trial_does_not_count() -> None:
    others = [number / 100 for number in range(300)]
    assert left_alone([0.1, 0.2, 2.0], others) == 0.2
    assert left_alone([], others) == 0.0
    assert left_alone([number / 10 for number in range(30)], others) is None


def test_clients_who_all_wait_leave_nobody_alone() -> None:
    assert left_alone([0.1, 0.2], [0.1, 0.2]) is None


def test_what_a_process_does_not_read_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as sender:
            sender.sendall(bytes(1000))
            latest = time.monotonic() + 5
            while unread(port) < 1000 and time.monotonic() < latest:
                time.sleep(0.01)
            assert unread(port) == 1000


async def test_the_silence_of_a_stream_is_that_between_its_pieces() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = said("a/0 ") + said("a/1 ") + DONE
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body[:20])
        await asyncio.sleep(0.3)
        writer.write(body[20:])
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        result = await Client().ask(port, Ask("/", b"", True, "a/0 a/1 "))
    assert result.kind == answers.OK
    assert 0.25 < result.silence <= result.waited


async def test_nobody_there_is_a_failure_like_others() -> None:
    result = await Client().ask(free_port(), Ask("/", b"", False, ""))
    assert result.kind == answers.REFUSED


async def test_silence_without_end_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = await Client().ask(server.getsockname()[1], Ask("/", b"", False, ""))
    assert result.kind == answers.TIMEOUT


@asynccontextmanager
async def mock_decoder(fault: Fault) -> AsyncIterator[Callable[[Ask], Awaitable[str]]]:
    """Asks it, with a client of its own."""
    engine, client = Engine(True, random.Random(1), fault), Client()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1")
    port = server.sockets[0].getsockname()[1]

    async def ask(asked: Ask) -> str:
        return (await client.ask(port, asked)).kind

    async with server:
        yield ask
        client.close()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("mode", [Mode.UNARY, Mode.STREAMED])
@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (Fault.NONE, {answers.OK}),
        (Fault.ERROR, {"status 500"}),
        (Fault.BUSY, {"status 503"}),
        (Fault.RESET, {answers.NO_ANSWER}),
        (Fault.RUBBISH, {answers.GARBLED, answers.CUT, answers.NO_ANSWER}),
        (Fault.SLOW, {answers.OK}),
    ],
)
async def test_an_engine_fails_as_it_is_told(mode: Mode, fault: Fault, kinds: set[str]) -> None:
    asks = mock_asks("test", mode, 2, 0.001, 1)
    async with mock_decoder(fault) as ask:
        assert {await ask(asks()) for _ in range(1 if fault is Fault.SLOW else 9)} <= kinds


@pytest.mark.parametrize("mode", [Mode.UNARY, Mode.STREAMED])
async def test_a_decoder_that_was_given_the_kv_of_another_request_is_found_out(mode: Mode) -> None:
    ask = mock_asks("test", mode, 2, 0.001, 1)()
    body = {**json.loads(ask.body), "kv_transfer_params": {"nonce": "another"}}
    ask.body = json.dumps(body).encode()
    async with mock_decoder(Fault.NONE) as say:
        assert await say(ask) == answers.WRONG


def chaos(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "nothing"],
        ["--short", "--only", "slow-p"],
        ["--seconds", "nan"],
        ["--seconds", "0"],
        ["--clients", "-1"],
        ["--at-once", "0"],
        ["--json", "/nowhere/at/all"],
        ["--compare", "file"],
        ["--peer", "whoever"],
        ["--shor"],
    ],
)
def test_bad_input_is_one_line(arguments: list[str]) -> None:
    done = chaos(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("chaos: error: ")
    assert done.stderr.count("\n") == 1


def test_a_router_that_does_not_start_is_one_line() -> None:
    done = chaos("--only", "kill-p", "--router-arg=--no-such-flag")
    assert done.returncode == 1
    assert "no-such-flag" in done.stderr
    assert done.stderr.count("\n") == 1


def test_files_are_set_side_by_side(tmp_path: Path) -> None:
    run = summary(scenarios()["kill-p"], Mode.UNARY, [Result("cut", 0.0, 0.5)], 0.0, 3.0, None)
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"runs": [run.to_json()]}))
    assert "| kill-p | unary | **1 of 1, 0.5 s: 1 cut** |" in table({"before": path})
    path.write_text("[]")
    done = chaos("--compare", f"before={path}")
    assert done.returncode == 1
    assert "not a file of this program" in done.stderr


@contextmanager
def under_way(directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Its engine is frozen, which is when it is hardest to end."""
    command = [sys.executable, str(PROGRAM), "--only", "freeze-p", "--at-once", "1"]
    with subprocess.Popen(
        [*command, "--logs", str(directory)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(directory)},
        start_new_session=True,
    ) as process:
        try:
            latest = time.monotonic() + 30
            while not any(state == "T" for state in states(process.pid)):
                assert time.monotonic() < latest
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def states(pid: int) -> list[str]:
    return [stat(child)[0] for child in children(pid)]


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def stat(pid: int) -> list[str]:
    """From its state on; an ended process is a zombie or none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ["X"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_everything_it_started_ends_with_it(number: signal.Signals, tmp_path: Path) -> None:
    with under_way(tmp_path) as process:
        started = children(process.pid)
        assert len(started) == 7
        os.kill(process.pid, number)
        process.wait(timeout=60)
        latest = time.monotonic() + 5
        while any(stat(pid)[0] not in "XZ" for pid in started):
            assert time.monotonic() < latest
            time.sleep(0.05)
