"""A chat answer as it is told, whole or in chunks: blocks of reasoning, text and calls of tools.

Pure. Each thing that arrives becomes steps (a block begins, goes on, ends), which is what other
dialects stream; and all of it together is what they answer in one piece.
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

# Finish reasons of an answer that is one, and of one that the engine has broken off.
FINISHES = frozenset(("stop", "length", "tool_calls", "function_call", "content_filter"))
BROKEN_OFF = frozenset(("abort", "error", "cache_threshold"))
# Characters that one answer may have, or it is not for us to keep together.
MOST = 16 * 1024 * 1024
# Bytes of memory for one of JSON, where objects are as small as log-probabilities are.
PER_BYTE = 8


class Kind(Enum):
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


class Does(Enum):
    BEGINS = auto()
    GOES_ON = auto()
    ENDS = auto()


@dataclass(slots=True)
class Block:
    """`number`: in the order that they began. `call`: of a call, the number that the engine gave
    it."""

    kind: Kind
    number: int
    call: int = -1
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Step(NamedTuple):
    does: Does
    block: Block
    text: str = ""


class Usage(NamedTuple):
    prompt: int = 0
    cached: int = 0
    answer: int = 0
    reasoning: int = 0


class Piece(NamedTuple):
    kind: Kind
    text: str
    call: int = -1
    id: str = ""
    name: str = ""


class Story:
    """`finish` and `stop` are the engine's finish_reason and stop_reason; `error` what it said of a
    failure, after which nothing counts."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was heard, and told to nobody: another engine answers."""
        self.blocks: list[Block] = []
        self.finish: str | None = None
        self.stop: object = None
        self.usage = Usage()
        self.model = ""
        self.error: Json | None = None
        self.logprobs: list[object] = []
        # Bytes of memory, roughly: text comes in many small strings.
        self.memory = 0
        self._open: Block | None = None
        self._size = 0

    def hear(self, content: Json) -> Iterator[Step]:
        """Of an answer, or of a chunk of one. Total: what makes no sense is left out."""
        if self.error is not None:
            return
        error = content.get("error")
        if error is not None and not content.get("choices"):
            self.error = error if isinstance(error, dict) else {"message": str(error)[:1000]}
            return
        self.model = self.model or _text(content.get("model"))
        self.usage = _usage(content.get("usage")) or self.usage
        choice = _choice(content.get("choices"))
        said = choice.get("delta") or choice.get("message")
        for piece in _pieces(said) if isinstance(said, dict) else ():
            yield from self._take(piece)
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            self._keep_logprobs(logprobs["content"])
        if isinstance(finish := choice.get("finish_reason"), str) and finish:
            self.finish, self.stop = finish, choice.get("stop_reason")

    def end(self) -> Iterator[Step]:
        """Nothing more will come."""
        if self._open is not None:
            block, self._open = self._open, None
            yield Step(Does.ENDS, block)
        is_cut = self.finish is None or self.finish in BROKEN_OFF
        if is_cut and self.error is None:
            self.error = {"message": "the answer ended early", "type": "BadGatewayError"}

    @property
    def is_odd(self) -> bool:
        """True for an unknown finish reason: the answer may be cut."""
        return self.error is None and self.finish is not None and self.finish not in FINISHES

    @property
    def has_calls(self) -> bool:
        return any(block.kind is Kind.CALL for block in self.blocks)

    def _keep_logprobs(self, given: list[object]) -> None:
        """Unless they cannot be said again: nested beyond 250 levels."""
        try:
            size = len(dumps(given))
        except orjson.JSONEncodeError:
            return
        self._size += size
        if self._size <= MOST:
            self.logprobs += given
            self.memory += size * PER_BYTE

    def _take(self, piece: Piece) -> Iterator[Step]:
        self._size += len(piece.text)
        self.memory += getsizeof(piece.text)
        if self._size > MOST:
            self.error = {"message": "the answer is too large", "type": "BadGatewayError"}
            return
        block = self._block_of(piece)
        if block is None:
            if self._open is not None:
                yield Step(Does.ENDS, self._open)
            number = len(self.blocks)
            block = Block(piece.kind, number, piece.call, piece.id, piece.name)
            self.blocks.append(block)
            self._open = block
            yield Step(Does.BEGINS, block)
        if piece.text:
            block.parts.append(piece.text)
            yield Step(Does.GOES_ON, block, piece.text)

    def _block_of(self, piece: Piece) -> Block | None:
        """What the piece goes on with; a call by its number, even if another one began since."""
        if piece.kind is Kind.CALL:
            same = (block for block in self.blocks if block.kind is Kind.CALL)
            return next((block for block in same if block.call == piece.call), None)
        is_open = self._open is not None and self._open.kind is piece.kind
        return self._open if is_open else None


def _choice(choices: object) -> Json:
    """The first one: these dialects know no other."""
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            return choice
    return {}


def _pieces(said: Json) -> Iterator[Piece]:
    thought = said.get("reasoning") or said.get("reasoning_content")
    if isinstance(thought, str) and thought:
        yield Piece(Kind.THOUGHT, thought)
    text = said.get("content") or said.get("refusal")
    if isinstance(text, str) and text:
        yield Piece(Kind.TEXT, text)
    calls = said.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            yield _piece_of_call(call, number)


def _piece_of_call(call: Json, number: int) -> Piece:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    given = call.get("index")
    index = given if type(given) is int else number
    name, arguments = _text(function.get("name")), _text(function.get("arguments"))
    return Piece(Kind.CALL, arguments, index, _text(call.get("id")), name)


def _usage(given: object) -> Usage | None:
    if not isinstance(given, dict):
        return None
    prompt, answer = given.get("prompt_tokens_details"), given.get("completion_tokens_details")
    return Usage(
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
