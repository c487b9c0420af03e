"""What a request that begins in mid-answer was given, on its way from vLLM's HTTP server by way of
its engine to the workers: among its sampling params, where all three look.

The prompt's ids travel as every prompt's do. Knows no vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_ext.common.resume_payload import KEY, MAX_ID, Logprob, ResumePayload

FIELD = "disagg_begun"
STAYS = "disagg_stays"
"""Of a request that cannot begin in mid-answer anywhere."""


@dataclass(frozen=True, slots=True)
class Given:
    token_ids: list[int]
    """Of the answer."""
    spoken: int
    logprobs: list[list[Logprob]]
    """Of the tokens that are not spoken yet, or nothing."""

    def logprobs_of(self, number: int) -> list[Logprob]:
        """Of a token of the answer; where nobody will see them, anything."""
        at = number - self.spoken
        return (
            self.logprobs[at] if 0 <= at < len(self.logprobs) else [(self.token_ids[number], 0.0)]
        )


def carried(begun: ResumePayload) -> dict[str, Any]:
    return {
        "token_ids": list(begun.output_token_ids),
        "spoken": begun.num_sent,
        "logprobs": [list(each) for each in begun.logprobs],
    }


def carried_by(request: Any) -> ResumePayload | None:
    """What compat/begun_prompt.py has left on a request."""
    begun = (request.kv_transfer_params or {}).get(KEY)
    return begun if isinstance(begun, ResumePayload) else None


def given_in(sampling_params: Any) -> Given | None:
    """In the HTTP server, where `carried` has put it; None where nothing of the answer is given."""
    told = _told(sampling_params)
    if not told or not token_ids_in(sampling_params):
        return None
    return Given(told["token_ids"], told["spoken"], told["logprobs"])


def token_ids_in(sampling_params: Any) -> list[int]:
    """Total, whatever is there: in the engine and its workers an exception would end them."""
    told = _told(sampling_params)
    found = told.get("token_ids") if isinstance(told, Mapping) else None
    if not isinstance(found, list) or not found or {*map(type, found)} != {int}:
        return []
    return found if min(found) >= 0 and max(found) <= MAX_ID else []


def stays(sampling_params: Any) -> bool:
    """Its answer is of no use to another engine. Total."""
    extra = getattr(sampling_params, "extra_args", None)
    return isinstance(extra, Mapping) and extra.get(STAYS) is True


def _told(sampling_params: Any) -> Any:
    extra = getattr(sampling_params, "extra_args", None)
    return extra.get(FIELD) if isinstance(extra, Mapping) else None
