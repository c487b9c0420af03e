"""A TCP proxy cuts each connection to a real API server after three seconds. The router still sees
new pods within the short backoff."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from router.fleet.engine import EngineRole
from router.fleet.sources import kubernetes
from router.fleet.sources.pod_api import PodApi
from tests.k8s.cluster import Cluster
from tests.k8s.pods import Pods
from tests.unit.router.harness import eventually

LIFE_S = 3.0
PODS = 6
MAX_PAUSE_S = 4.0
"""Pauses grew to 30 s while lists were read and watches lived."""


@contextlib.asynccontextmanager
async def cutting(port: int) -> AsyncIterator[int]:
    """Yield a port from which bytes go to `port` and back for LIFE_S seconds."""

    async def relay(client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        server, requests = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LIFE_S):
                await asyncio.gather(_copy(client, requests), _copy(server, answers))
        for one in (answers, requests):
            one.transport.abort()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()


async def test_new_pods_are_seen_although_each_watch_is_cut(
    cluster: Cluster, pods: Pods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(kubernetes, "sleep", noted)
    address = urlsplit(cluster.url)
    assert address.port
    async with cutting(address.port) as port:
        config = tmp_path / "kubeconfig"
        direct = cluster.kubeconfig.read_text()
        config.write_text(direct.replace(f":{address.port}", f":{port}"))
        api = PodApi(config, "default", "role=decode")
        source = kubernetes.KubernetesSource(EngineRole.DECODE, "8000", api)
        seen: asyncio.Queue[str] = asyncio.Queue()
        known: set[str] = set()

        async def follow() -> None:
            async with contextlib.aclosing(source.watch()) as reports:
                async for report in reports:
                    hosts = {engine.address.host for engine in report.listed or ()} - known
                    known.update(hosts)
                    for host in hosts:
                        seen.put_nowait(host)

        task = asyncio.create_task(follow())
        try:
            for number in range(PODS):
                host = f"127.1.1.{number}"
                await asyncio.to_thread(pods.run, f"cut-{number}", host, {"role": "decode"})
                async with asyncio.timeout(60):
                    assert await seen.get() == host
                so_far = len(pauses)
                await eventually(lambda: len(pauses) > so_far)  # noqa: B023 # a watch is cut
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert max(pauses) <= MAX_PAUSE_S, pauses
