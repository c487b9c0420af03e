"""What an engine tells of an answer that another is to go on with: its tokens."""

from __future__ import annotations

import re

import msgspec

TOKEN_IDS = re.compile(r"(?:[A-Za-z0-9+/]{4})+")
# Base64 of a token's three bytes.
TOKEN_ID_CHARS = 4


class GeneratedTokens(msgspec.Struct, gc=False):
    """Ids in base64, and what is to be told of them besides."""

    prompt_token_ids: str
    output_token_ids: str
    spoken: int = 0
    logprobs: msgspec.Raw = msgspec.Raw(b"")

    @property
    def is_sound(self) -> bool:
        """None of it is said, and there is something to go on with."""
        told = (self.prompt_token_ids, self.output_token_ids)
        return not self.spoken and all(map(TOKEN_IDS.fullmatch, told))


class _Params(msgspec.Struct, gc=False):
    begun: GeneratedTokens


_params = msgspec.json.Decoder(_Params).decode


def read_generated_tokens(params: bytes) -> GeneratedTokens | None:
    """Of kv_transfer_params. What makes no sense is not gone on with."""
    try:
        begun = _params(params).begun
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return begun if begun.is_sound else None
