"""How far vLLM has come with prompts that are pushed while they are computed.

vLLM lists a request's blocks when it is admitted, and the new ones with each step. Imports no vLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine_ext.common.types import BlockIds, EngineRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Computed(NamedTuple):
    request_id: str
    block_ids: BlockIds
    num_tokens: int
    """Whose KV stands in these blocks."""
    num_new_tokens: int
    """That the step computes."""


@dataclass(slots=True)
class _AdmittedPrompt:
    view: EngineRequest
    block_ids: list[list[int]] = field(default_factory=list)
    num_found: int = 0
    """Tokens that it had when it was admitted."""

    def admit(self, block_ids: tuple[list[int], ...], num_tokens: int) -> None:
        self.block_ids = [list(group) for group in block_ids]
        self.num_found = num_tokens

    def grow(self, block_ids: tuple[list[int], ...] | None) -> None:
        for group, fresh in zip(self.block_ids, block_ids or (), strict=False):
            group += fresh


class PromptProgress:
    def __init__(self) -> None:
        self.prompts: dict[str, _AdmittedPrompt] = {}

    def follow(self, view: EngineRequest) -> None:
        self.prompts[view.request_id] = _AdmittedPrompt(view)

    def forget(self, request_id: str) -> None:
        self.prompts.pop(request_id, None)

    def preempted(self, output: "SchedulerOutput") -> list[str]:
        """Those whose blocks went to others before this step."""
        names = [name for name in output.preempted_req_ids or () if name in self.prompts]
        for name in names:
            self.prompts[name].admit((), 0)
        return names

    def computed(self, output: "SchedulerOutput") -> Iterator[Computed]:
        """Yield what earlier steps have computed of the prompts in this step."""
        if not self.prompts:
            return
        self._note(output)
        for name, num_new_tokens in output.num_scheduled_tokens.items():
            prompt = self.prompts.get(name)
            # A prefix that vLLM found in its cache may be computed by another request in this very
            # step: it counts when a step of the request's own has come back.
            if prompt is None or prompt.view.num_computed_tokens <= prompt.num_found:
                continue
            block_ids = tuple(map(tuple, prompt.block_ids))
            yield Computed(name, block_ids, prompt.view.num_computed_tokens, num_new_tokens)

    def _note(self, output: "SchedulerOutput") -> None:
        for new in output.scheduled_new_reqs:
            if new.req_id in self.prompts:
                self.prompts[new.req_id].admit(new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        steps = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, block_ids, num_tokens in steps:
            prompt = self.prompts.get(name)
            if prompt is None:
                continue
            if name in cached.resumed_req_ids:
                prompt.admit(block_ids or (), num_tokens)
            else:
                prompt.grow(block_ids)
