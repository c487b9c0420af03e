"""The kv_transfer_params of the legs.

The router sends the kv_transfer_params to the decode engine byte for byte. They grow with the
prompt (a list of blocks, a hash for each), and the router itself needs little of them.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
from msgspec import Struct

from router.common.exact_json import dumps, loads
from router.openai.answers import (
    TOKEN_ID_CHARS,
    read_generated_tokens,
)

Body = dict[str, Any]
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


def _read(raw: bytes) -> object:
    try:
        return loads(raw)
    except orjson.JSONDecodeError:
        return None
