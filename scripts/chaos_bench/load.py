"""Clients that ask again as soon as they have an answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from scripts.chaos_bench.answers import OK, Ask
from scripts.chaos_bench.client import Client, Result

CHAGRIN = 0.1
"""Seconds after a failure, so that quick failures do not outnumber everything else."""

Asks = Callable[[], Ask]


@dataclass
class Load:
    """Runs in a `with` block, and at its end waits for the answers that are still to come."""

    port: int
    """Changes when a balancer moves new connections elsewhere."""
    clients: int
    asks: Asks
    pause: float = 0.0
    spread: float = 0.0
    """Seconds over which the clients begin, so that they do not ask in step."""
    connects_anew: bool = False
    results: list[Result] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _is_over: bool = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        delays = [self.spread * number / self.clients for number in range(self.clients)]
        self._tasks = [loop.create_task(self._work(delay)) for delay in delays]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    async def _work(self, delay: float) -> None:
        await asyncio.sleep(delay)
        client = Client()
        try:
            while not self._is_over:
                result = await client.ask(self.port, self.asks())
                self.results.append(result)
                if self.connects_anew:
                    client.close()
                await asyncio.sleep(self.pause if result.kind == OK else CHAGRIN)
        finally:
            client.close()
