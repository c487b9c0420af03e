"""The routers that stand in front of the engines: this checkout's, and peers."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from router.common.child_processes import Child, Family
from scripts.bench.errors import BenchError
from scripts.chaos_bench.answers import OK, Ask
from scripts.chaos_bench.client import Client
from scripts.chaos_bench.fleet import Engine, Fleet, free_port, until_healthy

OURS = "disagg-router"
FLAGS = ("--health-interval", "1", "--health-timeout", "1", "--prefill-timeout", "3")
IN_A_ROW = 6
"""Right answers that say that a router knows all its engines."""
READY = 60.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """How a router is started; `environment` is a peer's own."""

    name: str
    flags: tuple[str, ...] = ()
    environment: Path | None = None

    def command(self, port: int, fleet: Fleet) -> list[str]:
        if self.environment is None:
            return [*_ours(port, fleet), *self.flags]
        return [*_vllm_router(self.environment, port, fleet), *self.flags]


def _ours(port: int, fleet: Fleet) -> list[str]:
    command = [sys.executable, "-m", "router.commands.cli", "--port", str(port), *FLAGS]
    for role, engines in (("prefiller", fleet.prefillers), ("decoder", fleet.decoders)):
        command += [f"--{role}-hosts", *["127.0.0.1"] * len(engines)]
        command += [f"--{role}-ports", *(str(engine.port) for engine in engines)]
    return command


def _vllm_router(environment: Path, port: int, fleet: Fleet) -> list[str]:
    """As near to FLAGS as its own flags allow; it has no deadline for the prefiller alone."""
    return [
        *(str(environment / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)),
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"),
        *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"),
        *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
        *("--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())),
        *_urls("--prefill", fleet.prefillers),
        *_urls("--decode", fleet.decoders),
    ]


def _urls(flag: str, engines: Sequence[Engine]) -> Iterator[str]:
    for engine in engines:
        yield from (flag, f"http://127.0.0.1:{engine.port}")


READY_PAGES: Mapping[str, str] = {OURS: "/ready"}


@dataclass(slots=True)
class Router:
    child: Child
    port: int

    @classmethod
    async def start(
        cls, family: Family, contestant: Contestant, name: str, fleet: Fleet, ask: Ask
    ) -> "Router":
        """Raises BenchError when it does not serve."""
        port = free_port()
        child = family.start(f"{name} router", contestant.command(port, fleet), "")
        try:
            await until_healthy(child, port, READY_PAGES.get(contestant.name, "/health"))
            await _until_right(port, ask)
        except BaseException:
            kill(family, child)
            raise
        return cls(child, port)

    def ask_to_end(self) -> None:
        self.child.process.send_signal(signal.SIGTERM)


async def _until_right(port: int, ask: Ask) -> None:
    """It may answer before it has found its engines."""
    client, right, latest = Client(), 0, time.monotonic() + READY
    try:
        while right < IN_A_ROW:
            result = await client.ask(port, ask)
            right = right + 1 if result.kind == OK else 0
            if time.monotonic() > latest:
                raise BenchError(f"a router answers wrongly for {READY:g} s: {result.kind}")
            await asyncio.sleep(0 if right else 0.2)
    finally:
        client.close()


def kill(family: Family, child: Child) -> None:
    """At once: a run is over, and nobody waits for it to drain."""
    if child.process.poll() is None:
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
    family.children.remove(child)
