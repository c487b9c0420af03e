"""The results of given tokens on their way from begun_answer.py to streams.py."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.outputs import RequestOutput


class GivenTokenResults(RequestOutput):
    """The results of given tokens, and behind them what has come since: vLLM adds results to one
    that nobody has fetched yet, and parsers want them one by one."""

    parts: Sequence[RequestOutput] = ()
    num_silent: int = 0
    """Of the parts, the first, which the client has."""
    rest: RequestOutput | None = None

    @classmethod
    def of(cls, parts: Sequence[RequestOutput], num_silent: int) -> "GivenTokenResults":
        given = cls(**vars(parts[-1]))
        given.parts, given.num_silent = parts, num_silent
        if num_silent == len(parts) and given.finished:
            # That it ends is still to be said.
            (last,) = parts[-1].outputs
            given.rest = _without_content(parts[-1], last)
            last.finish_reason = last.stop_reason = None
        return given

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        if self.rest is None:
            self.rest = next_output
        else:
            self.rest.add(next_output, aggregate)
        self.finished |= next_output.finished

    def unrolled(self, one_by_one: bool) -> Iterator[tuple[RequestOutput, bool]]:
        """Each with whether it is silent; neighbours are made one where nobody needs to see them
        apart."""
        silent, aloud = self.parts[: self.num_silent], self.parts[self.num_silent :]
        for parts, is_silent in ((silent, True), (aloud, False)):
            for part in parts if one_by_one else _merged(parts):
                yield part, is_silent
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
