"""An answer that begins in mid-answer: what was made elsewhere, taken as if it had been made here.

Detokenizer, stop strings and grammar are led through the given tokens by the thread that reads the
request, as they would have been by the engine's thread, token by token. The client has what the
first `spoken` of them said; what the others say is said before the engine's first step. Tokens
behind one that ends the answer are not the answer's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from engine_ext.common import resume_payload as wire
from engine_ext.common.resume_payload import Logprob, ResumePayload
from engine_ext.reference.answer import GeneratedAnswer, StopRules
from engine_ext.reference.grammar import Constraint
from engine_ext.reference.messages import Finish, SamplingParams, TokenLogprob
from engine_ext.scheduler.admission import prefills


class BeginningError(ValueError):
    """The given tokens cannot be this answer's: one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """For one request, which leads `answer` and `constraint` on."""

    token_ids: tuple[int, ...]
    num_spoken: int
    spoken_text: str
    """What the client has."""
    text: str
    """What is to be said besides."""
    logprobs: tuple[TokenLogprob, ...]
    """Of the tokens that are not spoken, where they are asked for."""
    answer: GeneratedAnswer
    constraint: Constraint | None
    finish: Finish | None
    """The given tokens end the answer: nothing is to be computed."""

    @property
    def unspoken(self) -> tuple[int, ...]:
        return self.token_ids[self.num_spoken :]


def begin(
    given: ResumePayload,
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    rules: StopRules,
    *,
    hands_over: bool = False,
) -> Beginning:
    """Raises BeginningError."""
    prompt = given.prompt_token_ids
    answer = GeneratedAnswer(prompt, sampling, tokenizer, rules, hands_over=hands_over)
    constraint = sampling.grammar.start() if sampling.grammar else None
    pieces: list[str] = []
    finish = None
    for token_id in given.output_token_ids:
        if constraint is not None and (error := constraint.accept(token_id)):
            raise BeginningError(
                f"token {len(pieces)} of output_token_ids does not fit the answer's form: {error}"
            )
        text, finish = answer.accept(token_id)
        pieces.append(text)
        if finish is not None:
            break
    token_ids = given.output_token_ids[: len(pieces)]
    num_spoken = min(given.num_sent, len(pieces))
    return Beginning(
        token_ids=token_ids,
        num_spoken=num_spoken,
        spoken_text="".join(pieces[:num_spoken]),
        text="".join(pieces[num_spoken:]),
        logprobs=_logprobs(given, token_ids[num_spoken:], sampling.logprobs),
        answer=answer,
        constraint=constraint,
        finish=finish,
    )


def hands_over(params: object) -> bool:
    """A request with these `kv_transfer_params` is a prefill whose answer another engine is to go
    on with."""
    return isinstance(params, dict) and prefills(params) and params.get(wire.HAND_OVER) is True


def handed_over(
    told: Mapping[str, Any], num_spoken: int, logprobs: Sequence[TokenLogprob]
) -> dict[str, Any]:
    """What the connector tells of tokens, and what only the host knows of them."""
    spoken = {"spoken": num_spoken} if num_spoken else {}
    written = {"logprobs": list(map(_written, logprobs))} if logprobs else {}
    return {**told, **spoken, **written}


def handed_back(
    prompt: Sequence[int],
    spoken: Sequence[int],
    said: Sequence[int],
    logprobs: Sequence[TokenLogprob],
) -> dict[str, Any]:
    """Of an answer that ends here before its end."""
    told = ResumePayload(tuple(prompt), (*spoken, *said)).to_wire()
    return handed_over(told, len(spoken), logprobs)


def _logprobs(
    given: ResumePayload, unspoken: Sequence[int], asked: int | None
) -> tuple[TokenLogprob, ...]:
    if asked is None or not unspoken:
        return ()
    if not given.logprobs:
        raise BeginningError("logprobs are asked for, and those of output_token_ids are missing")
    return tuple(_logprob(entry, asked) for entry in given.logprobs[: len(unspoken)])


def _logprob(entry: Sequence[Logprob], asked: int) -> TokenLogprob:
    """The token's own need not be named again among the likeliest."""
    own, *likeliest = entry
    if len(likeliest) < asked and own[0] not in (token_id for token_id, _ in likeliest):
        likeliest = sorted([own, *likeliest], key=lambda one: -one[1])
    return TokenLogprob(*own, tuple(likeliest[:asked]))


def _written(logprob: TokenLogprob) -> list[list[float]]:
    entries = [(logprob.token_id, logprob.logprob), *logprob.top]
    return [wire.logprob_entry(token_id, value) for token_id, value in entries]
