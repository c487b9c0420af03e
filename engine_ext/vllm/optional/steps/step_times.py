"""The step model (`step_model`): measures the steps of this engine for common/step_costs.py.

The connector is called when vLLM has scheduled a step, and when it has taken the step's output.
Steps end in the order in which they began, whether one runs at a time or several (asynchronous
scheduling), so a step takes from the end of the one before to its own end. After an idle pause, or
a step without tokens, it takes from its own beginning. KV is loaded beside steps: none waits for a
load. What a step computes is only looked up for one step in DECODES without prompts, and, after the
first ALL_PROMPTS, for one in PROMPTS with prompts: that takes longer than the rest.

Not covered: the work of draft tokens, which counts to the decoding requests; encoders, whose steps
are left out; and pipeline parallelism, where the time is that from one step's end to the next's.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine_ext.common.step_costs import StepWork

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

DECODES = 16
PROMPTS = 4
ALL_PROMPTS = 64


class StepTimes:
    """`add` gets the work of a step and its milliseconds."""

    def __init__(
        self,
        add: Callable[[StepWork, float], None],
        clock: Callable[[], float] = time.perf_counter,
        all_prompts: int = ALL_PROMPTS,
    ) -> None:
        self._add = add
        self._clock = clock
        self._num_left = all_prompts
        """The rest of the first steps with prompts, all of which may be measured."""
        self._num_begun = 0
        self._num_ended = 0
        self._next_decode = self._next_prompt = 0
        """The number of the next step without prompts, and with some, that may be taken."""
        self._was_empty = True
        """The last step that began had no tokens."""
        self._ended_at = 0.0
        self._taken = 0
        """The number of the step whose time is taken, of those that run; 0 for none."""
        self._began_at = 0.0
        self._work = StepWork(0, 0.0, 0)

    def begin(self, output: "SchedulerOutput") -> None:
        """vLLM has scheduled a step."""
        self._num_begun = number = self._num_begun + 1
        num_tokens, drafts = output.total_num_scheduled_tokens, output.scheduled_spec_decode_tokens
        follows_empty, self._was_empty = self._was_empty, not num_tokens
        if self._taken or not num_tokens or output.scheduled_encoder_inputs:
            return
        num_decoding = len(output.num_scheduled_tokens)
        if drafts:
            num_decoding += sum(map(len, drafts.values()))
        if num_tokens > num_decoding:
            if number < self._next_prompt:
                return
            self._num_left -= 1
            self._next_prompt = number + (1 if self._num_left >= 0 else PROMPTS)
        else:
            if number < self._next_decode:
                return
            self._next_decode = number + DECODES
        self._work = work_of(output)
        # Requests that have run before show that the engine was not idle.
        is_next = output.scheduled_cached_reqs.req_ids and not follows_empty
        self._began_at = 0.0 if is_next else self._clock()
        self._taken = number

    def end(self) -> None:
        """vLLM has taken the output of the step that began first."""
        # Steps end in the order in which they began, however many run at a time.
        self._num_ended += 1
        now = self._clock()
        if self._num_ended == self._taken:
            self._taken = 0
            self._add(self._work, (now - max(self._began_at, self._ended_at)) * 1e3)
        self._ended_at = now


def work_of(output: "SchedulerOutput") -> StepWork:
    """Return what a step computes. A chunk of one token costs what a decoding request does."""
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    cached = output.scheduled_cached_reqs
    contexts = sum(cached.num_computed_tokens)
    chunks = []
    if output.total_num_scheduled_tokens > len(scheduled):
        lengths = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        chunks = [
            (scheduled[name], before)
            for name, before in lengths
            if scheduled[name] > 1 and name not in drafts
        ]
        contexts -= sum(before for _, before in chunks)
    for new in output.scheduled_new_reqs:
        count = scheduled[new.req_id]
        if count > 1:
            chunks.append((count, new.num_computed_tokens))
        else:
            contexts += new.num_computed_tokens
    return StepWork.of(chunks, contexts)
