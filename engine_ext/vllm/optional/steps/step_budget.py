"""The step budget in time (`target_itl_ms`): steps that decode compute as many prompt tokens as
common/step_budget.py says, by the times that step_times.py has measured.

vLLM's scheduler decides for each request how many tokens a step computes, and then calls
`_reserve_prefill_lookahead`, which may lower this number. We lower it there, where the tokens
before the chunk are known. A request with 0 tokens is left for a later step. Requests that load KV
need one token and are admitted whatever the time.

If vLLM does not call this method for a request, its chunk has vLLM's size. If it calls the method
before the last of its own limits, the chunk may end where a state or an image cannot be cut: so
chunks of models that keep states end at blocks, and images are not cut where vLLM does not.
"""

import logging
import time
from typing import Any

from vllm.v1.request import Request, RequestStatus

from engine_ext.common.step_budget import MIN_PROMPT_TOKENS, StepBudget
from engine_ext.common.types import Clock
from engine_ext.vllm.compat.patching import Host
from engine_ext.vllm.connector_calls import find_our_connector

logger = logging.getLogger(__name__)


class StepBudgetPart(Host):
    step_clock: Clock = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = find_our_connector(self.connector)
        budget = None if ours is None else ours.step_budget
        if budget is None:
            return
        self._budget: StepBudget = budget
        self._reserve_lookahead = super()._reserve_prefill_lookahead
        self._reserve_prefill_lookahead = self._cut
        self.on_scheduled.append(self._end_step)
        self._has_begun = False
        """A step is being scheduled, and has got to a prompt."""
        self._room = 0
        """Tokens that prompts leave to the decoding requests behind them."""
        self._held_up: dict[str, float] = {}
        """The prompts that the last step, or this one, had no time for: since when. A request's
        `arrival_time` is the wall clock's, which may be set meanwhile."""
        self._were_held_up: dict[str, float] = {}
        """Those of the step before."""

    def _cut(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens of a request this step computes."""
        count = num_new_tokens
        if count > 1 + self.num_spec_tokens:
            try:
                count = self._take(request, num_computed_tokens, count)
            except Exception:
                logger.exception("target_itl_ms is no longer kept")
                self._reserve_prefill_lookahead = self._reserve_lookahead
        found: int = self._reserve_lookahead(request, num_computed_tokens, count)
        return found

    def _take(self, request: Request, before: int, wanted: int) -> int:
        if request.has_encoder_inputs and self.scheduler_config.disable_chunked_mm_input:
            return wanted
        if not self._has_begun:
            self._begin_step()
        count = self._budget.take(min(wanted, self._room), before)
        if 0 < count < wanted and self.need_mamba_block_aligned_split:
            size = self.cache_config.block_size
            end = max((before + count) // size, before // size + 1) * size
            count = min(wanted, end - before)
        self._room -= count
        if not count and request.status is not RequestStatus.RUNNING:
            name = request.request_id
            self._held_up[name] = self._were_held_up.get(name, self.step_clock())
        return count

    def _begin_step(self) -> None:
        decoding = [each for each in self.running if not each.is_prefill_chunk]
        contexts = sum(each.num_computed_tokens for each in decoding)
        self._were_held_up, self._held_up = self._held_up, {}
        now = self.step_clock()
        since = min(self._were_held_up.values(), default=now)
        self._budget.begin(len(decoding), contexts, now - since)
        room = self.max_num_scheduled_tokens - len(decoding) * (1 + self.num_spec_tokens)
        self._room = max(MIN_PROMPT_TOKENS, room)
        self._has_begun = True

    def _end_step(self, output: Any) -> None:
        self._has_begun = False
