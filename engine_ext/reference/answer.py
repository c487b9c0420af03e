"""The visible side of a sequence: its text so far, and whether the newest token ends it."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from engine_ext.reference.detokenizer import Detokenizer
from engine_ext.reference.finish import LENGTH, Finish, stopped
from engine_ext.reference.messages import SamplingParams
from engine_ext.reference.stop_strings import StopStrings


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
