"""The asyncio tasks of requests, and of what outlives a request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

# Seconds for tasks to end by themselves when the router stops.
CLOSE_TIMEOUT_S = 2.0


class RequestTasks:
    """`running` are the tasks of requests, `background` those that outlive one.

    `is_draining`: the router stops, and new requests are not wanted. `is_interrupted`: running
    requests are cancelled, and answer their clients with an error.
    """

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self.background: set[asyncio.Task[None]] = set()
        self.is_draining = False
        self.is_interrupted = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that outlives its request. The work must end soon, without being cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that continues even if its request is cancelled."""
        await asyncio.shield(self.spawn(work))

    def interrupt(self) -> None:
        """End every running request with an error for its client."""
        self.is_interrupted = True
        for task in list(self.running):
            task.cancel()

    async def close(self) -> None:
        """Wait CLOSE_TIMEOUT_S for all tasks, then cancel those that are left."""
        if left := self.running | self.background:
            _, late = await asyncio.wait(left, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
