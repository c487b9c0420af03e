"""The costs that routing compares, all of them estimates in seconds.

prefill   computing the tokens that an engine lacks, beside the answers that run there
queue     a share of the work that waits there: it is a wait for one request, not work
transfer  moving the KV of a prompt to the engine that answers
loan      moving a prefix from another engine's cache, instead of computing it
decode    the steps of an answer
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec.structs
from msgspec import Struct

from router.fleet.engine import BOTH, Engine, Place
from router.fleet.step_model import MAX_STEP_TOKENS, StepModel

# The share of an engine's queue that counts like work for this prompt. Computing is work for the
# fleet, queueing only a wait for this request. In simulations of published traces, all shares from
# 0.25 to 0.5 are about equally good; 1 loses up to 0.15 of goodput near saturation.
QUEUE_SHARE = 0.35
# The share of the time by which prompts and answers of one engine delay each other.
DELAY_SHARE = 0.05
# The steps of an answer that count. How many it will have is not known before its end.
ANSWER_STEPS = 50
# Seconds of queued prompts with which an engine has enough to do.
BUSY_QUEUE_S = 0.5
# A transfer between engines of one network (NIXL over one 400 Gb/s link).
TRANSFER_LATENCY_S = 0.003
TRANSFER_TOKENS_PER_S = 300_000
# Seconds that a step takes longer per token of context where no engine's step model is known.
DEFAULT_CONTEXT_S = 30e-9
# The question, the holder's answer, and the reader's next step.
LOAN_LATENCY_S = 0.03
# Seconds per prompt token where no engine's rate is known.
DEFAULT_TOKEN_S = 50e-6
# An engine with a step budget in time computes at least so many tokens of a prompt in a step.
MIN_STEP_TOKENS = 64
# The part of a limit that estimates may reach: of a KV cache, and of the target of a step.
SAFE_SHARE = 0.95
# Two engines whose measured paces differ by less than this factor count as equally fast: equal
# engines differ by up to 1.2, because they get different prompts.
CLEAR_DIFFERENCE = 1.25


def queue_cost(queued_s: float, share: float = QUEUE_SHARE) -> float:
    """Return the cost of waiting for so many seconds of work."""
    return share * queued_s


def prompt_cost(token_s: float, uncached: int, queued: int, share: float = QUEUE_SHARE) -> float:
    """Return the cost of computing `uncached` tokens, at `token_s` for each, behind `queued`."""
    return token_s * uncached + queue_cost(token_s * queued, share)


def transfer_cost(tokens: int, waiting: int = 1, slowness: float = 1.0) -> float:
    """Return the cost of moving a prompt's KV as the last of `waiting` transfers of its size.
    `slowness`: between these engines it takes so many times as long as between others."""
    return TRANSFER_LATENCY_S + slowness * waiting * tokens / TRANSFER_TOKENS_PER_S


def loan_cost(tokens: int, token_s: float, queued_s: float = 0.0) -> float:
    """Return the cost of borrowing tokens, at `token_s` for each, behind `queued_s` of others."""
    return LOAN_LATENCY_S + queued_s + tokens * token_s


class PairSlowness(Protocol):
    def __call__(self, source: str, target: str) -> float:
        """Return how many times as long a transfer between these engines takes as between their
        neighbours; 1 if they are not slow."""
        ...


class PlaceLoad(Struct, frozen=True):
    """The capacity and the load of an engine, or of one of its data-parallel ranks."""

    model: StepModel
    max_step_tokens: int
    cache_tokens: int
    contexts: int = 0
    """Tokens of the prompts whose answers run there."""
    queued_s: float = 0.0
    """Seconds of work for prompts that it has to compute, until their first token."""
    queued_tokens: int = 0
    """The uncached tokens of these prompts."""
    step_limit: float = math.inf
    """The longest step in seconds that the engine allows beside its answers."""

    @classmethod
    def of(cls, engine: Engine, place: Place, usual: StepModel | None = None) -> PlaceLoad | None:
        """Return the load of an engine, or of its data-parallel rank `place`; None if its step
        model, budget or cache is unknown. An engine that chooses a rank itself has the mean of all
        ranks. `usual`: what counts as its step model until it has measured its steps."""
        known = engine.capabilities
        model = known.step_model or usual
        if model is None or not known.max_step_tokens or not place.cache_tokens:
            return None
        parts = _count_ranks(place)
        queued_s, queued = place.total_local_prefill
        return cls(
            model,
            known.max_step_tokens,
            place.cache_tokens // parts,
            place.total_tokens // parts,
            queued_s / parts,
            queued // parts,
            known.step_limit,
        )

    @classmethod
    def of_prefiller(cls, engine: Engine, place: Place, usual: StepModel) -> PlaceLoad:
        """Return the load of an engine without answers. Its step model is `usual` if unknown;
        without a known budget, it computes a prompt in one step."""
        known, parts = engine.capabilities, _count_ranks(place)
        model = known.step_model or usual
        if engine.role is BOTH:  # its tokens are those of answers
            queued_s = place.total_local_prefill[0] / parts
        else:
            token_s = place.prefill_rate.token_seconds or model.token
            queued_s = place.total_tokens // parts * token_s
        chunk = known.max_step_tokens or MAX_STEP_TOKENS
        return cls(model, chunk, place.cache_tokens, queued_s=queued_s)

    def without_step_limit(self) -> PlaceLoad:
        """Return the load of an engine that computes prompts without answers beside them."""
        return msgspec.structs.replace(self, step_limit=math.inf)

    def has_room(self, tokens: int) -> bool:
        """Return True if its KV cache has room for a prompt of so many tokens."""
        return self.contexts + tokens < SAFE_SHARE * self.cache_tokens

    def chunk(self, total: int) -> int:
        """Return the most tokens of a prompt of `total` tokens in a step beside its answers."""
        left = self.step_limit - self.model.mixed_step(self.contexts)
        fitting = left / (self.model.token + self.model.token_context * total)
        return int(min(self.max_step_tokens, max(fitting, MIN_STEP_TOKENS)))

    def prefill_seconds(self, uncached: int, total: int) -> float:
        """Return the seconds in which it computes the last `uncached` of `total` tokens beside its
        answers."""
        return self.model.prefill_seconds(uncached, total, self.chunk(total), self.contexts)

    def prefill_cost(self, uncached: int, total: int) -> float:
        """Return the cost of computing the last `uncached` of `total` tokens behind its queue."""
        return self.prefill_seconds(uncached, total) + queue_cost(self.queued_s)

    def remote_cost(self, uncached: int, total: int, slowness: float = 1.0) -> float:
        """Return the cost of computing a prompt here for another engine; see `transfer_cost`."""
        return self.prefill_cost(uncached, total) + transfer_cost(total, slowness=slowness)

    def decode_cost(self, total: int, model: StepModel) -> float:
        """Return the cost of an answer to a prompt of `total` tokens by the step model `model`,
        beside what is queued."""
        step = model.decode_step(self.contexts + total)
        return ANSWER_STEPS * step + queue_cost(self.queued_s, DELAY_SHARE)


def _count_ranks(place: Place) -> int:
    """Return among how many ranks the load is distributed."""
    return len(place.ranks or ()) or 1 if isinstance(place, Engine) else 1
