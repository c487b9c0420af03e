"""The text of an answer, token by token, what ends it, and how another engine continues it.

To continue an answer that another engine began, the thread that reads the request feeds the given
tokens to the detokenizer, the stop strings and the grammar, one by one, as the engine's thread
would have done. The client already has the text of the first `num_sent` tokens. The engine outputs
the text of the others before its first step. Tokens behind one that ends the answer are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from engine_ext.common import resume_payload as wire
from engine_ext.common.resume_payload import Logprob, ResumePayload
from engine_ext.reference.grammar import Grammar
from engine_ext.reference.messages import LENGTH, Finish, SamplingParams, TokenLogprob, stopped
from engine_ext.scheduler.admission import prefills

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
        self._num_returned = len(self._text)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._text = self._decode(self._window)
        tail = self._text[-3:]
        piece = self._take(len(self._text) - len(tail) + len(tail.rstrip(_REPLACEMENT)))
        if len(self._window) >= _WINDOW_TOKENS:
            self._slide()
        return piece

    def flush(self) -> str:
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        piece = self._text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        return piece

    def _slide(self) -> None:
        tail = self._decode(self._window[-_CONTEXT_TOKENS:])
        if self._text.endswith(tail):
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._num_returned -= len(self._text) - len(tail)
            self._text = tail

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopStrings:
    """Finds stop strings in streamed text; keeps back exactly what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def scan(self, piece: str) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string that ended it."""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            return text[:at], stop
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, `stop` itself left out."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class StopRules(NamedTuple):
    """What ends any answer of one engine."""

    eos_token_ids: frozenset[int]
    max_model_len: int


class Accepted(NamedTuple):
    text: str
    finish: Finish | None


class GeneratedAnswer:
    """The client's view of one sequence.

    `hands_over`: if the answer ends because it may have no more tokens, another engine continues
    it, and that engine outputs the text that is held back here.
    """

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
        self._eos_token_ids = rules.eos_token_ids
        self._hands_over = hands_over
        self._num_output_tokens = 0
        self._room = rules.max_model_len - len(prompt_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stops = StopStrings(sampling.stop)

    def accept(self, token_id: int) -> Accepted:
        """Add the sequence's next token. Returns the new text, and why the answer ends with it."""
        sampling = self._sampling
        self._num_output_tokens += 1
        finish = self._stop_token(token_id)
        text, matched = self._detokenizer.push(token_id) if finish is None else "", None
        if self._num_output_tokens > sampling.min_tokens:
            text, matched = self._stops.scan(text)
        if matched is not None and finish is None:
            return Accepted(text, stopped(matched))
        if finish is None and self._num_output_tokens >= min(self._room, sampling.max_tokens):
            finish = LENGTH
            if self._hands_over and self._num_output_tokens < self._room:
                return Accepted(text, finish)
        if finish is not None:
            text += self._stops.flush() + self._detokenizer.flush()
        return Accepted(text, finish)

    def _stop_token(self, token_id: int) -> Finish | None:
        sampling = self._sampling
        if self._num_output_tokens <= sampling.min_tokens and sampling.grammar is None:
            return None  # Never sampled so early; in a resumed answer it ends nothing.
        is_end = token_id in self._eos_token_ids and not sampling.ignore_eos
        return stopped() if is_end else None


class ResumeError(ValueError):
    """The given tokens cannot belong to this answer; the message says why in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedAnswer:
    """The state of one answer after the given tokens. The engine goes on with its parts."""

    token_ids: tuple[int, ...]
    num_sent: int
    sent_text: str
    """The text that the client has."""
    text: str
    """The text of the other tokens."""
    logprobs: tuple[TokenLogprob, ...]
    """The log-probabilities of the unsent tokens, if the request asks for them."""
    answer: GeneratedAnswer
    constraint: Grammar | None
    finish: Finish | None
    """The given tokens end the answer: there is nothing to compute."""

    @property
    def unsent_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[self.num_sent :]


def resume_answer(
    payload: ResumePayload,
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    rules: StopRules,
    *,
    hands_over: bool = False,
) -> ResumedAnswer:
    """Raises ResumeError."""
    answer = GeneratedAnswer(
        payload.prompt_token_ids, sampling, tokenizer, rules, hands_over=hands_over
    )
    constraint = sampling.grammar.start() if sampling.grammar else None
    pieces: list[str] = []
    finish = None
    for token_id in payload.output_token_ids:
        if constraint is not None and (error := constraint.accept(token_id)):
            raise ResumeError(
                f"token {len(pieces)} of output_token_ids does not fit the answer's form: {error}"
            )
        text, finish = answer.accept(token_id)
        pieces.append(text)
        if finish is not None:
            break
    token_ids = payload.output_token_ids[: len(pieces)]
    num_sent = min(payload.num_sent, len(pieces))
    logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.logprobs is not None and num_sent < len(token_ids):
        if not payload.logprobs:
            raise ResumeError("logprobs are requested, but those of output_token_ids are missing")
        entries = payload.logprobs[: len(token_ids) - num_sent]
        logprobs = tuple(_read_logprob(entry, sampling.logprobs) for entry in entries)
    return ResumedAnswer(
        token_ids=token_ids,
        num_sent=num_sent,
        sent_text="".join(pieces[:num_sent]),
        text="".join(pieces[num_sent:]),
        logprobs=logprobs,
        answer=answer,
        constraint=constraint,
        finish=finish,
    )


def hands_over(params: object) -> bool:
    """Return True if these `kv_transfer_params` ask for the first token, for another engine."""
    return isinstance(params, dict) and prefills(params) and params.get(wire.HAND_OVER) is True


def with_progress(
    payload: Mapping[str, Any], num_sent: int, logprobs: Sequence[TokenLogprob]
) -> dict[str, Any]:
    """Complete a resume payload in its wire form with what only the engine knows."""
    entries = [
        [wire.logprob_entry(*pair) for pair in ((one.token_id, one.logprob), *one.top)]
        for one in logprobs
    ]
    sent = {"spoken": num_sent} if num_sent else {}
    return {**payload, **sent, **({"logprobs": entries} if entries else {})}


def _read_logprob(entry: Sequence[Logprob], count: int) -> TokenLogprob:
    """A payload need not name the token itself again among the likeliest."""
    own, *likeliest = entry
    if len(likeliest) < count and own[0] not in (token_id for token_id, _ in likeliest):
        likeliest = sorted([own, *likeliest], key=lambda one: -one[1])
    return TokenLogprob(*own, tuple(likeliest[:count]))
