"""The time of an engine's steps, as its identity page reports it.

A step computes a chunk of prompts and one token of each running answer. Its time is

    base + token * T + token_context * sum(chunk * context) + context * sum(contexts of answers)

with T prompt tokens in the step, and the tokens before and in each chunk as its context. A step
with both a chunk and answers takes `mixing * base` longer: 0 if the engine reads its weights once
for both, 1 if it reads them twice. The engine fits the factors to its own steps. `max_step_tokens`
of the page bounds T. So does `target_itl_ms`, if the page has one: the engine lets a step with
answers take LIMIT_SHARE of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The factors of a page by name: seconds of its unit, and the largest credible value in seconds.
FACTORS = {
    "base_ms": (1e-3, 60.0),
    "token_us": (1e-6, 1.0),
    "token_context_ns": (1e-9, 1e-3),
    "context_ns": (1e-9, 1e-3),
}
MAX_MIXING = 100.0
MAX_STEP_TOKENS = 10_000_000
LIMIT_SHARE = 0.9
MAX_TARGET_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class StepModel:
    """The factors in seconds, none negative; `base` and `token` are positive."""

    base: float
    token: float
    token_context: float
    context: float
    mixing: float | None = None
    """The mixing penalty: weight reads that a step with prompts and answers takes beyond the other
    parts. None if unknown: then predictions have none."""

    @classmethod
    def parse(cls, value: object) -> StepModel | None:
        """Read `step_model` of an identity page, whose content may be anything; never raises."""
        if not isinstance(value, dict):
            return None
        found = [_factor(value.get(name), *limits) for name, limits in FACTORS.items()]
        factors = [factor for factor in found if factor is not None]
        if len(factors) < len(FACTORS) or not (factors[0] and factors[1]):
            return None
        base, token, token_context, context = factors
        mixing = _factor(value.get("mixing"), 1.0, MAX_MIXING)
        return cls(base, token, token_context, context, mixing)

    def decode_step(self, contexts: int) -> float:
        """Return the seconds of a step without prompts. `contexts` are the tokens of all running
        answers and their prompts."""
        return self.base + self.context * contexts

    def mixed_step(self, contexts: int) -> float:
        """Return the seconds of a step with prompts, less those of its prompt tokens."""
        penalty = (self.mixing or 0.0) * self.base if contexts else 0.0
        return self.decode_step(contexts) + penalty

    def worst_step(self, chunk: int, context: int, contexts: int) -> float:
        """Return the seconds of a step with the last `chunk` tokens of a prompt of `context`
        tokens."""
        return self.mixed_step(contexts) + chunk * (self.token + self.token_context * context)

    def prefill_seconds(
        self, uncached: int, total: int, chunk: int = MAX_STEP_TOKENS, contexts: int = 0
    ) -> float:
        """Return the seconds in which the last `uncached` of `total` tokens are computed, in chunks
        of at most `chunk` tokens."""
        mean_context = total - uncached / 2
        steps = -(-uncached // max(1, chunk))
        tokens = uncached * (self.token + self.token_context * mean_context)
        return steps * self.mixed_step(contexts) + tokens


def step_model_of_ranks(ranks: Sequence[object]) -> StepModel | None:
    """Return the slower of each factor of these data-parallel ranks; None if all are unknown."""
    found = [StepModel.parse(rank.get("step_model")) for rank in ranks if isinstance(rank, dict)]
    models = [model for model in found if model is not None]
    if not models:
        return None
    return StepModel(
        max(one.base for one in models),
        max(one.token for one in models),
        max(one.token_context for one in models),
        max(one.context for one in models),
        max((one.mixing for one in models if one.mixing is not None), default=None),
    )


def max_step_tokens_of_ranks(ranks: Sequence[object]) -> int:
    """Return the most prompt tokens in one step of any of these ranks; 0 if one is unknown."""
    found = [rank.get("max_step_tokens") if isinstance(rank, dict) else None for rank in ranks]
    counts = [n for n in found if type(n) is int and 0 < n <= MAX_STEP_TOKENS]
    return max(counts) if counts and len(counts) == len(ranks) else 0


def step_limit_of_ranks(ranks: Sequence[object]) -> float:
    """Return the longest step in seconds that any of these ranks allows beside answers; infinite if
    tokens alone limit the steps of one."""
    found = [rank.get("target_itl_ms") if isinstance(rank, dict) else None for rank in ranks]
    targets = [_factor(target, 1e-3, MAX_TARGET_MS * 1e-3) for target in found]
    limits = [LIMIT_SHARE * target if target else math.inf for target in targets]
    return max(limits, default=math.inf)


def _factor(value: object, unit: float, most: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value <= most / unit:  # an int may be too large for a float
        return None
    seconds = value * unit
    return seconds if math.isfinite(seconds) else None
