"""From the engine's outputs to an answer as vLLM writes it: a text completion or a chat completion,
whole or streamed."""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, ClassVar

import orjson

from engine_ext.common import load_failure
from engine_ext.common.resume_payload import (
    ALL,
    KEY,
    LOWEST,
    PREEMPTED,
    ResumePayload,
    token_id_comment,
)
from engine_ext.reference.answer import with_progress
from engine_ext.reference.engine import ReferenceEngine, merge
from engine_ext.reference.messages import RequestOutput, TokenLogprob
from engine_ext.reference.server.job import Job
from engine_ext.reference.server.requests import ApiError, error_body
from engine_ext.reference.server.structured_output import Calls, calls_in
from engine_ext.reference.tokenizer import Tokenizer
from engine_ext.scheduler.admission import FINISH_REASON

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class AnswerFormat(ABC):
    object_name: ClassVar[str]
    chunk_suffix: ClassVar[str]

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        self._tokenizer = tokenizer

    def opening(self) -> Iterable[dict[str, Any]]:
        """The chunks before any token."""
        return ()

    @abstractmethod
    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        """The `choices` entry of a chunk. `first`: it is the choice's first with anything in it."""

    def answer_choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        """The `choices` entry of a whole answer."""
        return self.chunk_choice(choice, output, first=True)

    def chunk(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        job = self.job
        kind = self.object_name + self.chunk_suffix
        head = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        return {**head, "choices": choices, **rest}

    def answer(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        return {**self.chunk(choices), "object": self.object_name, **rest}

    def _name(self, token_id: int) -> str:
        return self._name_bytes(token_id).decode(errors="replace")

    def _name_bytes(self, token_id: int) -> bytes:
        if self.job.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def _token_ids(self, output: RequestOutput) -> list[int] | None:
        return list(output.token_ids) if self.job.body.return_token_ids else None

    def _prompt_token_ids(self, choice: int) -> list[int] | None:
        return (
            list(self.job.requests[choice].prompt_token_ids)
            if self.job.body.return_token_ids
            else None
        )


class CompletionDialect(AnswerFormat):
    object_name, chunk_suffix = "text_completion", ""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        sent = job.resumed.token_ids[: job.num_sent] if job.resumed else ()
        self._offsets = [sum(len(self._name(token)) for token in sent)] * len(job.requests)
        """The offset of the next token of each choice, in characters of token names."""

    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        return {
            "index": choice,
            "text": output.text,
            "logprobs": self._logprobs(choice, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": self._prompt_token_ids(choice) if first else None,
            "token_ids": self._token_ids(output),
        }

    def _logprobs(self, choice: int, output: RequestOutput) -> dict[str, Any] | None:
        if self.job.requests[0].sampling.logprobs is None:
            return None
        tokens = [self._name(entry.token_id) for entry in output.logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in output.logprobs],
            "tokens": tokens,
            "top_logprobs": [self._top(entry) for entry in output.logprobs],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The chosen token first, then the best ones. Of tokens with one name the best stays."""
        top = {self._name(entry.token_id): max(entry.logprob, LOWEST)}
        for token_id, logprob in entry.top:
            top.setdefault(self._name(token_id), max(logprob, LOWEST))
        return top


class ChatDialect(AnswerFormat):
    object_name, chunk_suffix = "chat.completion", ".chunk"

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._calls = [Calls(job.forced) for _ in range(len(job.requests))] if job.forced else []
        self._sent_text = job.resumed.sent_text if job.resumed else ""
        if job.num_sent:
            for calls in self._calls:
                calls.take(self._sent_text)

    def opening(self) -> Iterator[dict[str, Any]]:
        prompt = self._prompt_token_ids(0)
        extra = {} if prompt is None else {"prompt_token_ids": prompt}
        for choice in range(len(self.job.requests)):
            delta = {"role": "assistant", "content": ""}
            entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.chunk([entry], **extra)

    def chunk_choice(self, choice: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": output.text}
        if self._calls:
            calls = self._calls[choice].take(output.text)
            delta = {"tool_calls": calls} if calls else {}
        entry = {
            "index": choice,
            "delta": delta,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "token_ids": self._token_ids(output),
        }
        stop = {} if output.finish_reason is None else {"stop_reason": output.stop_reason}
        return entry | stop

    def answer_choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        forced = self.job.forced
        # No message holds half a call: the part that the client has is repeated.
        calls = calls_in(self._sent_text + output.text, forced) if forced else []
        return {
            "index": choice,
            "message": {
                "role": "assistant",
                "content": "" if forced else output.text,
                "tool_calls": calls,
            },
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "stop_reason": output.stop_reason,
            "token_ids": self._token_ids(output),
        }

    def answer(self, choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        return super().answer(choices, prompt_token_ids=self._prompt_token_ids(0), **rest)

    def _finish_reason(self, output: RequestOutput) -> str | None:
        """As OpenAI has it: the call of a tool that was named ends with "stop"."""
        forced = self.job.forced
        if forced is None or forced.name is not None or output.finish_reason != "stop":
            return output.finish_reason
        return "tool_calls"

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if self.job.requests[0].sampling.logprobs is None:
            return None
        content = []
        for entry in output.logprobs:
            top = [self._token(*alternative) for alternative in entry.top]
            content.append({**self._token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        name = self._name_bytes(token_id)
        return {
            "token": name.decode(errors="replace"),
            "logprob": max(logprob, LOWEST),
            "bytes": list(name),
        }


Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Pairs of a choice and what it adds."""


async def run(engine: ReferenceEngine, job: Job) -> Outputs:
    """(choice, output) pairs as they come. Closing it aborts whatever still runs.

    Raises ApiError, which ends the other choices too.
    """
    streams = [engine.generate(request, job.resumed) for request in job.requests]
    pending = {asyncio.ensure_future(anext(one)): choice for choice, one in enumerate(streams)}
    try:
        while pending:
            ended, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                choice = pending.pop(task)
                with contextlib.suppress(StopAsyncIteration):
                    output = task.result()
                    _check(output)
                    yield choice, output
                    pending[asyncio.ensure_future(anext(streams[choice]))] = choice
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for one in streams:
            await one.aclose()


def _check(output: RequestOutput) -> None:
    if output.finish_reason == "error":
        message = output.error or "the engine could not finish this request"
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, load_failure=output.load_failure)
    if output.finish_reason == "abort":
        message = output.error or "the engine aborted this request"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message)


class AnswerProgress:
    """The output of a job's choices so far, for `usage` and for the end of the answer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_tokens = [job.num_sent] * len(job.requests)
        self._num_cached = [0] * len(job.requests)
        self._started = set(range(len(job.requests))) if job.num_sent else set()
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
        return len(self._finished) == len(self._job.requests)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; a prompt counts once, however many choices it has."""
        n, completion = self._job.body.n, sum(self._num_tokens)
        prompt = sum(len(one.prompt_token_ids) for one in self._job.requests[::n])
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached[::n])},
        }

    def last_fields(self) -> dict[str, Any]:
        """The `kv_transfer_params` of the last chunk of a stream."""
        params = self.kv_transfer_params
        return {} if params is None else {"kv_transfer_params": params}


async def whole_answer(dialect: AnswerFormat, outputs: Outputs) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    job, progress = dialect.job, AnswerProgress(dialect.job)
    pieces: list[list[RequestOutput]] = [[] for _ in range(len(job.requests))]
    async with aclosing(outputs):
        async for choice, output in outputs:
            progress.add(choice, output)
            pieces[choice].append(output)
    answers = [merge(each) for each in pieces]
    params, only = progress.kv_transfer_params, answers[0]
    if (only.finish_reason, only.stop_reason) == (FINISH_REASON, PREEMPTED):
        # No comments have reported these tokens to the router, so the answer does.
        sent = job.resumed.token_ids[: job.num_sent] if job.resumed else ()
        payload = ResumePayload(job.requests[0].prompt_token_ids, (*sent, *only.token_ids))
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
    has_usage = job.body.stream_options.include_usage
    # With several choices no other engine could continue the answer.
    must_tell = job.tell_token_ids is not None and len(job.requests) == 1
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
                prompt = (
                    job.requests[0].prompt_token_ids
                    if is_first and job.tell_token_ids == ALL
                    else ()
                )
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
