"""The time of an engine's steps, as its identity page reports it.

A step computes a chunk of prompts and one token of each running answer. Its time is

    base + token * T + token_context * sum(chunk * context) + context * sum(contexts of answers)

with T prompt tokens in the step, and the tokens before and in each chunk as its context. A step
with prompts takes `prompt` longer, mostly a negative value, because computing hides a part of
reading the weights; but it takes no less than one without. A mixed step, with both, takes
`mixing * base + mixed_context * sum(contexts of answers)` longer: `mixing` is 0 if the engine reads
its weights once for both, 1 if it reads them twice. The engine fits the factors to its own steps.
`max_step_tokens` of the page bounds T. So does `target_itl_ms`, if the page has one: the engine
lets a step with answers take LIMIT_SHARE of it.
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
MAX_CREDIBLE_MIXING = 100.0
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
    """The mixing penalty: weight reads that a mixed step takes beyond the other parts. None if
    unknown: then predictions have none."""
    prompt: float = 0.0
    """May be negative, down to -base."""
    mixed_context: float = 0.0

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
        mixing = _factor(value.get("mixing"), 1.0, MAX_CREDIBLE_MIXING)
        prompt_base = _factor(value.get("prompt_base_ms"), *FACTORS["base_ms"])
        prompt = 0.0 if prompt_base is None else prompt_base - base
        mixed = _factor(value.get("mixed_context_ns"), *FACTORS["context_ns"])
        return cls(base, token, token_context, context, mixing, prompt, mixed or 0.0)

    def decode_step(self, contexts: int) -> float:
        """Return the seconds of a step without prompts. `contexts` are the tokens of all running
        answers and their prompts."""
        return self.base + self.context * contexts

    def mixed_step(self, contexts: int) -> float:
        """Return the seconds of a step with prompts, less those of its prompt tokens."""
        penalty = (self.mixing or 0.0) * self.base + self.mixed_context * contexts
        return self.decode_step(contexts) + self.prompt + (penalty if contexts else 0.0)

    def worst_step(self, chunk: int, context: int, contexts: int) -> float:
        """Return the seconds of a step with the last `chunk` tokens of a prompt of `context`
        tokens."""
        tokens = chunk * (self.token + self.token_context * context)
        return max(self.decode_step(contexts), self.mixed_step(contexts) + tokens)

    def prefill_seconds(
        self, uncached: int, total: int, chunk: int = MAX_STEP_TOKENS, contexts: int = 0
    ) -> float:
        """Return the seconds in which the last `uncached` of `total` tokens are computed, in chunks
        of at most `chunk` tokens."""
        mean_context = total - uncached / 2
        steps = -(-uncached // max(1, chunk))
        tokens = uncached * (self.token + self.token_context * mean_context)
        return max(steps * self.decode_step(contexts), steps * self.mixed_step(contexts) + tokens)


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
        max(one.prompt for one in models),
        max(one.mixed_context for one in models),
    )


def largest_of_ranks(ranks: Sequence[object], name: str) -> int:
    """Return the largest `name` of these ranks, such as `max_step_tokens`; 0 if one is unknown."""
    found = [rank.get(name) if isinstance(rank, dict) else None for rank in ranks]
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
