"""The times of vLLM's steps, from the order of its calls, by a clock of the test."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.common.step_costs import StepWork
from engine_ext.vllm.optional.steps.step_times import (
    ALL_PROMPTS,
    DECODES,
    PROMPTS,
    StepTimes,
    work_of,
)


def scheduled(
    *,
    running: dict[str, tuple[int, int]] | None = None,
    new: dict[str, tuple[int, int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
    images: dict[str, list[int]] | None = None,
) -> Any:
    """Each request's tokens before the step, and in it."""
    running, new = running or {}, new or {}
    counts = {name: count for name, (_, count) in (running | new).items()}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_encoder_inputs=images or {},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before)
            for name, (before, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[*running], num_computed_tokens=[before for before, _ in running.values()]
        ),
    )


class Times(StepTimes):
    """`now` is the clock, in milliseconds; `found` what was measured."""

    def __init__(self, all_prompts: int = ALL_PROMPTS) -> None:
        self.now = 0.0
        self.found: list[tuple[StepWork, float]] = []
        super().__init__(
            lambda work, ms: self.found.append((work, round(ms, 6))),
            lambda: self.now / 1e3,
            all_prompts,
        )

    def at(self, now: float, *calls: Any) -> None:
        """A scheduled step begins; None: the output of the oldest one was taken."""
        self.now = now
        for output in calls:
            if output is None:
                self.end()
            else:
                self.begin(output)


PROMPT = scheduled(new={"a": (32, 100)})
NEXT = scheduled(running={"a": (132, 50)})
PROMPT_WORK, NEXT_WORK = StepWork(100, 100 * 82.0, 0), StepWork(50, 50 * 157.0, 0)


def test_work_is_divided_into_chunks_and_decoding_requests() -> None:
    output = scheduled(
        running={"decodes": (900, 1), "chunk": (512, 200), "guesses": (300, 4)},
        new={"prompt": (64, 36), "last token": (99, 1)},
        drafts={"guesses": [1, 2, 3]},
    )
    assert work_of(output) == StepWork(236, 200 * 612.0 + 36 * 82.0, 900 + 300 + 99)


def test_one_step_at_a_time_takes_from_the_end_of_the_step_before_to_its_own() -> None:
    times = Times()
    times.at(5, PROMPT)
    times.at(25, None)
    times.at(27, NEXT)
    times.at(40, None)
    assert times.found == [(PROMPT_WORK, 20.0), (NEXT_WORK, 15.0)]


def test_an_idle_pause_is_no_part_of_the_step_behind_it() -> None:
    times = Times()
    times.at(0, PROMPT)
    times.at(20, None)
    times.at(5_000, PROMPT)
    times.at(5_030, None)
    times.at(9_000, scheduled())  # nothing but a connector's work
    times.at(9_001, None)
    times.at(9_500, NEXT)  # a scheduler that was paused goes on
    times.at(9_510, None)
    assert [milliseconds for _, milliseconds in times.found] == [20.0, 30.0, 10.0]


def test_with_two_steps_under_way_each_takes_from_the_end_of_the_one_before() -> None:
    times = Times()
    times.at(0, PROMPT, NEXT)
    times.at(20, None)
    times.at(21, scheduled(running={"a": (182, 60)}))
    times.at(30, None)
    times.at(42, None)
    # One is measured at a time.
    assert times.found == [(PROMPT_WORK, 20.0), (StepWork(60, 60 * 212.0, 0), 12.0)]


@pytest.mark.parametrize(
    ("count", "drafts", "interval"),
    [(1, {}, DECODES), (3, {"a": [7, 8]}, DECODES), (3, {}, PROMPTS)],
)
def test_some_steps_are_measured(count: int, drafts: dict[str, list[int]], interval: int) -> None:
    times = Times(all_prompts=0)
    for number in range(2 * DECODES):
        times.at(10 * number, scheduled(running={"a": (number, count)}, drafts=drafts))
        times.at(10 * number + 9, None)
    assert len(times.found) == 2 * DECODES / interval


def test_the_first_steps_with_prompts_are_all_measured() -> None:
    times = Times(all_prompts=8)
    for number in range(16):
        times.at(10 * number, NEXT)
        times.at(10 * number + 9, None)
    assert len(times.found) == 8 + 8 / PROMPTS


def test_steps_with_encoders_are_not_measured() -> None:
    times = Times()
    times.at(0, scheduled(new={"b": (0, 40)}, images={"b": [0]}))
    times.at(10, None)
    assert times.found == []
