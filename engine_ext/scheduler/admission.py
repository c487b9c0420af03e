"""`cache_hit_threshold`: a decode engine refuses a prompt if too little of it is cached.

The rate is the share of the tokens whose KV is at hand, in the local prefix cache or announced by a
remote, before anything is allocated. Source: vLLM RFC #24256 (never merged there).
"""

from dataclasses import dataclass
from typing import Any, Final

from engine_ext.common.resume_payload import HAND_BACK

FINISH_REASON: Final = "cache_threshold"
FIELD = "cache_hit_threshold"


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """`is_refused` exactly when `rate` is below `threshold`."""

    rate: float
    threshold: float

    @property
    def is_refused(self) -> bool:
        return self.rate < self.threshold

    @property
    def stop_reason(self) -> str:
        return f"cache_hit_rate={self.rate:.4f}<{self.threshold:.4f}"


def parse_threshold(value: Any) -> float | None:
    """Return a request's own threshold, None without one. Raises ValueError outside [0, 1]."""
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:
        raise ValueError(f"{FIELD} must be a number from 0 to 1, not {value!r}")
    return float(value)


def prefills(params: Any) -> bool:
    """Return True if a request with these `kv_transfer_params` is a prefill leg."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def hands_back(params: Any, default: bool) -> bool:
    """Return True if a request with these `kv_transfer_params` is ended instead of preempted and
    computed again. Never True for a prefill leg."""
    asked = params.get(HAND_BACK) if isinstance(params, dict) else None
    return (asked if isinstance(asked, bool) else default) and not prefills(params)


def judge(
    threshold: float, local_tokens: int, external_tokens: int, num_tokens: int, *, prefills: bool
) -> AdmissionVerdict:
    """Compare the cache hit rate with the threshold. `num_tokens`: the prompt, and the tokens that
    were generated before a preemption. A prefill leg (`prefills`) is never refused."""
    rate = min(1.0, (local_tokens + external_tokens) / max(1, num_tokens))
    return AdmissionVerdict(rate, 0.0 if prefills else threshold)
