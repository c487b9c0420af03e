"""The results of replayed tokens on their way from patch_replay to patch_streams."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.outputs import RequestOutput


class ReplayedOutput(RequestOutput):
    """The results of replayed tokens, and behind them what has come since: vLLM adds results to one
    that has not been fetched yet, and parsers want them one by one."""

    parts: Sequence[RequestOutput] = ()
    num_sent: int = 0
    """How many of the first parts the client has."""
    rest: RequestOutput | None = None

    @classmethod
    def of(cls, parts: Sequence[RequestOutput], num_sent: int) -> "ReplayedOutput":
        replayed = cls(**vars(parts[-1]))
        replayed.parts, replayed.num_sent = parts, num_sent
        if num_sent == len(parts) and replayed.finished:
            # The client does not know that the answer ends.
            (last,) = parts[-1].outputs
            replayed.rest = _without_content(parts[-1], last)
            last.finish_reason = last.stop_reason = None
        return replayed

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        if self.rest is None:
            self.rest = next_output
        else:
            self.rest.add(next_output, aggregate)
        self.finished |= next_output.finished

    def unrolled(self, one_by_one: bool) -> Iterator[tuple[RequestOutput, bool]]:
        """Yield each result and whether the client has it. Neighbours are merged unless
        `one_by_one`."""
        for parts, is_sent in (
            (self.parts[: self.num_sent], True),
            (self.parts[self.num_sent :], False),
        ):
            for part in parts if one_by_one else _merged(parts):
                yield part, is_sent
        if self.rest is not None:
            yield self.rest, False


def _merged(parts: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
    for part in parts[1:]:
        parts[0].add(part, aggregate=True)
    return parts[:1]


def _without_content(output: RequestOutput, completion: Any) -> RequestOutput:
    last, empty = copy.copy(output), copy.copy(completion)
    empty.text, empty.token_ids = "", []
    empty.logprobs = None if completion.logprobs is None else completion.logprobs[:0]
    last.outputs = [empty]
    return last
