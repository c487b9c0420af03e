"""The answer of a prefill engine, and its KV transfer params.

The router sends the kv_transfer_params to the decode engine byte for byte. They grow with the
prompt (a list of blocks, a hash for each), and the router itself needs little of them.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson
from msgspec import Struct

from router.common.exact_json import dumps, loads
from router.http_client.errors import BrokenAnswerError
from router.openai.answers import (
    ABORT_VALUE,
    ERROR_KEY,
    REJECTION_VALUE,
    TOKEN_ID_CHARS,
    read_generated_tokens,
)

Body = dict[str, Any]
ABSENT = msgspec.Raw(b"null")
EMPTY = (b"null", b"[]")
PREFIX_HASHES_KEY, GENERATED_TOKENS_KEY = b'"prefix_proof"', b'"begun"'
# Base64 of three bytes for each id.
PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*"((?:[A-Za-z0-9+/]{4})+)"')


class KvParams(Struct, frozen=True):
    """The kv_transfer_params of a leg."""

    raw: bytes
    """A JSON object that is not empty."""
    continues_tokens: bool = False
    """The decode engine is to continue from the tokens in the params, if it can."""

    @property
    def content(self) -> Body:
        """The parsed params; empty for what only a lenient JSON parser accepts."""
        content = _read(self.raw)
        return content if isinstance(content, dict) else {}

    @property
    def has_prefix_hashes(self) -> bool:
        """The params contain hashes that show which tokens the blocks hold (engine_ext)."""
        is_mentioned = self.raw.find(PREFIX_HASHES_KEY) >= 0
        return is_mentioned and isinstance(self.content.get("prefix_proof"), dict)

    @property
    def fragment(self) -> orjson.Fragment:
        """The params as a part of a body that orjson writes."""
        return orjson.Fragment(self.raw)

    @property
    def has_generated_tokens(self) -> bool:
        return self.raw.find(GENERATED_TOKENS_KEY) >= 0

    @property
    def has_one_token(self) -> bool:
        """The params contain exactly one generated token, and the ids of the prompt."""
        begun = read_generated_tokens(self.raw)
        return begun is not None and len(begun.output_token_ids) == TOKEN_ID_CHARS

    def without_generated_tokens(self) -> KvParams:
        """Return params for a decode engine that cannot continue from the tokens, or whose token
        ids have another meaning."""
        content = {name: value for name, value in self.content.items() if name != "begun"}
        return KvParams(dumps(content))


def with_field(params: KvParams | None, field: bytes) -> KvParams:
    if params is None:
        return KvParams(b"{%s}" % field)
    return KvParams(b"%s,%s}" % (params.raw[:-1], field), params.continues_tokens)


class _PrefilledChoice(msgspec.Struct):
    finish_reason: str | None = None


class _PrefillFields(msgspec.Struct):
    choices: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    usage: msgspec.Raw = ABSENT
    error: Any = None
    object: Any = None
    type: Any = None


_decode_answer = msgspec.json.Decoder(_PrefillFields).decode
_decode_choices = msgspec.json.Decoder(list[_PrefilledChoice]).decode


class PrefillAnswer:
    """The answer of a prefill engine.

    `params` is None if the engine sent none; `usage` is JSON as the engine wrote it. `raw` is the
    whole answer. `is_whole_answer` is True if the one token of the
    engine ends the answer. `may_fail` is False if the answer certainly reports no failure.
    """

    __slots__ = (
        "_choices", "is_whole_answer", "may_fail", "mentions_prefix_hashes", "params", "raw",
        "usage",
    )  # fmt: skip

    def __init__(self, answer: bytes) -> None:
        """Raises BrokenAnswerError if `answer` is not a JSON object, or has neither params nor
        choices."""
        try:
            content = _decode_answer(answer)
            given = bytes(content.kv_transfer_params)
            given.decode()  # msgspec does not check the encoding of a raw value
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenAnswerError(f"not a JSON object: {error}") from error
        # The start shows whether they are empty; they may be large.
        is_some = given[:1] == b"{" and given[1:64].strip(b" \t\r\n") not in (b"", b"}")
        self.params = KvParams(given) if is_some else None
        choices = bytes(content.choices)
        if self.params is None and choices.translate(None, b" \t\r\n") in EMPTY:
            raise BrokenAnswerError("an answer without choices")
        self.usage, self._choices = bytes(content.usage), choices
        is_error = content.error or "error" in (content.object, content.type)
        self.may_fail = bool(
            is_error
            or choices.find(ERROR_KEY) >= 0  # `in` costs three times as much for bytes
            or choices.find(ABORT_VALUE) >= 0
            or choices.find(REJECTION_VALUE) >= 0
        )
        self.mentions_prefix_hashes = given.rfind(PREFIX_HASHES_KEY) >= 0
        self.raw = answer
        self.is_whole_answer = False

    def prepare_hand_over(self) -> str:
        """Prepare the hand-over of the token that the engine has sampled.

        The token becomes the first one of the answer, or the whole answer (`is_whole_answer`).
        Return the metric label of the outcome.
        """
        params, finish = self.params, None
        try:
            (choice,) = _decode_choices(self._choices)
            finish = choice.finish_reason
        except (msgspec.DecodeError, ValueError):  # not exactly one choice
            pass
        if params is None or not params.has_generated_tokens:
            return "no_token"
        if finish not in ("stop", "length") or not params.has_one_token:
            self.params = params.without_generated_tokens()
            return "no_token"
        self.is_whole_answer = finish == "stop"
        self.params = KvParams(params.raw, continues_tokens=True)
        return "ended" if self.is_whole_answer else "continued"


def _read(raw: bytes) -> object:
    try:
        return loads(raw)
    except orjson.JSONDecodeError:
        return None
