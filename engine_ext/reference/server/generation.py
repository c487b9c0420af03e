"""Runs a job's requests on the engine, as one stream of outputs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from engine_ext.common.inspection import Inspection
from engine_ext.common.types import ConnectorStats
from engine_ext.reference.messages import EngineStats, GenerateRequest, RequestOutput
from engine_ext.reference.resume import ResumedAnswer
from engine_ext.reference.server.errors import EngineFailureError, UnavailableError
from engine_ext.reference.server.job import Job

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Pairs of a choice and what it adds."""


class EngineLike(Protocol):
    """What the server needs of an engine; `ReferenceEngine` documents the methods."""

    @property
    def is_healthy(self) -> bool:
        """False for good once the engine can make no more tokens."""

    def generate(
        self, request: GenerateRequest, resumed: ResumedAnswer | None = None
    ) -> AsyncGenerator[RequestOutput, None]: ...
    def decline(self, params: dict[str, Any]) -> None: ...
    def abort(self, request_id: str) -> None: ...
    async def release(self, engine_id: str, request_id: str) -> bool: ...
    def stats(self) -> EngineStats: ...
    def connector_stats(self) -> ConnectorStats: ...
    def inspect(self, asked: str | None = None) -> Inspection | None: ...


async def run(engine: EngineLike, job: Job) -> Outputs:
    """(choice, output) pairs as they come. Closing it aborts whatever still runs.

    Raises EngineFailureError or UnavailableError, which end the other choices too.
    """
    streams = [engine.generate(request, job.resumed) for request in job.engine_requests()]
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                _check(output)
                yield 0, output
        return
    # One place for each stream: a slow client slows the reading, and the engine merges outputs.
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(len(streams))

    async def pump(choice: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((choice, output))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(choice, stream)) for choice, stream in enumerate(streams)]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
                continue
            _check(item[1])
            yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _check(output: RequestOutput) -> None:
    if output.finish_reason == "error":
        error = EngineFailureError(output.error or "the engine could not finish this request")
        error.load_failure = output.load_failure
        raise error
    if output.finish_reason == "abort":
        raise UnavailableError(output.error or "the engine aborted this request")
