"""The tokens of an unfinished answer, which an engine returns for another one to continue."""

from __future__ import annotations

import re

import msgspec

TOKEN_IDS = re.compile(r"(?:[A-Za-z0-9+/]{4})+")
# A token id has three bytes, which are four characters in base64.
TOKEN_ID_CHARS = 4


class GeneratedTokens(msgspec.Struct, gc=False):
    """Token ids in base64, three bytes each. `spoken` counts the tokens that the client has;
    `logprobs` are the log-probabilities of the others. The names are those of the wire format."""

    prompt_token_ids: str
    output_token_ids: str
    spoken: int = 0
    logprobs: msgspec.Raw = msgspec.Raw(b"")

    @property
    def is_resumable(self) -> bool:
        """True if the client has none of the tokens, and the ids are well formed and not empty."""
        ids = (self.prompt_token_ids, self.output_token_ids)
        return not self.spoken and all(map(TOKEN_IDS.fullmatch, ids))


class _Params(msgspec.Struct, gc=False):
    begun: GeneratedTokens


_params = msgspec.json.Decoder(_Params).decode


def read_generated_tokens(params: bytes) -> GeneratedTokens | None:
    """Read them from kv_transfer_params, or return None if no engine can continue from them."""
    try:
        begun = _params(params).begun
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return begun if begun.is_resumable else None
