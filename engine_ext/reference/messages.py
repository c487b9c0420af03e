"""What the HTTP server and the engine exchange: requests, outputs and statistics."""

from dataclasses import dataclass, field
from typing import Any, Literal

from engine_ext.common.resume_payload import PREEMPTED
from engine_ext.common.types import FinishStatus
from engine_ext.reference.grammar import Grammar
from engine_ext.scheduler.admission import FINISH_REASON

FinishReason = Literal["stop", "length", "abort", "error", "cache_threshold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Validated by the server, trusted by the engine."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report per token; 0 reports the chosen token alone, None nothing."""
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    """The form that the answer is kept to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kv_transfer_params: dict[str, Any] | None = None
    cache_hit_threshold: float | None = None
    """Share of its tokens whose KV must be at hand, 0 to 1. None: the engine's default."""
    cache_salt: str | None = None
    """Only requests with an equal salt share KV."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`top` holds (token id, log-probability) of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one or more steps added to one request. The last one carries `finish_reason`."""

    request_id: str
    text: str = ""
    """New text only. Held back while it may still become part of a stop string."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it, as vLLM reports it; None for EOS."""
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for this request, here or on its prefill engine."""
    error: str | None = None
    load_failure: dict[str, Any] | None = None
    """In its wire form, see engine_ext.common.load_failure."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended: `reason` for its caller, `status` for the connector."""

    reason: FinishReason
    status: FinishStatus
    stop_reason: str | int | None = None
    error: str | None = None


ABORTED = Finish("abort", FinishStatus.ABORTED)
LENGTH = Finish("length", FinishStatus.LENGTH_CAPPED)
HANDED_BACK = Finish(FINISH_REASON, FinishStatus.ABORTED, PREEMPTED)
"""A preemption return: another engine continues the answer, and this one keeps nothing of it."""


def stopped(stop_reason: str | int | None = None) -> Finish:
    return Finish("stop", FinishStatus.STOPPED, stop_reason)


def failed(error: str) -> Finish:
    return Finish("error", FinishStatus.ERROR, error=error)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since the engine's start; server/metrics.py describes each."""

    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_fetched: int = 0
    generation_tokens: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)
    """By finish reason."""
    preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats(Counters):
    """A snapshot for /metrics."""

    num_running: int
    num_waiting: int
    num_waiting_for_remote_kv: int
    num_blocks_total: int
    num_blocks_free: int
    num_blocks_delayed: int
