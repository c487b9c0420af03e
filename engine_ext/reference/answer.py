"""The visible side of a sequence: its text so far, and whether the newest token ends it."""

from typing import NamedTuple

from tokenizers import Tokenizer

from engine_ext.reference.detokenizer import Detokenizer
from engine_ext.reference.sequence import LENGTH, Finish, Sequence, stopped
from engine_ext.reference.stop_strings import StopStrings


class StopRules(NamedTuple):
    """What ends any sequence of this engine."""

    eos_token_ids: frozenset[int]
    max_model_len: int


class Accepted(NamedTuple):
    text: str
    finish: Finish | None


class Answer:
    def __init__(self, seq: Sequence, tokenizer: Tokenizer, rules: StopRules) -> None:
        self._seq = seq
        self._rules = rules
        self._detokenizer = Detokenizer(
            tokenizer,
            seq.prompt_token_ids,
            skip_special_tokens=seq.sampling.skip_special_tokens,
        )
        self._stops = StopStrings(
            seq.sampling.stop, include_in_output=seq.sampling.include_stop_str_in_output
        )

    def accept(self, token_id: int) -> Accepted:
        """`token_id` is already the last of the sequence's tokens."""
        finish = self._stop_token(token_id)
        visible = finish is None or self._seq.sampling.include_stop_str_in_output
        text, matched = self._scan(self._detokenizer.push(token_id) if visible else "")
        if matched is not None and finish is None:
            return Accepted(text, stopped(matched))
        finish = finish or self._length()
        return Accepted(text + self._flush() if finish else text, finish)

    def _scan(self, piece: str) -> tuple[str, str | None]:
        if self._seq.num_output_tokens <= self._seq.sampling.min_tokens:
            return piece, None
        return self._stops.scan(piece)

    def _flush(self) -> str:
        return self._stops.flush() + self._detokenizer.flush()

    def _stop_token(self, token_id: int) -> Finish | None:
        sampling = self._seq.sampling
        if token_id in self._rules.eos_token_ids and not sampling.ignore_eos:
            return stopped()
        return stopped(token_id) if token_id in sampling.stop_token_ids else None

    def _length(self) -> Finish | None:
        full = self._seq.num_tokens >= self._rules.max_model_len
        return (
            LENGTH if full or self._seq.num_output_tokens >= self._seq.sampling.max_tokens else None
        )
