"""Runs a job on the engine, and turns the outputs into one answer, whole or streamed."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import orjson

from engine_ext.common import load_failure
from engine_ext.common.resume_payload import ALL, KEY, PREEMPTED, ResumePayload, token_id_comment
from engine_ext.reference.engine import ReferenceEngine, merge
from engine_ext.reference.messages import RequestOutput
from engine_ext.reference.resume import with_progress
from engine_ext.reference.server.dialect import AnswerFormat
from engine_ext.reference.server.job import Job
from engine_ext.reference.server.requests import ApiError, error_body
from engine_ext.scheduler.admission import FINISH_REASON

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Pairs of a choice and what it adds."""


async def run(engine: ReferenceEngine, job: Job) -> Outputs:
    """(choice, output) pairs as they come. Closing it aborts whatever still runs.

    Raises ApiError, which ends the other choices too.
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
        message = output.error or "the engine could not finish this request"
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, load_failure=output.load_failure)
    if output.finish_reason == "abort":
        message = output.error or "the engine aborted this request"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message)


class AnswerProgress:
    """What a job's choices have output so far, for `usage` and for the end of the answer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_tokens = [job.num_sent] * job.num_choices
        self._num_cached = [0] * job.num_choices
        self._started = set(range(job.num_choices)) if job.num_sent else set()
        self._finished: set[int] = set()
        self.kv_transfer_params: dict[str, Any] | None = None
        self.load_failure: dict[str, Any] | None = None

    def add(self, choice: int, output: RequestOutput) -> bool:
        """Returns whether it is the first output of its choice."""
        is_first = choice not in self._started
        self._started.add(choice)
        self._num_tokens[choice] += len(output.token_ids)
        self._num_cached[choice] = max(self._num_cached[choice], output.num_cached_tokens)
        if output.finish_reason is not None:
            self._finished.add(choice)
        self.load_failure = self.load_failure or output.load_failure
        if choice == 0 and output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params
        return is_first

    @property
    def is_complete(self) -> bool:
        return len(self._finished) == self._job.num_choices

    def check_complete(self) -> None:
        if not self.is_complete:
            message = "the engine ended without finishing this request"
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; a prompt counts once, however many choices it has."""
        prompt, completion = sum(map(len, self._job.prompts)), sum(self._num_tokens)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(self._num_cached[:: self._job.request.n])
            },
        }

    def last_fields(self) -> dict[str, Any]:
        """Of the last chunk of a stream."""
        params = self.kv_transfer_params
        return {} if params is None else {"kv_transfer_params": params}


async def whole_answer(dialect: AnswerFormat, outputs: Outputs) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    job, progress = dialect.job, AnswerProgress(dialect.job)
    pieces: list[list[RequestOutput]] = [[] for _ in range(job.num_choices)]
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
    has_usage = job.request.stream_options.include_usage
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
                parts += [_event(chunk) for chunk in dialect.opening()]
            if must_tell:
                prompt = job.prompts[0] if is_first and job.tell_token_ids == ALL else ()
                parts.append(token_id_comment(output.token_ids, prompt).encode())
            is_opened, is_first = True, False
            is_start = progress.add(choice, output)
            entry = dialect.chunk_choice(choice, output, first=is_start)
            rest: dict[str, Any] = {}
            if has_usage:
                rest["usage"] = None
            elif progress.is_complete:
                rest = progress.last_fields()
            yield b"".join([*parts, _event(dialect.chunk([entry], **rest))])
    progress.check_complete()
    if has_usage:
        last = dialect.chunk([], usage=progress.usage(), **progress.last_fields())
        yield _event(last) + DONE
    else:
        yield DONE


async def with_errors(
    first: bytes, events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """The stream's events. Its status has gone out, so an error is an event, too."""
    async with aclosing(events):
        yield first
        try:
            async for each in events:
                yield each
        except ApiError as error:
            yield _event(error.body) + DONE
        except Exception:
            logger.exception("a stream broke")
            yield _event(error_body(500, "internal error")) + DONE


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
