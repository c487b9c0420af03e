"""The output tokens of a resume payload, on their way from vLLM's HTTP server by way of its engine
to the workers: in `SamplingParams.extra_args`, which all three can read.

The prompt's ids travel as every prompt's do. Imports no vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_ext.common.resume_payload import MAX_ID, Logprob, ResumePayload

FIELD = "disagg_begun"
CANNOT_RESUME = "disagg_stays"
"""The field of a request that another engine cannot resume."""


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
