"""The output tokens of a resume payload, on their way from vLLM's HTTP server by way of its engine
to the workers: in `SamplingParams.extra_args`, which all three can read.

The prompt's ids travel as every prompt's do. Below: which payloads this engine can resume at all.
Imports no vLLM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_ext.common.resume_payload import KEY, MAX_ID, Logprob, ResumePayload

FIELD = "disagg_begun"
CANNOT_RESUME = "disagg_stays"
"""The field of a request that another engine cannot resume."""
FIELDS_NOT_RESUMED = (
    "use_beam_search",
    "echo",
    "prompt_logprobs",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "thinking_token_budget",
)
CHAT_FIELDS_NOT_RESUMED = ("return_prompt_text",)
COMPLETION_FIELDS_NOT_RESUMED = ("suffix", "prompt_embeds")
"""Fields that need the prompt's text, its log-probabilities or several answers at once, or that
keep a count of the answer that we do not set."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Tokens of the answer that the HTTP server feeds to its detokenizer and streams."""

    token_ids: list[int]
    num_sent: int
    """How many of them the client has."""
    logprobs: list[list[Logprob]]
    """Those of the tokens that the client does not have, or nothing."""

    def logprobs_of(self, number: int) -> list[Logprob]:
        """Return those of a token of the answer; any value where they are not sent."""
        at = number - self.num_sent
        return (
            self.logprobs[at] if 0 <= at < len(self.logprobs) else [(self.token_ids[number], 0.0)]
        )


def carried(payload: ResumePayload) -> dict[str, Any]:
    return {
        "token_ids": list(payload.output_token_ids),
        "spoken": payload.num_sent,
        "logprobs": [list(each) for each in payload.logprobs],
    }


def replay_in(sampling_params: Any) -> Replay | None:
    """For the HTTP server, which has put it there; None if there are no tokens."""
    field = _field(sampling_params)
    if not field or not token_ids_in(sampling_params):
        return None
    return Replay(field["token_ids"], field["spoken"], field["logprobs"])


def token_ids_in(sampling_params: Any) -> list[int]:
    """Total, whatever is there: in the engine and its workers an exception would end them."""
    field = _field(sampling_params)
    found = field.get("token_ids") if isinstance(field, Mapping) else None
    if not isinstance(found, list) or not found or {*map(type, found)} != {int}:
        return []
    return found if min(found) >= 0 and max(found) <= MAX_ID else []


def cannot_resume(sampling_params: Any) -> bool:
    """Return True if another engine cannot resume the answer. Total."""
    extra = getattr(sampling_params, "extra_args", None)
    return isinstance(extra, Mapping) and extra.get(CANNOT_RESUME) is True


def _field(sampling_params: Any) -> Any:
    extra = getattr(sampling_params, "extra_args", None)
    return extra.get(FIELD) if isinstance(extra, Mapping) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """The limits that this engine and the request set."""

    vocab_size: int
    max_model_len: int
    sends_only_the_rest: bool
    """The request is streamed, or a prefill."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens are asked for, beside the token's own; None: none at all."""
    conflicts: Sequence[str] = ()
    """Fields that are set and rule a payload out."""


def refusal(payload: ResumePayload, limits: ResumeLimits) -> str | None:
    """Return one line that says why the payload cannot be resumed; None if it can."""
    if limits.conflicts:
        return f"{KEY} cannot be combined with {', '.join(limits.conflicts)}"
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
        return f"{KEY}.spoken must be 0 if the answer is not streamed"
    return _missing_logprobs(payload, limits.num_logprobs)


def fields_not_resumed(request: Any) -> list[str]:
    """Return the fields of an HTTP request for which no engine can resume its answer."""
    fields = FIELDS_NOT_RESUMED + CHAT_FIELDS_NOT_RESUMED + COMPLETION_FIELDS_NOT_RESUMED
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
        return f"log-probabilities are requested, but {KEY}.logprobs is missing"
    fewest = min(len({token for token, _ in entry}) for entry in payload.logprobs)
    if wanted < 0 or fewest < wanted:
        what = "those of all tokens" if wanted < 0 else f"{wanted} a token"
        return f"{what} are requested, but {KEY}.logprobs holds {fewest}"
    return None
