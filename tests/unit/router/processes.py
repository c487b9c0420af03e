"""The router as a process of its own, in front of engines in this one."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from scripts.mock_engine import MockEngine

# A loaded machine takes a minute to import a router. Its end has as long.
START_TIMEOUT_S = 240


@dataclass
class RouterProcess:
    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    url: str = ""

    async def until(self, pattern: str) -> re.Match[str]:
        """Reads its log up to a line that matches."""
        assert self.process.stderr is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"no line like {pattern!r} in {self.lines}")

    async def wait_healthy(self, engines: int) -> None:
        """Wait until it listens and so many engines are healthy."""
        self.url = (await self.until(r"disagg-router on (https?://\S+)")).group(1)
        for _ in range(engines):
            await self.until("is healthy")

    async def ended(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            self.lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()


@contextlib.asynccontextmanager
async def router_process(
    p: MockEngine, d: MockEngine, *arguments: str, module: str = "router.commands.cli"
) -> AsyncIterator[RouterProcess]:
    engines = [f"--prefiller-hosts=127.0.0.1 --prefiller-ports={p.port}"]
    engines += [f"--decoder-hosts=127.0.0.1 --decoder-ports={d.port}"]
    async with started_router(*" ".join(engines).split(), *arguments, module=module) as router:
        yield router


@contextlib.asynccontextmanager
async def started_router(
    *arguments: str, module: str = "router.commands.cli"
) -> AsyncIterator[RouterProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
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
        await router.wait_healthy(2)
        yield router


@contextlib.asynccontextmanager
async def running_router(*arguments: str, engines: int) -> AsyncIterator[RouterProcess]:
    """Start a router with these arguments; enter when all `engines` are healthy."""
    async with started_router("--health-interval=0.1", *arguments) as router:
        await router.wait_healthy(engines)
        yield router


async def until_refused(url: str) -> None:
    """Wait until nothing listens there any more."""
    address = httpx.URL(url)
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection(address.host, address.port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
