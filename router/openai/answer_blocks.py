"""An engine's chat answer as a list of blocks: reasoning, text and tool calls. Pure.

Other dialects stream blocks that begin, grow and end, so each piece of a chat answer is translated
to such steps. Unstreamed answers are translated from the list of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from sys import getsizeof
from typing import NamedTuple

import orjson

from router.common.exact_json import dumps
from router.openai.answers import Json

COMPLETE_FINISH_REASONS = frozenset(
    ("stop", "length", "tool_calls", "function_call", "content_filter")
)
# Finish reasons of an answer that the engine has broken off.
FAILED_FINISH_REASONS = frozenset(("abort", "error", "cache_threshold"))
MAX_ANSWER_CHARS = 16 * 1024 * 1024
# How much memory one byte of JSON takes where objects are as small as log-probabilities.
MEMORY_PER_JSON_BYTE = 8


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
    number: int
    call: int = -1
    id: str = ""
    name: str = ""
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


class BlockPiece(NamedTuple):
    kind: BlockKind
    text: str
    call: int = -1
    id: str = ""
    name: str = ""


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
        self.model = self.model or _text(content.get("model"))
        self.usage = _usage(content.get("usage")) or self.usage
        choice = _choice(content.get("choices"))
        message = choice.get("delta") or choice.get("message")
        for piece in _pieces(message) if isinstance(message, dict) else ():
            yield from self._add_piece(piece)
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            self._add_logprobs(logprobs["content"])
        if isinstance(finish := choice.get("finish_reason"), str) and finish:
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

    def _add_piece(self, piece: BlockPiece) -> Iterator[BlockStep]:
        self._size += len(piece.text)
        self.memory += getsizeof(piece.text)  # an answer is many small strings
        if self._size > MAX_ANSWER_CHARS:
            self.error = {"message": "the answer is too large", "type": "BadGatewayError"}
            return
        block = self._block_of(piece)
        if block is None:
            if self._open is not None:
                yield BlockStep(StepKind.END, self._open)
            block = AnswerBlock(piece.kind, len(self.blocks), piece.call, piece.id, piece.name)
            self.blocks.append(block)
            self._open = block
            yield BlockStep(StepKind.BEGIN, block)
        if piece.text:
            block.parts.append(piece.text)
            yield BlockStep(StepKind.EXTEND, block, piece.text)

    def _block_of(self, piece: BlockPiece) -> AnswerBlock | None:
        """Return the block that the piece extends: a tool call by its index, even if another block
        began after it."""
        if piece.kind is BlockKind.TOOL_CALL:
            calls = (block for block in self.blocks if block.kind is BlockKind.TOOL_CALL)
            return next((block for block in calls if block.call == piece.call), None)
        is_open = self._open is not None and self._open.kind is piece.kind
        return self._open if is_open else None


def _choice(choices: object) -> Json:
    """Return the first choice: these dialects have only one."""
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            return choice
    return {}


def _pieces(message: Json) -> Iterator[BlockPiece]:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        yield BlockPiece(BlockKind.REASONING, reasoning)
    text = message.get("content") or message.get("refusal")
    if isinstance(text, str) and text:
        yield BlockPiece(BlockKind.TEXT, text)
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            yield _piece_of_call(call, number)


def _piece_of_call(call: Json, number: int) -> BlockPiece:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    given = call.get("index")
    index = given if type(given) is int else number
    name, arguments = _text(function.get("name")), _text(function.get("arguments"))
    return BlockPiece(BlockKind.TOOL_CALL, arguments, index, _text(call.get("id")), name)


def _usage(given: object) -> AnswerUsage | None:
    if not isinstance(given, dict):
        return None
    prompt, answer = given.get("prompt_tokens_details"), given.get("completion_tokens_details")
    return AnswerUsage(
        _count(given, "prompt_tokens"),
        _count(prompt, "cached_tokens"),
        _count(given, "completion_tokens"),
        _count(answer, "reasoning_tokens"),
    )


def _count(given: object, name: str) -> int:
    value = given.get(name) if isinstance(given, dict) else None
    return value if type(value) is int else 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
