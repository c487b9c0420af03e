"""From the engine's outputs to an answer as vLLM writes it: a text completion or a chat completion,
whole or streamed."""

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from itertools import accumulate
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
from engine_ext.reference.engine import merge
from engine_ext.reference.messages import RequestOutput, TokenLogprob
from engine_ext.reference.server.job import Job
from engine_ext.reference.server.requests import ApiError, error_body
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
        self._num_tokens = len(job.sent_token_ids)
        self._num_cached = 0
        self.kv_transfer_params: dict[str, Any] | None = None
        self.load_failure: dict[str, Any] | None = None

    def take(self, output: RequestOutput) -> None:
        """Note what the end of the answer reports. Raises ApiError if the engine could not finish
        the request."""
        if output.finish_reason == "error":
            status, message = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "the engine could not finish this request",
            )
            raise ApiError(status, output.error or message, load_failure=output.load_failure)
        if output.finish_reason == "abort":
            message = output.error or "the engine aborted this request"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message)
        self._num_tokens += len(output.token_ids)
        self._num_cached = max(self._num_cached, output.num_cached_tokens)
        self.load_failure = self.load_failure or output.load_failure
        if output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = len(self.job.request.prompt_token_ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._num_tokens,
            "completion_tokens": self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    def last_fields(self) -> dict[str, Any]:
        """The `kv_transfer_params` of the last chunk of a stream."""
        params = self.kv_transfer_params
        return {} if params is None else {"kv_transfer_params": params}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before any token."""
        return []

    @abstractmethod
    def chunk_choice(self, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        """The `choices` entry of a chunk. `first`: it is the first with anything in it."""

    def answer_choice(self, output: RequestOutput) -> dict[str, Any]:
        """The `choices` entry of a whole answer."""
        return self.chunk_choice(output, first=True)

    def chunk(self, *choices: dict[str, Any], **rest: Any) -> dict[str, Any]:
        job = self.job
        kind = self.object_name + self.chunk_suffix
        head = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        return {**head, "choices": choices, **rest}

    def answer(self, choice: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return {**self.chunk(choice), "object": self.object_name, **rest}

    def _name_bytes(self, token_id: int) -> bytes:
        if self.job.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def _name(self, token_id: int) -> str:
        return self._name_bytes(token_id).decode(errors="replace")

    def _token_ids(self, output: RequestOutput) -> list[int] | None:
        return list(output.token_ids) if self.job.body.return_token_ids else None

    def _prompt_token_ids(self) -> list[int] | None:
        ids = self.job.request.prompt_token_ids
        return list(ids) if self.job.body.return_token_ids else None


class CompletionDialect(AnswerFormat):
    object_name, chunk_suffix = "text_completion", ""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job, tokenizer)
        self._offset = sum(len(self._name(token)) for token in job.sent_token_ids)
        """The offset of the next token, in characters of token names."""

    def chunk_choice(self, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        return {
            "index": 0,
            "text": output.text,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": self._prompt_token_ids() if first else None,
            "token_ids": self._token_ids(output),
        }

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if self.job.request.sampling.logprobs is None:
            return None
        tokens = [self._name(entry.token_id) for entry in output.logprobs]
        *offsets, self._offset = accumulate(map(len, tokens), initial=self._offset)
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
        self._call_id = f"chatcmpl-tool-{uuid.uuid4().hex}"

    def opening(self) -> list[dict[str, Any]]:
        prompt = self._prompt_token_ids()
        extra = {} if prompt is None else {"prompt_token_ids": prompt}
        delta = {"role": "assistant", "content": ""}
        entry = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self.chunk(entry, **extra)]

    def chunk_choice(self, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": output.text}
        if self.job.tool is not None:
            call = self._call(output.text) if first else {"function": {"arguments": output.text}}
            delta = {"tool_calls": [{"index": 0, **call}]} if first or output.text else {}
        entry = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "token_ids": self._token_ids(output),
        }
        stop = {} if output.finish_reason is None else {"stop_reason": output.stop_reason}
        return entry | stop

    def answer_choice(self, output: RequestOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "tool_calls": []}
        if self.job.tool is not None:
            # No message holds half a call: the part that the client has is repeated.
            sent = self.job.resumed.sent_text if self.job.resumed else ""
            message |= {"content": "", "tool_calls": [self._call(sent + output.text)]}
        return {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "stop_reason": output.stop_reason,
            "token_ids": self._token_ids(output),
        }

    def _call(self, arguments: str) -> dict[str, Any]:
        assert self.job.tool is not None
        function = {"name": self.job.tool.name, "arguments": arguments}
        return {"id": self._call_id, "type": "function", "function": function}

    def answer(self, choice: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return super().answer(choice, prompt_token_ids=self._prompt_token_ids(), **rest)

    def _finish_reason(self, output: RequestOutput) -> str | None:
        tool, reason = self.job.tool, output.finish_reason
        return tool.finish_reason if tool and reason == "stop" else reason

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if self.job.request.sampling.logprobs is None:
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


Outputs = AsyncGenerator[RequestOutput, None]


async def whole_answer(dialect: AnswerFormat, outputs: Outputs) -> dict[str, Any]:
    """The body of an answer that is not streamed. Raises ApiError."""
    job, pieces = dialect.job, []
    async with aclosing(outputs):
        async for output in outputs:
            dialect.take(output)
            pieces.append(output)
    answer, params = merge(pieces), dialect.kv_transfer_params
    if (answer.finish_reason, answer.stop_reason) == (FINISH_REASON, PREEMPTED):
        # No comments have reported these tokens to the router, so the answer does.
        sent = job.sent_token_ids
        payload = ResumePayload(job.request.prompt_token_ids, (*sent, *answer.token_ids))
        params = {KEY: with_progress(payload.to_wire(), len(sent), answer.logprobs)}
    if dialect.load_failure is not None:
        params = {**(params or {}), load_failure.KEY: dialect.load_failure}
    choice = dialect.answer_choice(answer)
    return dialect.answer(choice, usage=dialect.usage(), kv_transfer_params=params)


async def streamed_answer(dialect: AnswerFormat, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    """Server-sent events, those that belong to one output in one piece. Raises ApiError.

    `kv_transfer_params` are in the last chunk before `[DONE]`: that of the usage if the client
    asked for one, else the one that finishes the choice. Stock vLLM 0.32 never streams them.
    """
    job, options = dialect.job, dialect.job.body.stream_options
    has_usage = options.include_usage
    is_resumed, is_first, is_failure_sent = bool(job.sent_token_ids), True, False
    async with aclosing(outputs):
        async for output in outputs:
            dialect.take(output)
            if not (output.token_ids or output.text or output.finish_reason):
                continue
            parts = []
            if output.load_failure is not None and not is_failure_sent:
                is_failure_sent = True
                parts.append(load_failure.comment(output.load_failure).encode())
            if is_first and not is_resumed:
                parts += [_event(chunk) for chunk in dialect.opening()]
            if job.tell_token_ids is not None:
                names_prompt = is_first and job.tell_token_ids == ALL
                prompt = job.request.prompt_token_ids if names_prompt else ()
                parts.append(token_id_comment(output.token_ids, prompt).encode())
            entry = dialect.chunk_choice(output, first=is_first and not is_resumed)
            is_first = False
            rest: dict[str, Any] = {}
            if has_usage:
                rest["usage"] = dialect.usage() if options.continuous_usage_stats else None
            elif output.finish_reason is not None:
                rest = dialect.last_fields()
            yield b"".join([*parts, _event(dialect.chunk(entry, **rest))])
    usage = dialect.chunk(usage=dialect.usage(), **dialect.last_fields())
    yield _event(usage) + DONE if has_usage else DONE


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
