"""The visible side of a sequence: its text so far, and whether the newest token ends it."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from engine_ext.reference.messages import LENGTH, Finish, SamplingParams, stopped

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


class Scanned(NamedTuple):
    text: str
    """What may leave."""
    matched: str | None
    """The stop string that ended the text."""


class StopStrings:
    """Keeps back exactly the text that may still become a stop string."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include_in_output
        self._held = ""

    def scan(self, piece: str) -> Scanned:
        text = self._held + piece
        first = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None
        )
        if first is not None:
            at, stop = first
            self._held = ""
            return Scanned(text[: at + len(stop) if self._include else at], stop)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return Scanned(text[:cut], None)

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, `stop` itself left out."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class StopRules(NamedTuple):
    """What ends any sequence of this engine."""

    eos_token_ids: frozenset[int]
    max_model_len: int


class Accepted(NamedTuple):
    text: str
    finish: Finish | None


class GeneratedAnswer:
    """`hands_over`: where it ends because it was to have no more tokens, another engine goes on,
    and says what is held back here."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        rules: StopRules,
        *,
        hands_over: bool = False,
    ) -> None:
        self._sampling = sampling
        self._rules = rules
        self._hands_over = hands_over
        self._num_output_tokens = 0
        self._room = rules.max_model_len - len(prompt_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stops = StopStrings(
            sampling.stop, include_in_output=sampling.include_stop_str_in_output
        )

    def accept(self, token_id: int) -> Accepted:
        """The sequence's next token."""
        self._num_output_tokens += 1
        finish = self._stop_token(token_id)
        visible = finish is None or self._sampling.include_stop_str_in_output
        text, matched = self._scan(self._detokenizer.push(token_id) if visible else "")
        if matched is not None and finish is None:
            return Accepted(text, stopped(matched))
        finish = finish or self._length()
        return Accepted(text + self._flush() if self._is_over(finish) else text, finish)

    def _scan(self, piece: str) -> tuple[str, str | None]:
        if self._num_output_tokens <= self._sampling.min_tokens:
            return piece, None
        return self._stops.scan(piece)

    def _flush(self) -> str:
        return self._stops.flush() + self._detokenizer.flush()

    def _is_over(self, finish: Finish | None) -> bool:
        """For whoever goes on with it, too."""
        if finish is LENGTH and self._hands_over:
            return self._num_output_tokens >= self._room
        return finish is not None

    def _stop_token(self, token_id: int) -> Finish | None:
        sampling = self._sampling
        if self._num_output_tokens <= sampling.min_tokens and sampling.grammar is None:
            return None  # Never sampled so early; given, it ends nothing.
        if token_id in self._rules.eos_token_ids and not sampling.ignore_eos:
            return stopped()
        return stopped(token_id) if token_id in sampling.stop_token_ids else None

    def _length(self) -> Finish | None:
        most = min(self._room, self._sampling.max_tokens)
        return LENGTH if self._num_output_tokens >= most else None
