"""Workers of one router exchange reports through sockets in their folder."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from router.coordination.exchange import SOCKET_PREFIX, PeerExchange, WorkerSockets
from router.coordination.peers import MAX_REPORT_BYTES, PeerRouters
from router.routing.chunk_index import ChunkIndex
from tests.unit.router.coordination.test_peers import SeenEngine
from tests.unit.router.harness import eventually

CHUNKS = tuple(range(1, 20))


class Worker:
    def __init__(self, directory: Path) -> None:
        self.index = ChunkIndex()
        self.engines = [SeenEngine("a:1"), SeenEngine("b:1")]
        self.peers = PeerRouters(self.index)
        self.registry = CollectorRegistry()
        labels = ("operation", "result")
        errors = Counter("errors", "Errors.", labels, registry=self.registry)
        sockets = WorkerSockets(directory, self.peers.name)
        self.exchange = PeerExchange(self.peers, lambda: self.engines, sockets, errors)

    def errors(self, result: str) -> float:
        labels = {"operation": "exchange", "result": result}
        return self.registry.get_sample_value("errors_total", labels) or 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.exchange.exchange_forever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.exchange.transport.close()


def sockets_in(directory: Path) -> int:
    return len([*directory.iterdir()])


@contextlib.asynccontextmanager
async def workers(directory: Path) -> AsyncIterator[tuple[Worker, Worker]]:
    one, other = Worker(directory), Worker(directory)
    async with one.running(), other.running():
        await eventually(lambda: len(one.peers) == len(other.peers) == 1)
        yield one, other


async def test_load_and_prompts_of_a_worker_reach_the_other(tmp_path: Path) -> None:
    async with workers(tmp_path) as (one, other):
        one.engines[0].in_flight, one.engines[0].tokens_in_flight = 2, 900
        one.index.on_sent("b:1", CHUNKS)
        await eventually(lambda: other.engines[0].elsewhere == (2, 900))
        await eventually(lambda: other.index.longest(CHUNKS, other.index.bit("b:1")).depth == 19)
        one.engines[0].in_flight = 0
        await eventually(lambda: other.engines[0].elsewhere == (0, 0))
    assert sockets_in(tmp_path) == 0, "both have removed theirs"


async def test_frozen_worker_keeps_nobody_from_the_exchange(tmp_path: Path) -> None:
    frozen = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with frozen:
        frozen.bind(str(tmp_path / f"{SOCKET_PREFIX}frozen"))
        async with workers(tmp_path) as (one, other):
            for number in range(2000):  # more than any queue holds
                one.index.on_sent("a:1", tuple(range(number, number + 128)))
                await one.exchange.exchange()
            one.engines[0].in_flight = 7
            await eventually(lambda: other.engines[0].elsewhere[0] == 7)
            assert one.errors("failed") == other.errors("failed") == 0


async def test_worker_that_died_is_forgotten_and_its_successor_found(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(tmp_path / f"{SOCKET_PREFIX}dead"))
    async with workers(tmp_path) as (one, other):
        await eventually(lambda: sockets_in(tmp_path) == 2)
        third = Worker(tmp_path)
        async with third.running():
            await eventually(lambda: [len(w.peers) for w in (one, other, third)] == [2, 2, 2])
        await eventually(lambda: len(one.peers) == len(other.peers) == 1)


async def test_worker_that_cannot_bind_its_socket_reports_why(tmp_path: Path) -> None:
    alone = Worker(tmp_path / "missing")
    async with alone.running():
        await eventually(lambda: alone.errors("failed") > 0)
        assert "cannot exchange their load" in alone.exchange.transport.failure


async def test_strange_datagrams_are_counted_and_change_nothing(tmp_path: Path) -> None:
    async with workers(tmp_path) as (one, other):
        target = str(tmp_path / f"{SOCKET_PREFIX}{one.peers.name}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"\xff" * 1000, target)
            sender.sendto(b"", target)
        await eventually(lambda: one.errors("invalid") == 2)
        other.engines[1].in_flight = 3
        await eventually(lambda: one.engines[1].elsewhere[0] == 3)


async def test_largest_report_fits_into_a_datagram(tmp_path: Path) -> None:
    async with workers(tmp_path) as (one, other):
        one.engines += [
            SeenEngine(f"10.0.{n // 256}.{n % 256}:8000", 1, 10**6) for n in range(4000)
        ]
        for number in range(100):
            one.index.on_sent("a:1", tuple((number << 50) + n for n in range(128)))
        one.engines[1].in_flight = 4
        await eventually(lambda: other.engines[1].elsewhere[0] == 4)
        assert one.errors("failed") == 0
        assert len(one.peers.report(one.engines)) < MAX_REPORT_BYTES
