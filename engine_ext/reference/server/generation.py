"""Runs a job on the engine, and turns the outputs into one answer, whole or streamed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from engine_ext.common import load_failure
from engine_ext.common.inspection import Inspection
from engine_ext.common.resume_payload import ALL, KEY, PREEMPTED, ResumePayload, token_id_comment
from engine_ext.common.types import ConnectorStats
from engine_ext.reference.engine import merge
from engine_ext.reference.messages import EngineStats, GenerateRequest, RequestOutput
from engine_ext.reference.resume import ResumedAnswer, with_progress
from engine_ext.reference.server.connection import DONE, event
from engine_ext.reference.server.dialect import AnswerFormat
from engine_ext.reference.server.errors import EngineFailureError, UnavailableError
from engine_ext.reference.server.job import Job
from engine_ext.scheduler.admission import FINISH_REASON

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


@dataclass(slots=True)
class ChoiceProgress:
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_started: bool = False
    is_finished: bool = False


class AnswerProgress:
    """What a job's choices have output so far, for `usage` and for the end of the answer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        sent = job.num_sent
        self.choices = [ChoiceProgress(sent, is_started=sent > 0) for _ in range(job.num_choices)]
        self.kv_transfer_params: dict[str, Any] | None = None
        self.load_failure: dict[str, Any] | None = None

    def add(self, choice: int, output: RequestOutput) -> None:
        progress = self.choices[choice]
        progress.num_tokens += len(output.token_ids)
        progress.is_started = True
        progress.num_cached_tokens = max(progress.num_cached_tokens, output.num_cached_tokens)
        progress.is_finished = output.finish_reason is not None
        self.load_failure = self.load_failure or output.load_failure
        if choice == 0 and output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params

    @property
    def is_complete(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    def check_complete(self) -> None:
        if not self.is_complete:
            raise EngineFailureError("the engine ended without finishing this request")

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; a prompt counts once, however many choices it has."""
        prompt = sum(len(prompt) for prompt in self._job.prompts)
        cached = sum(choice.num_cached_tokens for choice in self.choices[:: self._job.request.n])
        usage = _usage(prompt, sum(choice.num_tokens for choice in self.choices))
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}

    def usage_of(self, choice: int) -> dict[str, Any]:
        """For `continuous_usage_stats`."""
        return _usage(len(self._job.prompt_of(choice)), self.choices[choice].num_tokens)


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


async def whole_answer(dialect: AnswerFormat, outputs: Outputs) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    job, progress = dialect.job, AnswerProgress(dialect.job)
    pieces: list[list[RequestOutput]] = [[] for _ in progress.choices]
    async with aclosing(outputs):
        async for choice, output in outputs:
            progress.add(choice, output)
            pieces[choice].append(output)
    progress.check_complete()
    answers = [merge(each) for each in pieces]
    params, only = progress.kv_transfer_params, answers[0]
    if (only.finish_reason, only.stop_reason) == (FINISH_REASON, PREEMPTED):
        # No comments have reported these tokens to the router, so the answer does.
        sent = job.resumed.token_ids[: job.num_sent] if job.resumed else ()
        payload = ResumePayload(job.prompts[0], (*sent, *only.token_ids))
        params = {KEY: with_progress(payload.to_wire(), len(sent), only.logprobs)}
    if progress.load_failure is not None:
        params = {**(params or {}), load_failure.KEY: progress.load_failure}
    return dialect.answer(
        [dialect.answer_choice(choice, each) for choice, each in enumerate(answers)],
        usage=progress.usage(),
        kv_transfer_params=params,
    )


async def streamed_answer(dialect: AnswerFormat, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    """Server-sent events, those that belong to one output in one piece.

    `kv_transfer_params` are in the last chunk before `[DONE]`: that of the usage if the client
    asked for one, else the one that finishes the last choice. Stock vLLM 0.32 never streams them.
    """
    job, progress = dialect.job, AnswerProgress(dialect.job)
    usage = job.request.stream_options
    # With several choices no other engine could continue the answer.
    must_tell = job.tell_token_ids is not None and job.num_choices == 1
    is_opened, is_first = job.num_sent > 0, True
    async with aclosing(outputs):
        async for choice, output in outputs:
            if not (output.token_ids or output.text or output.finish_reason):
                continue
            parts = []
            if output.load_failure is not None and progress.load_failure is None:
                parts.append(load_failure.comment(output.load_failure).encode())
            if not is_opened:
                parts += [event(chunk) for chunk in dialect.opening()]
            if must_tell:
                prompt = job.prompts[0] if is_first and job.tell_token_ids == ALL else ()
                parts.append(token_id_comment(output.token_ids, prompt).encode())
            is_opened, is_first = True, False
            is_start = not progress.choices[choice].is_started
            entry = dialect.chunk_choice(choice, output, first=is_start)
            progress.add(choice, output)
            rest: dict[str, Any] = {}
            if usage.include_usage:
                is_continuous = usage.continuous_usage_stats
                rest["usage"] = progress.usage_of(choice) if is_continuous else None
            elif progress.is_complete:
                rest = _last_fields(progress)
            yield b"".join([*parts, event(dialect.chunk([entry], **rest))])
    progress.check_complete()
    if usage.include_usage:
        last = dialect.chunk([], usage=progress.usage(), **_last_fields(progress))
        yield event(last) + DONE
    else:
        yield DONE


def _last_fields(progress: AnswerProgress) -> dict[str, Any]:
    params = progress.kv_transfer_params
    return {} if params is None else {"kv_transfer_params": params}
