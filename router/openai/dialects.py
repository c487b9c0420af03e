"""What the dialects share: checks of their requests, and an engine's chat answer as blocks. Pure.

A dialect is another API than chat completions: OpenAI's Responses (`responses`), or Anthropic's
Messages (`anthropic_messages`). Dialects stream blocks of reasoning, text and tool calls that
begin, grow and end, so each piece of a chat answer is translated to such steps. Unstreamed answers
are translated from the list of all blocks.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from sys import getsizeof
from typing import Any, NamedTuple

import msgspec
import orjson

from router.common.exact_json import dumps
from router.openai.answers import Json, count_in
from router.openai.errors import BadRequestError
from router.openai.request_fields import (
    FIELD_TYPES,
    STREAM,
    STREAM_OPTIONS,
    USAGE,
    field_problem,
    read_fields,
)

COMPLETE_FINISH_REASONS = frozenset(
    ("stop", "length", "tool_calls", "function_call", "content_filter")
)
# Finish reasons of an answer that the engine has broken off.
FAILED_FINISH_REASONS = frozenset(("abort", "error", "cache_threshold"))
# Hints of clients that only the makers of the dialects act on: they do not go to engines.
# fmt: off
CLIENT_HINTS = frozenset((
    "anthropic_beta", "anthropic_version", "betas", "client_metadata", "diagnostics", "fallbacks",
    "inference_geo", "metadata", "safety_identifier", "service_tier", "speed", "user_profile_id",
))
# fmt: on
# How many kinds of tools one phrase for the log names.
MAX_NAMED_KINDS = 16
MAX_ANSWER_CHARS = 16 * 1024 * 1024
# How much memory one byte of JSON takes where objects are as small as log-probabilities.
MEMORY_PER_JSON_BYTE = 8
# The size of a block without its text, in characters and bytes.
BLOCK_SIZE = 512
_skip = msgspec.json.Decoder(msgspec.Raw).decode
# Characters of a piece that is first tried as a whole JSON value.
LONG_CHARS = 4096
# The tokens that change the depth of JSON text; a lone backslash ends a piece.
JSON_TOKENS = re.compile(r'\\.|\\\Z|["{}\[\]]', re.DOTALL)


# Requests. `where` is the path of the object that has the field, empty for the body.


def field_error(where: str, why: str) -> BadRequestError:
    return BadRequestError(f"{where}: {why}", where)


def unsupported_type(where: str, what: str, kind: object) -> BadRequestError:
    return field_error(where, f"{of_type(what, kind)} are not supported")


def of_type(what: str, kind: object) -> str:
    """Return a phrase for an error or a log line about things of this kind."""
    return f"{what} of type {repr(kind[:80]) if isinstance(kind, str) else 'none'}"


def require_text(holder: Json, name: str, where: str = "") -> str:
    if not isinstance(value := holder.get(name), str):
        raise field_error(_path(where, name), "must be a string")
    return value


def read_flag(holder: Json, name: str, where: str = "") -> bool | None:
    """Return a boolean as vLLM reads it, None if the field is absent or null."""
    value = holder.get(name)
    if value is not None and (why := field_problem(value, bool)):
        raise field_error(_path(where, name), why)
    flags: Json = read_fields({name: value}, {name: bool})
    flag: bool | None = flags[name]
    return flag


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


class LeftOut(set[str]):
    """Phrases for the kinds of what a translation leaves out: as many as a log names. A request may
    have millions."""

    def add(self, phrase: str, /) -> None:
        if len(self) < MAX_NAMED_KINDS:
            super().add(phrase)


def read_dialect_fields(body: Json) -> Json:
    """Return the body with the fields that the router acts on as vLLM reads them.

    Raises BadRequestError for other values, and for several answers: the dialects have one.
    """
    for name, kind in FIELD_TYPES.items():
        value = body.get(name)
        if value is not None and (why := field_problem(value, kind)):
            raise field_error(name, why)
    body = read_fields(body)
    if body.get("n") not in (None, 1):
        raise field_error("n", "only one answer is supported")
    return body


def start_chat(
    body: Json,
    translated: Container[str],
    unsupported: Iterable[str],
    translate_tool: Callable[[Json, str], Json | None],
    left_out: set[str],
) -> Json:
    """Return the part of a chat request that all dialects translate alike: the fields that are not
    `translated`, the tools and the options of a stream. Raises BadRequestError.

    Tools for which `translate_tool` returns None are left out, and `left_out` receives a phrase for
    each kind of them. They must stand beside others: a model that has none of its tools would
    answer something else.
    """
    for name in unsupported:
        if body.get(name):
            raise field_error(name, "is not supported")
    chat: Json = {
        name: body[name] for name in body if name not in translated and name not in CLIENT_HINTS
    }
    if body.get(STREAM):
        chat[STREAM], chat[STREAM_OPTIONS] = True, {**USAGE}
    if body.get("tools"):
        chat["tools"] = []
        kinds: set[str] = set()
        for tool, where in require_objects(body, "tools"):
            if (made := translate_tool(tool, where)) is not None:
                chat["tools"].append(made)
            else:
                kinds.add(repr(tool.get("type"))[:80])
        if not chat["tools"]:
            raise unsupported_type("tools[0]", "tools", body["tools"][0].get("type"))
        if kinds:
            left_out.add(f"tools of type {', '.join(sorted(kinds)[:MAX_NAMED_KINDS])}")
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


def arguments_text(arguments: Json, where: str) -> str:
    """Return the JSON text of a tool call's arguments. Raises BadRequestError."""
    try:
        return dumps(arguments).decode()
    except orjson.JSONEncodeError:
        raise field_error(where, "nested too deep") from None


def tool_call(id: str, name: str, arguments: str) -> Json:
    """Return a tool call of an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Answers.


class UntranslatableError(ValueError):
    """An answer or a chunk has no form that is known, so a part of it would be lost."""


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    TOOL_CALL = auto()


# The fields of a message with a text; the first one that has some counts.
TEXT_FIELDS = {
    BlockKind.REASONING: ("reasoning", "reasoning_content"),
    BlockKind.TEXT: ("content", "refusal"),
}


class StepKind(Enum):
    BEGIN = auto()
    EXTEND = auto()
    END = auto()


class JsonDepth:
    """Finds the end of JSON text that arrives in pieces.

    `is_complete` is True once all objects and lists that began have ended. `first` is the first
    character that is no space.
    """

    __slots__ = ("_carried", "_depth", "_in_string", "first", "is_complete")

    def __init__(self) -> None:
        self.first, self.is_complete = "", False
        self._depth, self._in_string, self._carried = 0, False, ""

    def feed(self, text: str) -> None:
        first = text.lstrip()[:1]
        self.first = self.first or first
        is_between = not (self._depth or self._in_string or self._carried)
        if is_between and len(text) > LONG_CHARS and _is_json(text):  # saves a second for 10 MB
            self.is_complete = self.is_complete or first in "{["
            return
        text, self._carried = self._carried + text, ""
        for found in JSON_TOKENS.finditer(text):
            token = found.group()
            if token == "\\":
                self._carried = token
            elif token == '"':
                self._in_string = not self._in_string
            elif len(token) == 1 and not self._in_string:
                self._depth += 1 if token in "{[" else -1
                self.is_complete = self.is_complete or self._depth == 0


def _is_json(text: str) -> bool:
    """Return True for one whole JSON value, which is read without building objects."""
    try:
        _skip(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


@dataclass(slots=True)
class AnswerBlock:
    """One block. `number` counts the blocks of the answer, and is set when the block begins; `call`
    is the engine's index of a tool call; `sent` is how many of the parts were passed on. `logprobs`
    are those of a text's tokens, by the number of the part."""

    kind: BlockKind
    call: int = -1
    id: str = ""
    name: str = ""
    number: int = -1
    sent: int = 0
    parts: list[str] = field(default_factory=list)
    arguments: JsonDepth = field(default_factory=JsonDepth)
    logprobs: dict[int, list[object]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def append(self, text: str, logprobs: list[object]) -> None:
        if logprobs:
            self.logprobs[len(self.parts)] = logprobs
        self.parts.append(text)
        if self.kind is BlockKind.TOOL_CALL:
            self.arguments.feed(text)


class BlockStep(NamedTuple):
    kind: StepKind
    block: AnswerBlock
    text: str = ""
    logprobs: Sequence[object] = ()


class AnswerUsage(NamedTuple):
    """Counts of tokens."""

    prompt: int = 0
    cached: int = 0
    """Prompt tokens that were read from a cache."""
    written: int = 0
    """Prompt tokens that were written to a cache."""
    answer: int = 0
    reasoning: int = 0


class AnswerBlocks:
    """The blocks of one answer as they arrive.

    Only one block is open at a time, as in the dialects' own streams: clients may rely on it. The
    pieces of tool calls can be mixed, so a block waits until all blocks before it have ended. Text
    ends when another block follows; a tool call ends when its arguments are complete and another
    block follows, or with the answer. A tool call begins once its id and its name are known.

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
        self.memory = 0
        # Log-probabilities of tokens that belong to no piece so far.
        self._waiting_logprobs: list[object] = []
        # How many blocks have ended, the first ones of `blocks`.
        self._ended = 0
        # Tool calls by index and id, and the latest one of an index under an empty id.
        self._calls: dict[tuple[int, str], AnswerBlock] = {}
        self._size = 0

    def add(self, content: Json) -> Iterator[BlockStep]:
        """Add a whole answer or one chunk of a stream. Raises UntranslatableError before the first
        step."""
        if self.error is not None:
            return
        error = content.get("error")
        if error is not None and not content.get("choices"):
            self.error = error if isinstance(error, dict) else {"message": str(error)[:1000]}
            return
        self.model = self.model or _text(content, "model")
        self.usage = _usage(content.get("usage")) or self.usage
        # These dialects have only the first choice.
        choices = _objects(content, "choices")
        choice = next((one for one in choices if one.get("index") in (0, None)), {})
        message = _object(choice, "delta") or _object(choice, "message")
        pieces = list(_pieces(message))
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            of_text = self._logprobs_of_text(pieces, logprobs["content"])
        else:
            of_text = []
        for block, text in pieces:
            yield from self._add_piece(block, text, of_text)
        if finish := _text(choice, "finish_reason"):
            self.finish_reason, self.stop_reason = finish, choice.get("stop_reason")

    def close(self) -> Iterator[BlockStep]:
        """End the answer: end all blocks, and set `error` if the answer is incomplete."""
        is_cut = self.finish_reason is None or self.finish_reason in FAILED_FINISH_REASONS
        if is_cut and self.error is None:
            self.error = {"message": "the answer ended early", "type": "BadGatewayError"}
        self.blocks = [block for block in self.blocks if self._is_kept(block)]
        yield from self._advance(is_over=True)

    def _is_kept(self, block: AnswerBlock) -> bool:
        """Return False for a block that has not begun by the end, and never will: a tool call of
        which only the id came, and what waited when the answer failed."""
        if block.number >= 0:
            return True
        is_empty = block.kind is BlockKind.TOOL_CALL and not block.name and not block.parts
        return self.error is None and not is_empty

    @property
    def has_unknown_finish(self) -> bool:
        """True if the finish reason is unknown, so that the answer may be incomplete."""
        reason = self.finish_reason
        return self.error is None and reason is not None and reason not in COMPLETE_FINISH_REASONS

    @property
    def has_tool_calls(self) -> bool:
        return any(block.kind is BlockKind.TOOL_CALL for block in self.blocks)

    def _logprobs_of_text(
        self, pieces: list[tuple[AnswerBlock, str]], given: list[object]
    ) -> list[object]:
        """Return those of the log-probabilities that belong to the piece of text.

        Engines give them for all tokens: for those of reasoning, of tool calls and of the tags
        around them, too. A token may come before its text, if a parser had to wait for more.
        """
        try:
            size = len(dumps(given))
        except orjson.JSONEncodeError:  # nested beyond 250 levels: they could not be sent
            return []
        self._size += size
        if self._size > MAX_ANSWER_CHARS:
            return []
        self.memory += size * MEMORY_PER_JSON_BYTE
        if not pieces:
            self._waiting_logprobs += given
            return []
        candidates, self._waiting_logprobs = [*self._waiting_logprobs, *given], []
        texts = {piece.kind: text for piece, text in pieces}
        text = texts.get(BlockKind.TEXT)
        if text is None:
            return []
        before = "" if BlockKind.TOOL_CALL in texts else None
        found = _find_tokens(candidates, text, texts.get(BlockKind.REASONING, before))
        if found is None and len(texts) == 1:
            is_plain = all(block.kind is BlockKind.TEXT for block in self.blocks)
            return candidates if is_plain else given
        return found or []

    def _add_piece(
        self, piece: AnswerBlock, text: str, of_text: list[object]
    ) -> Iterator[BlockStep]:
        """Add a text to the block that it extends, or to `piece` as a new block."""
        block = self._extended_by(piece, text)
        size = len(text) if block else len(text) + BLOCK_SIZE + len(piece.id) + len(piece.name)
        self._size += size
        # An answer is many small strings.
        self.memory += getsizeof(text) + size - len(text)
        if self._size > MAX_ANSWER_CHARS:
            self.error = {"message": "the answer is too large", "type": "BadGatewayError"}
            return
        if block is None:
            block = piece
            self.blocks.append(block)
        elif block.number < 0:
            block.id, block.name = block.id or piece.id, block.name or piece.name
        if block.kind is BlockKind.TOOL_CALL:
            self._calls[block.call, block.id] = self._calls[block.call, ""] = block
        if text and not (block.number >= 0 and block.number < self._ended):
            block.append(text, of_text if block.kind is BlockKind.TEXT else [])
        yield from self._advance()

    def _extended_by(self, piece: AnswerBlock, text: str) -> AnswerBlock | None:
        """Return the block that the piece extends: the last one, or any tool call, by its index
        and its id."""
        if piece.kind is not BlockKind.TOOL_CALL:
            is_last = bool(self.blocks) and self.blocks[-1].kind is piece.kind
            return self.blocks[-1] if is_last else None
        if piece.id and (piece.call, piece.id) in self._calls:
            return self._calls[piece.call, piece.id]
        call = self._calls.get((piece.call, ""))
        return None if call is None or _is_another_call(piece, text, call) else call

    def _advance(self, is_over: bool = False) -> Iterator[BlockStep]:
        """Yield the steps that are due: none of a block before the one before it has ended."""
        while self._ended < len(self.blocks):
            block, is_last = self.blocks[self._ended], self._ended + 1 == len(self.blocks)
            is_call = block.kind is BlockKind.TOOL_CALL
            if is_call and not (block.id and block.name) and not is_over:
                return
            if block.number < 0:
                block.number = self._ended
                if is_call:
                    block.id = block.id or f"call_{secrets.token_hex(12)}"
                yield BlockStep(StepKind.BEGIN, block)
            is_open = not is_over and (is_last or (is_call and not block.arguments.is_complete))
            if is_call and is_open and block.arguments.first in ("", "n"):
                return  # nothing yet, or `null`, which becomes an empty object
            is_bare = is_call and block.sent == 0 and block.text.strip() in ("", "null")
            if is_bare and not is_open and self.error is None:
                block.parts = ["{}"]
            while block.sent < len(block.parts):
                part = block.sent
                block.sent += 1
                logprobs = block.logprobs.get(part, ())
                yield BlockStep(StepKind.EXTEND, block, block.parts[part], logprobs)
            if is_open:
                return
            self._ended += 1
            yield BlockStep(StepKind.END, block)


def _is_another_call(piece: AnswerBlock, text: str, call: AnswerBlock) -> bool:
    """Return True if a piece with the index of `call`, and no id that is known, begins another one.

    Its id alone does not show it: some engines send a new id with each piece of a call's arguments.
    """
    is_complete = call.arguments.is_complete
    if piece.id and call.id:
        return bool(piece.name) or not text or is_complete
    return bool(is_complete and call.name and piece.name and text.strip())


def _find_tokens(logprobs: list[object], text: str, before: str | None) -> list[object] | None:
    """Return the log-probabilities of the tokens that make up `text`, None if it is not there.

    The text is the first one after `before`, or the last one if `before` is None.
    """
    tokens = [_text(entry, "token") for entry in logprobs]
    joined = "".join(tokens)
    if before is None:
        start = joined.rfind(text)
    else:
        place = joined.find(before)
        start = joined.find(text, place + len(before) if place >= 0 else 0)
    if start < 0:
        return None
    found, position = [], 0
    for entry, token in zip(logprobs, tokens, strict=True):
        end = position + len(token)
        # A token without a text is the first part of a character.
        if position < start + len(text) and (end > start or position == end == start):
            found.append(entry)
        position = end
    return found


class DialectOutput(ABC):
    """Writes an answer in a dialect."""

    def __init__(self, answer: AnswerBlocks) -> None:
        self._answer = answer
        self._has_begun = False

    def restart(self) -> None:
        """Forget the answer, of which the client has nothing yet, so that another can follow."""
        self._answer.reset()
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
    def heartbeat(self) -> Iterator[bytes]:
        """Yield events that keep a silent stream alive. Some clients count no comments."""

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
    for kind, names in TEXT_FIELDS.items():
        text = next(filter(None, map(message.get, names)), "")
        if not isinstance(text, str):
            raise UntranslatableError(f"{names[0]} is no text")
        if text:
            yield AnswerBlock(kind), text
    for number, call in enumerate(_objects(message, "tool_calls")):
        function, given = _object(call, "function"), call.get("index")
        index = given if type(given) is int else number
        piece = AnswerBlock(BlockKind.TOOL_CALL, index, _text(call, "id"), _text(function, "name"))
        if (arguments := _arguments_in(function)) or piece.id or piece.name:
            yield piece, arguments


def _arguments_in(function: Json) -> str:
    """Return the text of a call's arguments; some engines send an object instead of its text."""
    given = function.get("arguments") or ""
    if isinstance(given, str):
        return given
    try:
        return dumps(given).decode()
    except orjson.JSONEncodeError as error:  # nested beyond 250 levels
        raise UntranslatableError(str(error)) from error


def _object(holder: Json, name: str) -> Json:
    """Return an object, an empty one for an absent or empty value. Raises UntranslatableError."""
    value = holder.get(name) or {}
    if not isinstance(value, dict):
        raise UntranslatableError(f"{name} is no object")
    return value


def _objects(holder: Json, name: str) -> list[Json]:
    """Return a list of objects without those that are null. Raises UntranslatableError."""
    value = holder.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, dict | None) for one in value):
        raise UntranslatableError(f"{name} is no list of objects")
    return [one for one in value if one is not None]


def _usage(given: object) -> AnswerUsage | None:
    if not isinstance(given, dict):
        return None
    prompt, answer = given.get("prompt_tokens_details"), given.get("completion_tokens_details")
    return AnswerUsage(
        count_in(given, "prompt_tokens") or 0,
        count_in(prompt, "cached_tokens") or 0,
        count_in(prompt, "created_cache_tokens") or 0,
        count_in(given, "completion_tokens") or 0,
        count_in(answer, "reasoning_tokens") or 0,
    )


def _text(holder: object, name: str) -> str:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, str) else ""
