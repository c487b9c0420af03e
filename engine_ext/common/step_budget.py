"""How many prompt tokens a step computes beside decoding requests (`target_itl_ms`).

A step with decoding requests is to end within TARGET_SHARE of the target, by the fitted times of
steps (step_costs.py). Two bounds are stronger than the target. A step computes at least
MIN_PROMPT_TOKENS, so that no prompt waits for the end of the answers. And a target can be too low
for the prompts that come: once the next prompt has waited for MAX_WAIT_S because steps had no time
for it, steps compute more, up to the engine's whole budget at twice that time. So the queue is
bounded wherever it is without a target.
"""

import math

from engine_ext.common.step_costs import StepFit

TARGET_SHARE = 0.9
"""The share of the target that a step may take. Some steps take longer than predicted."""
MIN_PROMPT_TOKENS = 64
MAX_WAIT_S = 2.0


def parse_target(value: object) -> float:
    """Return a target in milliseconds. Raises ValueError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"target_itl_ms must be a number above 0, not {value!r:.40}")
    return float(value)  # type: ignore[arg-type]


class StepBudget:
    """`begin` starts a step; then `take` gets each prompt of the step, in order."""

    def __init__(self, target_ms: float, fit: StepFit, max_step_tokens: int) -> None:
        self._target_ms = target_ms
        self._fit = fit
        self._max_step_tokens = max_step_tokens
        self._costs = fit.costs
        """None if the step may compute any number of tokens: it decodes nothing, or its time cannot
        be predicted yet."""
        self._left_ms = 0.0
        self._least = 0
        """Tokens that the step may still compute whatever their time."""

    def begin(self, num_decoding: int, contexts: int, waited_s: float) -> None:
        """Start a step of `num_decoding` requests with `contexts` tokens before their new ones.
        `waited_s`: how long the next prompt waits that the last step had no time for, or 0."""
        self._costs = costs = self._fit.costs if num_decoding else None
        if costs is None:
            return
        self._left_ms = TARGET_SHARE * self._target_ms - costs.milliseconds_beside(contexts)
        share = min(1.0, max(0.0, waited_s / MAX_WAIT_S - 1.0))
        self._least = max(MIN_PROMPT_TOKENS, int(share * self._max_step_tokens))

    def take(self, wanted: int, context: int) -> int:
        """Return how many of the next `wanted` tokens of a prompt the step computes, behind
        `context` tokens of it, and count them."""
        costs = self._costs
        if costs is None:
            return wanted
        fitting = costs.tokens_within(self._left_ms, context)
        count = int(min(wanted, max(fitting, self._least)))
        if count < wanted:
            self._left_ms, self._least = 0.0, 0
        else:
            self._left_ms -= costs.chunk_milliseconds(count, context)
            self._least = max(0, self._least - count)
        return count

    @property
    def is_used_up(self) -> bool:
        """True if the step has no time for another prompt."""
        return self._costs is not None and self._left_ms <= 0.0 and not self._least
