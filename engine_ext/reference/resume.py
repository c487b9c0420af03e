"""Continues an answer that another engine began, as if its tokens had been generated here.

The thread that reads the request feeds the given tokens to the detokenizer, the stop strings and
the grammar, one by one, as the engine's thread would have done. The client already has the text of
the first `num_sent` tokens. The engine outputs the text of the others before its first step. Tokens
behind one that ends the answer are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from engine_ext.common import resume_payload as wire
from engine_ext.common.resume_payload import Logprob, ResumePayload
from engine_ext.reference.answer import GeneratedAnswer, StopRules
from engine_ext.reference.grammar import Grammar
from engine_ext.reference.messages import Finish, SamplingParams, TokenLogprob
from engine_ext.scheduler.admission import prefills


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
    """Of the unsent tokens, if the request asks for them."""
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
            raise ResumeError("logprobs are asked for, and those of output_token_ids are missing")
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
    """Whether these `kv_transfer_params` ask a prefill for its first token, for another engine."""
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
