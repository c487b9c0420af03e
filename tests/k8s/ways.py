"""The way from a client to engines: a real gateway, routers that are processes, mock engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.conftest import find_free_ports
from tests.k8s import gateway_api, proxies
from tests.k8s.cluster import Cluster, wait_for
from tests.k8s.pods import Pods
from tests.unit.router.mock_engine import event
from tests.unit.router.processes import RouterProcess, serving_router

SERVICE = "disagg-router"
LABELS = {"app": SERVICE}
SELECTOR = f"app={SERVICE}"
ADDRESSES = "127.1.0.{}"
SERVICE_PORT = 80
EVENT_TIMEOUT_S = 30.0
"""For an event to reach the client."""
PROBES = ("--health-timeout=10",)
"""A machine that stands still for a moment takes no engine from a router."""
LAG = 0.3
"""Seconds until an endpoint's going is known, as in life, where nobody waits for it."""


@dataclass
class Way:
    """`port` is where clients go."""

    port: int
    routers: list[RouterProcess] = field(default_factory=list)
    pods: Pods | None = None
    _target: int = 0

    def client(self, **how: Any) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self.port}"
        return httpx.AsyncClient(base_url=url, timeout=120, headers={"host": "llm.test"}, **how)

    async def delete(self, number: int) -> None:
        """A pod is deleted as in life: told to go, while requests still come to it."""
        if self.pods is not None:
            await asyncio.to_thread(self.pods.delete, f"r{number}")
        self.routers[number].process.terminate()
        if self.pods is not None:
            await asyncio.sleep(LAG)
            await asyncio.to_thread(gateway_api.publish, self.pods, SERVICE, self._target, SELECTOR)


@contextlib.asynccontextmanager
async def routers(
    p: MockEngine, d: MockEngine, count: int, *flags: str
) -> AsyncIterator[tuple[int, list[RouterProcess]]]:
    """Each at an address of its own, all at one port."""
    [port] = find_free_ports(1)
    async with contextlib.AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                serving_router(
                    p,
                    d,
                    f"--host={ADDRESSES.format(number)}",
                    f"--port={port}",
                    "--no-access-log",
                    *PROBES,
                    *flags,
                )
            )
            for number in range(1, count + 1)
        ]
        yield port, started


def addresses(port: int, count: int) -> list[tuple[str, int]]:
    return [(ADDRESSES.format(number), port) for number in range(1, count + 1)]


@contextlib.asynccontextmanager
async def through_envoy(
    folder: Path, p: MockEngine, d: MockEngine, count: int = 1, *flags: str, **how: proxies.Fields
) -> AsyncIterator[Way]:
    async with routers(p, d, count, *flags) as (target, started):
        with proxies.envoy(folder, addresses(target, count), **how) as port:
            way = Way(port, started)
            await until_open(way)
            yield way


@contextlib.asynccontextmanager
async def through_traefik(
    folder: Path, cluster: Cluster, p: MockEngine, d: MockEngine, count: int = 1, *flags: str
) -> AsyncIterator[Way]:
    """Pods, a Service, a Gateway and an HTTPRoute, in a namespace of their own."""
    async with routers(p, d, count, *flags) as (target, started):
        [port] = find_free_ports(1)
        pods = Pods(cluster, f"way-{port}")
        with proxies.traefik(folder, cluster, port):
            await asyncio.to_thread(_deploy, pods, count, target, port)
            try:
                way = Way(port, started, pods, target)
                await until_open(way)
                yield way
            finally:
                namespace = f"/api/v1/namespaces/{pods.namespace}"
                await asyncio.to_thread(cluster.request, "DELETE", namespace)


def _deploy(pods: Pods, count: int, target: int, port: int) -> None:
    cluster, namespace = pods.cluster, pods.namespace
    cluster.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    has_account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_for("the namespace's account", lambda: _exists(cluster, has_account))
    for number in range(count):
        pods.run(f"r{number}", ADDRESSES.format(number + 1), LABELS)
    ports = [{"name": "http", "port": SERVICE_PORT, "targetPort": target, "protocol": "TCP"}]
    spec = {"selector": LABELS, "ports": ports}
    service = {"metadata": {"name": SERVICE}, "spec": spec}
    cluster.create(f"/api/v1/namespaces/{namespace}/services", service)
    gateway_api.publish(pods, SERVICE, target, SELECTOR)
    gateway_api.create_gateway(cluster, namespace, port)
    no_end = {"request": "0s", "backendRequest": "0s"}
    gateway_api.create_route(cluster, namespace, SERVICE, SERVICE_PORT, **no_end)

    def is_accepted() -> bool:
        said = gateway_api.conditions(cluster, namespace, SERVICE)
        return said.get("Accepted") == said.get("ResolvedRefs") == "True"

    wait_for("the HTTPRoute accepted", is_accepted)


def _exists(cluster: Cluster, path: str) -> bool:
    try:
        return bool(cluster.get(path).get("secrets"))
    except httpx.HTTPStatusError:
        return False


async def until_open(way: Way) -> None:
    """Until routers answer through the gateway."""
    await proxies.until_listening(way.port)
    async with asyncio.timeout(120), way.client() as client:
        while (await client.get("/v1/models")).status_code != 200:  # noqa: ASYNC110 # it tells nobody
            await asyncio.sleep(0.02)


class OneByOne:
    """A decoder's script: each event goes when the client has the one before. Who holds one back,
    waiting for more, gets none for EVENT_TIMEOUT_S, and then the end of the connection."""

    def __init__(self, count: int = 20) -> None:
        self.count = count
        self.heard = asyncio.Semaphore(0)

    async def __call__(self, request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for number in range(self.count):
            await peer.send(chunk(event(str(number))))
            await asyncio.wait_for(self.heard.acquire(), EVENT_TIMEOUT_S)
        await peer.send(chunk(DONE) + b"0\r\n\r\n")


async def heard_one_by_one(way: Way, script: OneByOne) -> bytes:
    """What the client has in the end; it says of each event that it is there."""
    body, held, num_heard = {"prompt": "x", "stream": True}, b"", 0
    async with (
        way.client() as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        async for block in answer.aiter_raw():
            held += block
            for _ in range(held.count(b"\n\n") - num_heard):
                num_heard += 1
                script.heard.release()
    assert num_heard == script.count + 1
    return held
