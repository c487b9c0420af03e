"""Engines and routers of a drill: processes on addresses that they keep."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from router.commands.bench.load import Client, LoadExchange, request_bytes
from router.common.child_processes import ChildProcess, ChildProcesses
from scripts.benchmarks.common import BenchError, free_ports
from scripts.benchmarks.contestants import OURS, our_command, package_command
from scripts.mock_engine import Fault

START_TIMEOUT_S = 60.0
STOCK_START_TIMEOUT_S = 300.0
NIXL = "nixl"
END_TIMEOUT_S = 30.0
CONTROL_TIMEOUT_S = 5.0
OUR_FLAGS = (
    *("--health-interval", "1", "--health-timeout", "1", "--prefill-timeout", "3"),
    *("--target-itl", "0"),  # KV moves, however quick the tiny engines are
)
# As near to ours as the flags of other routers allow: these have no deadline for the prefill leg
# alone.
PACKAGE_FLAGS = (
    *("--policy", "round_robin", "--worker-startup-check-interval", "1"),
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
)
SOCKETS_INTERVAL_S = 0.05
MIN_REQUEST_BYTES = 800
"""More than a probe, less than a request of the load."""


async def post(port: int, path: str, body: bytes = b"", timeout: float = CONTROL_TIMEOUT_S) -> Any:
    """Return the JSON that a process answers. Raises BenchError."""
    client = Client("127.0.0.1", port)
    exchange = await client.send(request_bytes(path, body), timeout)
    client.close()
    if exchange.status != 200 or exchange.problem:
        raise BenchError(f"{path} is answered {exchange.status} {exchange.problem}")
    return json.loads(exchange.body)


async def _get(port: int, path: str) -> LoadExchange:
    client = Client("127.0.0.1", port)
    request = f"GET {path} HTTP/1.1\r\nhost: chaos\r\n\r\n".encode()
    exchange = await client.send(request, CONTROL_TIMEOUT_S)
    client.close()
    return exchange


async def wait_until_healthy(
    child: ChildProcess, port: int, path: str = "/health", timeout: float = START_TIMEOUT_S
) -> None:
    """Wait until `path` answers 200. Raises BenchError if the process ends or takes too long."""
    latest = time.monotonic() + timeout
    while (await _get(port, path)).status != 200:
        if child.process.poll() is not None or time.monotonic() > latest:
            raise BenchError(f"{child.name} does not serve: {_last_line(child.log)}")
        await asyncio.sleep(0.05)


def _last_line(log: Path | None) -> str:
    lines = log.read_text(errors="replace").split("\n") if log else []
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")


@dataclass
class Engine:
    name: str
    command: list[str]
    port: int
    start_timeout: float = START_TIMEOUT_S
    child: ChildProcess | None = None

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.child.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the engine and all that it started, if it runs."""
        if self.child is not None and self.is_running:
            os.killpg(self.child.process.pid, number)


class EngineFleet:
    def __init__(
        self, family: ChildProcesses, prefillers: Sequence[Engine], decoders: Sequence[Engine]
    ) -> None:
        self._family = family
        self.prefillers = list(prefillers)
        self.decoders = list(decoders)

    @property
    def ports(self) -> tuple[list[int], list[int]]:
        return [one.port for one in self.prefillers], [one.port for one in self.decoders]

    def write_list(self) -> Path:
        """Write the engines' file. Their bootstrap servers are on their own ports."""
        path = self._family.directory / f"engines-{self.prefillers[0].port}.yaml"
        entries = [
            {"url": f"http://127.0.0.1:{one.port}", "role": role, "bootstrap_port": one.port}
            for role, engines in (("prefill", self.prefillers), ("decode", self.decoders))
            for one in engines
        ]
        path.write_text(json.dumps({"engines": entries}))
        return path

    async def start(self) -> None:
        """Start all engines that do not run. Raises BenchError when one does not serve."""
        engines = (*self.prefillers, *self.decoders)
        await asyncio.gather(*(self.restart(each) for each in engines if not each.is_running))

    async def restart(self, engine: Engine) -> None:
        engine.child = self._family.start(engine.name, engine.command, "")
        await wait_until_healthy(engine.child, engine.port, timeout=engine.start_timeout)

    def kill(self, engine: Engine) -> None:
        engine.send(signal.SIGKILL)
        assert engine.child is not None
        engine.child.process.wait()
        self._family.children.remove(engine.child)

    async def stop(self, engine: Engine) -> None:
        """Ask an engine to end. Raises BenchError when it does not."""
        engine.send(signal.SIGTERM)
        child = engine.child
        assert child is not None
        try:
            await asyncio.to_thread(child.process.wait, END_TIMEOUT_S)
        except TimeoutExpired:
            raise BenchError(f"{child.name} does not end: {_last_line(child.log)}") from None
        self._family.children.remove(child)

    async def switch(self, engine: Engine, fault: Fault) -> list[float]:
        """Switch a mock engine's fault; return when it was asked since the last switch."""
        asked = await post(engine.port, f"/chaos/{fault}")
        assert isinstance(asked, list)
        return asked

    def thaw(self) -> None:
        """Continue all engines: one that stands still cannot end."""
        for engine in (*self.prefillers, *self.decoders):
            engine.send(signal.SIGCONT)


def mock_fleet(family: ChildProcesses, name: str, seed: int, protocol: str) -> EngineFleet:
    """Three engines of each role."""

    def engine(role: str, number: int) -> Engine:
        (port,) = free_ports(1)
        own = f"{seed}-{role}-{number}"
        command = [sys.executable, "-m", "scripts.mock_engine", role, str(port), "--drill", own]
        if protocol != NIXL:
            command[2:] = ["tests.chaos.protocol_engine", protocol, role, str(port), own]
        return Engine(f"{name} {role} {number}", command, port)

    prefillers = [engine("prefill", number) for number in range(3)]
    return EngineFleet(family, prefillers, [engine("decode", number) for number in range(3)])


@dataclass(frozen=True, slots=True)
class RouterCommand:
    """How a router is started. Those of PyPI have an `environment` of their own."""

    name: str = OURS
    flags: tuple[str, ...] = ()
    environment: Path | None = None
    protocol: str = NIXL

    def to(self, port: int, fleet: EngineFleet) -> list[str]:
        if self.protocol != NIXL:
            flags = (*OUR_FLAGS, *self.flags, "--engines-file", str(fleet.write_list()))
            hosts = ("--prefiller-", "--decoder-")
            return [one for one in our_command(port, [], [], flags) if not one.startswith(hosts)]
        if self.environment is None:
            return our_command(port, *fleet.ports, (*OUR_FLAGS, *self.flags))
        flags = (*PACKAGE_FLAGS, *self.flags)
        return package_command(self.name, self.environment, port, *fleet.ports, flags)


@dataclass(slots=True)
class RouterProcess:
    child: ChildProcess
    port: int
    family: ChildProcesses

    @classmethod
    async def start(
        cls, family: ChildProcesses, command: RouterCommand, name: str, fleet: EngineFleet
    ) -> RouterProcess:
        """Start a router and wait until it serves. Raises BenchError."""
        (port,) = free_ports(1)
        child = family.start(f"{name} router", command.to(port, fleet), "")
        router = cls(child, port, family)
        try:
            path = "/ready" if command.environment is None else "/health"
            await wait_until_healthy(child, port, path)
        except BaseException:
            router.kill()
            raise
        return router

    def ask_to_end(self) -> None:
        self.child.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the router at once: a run that is over does not wait for it to drain."""
        if self.child.process.poll() is None:
            os.killpg(self.child.process.pid, signal.SIGKILL)
        self.child.process.wait()
        self.family.children.remove(self.child)


@contextlib.asynccontextmanager
async def noting_requests(port: int) -> AsyncIterator[list[float]]:
    """Note when requests come for a frozen process: what waits for it in the kernel grows."""
    came: list[float] = []

    async def note() -> None:
        before = _unread(port)
        while True:
            await asyncio.sleep(SOCKETS_INTERVAL_S)
            now = _unread(port)
            if now - before >= MIN_REQUEST_BYTES:
                came.append(time.monotonic())
            before = now

    task = asyncio.create_task(note())
    try:
        yield came
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _unread(port: int) -> int:
    """Return the bytes in the receive queues of the connections to a local port."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        if int(local.rpartition(":")[2], 16) == port and state != "0A":
            total += int(queues.rpartition(":")[2], 16)
    return total
