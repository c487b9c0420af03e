"""The router as a process of its own, in front of engines in this one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.unit.router.mock_engine import MockEngine


@dataclass
class RouterProcess:
    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    url: str = ""

    async def until(self, pattern: str) -> re.Match[str]:
        """Reads its log up to a line that matches."""
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"no line like {pattern!r} in {self.lines}")

    async def ended(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            self.lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()


@contextlib.asynccontextmanager
async def router_process(
    p: MockEngine, d: MockEngine, *arguments: str, module: str = "router.commands.cli"
) -> AsyncIterator[RouterProcess]:
    engines = [f"--prefiller-hosts=127.0.0.1 --prefiller-ports={p.port}"]
    engines += [f"--decoder-hosts=127.0.0.1 --decoder-ports={d.port}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *" ".join(engines).split(),
        "--log-format=text",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield RouterProcess(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def serving_router(
    p: MockEngine, d: MockEngine, *arguments: str
) -> AsyncIterator[RouterProcess]:
    async with router_process(p, d, "--port=0", "--health-interval=0.1", *arguments) as router:
        router.url = (await router.until(r"disagg-router on (https?://\S+)")).group(1)
        for _ in "pd":
            await router.until("is healthy")
        yield router
