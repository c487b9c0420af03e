"""The worker processes of one router choose engines by the load and the prompts of all of them."""

import asyncio
import contextlib
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from router.coordination.exchange import SOCKET_PREFIX
from router.coordination.peers import MAX_REPORT_BYTES, PeerReport
from scripts.mock_engine import MockEngine
from tests.unit.router.engine_scripts import answer_after, usual_prefill
from tests.unit.router.harness import eventually
from tests.unit.router.processes import RouterProcess, started_router

pytestmark = pytest.mark.slow  # processes

WORKERS = 2
TIMEOUT_S = 30.0
LONG = "A long document about which several users ask. " * 200


class Listener:
    """A socket in the workers' folder, to which the workers send reports as to another worker."""

    def __init__(self, receiver: socket.socket) -> None:
        self.reports: list[PeerReport] = []
        self._receiver = receiver
        asyncio.get_running_loop().add_reader(receiver, self._read)

    def _read(self) -> None:
        raw = self._receiver.recv(MAX_REPORT_BYTES)
        self.reports.append(msgspec.msgpack.decode(raw, type=PeerReport))

    async def until_prompt_is_known(self, since: int) -> None:
        """Wait until all workers have read a prompt that was reported after `since` reports."""
        await eventually(lambda: any(report.prompts for report in self.reports[since:]))
        at = next(n for n in range(since, len(self.reports)) if self.reports[n].prompts)
        await eventually(lambda: self._have_read(at))

    async def until_idle(self) -> None:
        """Wait until all workers know that none has a running leg. The first report may be older
        than the end of the last leg."""
        since = len(self.reports)
        await eventually(lambda: self._have_read(since))
        since = len(self.reports)
        await eventually(lambda: self._have_read(since))
        assert not any(report.loads for report in self.reports[since:])

    def _have_read(self, at: int) -> bool:
        """A worker that has sent two more reports has read what was there before."""
        counts = Counter(report.router for report in self.reports[at + 1 :])
        return len(counts) == WORKERS and min(counts.values()) > 2


@pytest.fixture
def directory() -> Iterator[Path]:
    """A folder for temporary files with a short name: workers move out of one with a long name."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@contextlib.asynccontextmanager
async def worker_router(
    ps: list[MockEngine], d: MockEngine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RouterProcess, Listener]]:
    monkeypatch.setenv("TMPDIR", str(directory))
    engines = ["--prefill", *(f"http://127.0.0.1:{p.port}" for p in ps)]
    engines += ["--decode", f"http://127.0.0.1:{d.port}"]
    options = (
        f"--workers={WORKERS}",
        "--port=0",
        "--health-interval=0.1",
        "--conversation-store=off",
    )
    async with started_router(*engines, *options) as process:
        process.url = (await process.until(r"disagg-router on (http://\S+)")).group(1)
        for _ in range(WORKERS * (len(ps) + 1)):
            await process.until("is healthy")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
            receiver.setblocking(False)
            receiver.bind(str(socket_path(directory)))
            listener = Listener(receiver)
            await listener.until_idle()
            yield process, listener


def socket_path(directory: Path) -> Path:
    (shared,) = directory.glob("disagg-router-*")
    return shared / f"{SOCKET_PREFIX}test"


async def ask_any(router: RouterProcess, prompt: str) -> None:
    """Send a request on a connection of its own, which any worker may get."""
    async with httpx.AsyncClient(base_url=router.url, timeout=TIMEOUT_S) as client:
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": prompt})
        assert answer.status_code == 200, answer.text


async def test_prompt_goes_to_the_engine_that_any_worker_has_chosen(
    ps: list[MockEngine], d: MockEngine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker_router(ps, d, directory, monkeypatch) as (process, listener):
        for number in range(4):
            before = [len(p.requests) for p in ps]
            since = len(listener.reports)
            await ask_any(process, f"{number} {LONG}")
            await listener.until_prompt_is_known(since)
            await listener.until_idle()
            for question in range(8):
                await ask_any(process, f"{number} {LONG} {question}")
            grown = [len(p.requests) - was for p, was in zip(ps, before, strict=True)]
            assert sorted(grown) == [0, 0, 0, 9]
    assert len({request.connection for request in d.requests}) >= WORKERS, "all workers took part"


async def test_engine_that_another_worker_has_loaded_is_avoided(
    ps: list[MockEngine], d: MockEngine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = asyncio.Event()
    for engine in ps:
        engine.usual = answer_after(release, usual_prefill)
    async with worker_router(ps, d, directory, monkeypatch) as (process, listener):
        for turn in range(3):
            release.clear()
            running = []
            for number in range(len(ps)):
                since = len(listener.reports)
                running.append(asyncio.create_task(ask_any(process, f"{turn} {number} {LONG}")))
                await listener.until_prompt_is_known(since)
            busy = [engine for engine in ps if engine.requests]
            assert len(busy) == len(ps)
            release.set()
            await asyncio.gather(*running)
            await listener.until_idle()
            for engine in ps:
                engine.requests.clear()
