"""Several workers on one port: whichever shows the page, it shows what all see."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.ui import snapshot as workers_module
from router.ui.snapshot import OtherWorkers, ProcessSnapshot, serve_snapshots, snapshot_socket
from scripts.mock_engine import MockEngine
from tests.unit.router.harness import eventually
from tests.unit.router.test_workers import BODY, family
from tests.unit.router.ui.test_hub import fed_events, until_sent
from tests.unit.router.ui.test_snapshot import one


@pytest.mark.slow
async def test_the_requests_of_all_workers_are_seen(p: MockEngine, d: MockEngine) -> None:
    async with (
        family(p, d, "--ui") as (router, pids),
        httpx.AsyncClient(base_url=router.url, timeout=10) as client,
        client.stream("GET", "/ui/events") as answer,
    ):
        events = fed_events(answer)
        picture = await until_sent(events, "snapshot")
        while picture["workers"]["answered"] < 2:
            picture |= await until_sent(events, "change")
        sent: set[str] = set()
        while len(sent) < 16:
            async with httpx.AsyncClient(base_url=router.url) as other:  # its own connection
                done = await other.post("/v1/completions", json=BODY)
                sent.add(done.headers["x-request-id"])
        seen: list[dict[str, Any]] = []
        while not sent <= {request["id"] for request in seen}:
            seen += (await until_sent(events, "ended"))["requests"]
        assert {request["key"].split("-")[0] for request in seen} == set(map(str, pids))
        assert len(seen) == len(sent), "each once"
        os.kill(next(pid for pid in pids if not _serves(answer, pid)), signal.SIGKILL)
        while (await until_sent(events, "change")).get("workers") != {"answered": 1, "known": 2}:
            pass
        while (await until_sent(events, "change")).get("workers") != {"answered": 2, "known": 2}:
            pass


def _serves(answer: httpx.Response, pid: int) -> bool:
    """Whether that process has the other end of the connection."""
    return answer.extensions["network_stream"].get_extra_info("client_addr") in _sockets(pid)


def _sockets(pid: int) -> list[tuple[str, int]]:
    """The far ends of its TCP connections."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes:
            far, port = fields[2].split(":")
            found.append((".".join(str(b) for b in bytes.fromhex(far)[::-1]), int(port, 16)))
    return found


class Source:
    """A worker that is looked at, or not."""

    def __init__(self) -> None:
        self.num_readers = 0

    @property
    def is_read(self) -> bool:
        return self.num_readers > 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[], ProcessSnapshot]]:
        self.num_readers += 1
        try:
            yield lambda: one(7)
        finally:
            self.num_readers -= 1


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Source]:
    made = Source()
    async with serve_snapshots(snapshot_socket(tmp_path, 1), made.reading):
        yield made


@contextlib.asynccontextmanager
async def polling(workers: OtherWorkers) -> AsyncIterator[None]:
    task = asyncio.create_task(workers.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_line_is_there_only_as_long_as_somebody_looks(
    tmp_path: Path, source: Source
) -> None:
    workers = OtherWorkers(tmp_path, 0, 3)
    await eventually(lambda: not source.is_read)
    async with polling(workers):
        await eventually(lambda: workers.snapshots() == [one(7), None])
        assert source.is_read
    await eventually(lambda: not source.is_read)
    assert workers.snapshots() == [None, None]


async def test_a_worker_that_is_frozen_or_talks_nonsense_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "LINE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(workers_module, "SNAPSHOT_RECONNECT_S", 0.01)
    writers: list[asyncio.StreamWriter] = []

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """And then it is silent."""
        writers.append(writer)
        sound = one(4).model_dump_json().encode() + b"\n"
        writer.write({1: b"{}\n", 2: b"x" * 100 + b"\n", 3: b""}.get(len(writers), sound))

    server = await asyncio.start_unix_server(talk, snapshot_socket(tmp_path, 1))
    workers = OtherWorkers(tmp_path, 0, 2)
    async with polling(workers):
        await eventually(lambda: len(writers) >= 4 and workers.snapshots() == [one(4)])
        # It says no more: what it said last is not what is so for ever.
        await eventually(lambda: workers.snapshots() == [None])
    server.close()
    for writer in writers:
        writer.transport.abort()


def test_a_picture_comes_through_as_it_was() -> None:
    text = one(3, 4).model_dump_json()
    assert "\n" not in text
    assert ProcessSnapshot.model_validate_json(text) == one(3, 4)
    json.loads(text)
