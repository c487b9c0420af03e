"""One HTTP request for tokens, checked and complete: nothing in it can fail any more."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from engine_ext.reference.beginning import Beginning
from engine_ext.reference.messages import GenerateRequest, SamplingParams
from engine_ext.reference.server import request_id
from engine_ext.reference.server.prompts import TokenizedPrompt
from engine_ext.reference.server.tool_calls import Forced


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How the answer is to look."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None
    tokens_as_ids: bool = False
    """Logprobs name tokens `token_id:<id>`."""
    role: str = "assistant"
    forced: Forced | None = None
    """The answer is calls of tools."""
    tell: str | None = None
    """A stream names the ids of the tokens that it says, in comments: of the output, or of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    """As the client sees it."""
    created: int
    model: str
    prompts: tuple[TokenizedPrompt, ...]
    engine_ids: tuple[str, ...]
    """One for each prompt."""
    sampling: SamplingParams
    n: int = 1
    kv_transfer_params: dict[str, Any] | None = None
    cache_hit_threshold: float | None = None
    options: AnswerOptions = field(default_factory=AnswerOptions)
    begun: Beginning | None = None
    """Of a job with one choice: its answer goes on from there."""

    @property
    def num_spoken(self) -> int:
        """Tokens of the answer that the client has."""
        return self.begun.num_spoken if self.begun else 0

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, choice: int) -> TokenizedPrompt:
        return self.prompts[choice // self.n]

    def engine_requests(self) -> Iterator[GenerateRequest]:
        """One for each choice, in the order of their indices.

        Only the first prompt's have the KV parameters, which are of one prompt; and where blocks
        are to be kept for another engine, its first alone.
        """
        for choice in range(self.num_choices):
            prompt, child = divmod(choice, self.n)
            own_id = self.engine_ids[prompt]
            yield GenerateRequest(
                request_id=f"{child}_{own_id}" if self.n > 1 else own_id,
                prompt_token_ids=self.prompts[prompt].token_ids,
                sampling=self._sampling(child),
                kv_transfer_params=self.kv_transfer_params if self._is_meant(choice) else None,
                cache_hit_threshold=self.cache_hit_threshold,
                is_only=self.num_choices == 1,
            )

    def _is_meant(self, choice: int) -> bool:
        if choice == 0:
            return True
        params = self.kv_transfer_params or {}
        return choice < self.n and params.get("do_remote_prefill") is True

    def _sampling(self, child: int) -> SamplingParams:
        if self.sampling.seed is None or child == 0:
            return self.sampling
        return replace(self.sampling, seed=self.sampling.seed + child)


def engine_ids(job_id: str, prompts: int) -> tuple[str, ...]:
    return tuple(request_id.engine_id(f"{job_id}-{place}") for place in range(prompts))
