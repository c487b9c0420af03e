"""What a prefiller's answer says.

Its kv_transfer_params go to the decoder byte by byte as they came, whatever is in them: they grow
with the prompt (a list of blocks, a hash for each), and nobody here needs most of it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson

from router.common.exact_json import dumps, loads
from router.common.structs import FrozenStruct
from router.http_client.errors import BrokenAnswerError
from router.openai.answers import (
    TOKEN_ID_CHARS,
    cached_tokens_of,
    prompt_tokens_of,
    read_generated_tokens,
)
from router.proxy.first_token import LENGTH, STOP, finish_reason_of

Body = dict[str, Any]
ABSENT = msgspec.Raw(b"null")
NOTHING = (b"null", b"[]")
PREFIX_PROOF_KEY, GENERATED_TOKENS_KEY = b'"prefix_proof"', b'"begun"'
# Base64 of three bytes for each id.
PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*"((?:[A-Za-z0-9+/]{4})+)"')


class KvParams(FrozenStruct, frozen=True):
    """kv_transfer_params: `raw` is a JSON object, and not an empty one. `begins`: a decoder that
    can is to go on from the tokens that they tell."""

    raw: bytes
    continues_tokens: bool = False

    @property
    def content(self) -> Body:
        """Read when it is asked for; empty where it is JSON only to a lenient reader."""
        content = _read(self.raw)
        return content if isinstance(content, dict) else {}

    @property
    def mentions_prefix_proof(self) -> bool:
        return self.raw.find(PREFIX_PROOF_KEY) >= 0

    @property
    def has_prefix_proof(self) -> bool:
        """The engine says by hashes which tokens its blocks hold, as ours do."""
        return self.mentions_prefix_proof and isinstance(self.content.get("prefix_proof"), dict)

    @property
    def fragment(self) -> orjson.Fragment:
        """To be written as a part of a body."""
        return orjson.Fragment(self.raw)

    def with_retain(self) -> KvParams:
        """The decoder is to keep its answer's KV; stock vLLM ignores the key."""
        return with_field(self, b'"retain":true')

    def without_retain(self) -> KvParams:
        """Nobody will ask for it. Our decoders keep it where nothing is said, for other proxies."""
        return with_field(self, b'"retain":false')

    @property
    def has_generated_tokens(self) -> bool:
        return self.raw.find(GENERATED_TOKENS_KEY) >= 0

    @property
    def has_one_token(self) -> bool:
        """In the form that was agreed on, and the prompt's before it."""
        begun = read_generated_tokens(self.raw)
        return begun is not None and len(begun.output_token_ids) == TOKEN_ID_CHARS

    def without_generated_tokens(self) -> KvParams:
        """For a decoder that cannot, or that reads ids in another way."""
        content = {name: value for name, value in self.content.items() if name != "begun"}
        return KvParams(dumps(content))


def with_field(params: KvParams | None, field: bytes) -> KvParams:
    if params is None:
        return KvParams(b"{%s}" % field)
    return KvParams(b"%s,%s}" % (params.raw[:-1], field), params.continues_tokens)


RETAIN = KvParams(b'{"retain":true}')


class _Answer(msgspec.Struct):
    choices: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    usage: msgspec.Raw = ABSENT


_decode = msgspec.json.Decoder(_Answer).decode


class PrefillAnswer:
    """A prefiller's answer: its params, if it gave any."""

    __slots__ = ("_choices", "_usage", "is_whole_answer", "params", "raw")

    def __init__(self, answer: bytes) -> None:
        """Raises BrokenAnswerError for what is no JSON object."""
        try:
            content = _decode(answer)
            given = bytes(content.kv_transfer_params)
            given.decode()  # the one thing that was not looked at
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenAnswerError(f"not a JSON object: {error}") from error
        is_some = given.startswith(b"{") and given[1:-1].strip(b" \t\r\n")
        self.params = KvParams(given) if is_some else None
        self._usage, self._choices = content.usage, content.choices
        self.raw = answer
        self.is_whole_answer = False

    def keep_params(self) -> None:
        """Forget all but the params, which alone are needed while a decoder answers."""
        self.raw = b""
        self._usage = self._choices = ABSENT

    def prepare_hand_over(self) -> str:
        """Makes of what it has sampled the answer's beginning, or all of it (`is_all`), where it
        can be. Says which, for the books."""
        params, finish = self.params, finish_reason_of(bytes(self._choices))
        if params is None or not params.has_generated_tokens:
            return "not_told"
        if finish not in (STOP, LENGTH) or not params.has_one_token:
            self.params = params.without_generated_tokens()
            return "not_told"
        self.is_whole_answer = finish == STOP
        self.params = KvParams(params.raw, continues_tokens=True)
        return "ended" if self.is_whole_answer else "went_on"

    @property
    def is_empty(self) -> bool:
        """It has neither KV to give nor an answer."""
        return self.params is None and bytes(self._choices).translate(None, b" \t\r\n") in NOTHING

    @property
    def usage(self) -> bytes:
        """As it came."""
        return bytes(self._usage)

    @property
    def prompt_tokens(self) -> int | None:
        """How long the prompt was, if it says so."""
        return prompt_tokens_of({"usage": self._said_usage()})

    @property
    def cached_tokens(self) -> int | None:
        """How much of it the prefiller had, if it says so."""
        return cached_tokens_of({"usage": self._said_usage()})

    def _said_usage(self) -> object:
        return _read(bytes(self._usage))


def _read(raw: bytes) -> object:
    try:
        return loads(raw)
    except orjson.JSONDecodeError:
        return None
