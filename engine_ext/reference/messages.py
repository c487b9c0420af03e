"""What the HTTP server and the engine of the reference engine say to each other."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from engine_ext.common.resume_payload import PREEMPTED
from engine_ext.common.types import FinishStatus
from engine_ext.reference.grammar import Grammar
from engine_ext.scheduler import admission

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
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report per token; 0 reports the chosen token alone, None nothing."""
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    """What the answer must look like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kv_transfer_params: dict[str, Any] | None = None
    cache_hit_threshold: float | None = None
    """Share of its tokens whose KV must be at hand, 0 to 1. None: what the engine wants."""
    is_only: bool = True
    """Of an answer's choices. Nobody goes on with one of several."""


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
    """Prompt tokens that were not computed here: prefix cache and remote KV together."""
    error: str | None = None
    load_failure: dict[str, Any] | None = None
    """In its wire form, see engine_ext.common.load_failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for /metrics. Token and request counts are totals since start."""

    num_running: int
    num_waiting: int
    num_waiting_for_remote_kv: int
    num_blocks_total: int
    """Usable blocks."""
    num_blocks_free: int
    """Blocks nobody holds, those with reusable cached contents included."""
    num_blocks_delayed: int
    """Blocks of finished requests, held for a remote reader."""
    prompt_tokens: int
    prompt_tokens_computed: int
    """Prompt tokens this engine ran through the model, recomputation included."""
    prompt_tokens_cached: int
    """Prompt tokens found in the local prefix cache."""
    prompt_tokens_fetched: int
    """Prompt tokens whose KV came from a remote engine."""
    generation_tokens: int
    requests_finished: dict[str, int]
    """By finish reason."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    status: FinishStatus
    stop_reason: str | int | None = None
    error: str | None = None


ABORTED = Finish("abort", FinishStatus.ABORTED)
LENGTH = Finish("length", FinishStatus.LENGTH_CAPPED)


HANDED_BACK = Finish(admission.FINISH_REASON, FinishStatus.ABORTED, PREEMPTED)
"""Another engine is to go on with it: nothing is kept of it here."""


def stopped(stop_reason: str | int | None = None) -> Finish:
    return Finish("stop", FinishStatus.STOPPED, stop_reason)


def failed(error: str) -> Finish:
    return Finish("error", FinishStatus.ERROR, error=error)


def refused(stop_reason: str) -> Finish:
    """Too little of its KV is at hand: the connector takes it for aborted."""
    return Finish(admission.FINISH_REASON, FinishStatus.ABORTED, stop_reason)


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start; `EngineStats` says what each means."""

    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_fetched: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
