"""What vLLM's streams leave out.

vLLM's stream generators (chat, completion) get results from an async iterator and yield chunks of
text. We wrap both: results are watched on their way in, and what they brought and the chunks do not
have is added to what goes out:

* `kv_transfer_params`, and an early end without any text, which 0.32 leaves out: one chunk before
  `[DONE]`. 0.33 sends them itself.
* The ids of a chunk's tokens, for a router that asks for them, in a comment before the chunk (see
  engine_ext.common.resume_payload).
* A load failure, in the error that came of it, else in a comment before the first chunk.
* The chunks that come of replayed tokens which the client has are kept back. The generator asks for
  the next result when it has yielded all chunks of one, so chunks and results can be told apart.

If the generator fetched results ahead, ids would stand before the wrong chunk and resumed streams
would repeat or lack text. Chunks are recognised by strings in vLLM's JSON (DONE to REFUSED below);
if vLLM writes them otherwise, a chunk is doubled or a field missing.
"""

import asyncio
import copy
import functools
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completion
from vllm.outputs import RequestOutput

from engine_ext.common import load_failure
from engine_ext.common.resume_payload import ALL, OUTPUT, TELL_TOKEN_IDS, token_id_comment
from engine_ext.scheduler.admission import FINISH_REASON
from engine_ext.vllm.compat.patching import wrap_in

DONE = "data: [DONE]"
ERROR = 'data: {"error"'
ROLE = '"role":'
PARAMS = '"kv_transfer_params":{'
NO_PARAMS = ',"kv_transfer_params":null'
REFUSED = f'"finish_reason":"{FINISH_REASON}"'
"""As vLLM writes them. In a chunk's text, quotes are escaped."""
AT_ONCE = 64
CHAT = "chat.completion.chunk"
TEXT = "text_completion"


@dataclass
class StreamResults:
    """What the results that went into a stream have and its chunks lack."""

    kv_transfer_params: dict[str, Any] | None = None
    load_failure: dict[str, Any] | None = None
    """Not sent yet."""
    has_failed: bool = False
    """The request has ended by it: an error comes, behind a chat's role perhaps."""
    refused: list[tuple[int, Any]] = field(default_factory=list)
    """(choice, stop reason) of those without a token, whose end vLLM does not send."""
    started: set[int] = field(default_factory=set)
    """Choices that have tokens."""
    one_by_one: bool = False
    """A parser wants replayed tokens as steps of the engine bring them."""
    is_sent: bool = False
    """The generator is at work on what the client has."""
    token_id_scope: str | None = None
    """Whose ids are sent: OUTPUT, ALL or None."""
    token_ids: list[int] = field(default_factory=list)
    """Not sent yet."""
    prompt_token_ids: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.kv_transfer_params is not None or bool(self.refused)

    async def watch(self, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for item in results:
            result = item[1] if isinstance(item, tuple) else item
            if not isinstance(result, ReplayedOutput):
                self._look_at(result)
                yield item
                continue
            for number, (part, is_sent) in enumerate(result.unrolled(self.one_by_one)):
                self.is_sent = is_sent
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)  # Other requests have their turn.
                self._look_at(part)
                yield (item[0], part) if isinstance(item, tuple) else part
            self.is_sent = False

    def note_sent(self, chunk: str) -> None:
        """What vLLM sends by itself, as from 0.33 on, is not sent again."""
        if self.kv_transfer_params is not None and PARAMS in chunk:
            self.kv_transfer_params = None
        if self.refused and REFUSED in chunk:
            sent = {each["index"] for each in json.loads(chunk.removeprefix("data: "))["choices"]}
            self.refused = [each for each in self.refused if each[0] not in sent]

    def failure_of(self, chunk: str) -> str:
        """Return the chunk with the load failure, if this is where it belongs."""
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
        return self.is_sent and not chunk.startswith((DONE, ERROR))

    def ids_of(self, chunk: str) -> str:
        """Return the comment before the chunk. A chat's first chunk has a role and no text."""
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
        if self.token_id_scope is not None and not self.is_sent:
            self._note_ids(result)
        for output in result.outputs:
            if output.token_ids:
                self.started.add(output.index)
            if output.finish_reason == FINISH_REASON and output.index not in self.started:
                self.refused.append((output.index, output.stop_reason))

    def _note_ids(self, result: Any) -> None:
        if self.token_id_scope == ALL:
            self.prompt_token_ids = list(result.prompt_token_ids or ())
            self.token_id_scope = OUTPUT
        for output in result.outputs:
            self.token_ids += output.token_ids


def install() -> None:
    """Idempotent."""
    wrap_in(chat, "chat_completion_stream_generator", functools.partial(_wrap_generator, CHAT))
    wrap_in(completion, "completion_stream_generator", functools.partial(_wrap_generator, TEXT))


def _wrap_generator(kind: str, original: Any) -> Any:
    async def generator(self: Any, request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        has_parser = getattr(self, "parser_cls", None) is not None
        seen = StreamResults(one_by_one=has_parser, token_id_scope=_token_id_scope(request))
        watched = [seen.watch(each) if _is_results(each) else each for each in args]
        if "result_generator" in kwargs:
            kwargs["result_generator"] = seen.watch(kwargs["result_generator"])
        async with aclosing(original(self, request, *watched, **kwargs)) as chunks:
            async for chunk in chunks:
                if seen and chunk.startswith(DONE):
                    yield seen.chunk(_request_id(args, kwargs), request.model, kind)
                if not seen.keeps_back(chunk):
                    seen.note_sent(chunk)
                    # 0.33 writes the null into each chunk; a router would have to parse them all.
                    yield seen.failure_of(seen.ids_of(chunk) + chunk.replace(NO_PARAMS, ""))

    return generator


def _token_id_scope(request: Any) -> str | None:
    """Only an answer of one choice can be resumed."""
    asked = (getattr(request, "kv_transfer_params", None) or {}).get(TELL_TOKEN_IDS)
    return asked if asked in (OUTPUT, ALL) and (request.n or 1) == 1 else None


def _is_results(value: Any) -> bool:
    return hasattr(value, "__aiter__")


def _request_id(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The first string among the arguments, as both generators are declared."""
    named = kwargs.get("request_id")
    return str(named or next((each for each in args if isinstance(each, str)), ""))


def _choice(kind: str, index: int, stop_reason: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"delta": {}} if kind == CHAT else {"text": ""}
    return {
        "index": index,
        **content,
        "logprobs": None,
        "finish_reason": FINISH_REASON,
        "stop_reason": stop_reason,
    }


class ReplayedOutput(RequestOutput):
    """The results of replayed tokens, and behind them what has come since: vLLM adds results to one
    that has not been fetched yet, and parsers want them one by one."""

    parts: Sequence[RequestOutput] = ()
    num_sent: int = 0
    """How many of the first parts the client has."""
    rest: RequestOutput | None = None

    @classmethod
    def of(cls, parts: Sequence[RequestOutput], num_sent: int) -> "ReplayedOutput":
        replayed = cls(**vars(parts[-1]))
        replayed.parts, replayed.num_sent = parts, num_sent
        if num_sent == len(parts) and replayed.finished:
            # The client does not know that the answer ends.
            (last,) = parts[-1].outputs
            replayed.rest = _without_content(parts[-1], last)
            last.finish_reason = last.stop_reason = None
        return replayed

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        if self.rest is None:
            self.rest = next_output
        else:
            self.rest.add(next_output, aggregate)
        self.finished |= next_output.finished

    def unrolled(self, one_by_one: bool) -> Iterator[tuple[RequestOutput, bool]]:
        """Yield each result and whether the client has it. Neighbours are merged unless
        `one_by_one`."""
        for parts, is_sent in (
            (self.parts[: self.num_sent], True),
            (self.parts[self.num_sent :], False),
        ):
            for part in parts if one_by_one else _merged(parts):
                yield part, is_sent
        if self.rest is not None:
            yield self.rest, False


def _merged(parts: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
    for part in parts[1:]:
        parts[0].add(part, aggregate=True)
    return parts[:1]


def _without_content(output: RequestOutput, completion: Any) -> RequestOutput:
    last, empty = copy.copy(output), copy.copy(completion)
    empty.text, empty.token_ids = "", []
    empty.logprobs = None if completion.logprobs is None else completion.logprobs[:0]
    last.outputs = [empty]
    return last
