"""Runs a job's requests on the engine, as one stream of outputs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine_ext.reference.messages import RequestOutput
from engine_ext.reference.server.engine_like import EngineLike
from engine_ext.reference.server.errors import EngineFailureError, UnavailableError
from engine_ext.reference.server.job import Job

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


async def run(engine: EngineLike, job: Job) -> Outputs:
    """(choice, output) pairs as they come. Closing it aborts whatever still runs.

    Raises EngineFailureError or UnavailableError, which end the other choices too.
    """
    streams = [engine.generate(request, job.begun) for request in job.engine_requests()]
    merged = _enumerated(streams[0]) if len(streams) == 1 else _merged(streams)
    async with aclosing(merged):
        async for choice, output in merged:
            _check(output)
            yield choice, output


def _check(output: RequestOutput) -> None:
    if output.finish_reason == "error":
        error = EngineFailureError(output.error or "the engine could not finish this request")
        error.load_failure = output.load_failure
        raise error
    if output.finish_reason == "abort":
        raise UnavailableError(output.error or "the engine aborted this request")


async def _enumerated(stream: AsyncGenerator[RequestOutput, None]) -> Outputs:
    async with aclosing(stream):
        async for output in stream:
            yield 0, output


async def _merged(streams: list[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    """A queue of one place a stream: a slow client slows the reading, and the engine coalesces."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(
        maxsize=len(streams)
    )
    pumps = [
        asyncio.create_task(_pump(choice, stream, queue)) for choice, stream in enumerate(streams)
    ]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    choice: int,
    stream: AsyncGenerator[RequestOutput, None],
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None],
) -> None:
    try:
        async with aclosing(stream):
            async for output in stream:
                await queue.put((choice, output))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
