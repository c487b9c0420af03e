"""Which resume payloads this engine can resume. Imports no vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_ext.common.resume_payload import KEY, ResumePayload

UNFIT = (
    "use_beam_search",
    "echo",
    "prompt_logprobs",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "thinking_token_budget",
)
UNFIT_OF_CHATS = ("return_prompt_text",)
UNFIT_OF_COMPLETIONS = ("suffix", "prompt_embeds")
"""Fields that need the prompt's text, its log-probabilities or several answers at once, or that
keep a count of the answer that we do not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """What this engine, and the rest of the request, allow."""

    vocab_size: int
    max_model_len: int
    sends_only_the_rest: bool
    """The request is streamed, or a prefill."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens are asked for, beside the token's own; None: none at all."""
    unfit: Sequence[str] = ()
    """Fields that are set and rule a payload out."""


def refusal(payload: ResumePayload, limits: ResumeLimits) -> str | None:
    """Return one line that says why the payload cannot be resumed; None if it can."""
    if limits.unfit:
        return f"{KEY} does not go with {', '.join(limits.unfit)}"
    for name, token_ids in (
        ("prompt", payload.prompt_token_ids),
        ("output", payload.output_token_ids),
    ):
        if token_ids and max(token_ids) >= limits.vocab_size:
            return (
                f"{KEY}.{name}_token_ids holds {max(token_ids)}, and this model has "
                f"{limits.vocab_size} tokens"
            )
    num_tokens = len(payload.prompt_token_ids) + max(1, len(payload.output_token_ids))
    if num_tokens > limits.max_model_len:
        return f"{KEY} has {num_tokens} tokens, and this model's context {limits.max_model_len}"
    if payload.num_sent and not limits.sends_only_the_rest:
        return f"{KEY}.spoken is for streams: what is not streamed is said whole"
    return _missing_logprobs(payload, limits.num_logprobs)


def unfit_fields(request: Any) -> list[str]:
    """Return the fields of an HTTP request for which no engine can resume its answer."""
    fields = UNFIT + UNFIT_OF_CHATS + UNFIT_OF_COMPLETIONS
    found = [name for name in fields if getattr(request, name, None) not in (None, False)]
    if (getattr(request, "n", None) or 1) != 1:
        found.append("n")
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        found.append("several prompts")
    return found


def _missing_logprobs(payload: ResumePayload, wanted: int | None) -> str | None:
    if wanted is None or not payload.unsent_token_ids:
        return None
    if not payload.logprobs:
        return f"log-probabilities are asked for, and {KEY}.logprobs is missing"
    fewest = min(len({token for token, _ in entry}) for entry in payload.logprobs)
    if wanted < 0 or fewest < wanted:
        what = "those of all tokens" if wanted < 0 else f"{wanted} a token"
        return f"{what} are asked for, and {KEY}.logprobs holds {fewest}"
    return None
