"""Text of a growing list of tokens, piece by piece, never half a character."""

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
"""Decoders look at the token before (a leading space is only one at the very start), and one
character spans at most four tokens."""
_WINDOW_TOKENS = 24


class Detokenizer:
    """The pieces concatenated, `flush` included, are the text of all tokens.

    Only a window of tokens is decoded again at each step. A trailing U+FFFD may be an unfinished
    character (at most three bytes of one) and is kept back until the next token decides.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._text = self._decode(self._window)
        self._given = len(self._text)
        """Characters of `_text` that left already."""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._text = self._decode(self._window)
        piece = self._give(len(self._text) - _num_undecided(self._text))
        if len(self._window) >= _WINDOW_TOKENS:
            self._slide()
        return piece

    def flush(self) -> str:
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _slide(self) -> None:
        tail = self._decode(self._window[-_CONTEXT_TOKENS:])
        if self._text.endswith(tail):
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._given -= len(self._text) - len(tail)
            self._text = tail

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _num_undecided(text: str) -> int:
    tail = text[-3:]
    return len(tail) - len(tail.rstrip(_REPLACEMENT))
