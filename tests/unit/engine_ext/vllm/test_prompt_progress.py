"""What vLLM's steps say of prompts that are pushed while they are computed."""

from types import SimpleNamespace
from typing import Any

from engine_ext.vllm.prompt_progress import Computed, PromptProgress


class Following:
    """One request, `x`, whose tokens count as computed when `num_computed_tokens` says so."""

    def __init__(self) -> None:
        self.view: Any = SimpleNamespace(request_id="x", num_computed_tokens=0)
        self.prompts = PromptProgress()
        self.prompts.follow(self.view)

    def admitted(self, block_ids: tuple[list[int], ...], num_found: int = 0) -> list[Computed]:
        new = SimpleNamespace(req_id="x", block_ids=block_ids, num_computed_tokens=num_found)
        other = SimpleNamespace(req_id="y", block_ids=([7],), num_computed_tokens=0)
        return self._step([new, other], {})

    def goes_on(
        self, block_ids: tuple[list[int], ...] | None, num_told: int, *, resumed: bool = False
    ) -> list[Computed]:
        return self._step([], {"x": (block_ids, num_told, resumed)})

    def _step(self, new: list[Any], cached: dict[str, Any]) -> list[Computed]:
        told = SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[each[0] for each in cached.values()],
            num_computed_tokens=[each[1] for each in cached.values()],
            resumed_req_ids={name for name, each in cached.items() if each[2]},
        )
        output: Any = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=told,
            num_scheduled_tokens={"x": 64, "y": 1},
        )
        return list(self.prompts.computed(output))

    def preempted(self) -> list[str]:
        output: Any = SimpleNamespace(preempted_req_ids={"x", "y"})
        return self.prompts.preempted(output)


def test_what_earlier_steps_have_computed_is_told_with_all_its_blocks() -> None:
    following = Following()
    assert following.admitted(([1, 2], [11])) == []
    following.view.num_computed_tokens = 64
    assert following.goes_on(([3, 4], []), 64) == [
        Computed("x", ((1, 2, 3, 4), (11,)), 64, num_new_tokens=64)
    ]
    following.view.num_computed_tokens = 128
    assert following.goes_on(None, 128) == [Computed("x", ((1, 2, 3, 4), (11,)), 128, 64)]


def test_a_prefix_from_the_cache_counts_when_a_step_of_its_own_has_come_back() -> None:
    """Another request of the same step may be computing it."""
    following = Following()
    following.view.num_computed_tokens = 64
    assert following.admitted(([1, 2, 3],), num_found=64) == []
    assert following.goes_on(([4],), 128) == [], "scheduled ahead of the model"
    following.view.num_computed_tokens = 128
    assert following.goes_on(([5],), 192) == [Computed("x", ((1, 2, 3, 4, 5),), 128, 64)]


def test_a_request_that_goes_on_after_preemption_has_other_blocks() -> None:
    following = Following()
    following.admitted(([1, 2],))
    following.view.num_computed_tokens = 64
    assert following.goes_on(([3],), 64)
    following.view.num_computed_tokens = 0
    assert following.preempted() == ["x"]
    following.view.num_computed_tokens = 32
    assert following.goes_on(([6, 7],), 32, resumed=True) == []
    following.view.num_computed_tokens = 96
    assert following.goes_on(([8],), 96) == [Computed("x", ((6, 7, 8),), 96, 64)]


def test_who_is_not_followed_any_more_is_not_told_of() -> None:
    following = Following()
    following.prompts.forget("x")
    following.view.num_computed_tokens = 64
    assert following.goes_on(([3],), 64) == []
    assert following.preempted() == []
