"""Whether a request can begin in mid-answer here. Knows no vLLM."""

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
class RequestDemands:
    """By the rest of the request, and of this engine."""

    vocab_size: int
    max_model_len: int
    says_only_the_rest: bool
    """It is streamed, or a prefill."""
    num_logprobs: int | None = None
    """Of the likeliest tokens, beside the token's own; None where none are asked for."""
    unfit: Sequence[str] = ()
    """Fields that were set and need a prompt that was rendered here, or several answers."""


def refusal(begun: ResumePayload, asked: RequestDemands) -> str | None:
    """One line that says why not; None where it can."""
    if asked.unfit:
        return f"{KEY} does not go with {', '.join(asked.unfit)}"
    given = (("prompt", begun.prompt_token_ids), ("output", begun.output_token_ids))
    for name, token_ids in given:
        if token_ids and max(token_ids) >= asked.vocab_size:
            return (
                f"{KEY}.{name}_token_ids holds {max(token_ids)}, and this model has "
                f"{asked.vocab_size} tokens"
            )
    num_tokens = len(begun.prompt_token_ids) + max(1, len(begun.output_token_ids))
    if num_tokens > asked.max_model_len:
        return f"{KEY} has {num_tokens} tokens, and this model's context {asked.max_model_len}"
    if begun.num_sent and not asked.says_only_the_rest:
        return f"{KEY}.spoken is for streams: what is not streamed is said whole"
    return _missing_logprobs(begun, asked.num_logprobs)


def unfit(request: Any) -> list[str]:
    """Fields for which an answer cannot begin in the middle, be it here or elsewhere."""
    fields = UNFIT + UNFIT_OF_CHATS + UNFIT_OF_COMPLETIONS
    found = [name for name in fields if getattr(request, name, None) not in (None, False)]
    if (request.n or 1) != 1:
        found.append("n")
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        found.append("several prompts")
    return found


def _missing_logprobs(begun: ResumePayload, wanted: int | None) -> str | None:
    if wanted is None or not begun.unsent_token_ids:
        return None
    if not begun.logprobs:
        return f"log-probabilities are asked for, and {KEY}.logprobs is missing"
    fewest = min(len({token for token, _ in entry}) for entry in begun.logprobs)
    if wanted < 0 or fewest < wanted:
        what = "those of all tokens" if wanted < 0 else f"{wanted} a token"
        return f"{what} are asked for, and {KEY}.logprobs holds {fewest}"
    return None
