"""What a job's choices have said so far, counted for `usage` and for the end of the stream."""

from dataclasses import dataclass, field
from typing import Any

from engine_ext.reference.messages import RequestOutput
from engine_ext.reference.server.job import Job


@dataclass(slots=True)
class ChoiceTally:
    tokens: int = 0
    cached_tokens: int = 0
    begun: bool = False
    finished: bool = False


@dataclass(slots=True)
class JobTally:
    job: Job
    choices: list[ChoiceTally] = field(init=False)
    kv_transfer_params: dict[str, Any] | None = None
    load_failure: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        spoken = self.job.num_spoken
        self.choices = [ChoiceTally(spoken, begun=spoken > 0) for _ in range(self.job.num_choices)]

    def add(self, choice: int, output: RequestOutput) -> None:
        tally = self.choices[choice]
        tally.tokens += len(output.token_ids)
        tally.begun = True
        tally.cached_tokens = max(tally.cached_tokens, output.num_cached_tokens)
        tally.finished = output.finish_reason is not None
        self.load_failure = self.load_failure or output.load_failure
        if choice == 0 and output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params

    @property
    def all_finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; a prompt counts once, however many choices it has."""
        prompt = sum(len(prompt.token_ids) for prompt in self.job.prompts)
        firsts = self.choices[:: self.job.n]
        cached = sum(choice.cached_tokens for choice in firsts)
        usage = _usage(prompt, sum(choice.tokens for choice in self.choices))
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}

    def usage_of(self, choice: int) -> dict[str, Any]:
        """For `continuous_usage_stats`."""
        return _usage(len(self.job.prompt_of(choice).token_ids), self.choices[choice].tokens)


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
