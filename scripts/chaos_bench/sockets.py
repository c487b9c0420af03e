"""Whether a frozen process is still sent requests: what waits for it in the kernel grows."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

INTERVAL = 0.05
A_REQUEST = 800
"""Bytes: more than a probe, less than a request of the load."""


@contextlib.asynccontextmanager
async def noting_requests(port: int) -> AsyncIterator[list[float]]:
    """When requests came for whoever listens there and does not read."""
    came: list[float] = []
    task = asyncio.get_running_loop().create_task(_note(port, came))
    try:
        yield came
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _note(port: int, came: list[float]) -> None:
    before = unread(port)
    while True:
        await asyncio.sleep(INTERVAL)
        now = unread(port)
        if now - before >= A_REQUEST:
            came.append(time.monotonic())
        before = now


def unread(port: int) -> int:
    """Bytes in the receive queues of the connections to a local port."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        if int(local.rpartition(":")[2], 16) == port and state != "0A":
            total += int(queues.rpartition(":")[2], 16)
    return total
