"""Log-probabilities in the two dialects of OpenAI's API."""

from collections.abc import Sequence
from typing import Any

from engine_ext.reference.messages import TokenLogprob
from engine_ext.reference.tokenizer import Tokenizer

LOWEST = -9999.0
"""JSON has no infinity; OpenAI and vLLM write this."""


class TokenNames:
    """How a token is written: its text, or `token_id:<id>` where the client wants that."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def content(self, token_id: int) -> list[int]:
        if self._as_ids:
            return list(self(token_id).encode())
        return list(self._tokenizer.token_bytes(token_id))


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], names: TokenNames, offset: int
) -> dict[str, Any]:
    """`offset`: characters of the answer before the first of these tokens."""
    tokens = [names(entry.token_id) for entry in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [max(entry.logprob, LOWEST) for entry in logprobs],
        "tokens": tokens,
        "top_logprobs": [_top(entry, names) for entry in logprobs],
    }


def _top(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The chosen token first, then the best ones. Of tokens with one name the best stays."""
    top = {names(entry.token_id): max(entry.logprob, LOWEST)}
    for token_id, logprob in entry.top:
        top.setdefault(names(token_id), max(logprob, LOWEST))
    return top


def chat_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_token(entry.token_id, entry.logprob, names),
                "top_logprobs": [_chat_token(*alternative, names) for alternative in entry.top],
            }
            for entry in logprobs
        ]
    }


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names(token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": names.content(token_id),
    }
