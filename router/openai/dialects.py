"""What the dialects share: checks of their requests, and an engine's chat answer as blocks. Pure.

A dialect is another API than chat completions: OpenAI's Responses (`responses`), or Anthropic's
Messages (`anthropic_messages`). Dialects stream blocks of reasoning, text and tool calls that
begin, grow and end, so each piece of a chat answer is translated to such steps. Unstreamed answers
are translated from the list of all blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from sys import getsizeof
from typing import Any, NamedTuple

import orjson

from router.common.exact_json import dumps
from router.openai.answers import Json, choices_of, count_in
from router.openai.errors import BadRequestError
from router.openai.request_fields import STREAM, STREAM_OPTIONS, USAGE

COMPLETE_FINISH_REASONS = frozenset(
    ("stop", "length", "tool_calls", "function_call", "content_filter")
)
# Finish reasons of an answer that the engine has broken off.
FAILED_FINISH_REASONS = frozenset(("abort", "error", "cache_threshold"))
MAX_ANSWER_CHARS = 16 * 1024 * 1024
# How much memory one byte of JSON takes where objects are as small as log-probabilities.
MEMORY_PER_JSON_BYTE = 8


# Requests. `where` is the path of the object that has the field, empty for the body.


def field_error(where: str, why: str) -> BadRequestError:
    return BadRequestError(f"{where}: {why}", where)


def unsupported_type(where: str, what: str, kind: object) -> BadRequestError:
    shown = repr(kind)[:80] if isinstance(kind, str) else "none"
    return field_error(where, f"{what} of type {shown} are not supported")


def require_text(holder: Json, name: str, where: str = "") -> str:
    if not isinstance(value := holder.get(name), str):
        raise field_error(_path(where, name), "must be a string")
    return value


def require_object(holder: Json, name: str, where: str = "") -> Json:
    if not isinstance(value := holder.get(name), dict):
        raise field_error(_path(where, name), "must be an object")
    return value


def require_objects(holder: Json, name: str, where: str = "") -> list[tuple[Json, str]]:
    """Return each object of the list with its path."""
    path = _path(where, name)
    if not isinstance(value := holder.get(name), list):
        raise field_error(path, "must be a list")
    placed = [(item, f"{path}[{index}]") for index, item in enumerate(value)]
    for item, item_path in placed:
        if not isinstance(item, dict):
            raise field_error(item_path, "must be an object")
    return placed


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def start_chat(
    body: Json,
    translated: Container[str],
    unsupported: Iterable[str],
    translate_tool: Callable[[Json, str], Json],
) -> Json:
    """Return the part of a chat request that all dialects translate alike: the fields that are not
    `translated`, the tools and the options of a stream. Raises BadRequestError."""
    for name in unsupported:
        if body.get(name):
            raise field_error(name, "is not supported")
    chat: Json = {name: body[name] for name in body if name not in translated}
    if body.get("stream"):
        chat[STREAM], chat[STREAM_OPTIONS] = body["stream"], {**USAGE}
    if body.get("tools"):
        chat["tools"] = [translate_tool(*tool) for tool in require_objects(body, "tools")]
    return chat


def text_part(holder: Json, name: str, where: str) -> Json:
    return {"type": "text", "text": require_text(holder, name, where)}


def join_text_parts(parts: list[Json]) -> str | list[Json]:
    """Return one text if all parts are text: some chat templates accept no list of parts."""
    if all(part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def chosen_tool(choice: Json) -> Json:
    return {"type": "function", "function": {"name": require_text(choice, "name", "tool_choice")}}


def tool_call(id: str, name: str, arguments: str) -> Json:
    """Return a tool call of an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Answers.


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    TOOL_CALL = auto()


class StepKind(Enum):
    BEGIN = auto()
    EXTEND = auto()
    END = auto()


@dataclass(slots=True)
class AnswerBlock:
    """One block. `number` counts the blocks of the answer; `call` is the engine's index of a tool
    call."""

    kind: BlockKind
    call: int = -1
    id: str = ""
    name: str = ""
    number: int = -1
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockStep(NamedTuple):
    kind: StepKind
    block: AnswerBlock
    text: str = ""


class AnswerUsage(NamedTuple):
    """Counts of tokens."""

    prompt: int = 0
    cached: int = 0
    answer: int = 0
    reasoning: int = 0


class AnswerBlocks:
    """The blocks of one answer as they arrive.

    `finish_reason` and `stop_reason` are the engine's. `error` is the engine's error object; once
    it is set, the rest of the answer is ignored. `memory` estimates the bytes of memory used.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, before another engine answers."""
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None
        self.stop_reason: object = None
        self.usage = AnswerUsage()
        self.model = ""
        self.error: Json | None = None
        self.logprobs: list[object] = []
        self.memory = 0
        self._open: AnswerBlock | None = None
        self._size = 0

    def add(self, content: Json) -> Iterator[BlockStep]:
        """Add a whole answer or one chunk of a stream. Never raises: invalid parts are ignored."""
        if self.error is not None:
            return
        error = content.get("error")
        if error is not None and not content.get("choices"):
            self.error = error if isinstance(error, dict) else {"message": str(error)[:1000]}
            return
        self.model = self.model or _text(content, "model")
        self.usage = _usage(content.get("usage")) or self.usage
        # These dialects have only the first choice.
        choice = next((one for one in choices_of(content) if one.get("index", 0) == 0), {})
        message = choice.get("delta") or choice.get("message")
        for block, text in _pieces(message) if isinstance(message, dict) else ():
            yield from self._add_piece(block, text)
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            self._add_logprobs(logprobs["content"])
        if finish := _text(choice, "finish_reason"):
            self.finish_reason, self.stop_reason = finish, choice.get("stop_reason")

    def close(self) -> Iterator[BlockStep]:
        """End the answer: close the open block, and set `error` if the answer is incomplete."""
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockStep(StepKind.END, block)
        is_cut = self.finish_reason is None or self.finish_reason in FAILED_FINISH_REASONS
        if is_cut and self.error is None:
            self.error = {"message": "the answer ended early", "type": "BadGatewayError"}

    @property
    def has_unknown_finish(self) -> bool:
        """True if the finish reason is unknown, so that the answer may be incomplete."""
        reason = self.finish_reason
        return self.error is None and reason is not None and reason not in COMPLETE_FINISH_REASONS

    @property
    def has_tool_calls(self) -> bool:
        return any(block.kind is BlockKind.TOOL_CALL for block in self.blocks)

    def _add_logprobs(self, given: list[object]) -> None:
        try:
            size = len(dumps(given))
        except orjson.JSONEncodeError:  # nested beyond 250 levels: they could not be sent
            return
        self._size += size
        if self._size <= MAX_ANSWER_CHARS:
            self.logprobs += given
            self.memory += size * MEMORY_PER_JSON_BYTE

    def _add_piece(self, piece: AnswerBlock, text: str) -> Iterator[BlockStep]:
        """Add a text to the block that it extends, or begin `piece` as a new block."""
        self._size += len(text)
        self.memory += getsizeof(text)  # an answer is many small strings
        if self._size > MAX_ANSWER_CHARS:
            self.error = {"message": "the answer is too large", "type": "BadGatewayError"}
            return
        block = self._extended_by(piece)
        if block is None:
            if self._open is not None:
                yield BlockStep(StepKind.END, self._open)
            block, piece.number = piece, len(self.blocks)
            self.blocks.append(block)
            self._open = block
            yield BlockStep(StepKind.BEGIN, block)
        if text:
            block.parts.append(text)
            yield BlockStep(StepKind.EXTEND, block, text)

    def _extended_by(self, piece: AnswerBlock) -> AnswerBlock | None:
        """Return the block that the piece extends: a tool call by its index, even if another block
        began after it."""
        if piece.kind is BlockKind.TOOL_CALL:
            calls = (block for block in self.blocks if block.kind is BlockKind.TOOL_CALL)
            return next((block for block in calls if block.call == piece.call), None)
        is_open = self._open is not None and self._open.kind is piece.kind
        return self._open if is_open else None


class DialectOutput(ABC):
    """Writes an answer in a dialect."""

    def __init__(self, answer: AnswerBlocks) -> None:
        self._answer = answer
        self._has_begun = False

    @abstractmethod
    def whole(self) -> Json:
        """Return an unstreamed answer."""

    def events(self, steps: Iterable[BlockStep]) -> Iterator[bytes]:
        """Yield the events for some steps of a streamed answer."""
        for step in steps:
            yield from self._begin()
            yield from self._events_of(step)

    @abstractmethod
    def last_events(self) -> Iterator[bytes]:
        """Yield the last events of a stream, after the answer was closed."""

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._first_events()

    @abstractmethod
    def _first_events(self) -> Iterator[bytes]: ...

    @abstractmethod
    def _events_of(self, step: BlockStep) -> Iterator[bytes]: ...


def event(type: str, **fields: Any) -> bytes:
    content = dumps({"type": type, **fields})
    return b"event: %b\ndata: %b\n\n" % (type.encode("ascii"), content)


def _pieces(message: Json) -> Iterator[tuple[AnswerBlock, str]]:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        yield AnswerBlock(BlockKind.REASONING), reasoning
    text = message.get("content") or message.get("refusal")
    if isinstance(text, str) and text:
        yield AnswerBlock(BlockKind.TEXT), text
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            function, given = call.get("function"), call.get("index")
            index = given if type(given) is int else number
            name, arguments = _text(function, "name"), _text(function, "arguments")
            yield AnswerBlock(BlockKind.TOOL_CALL, index, _text(call, "id"), name), arguments


def _usage(given: object) -> AnswerUsage | None:
    if not isinstance(given, dict):
        return None
    prompt, answer = given.get("prompt_tokens_details"), given.get("completion_tokens_details")
    return AnswerUsage(
        count_in(given, "prompt_tokens") or 0,
        count_in(prompt, "cached_tokens") or 0,
        count_in(given, "completion_tokens") or 0,
        count_in(answer, "reasoning_tokens") or 0,
    )


def _text(holder: object, name: str) -> str:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, str) else ""
