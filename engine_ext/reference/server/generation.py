"""What a job's choices have said so far, counted for `usage` and for the end of the stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_ext.common.inspection import Inspection
from engine_ext.common.types import ConnectorStats
from engine_ext.reference.messages import EngineStats, GenerateRequest, RequestOutput
from engine_ext.reference.resume import Beginning
from engine_ext.reference.server.errors import EngineFailureError, UnavailableError
from engine_ext.reference.server.job import Job


class EngineLike(Protocol):
    @property
    def is_healthy(self) -> bool:
        """False for good once the engine can make no more tokens."""

    def generate(
        self, request: GenerateRequest, begun: Beginning | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """What the request adds, piece by piece; the last piece has a finish reason. Where it has
        `begun` elsewhere, what is not spoken yet is the first piece.

        Closing or cancelling the iterator aborts the request.
        """

    def decline(self, params: dict[str, Any]) -> None:
        """A request with these `kv_transfer_params` was refused: a remote may hold blocks for it.
        Returns at once."""

    def abort(self, request_id: str) -> None:
        """Its answer reaches nobody: what it keeps for a remote, if it has ended, is given up."""

    async def release(self, engine_id: str, request_id: str) -> bool:
        """No remote will read this request's KV. True: it was held."""

    def stats(self) -> EngineStats: ...
    def connector_stats(self) -> ConnectorStats: ...
    def inspect(self, asked: str | None = None) -> Inspection | None:
        """What is held for other engines, of one request or of all; None without a connector.
        Blocks for a second at most; raises TimeoutError."""


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


@dataclass(slots=True)
class ChoiceTally:
    tokens: int = 0
    cached_tokens: int = 0
    begun: bool = False
    finished: bool = False


@dataclass(slots=True)
class JobTally:
    job: Job
    choices: list[ChoiceTally] = field(init=False)
    kv_transfer_params: dict[str, Any] | None = None
    load_failure: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        spoken = self.job.num_spoken
        self.choices = [ChoiceTally(spoken, begun=spoken > 0) for _ in range(self.job.num_choices)]

    def add(self, choice: int, output: RequestOutput) -> None:
        tally = self.choices[choice]
        tally.tokens += len(output.token_ids)
        tally.begun = True
        tally.cached_tokens = max(tally.cached_tokens, output.num_cached_tokens)
        tally.finished = output.finish_reason is not None
        self.load_failure = self.load_failure or output.load_failure
        if choice == 0 and output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params

    @property
    def all_finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; a prompt counts once, however many choices it has."""
        prompt = sum(len(prompt.token_ids) for prompt in self.job.prompts)
        firsts = self.choices[:: self.job.n]
        cached = sum(choice.cached_tokens for choice in firsts)
        usage = _usage(prompt, sum(choice.tokens for choice in self.choices))
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}

    def usage_of(self, choice: int) -> dict[str, Any]:
        """For `continuous_usage_stats`."""
        return _usage(len(self.job.prompt_of(choice).token_ids), self.choices[choice].tokens)


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
