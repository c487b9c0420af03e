"""What vLLM's streams leave out: in 0.32 `kv_transfer_params`, and a refusal without any text.

Both generators get their results from an async iterator, which is watched on its way in; what it
brought and the chunks did not say is said in one chunk before `[DONE]`. What a begun answer's
client has already goes in like all results, and the chunks that come of it are kept back. Who asks
for it is told the ids of the tokens that a chunk says, in comments (see
engine_ext.common.resume_payload).
"""

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completion

from engine_ext.common import load_failure
from engine_ext.common.resume_payload import ALL, OUTPUT, TELL_TOKEN_IDS, token_id_comment
from engine_ext.scheduler.admission import FINISH_REASON
from engine_ext.vllm.compat.told import GivenTokenResults
from engine_ext.vllm.compat.wrapped import wrap_in

DONE = "data: [DONE]"
ERROR = 'data: {"error"'
ROLE = '"role":'
PARAMS = '"kv_transfer_params":{'
NO_PARAMS = ',"kv_transfer_params":null'
REFUSED = f'"finish_reason":"{FINISH_REASON}"'
"""As vLLM writes them. In what a chunk says, quotes are escaped."""
AT_ONCE = 64
CHAT = "chat.completion.chunk"
TEXT = "text_completion"


@dataclass
class StreamResults:
    """Of the results that went into a stream."""

    kv_transfer_params: dict[str, Any] | None = None
    load_failure: dict[str, Any] | None = None
    """That no chunk has said yet."""
    has_failed: bool = False
    """The request has ended by it: an error comes, behind a chat's role perhaps."""
    refused: list[tuple[int, Any]] = field(default_factory=list)
    """(choice, stop reason), of those that have said nothing, whose end vLLM does not say."""
    begun: set[int] = field(default_factory=set)
    """Choices that have tokens."""
    one_by_one: bool = False
    """A parser wants given tokens as steps of the engine bring them."""
    is_silent: bool = False
    """The generator is at work on what the client has. It asks for the next result when it has
    said all that comes of one."""

    tell: str | None = None
    """Of the output's ids, or of all."""
    token_ids: list[int] = field(default_factory=list)
    """That no chunk has said yet."""
    prompt_token_ids: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.kv_transfer_params is not None or bool(self.refused)

    async def watch(self, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for item in results:
            result = item[1] if isinstance(item, tuple) else item
            if not isinstance(result, GivenTokenResults):
                self._look_at(result)
                yield item
                continue
            for number, (part, is_silent) in enumerate(result.unrolled(self.one_by_one)):
                self.is_silent = is_silent
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)  # Other requests have their turn.
                self._look_at(part)
                yield (item[0], part) if isinstance(item, tuple) else part
            self.is_silent = False

    def hear(self, chunk: str) -> None:
        """What vLLM says by itself, as from 0.33 on, is not said again."""
        if self.kv_transfer_params is not None and PARAMS in chunk:
            self.kv_transfer_params = None
        if self.refused and REFUSED in chunk:
            said = {each["index"] for each in json.loads(chunk.removeprefix("data: "))["choices"]}
            self.refused = [each for each in self.refused if each[0] not in said]

    def failure_of(self, chunk: str) -> str:
        """With what is to be said of a load that failed: in the error that came of it, else in a
        comment before the chunk."""
        failure, is_error = self.load_failure, chunk.startswith(ERROR)
        if failure is None or is_error is not self.has_failed:
            return chunk
        self.load_failure = None
        if not is_error:
            return load_failure.comment(failure) + chunk
        body = json.loads(chunk.removeprefix("data: "))
        body["error"][load_failure.KEY] = failure
        return f"data: {json.dumps(body)}\n\n"

    def keeps_back(self, chunk: str) -> bool:
        return self.is_silent and not chunk.startswith((DONE, ERROR))

    def ids_of(self, chunk: str) -> str:
        """A chat's first chunk has a role and says nothing."""
        if not self.token_ids or ROLE in chunk or chunk.startswith((DONE, ERROR)):
            return ""
        ids, self.token_ids = self.token_ids, []
        prompt, self.prompt_token_ids = self.prompt_token_ids, []
        return token_id_comment(ids, prompt)

    def chunk(self, request_id: str, model: str, kind: str) -> str:
        choices = [_choice(kind, index, reason) for index, reason in self.refused]
        body: dict[str, Any] = {
            "id": request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "choices": choices,
        }
        if self.kv_transfer_params is not None:
            body["kv_transfer_params"] = self.kv_transfer_params
        return f"data: {json.dumps(body)}\n\n"

    def _look_at(self, result: Any) -> None:
        params = getattr(result, "kv_transfer_params", None)
        if params and load_failure.KEY in params:
            params = dict(params)
            self.load_failure = params.pop(load_failure.KEY)
            self.has_failed = any(each.finish_reason == "error" for each in result.outputs)
            result.kv_transfer_params = params or None
        if params:
            self.kv_transfer_params = params
        if self.tell is not None and not self.is_silent:
            self._note_ids(result)
        for output in result.outputs:
            if output.token_ids:
                self.begun.add(output.index)
            if output.finish_reason == FINISH_REASON and output.index not in self.begun:
                self.refused.append((output.index, output.stop_reason))

    def _note_ids(self, result: Any) -> None:
        if self.tell == ALL:
            self.prompt_token_ids, self.tell = list(result.prompt_token_ids or ()), OUTPUT
        for output in result.outputs:
            self.token_ids += output.token_ids


def install() -> None:
    """Idempotent."""
    wrap_in(chat, "chat_completion_stream_generator", functools.partial(_saying_more, CHAT))
    wrap_in(completion, "completion_stream_generator", functools.partial(_saying_more, TEXT))


def _saying_more(kind: str, original: Any) -> Any:
    @functools.wraps(original)
    async def generator(self: Any, request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        has_parser = getattr(self, "parser_cls", None) is not None
        seen = StreamResults(one_by_one=has_parser, tell=_told_to(request))
        watched = [seen.watch(each) if _is_results(each) else each for each in args]
        if "result_generator" in kwargs:
            kwargs["result_generator"] = seen.watch(kwargs["result_generator"])
        async with aclosing(original(self, request, *watched, **kwargs)) as chunks:
            async for chunk in chunks:
                if seen and chunk.startswith(DONE):
                    yield seen.chunk(_request_id(args, kwargs), request.model, kind)
                if not seen.keeps_back(chunk):
                    seen.hear(chunk)
                    # In each chunk of 0.33. A router would have to look into every one.
                    yield seen.failure_of(seen.ids_of(chunk) + chunk.replace(NO_PARAMS, ""))

    return generator


def _told_to(request: Any) -> str | None:
    """Of one choice: where there are more, nobody could go on."""
    asked = (getattr(request, "kv_transfer_params", None) or {}).get(TELL_TOKEN_IDS)
    return asked if asked in (OUTPUT, ALL) and (request.n or 1) == 1 else None


def _is_results(value: Any) -> bool:
    return hasattr(value, "__aiter__")


def _request_id(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The first string among the arguments, as both generators are declared."""
    given = kwargs.get("request_id")
    return str(given or next((each for each in args if isinstance(each, str)), ""))


def _choice(kind: str, index: int, stop_reason: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"delta": {}} if kind == CHAT else {"text": ""}
    return {
        "index": index,
        **said,
        "logprobs": None,
        "finish_reason": FINISH_REASON,
        "stop_reason": stop_reason,
    }
