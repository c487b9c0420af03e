"""Engines that are processes of their own, on addresses that they keep."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

from router.common.child_processes import Child, Family
from scripts.bench.errors import BenchError
from scripts.bench.ports import free_ports_of
from scripts.chaos_bench import control
from scripts.chaos_bench.faults import Fault

START = 60.0
END = 30.0
PORTS = range(10_000, 15_000)
"""Below those of outgoing connections: one of these could take the port of an engine that is dead
for a while. tests/conftest.py gives out those above."""


_ports = free_ports_of(PORTS)


def free_port() -> int:
    """Nobody listened there a moment ago, and nobody here was given it lately."""
    return next(_ports)


@dataclass
class Engine:
    name: str
    command: list[str]
    port: int
    child: Child | None = None

    def send(self, number: signal.Signals) -> None:
        """To it and to all that it started, if it runs."""
        if self.child is not None and self.child.process.poll() is None:
            os.killpg(self.child.process.pid, number)


class Fleet:
    def __init__(
        self, family: Family, prefillers: Sequence[Engine], decoders: Sequence[Engine]
    ) -> None:
        self._family = family
        self.prefillers = list(prefillers)
        self.decoders = list(decoders)

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefillers, *self.decoders]

    async def start(self) -> None:
        """Raises BenchError when one does not serve."""
        for engine in self.engines:
            self._start(engine)
        await asyncio.gather(*map(self._until_healthy, self.engines))

    def _start(self, engine: Engine) -> None:
        engine.child = self._family.start(engine.name, engine.command, "")

    async def _until_healthy(self, engine: Engine) -> None:
        assert engine.child is not None
        await until_healthy(engine.child, engine.port)

    async def restart(self, engine: Engine) -> None:
        self._start(engine)
        await self._until_healthy(engine)

    def kill(self, engine: Engine) -> None:
        engine.send(signal.SIGKILL)
        assert engine.child is not None
        engine.child.process.wait()
        self._family.children.remove(engine.child)

    async def stop(self, engine: Engine) -> None:
        """Raises BenchError when it does not end."""
        engine.send(signal.SIGTERM)
        child = engine.child
        assert child is not None
        try:
            await asyncio.to_thread(child.process.wait, END)
        except TimeoutExpired:
            raise BenchError(f"{child.name} does not end: {_last_line(child.log)}") from None
        self._family.children.remove(child)

    async def switch(self, engine: Engine, fault: Fault) -> list[float]:
        """When requests came since the last switch."""
        asked = await control.post(engine.port, f"/chaos/{fault}")
        assert isinstance(asked, list)
        return asked

    def thaw(self) -> None:
        """Everyone: what stands still does not hear that it is to end."""
        for engine in self.engines:
            engine.send(signal.SIGCONT)


async def until_healthy(child: Child, port: int, path: str = "/health") -> None:
    """Raises BenchError when it ends, or does not answer 200 in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START):
            while not await control.is_ok(port, path):
                if child.process.poll() is not None:
                    break
                await asyncio.sleep(0.05)
            else:
                return
    raise BenchError(f"{child.name} does not serve: {_last_line(child.log)}")


def _last_line(log: Path | None) -> str:
    lines = log.read_text(errors="replace").split("\n") if log else []
    return next((line for line in reversed(lines) if line.strip()), "it says nothing")


def mock_fleet(family: Family, name: str, seed: int, each: int = 3) -> Fleet:
    def engine(role: str, number: int) -> Engine:
        port = free_port()
        module = "scripts.chaos_bench.mock_engine"
        command = [sys.executable, "-m", module, role, str(port), f"{seed}-{role}-{number}"]
        return Engine(f"{name} {role} {number}", command, port)

    prefillers = [engine("prefill", number) for number in range(each)]
    return Fleet(family, prefillers, [engine("decode", number) for number in range(each)])
