"""What an engine answered, and whether another answer is the same one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def in_body(cls, body: dict[str, Any]) -> "Answer":
        """Of a completion that was asked for token ids and log-probabilities."""
        choice = body["choices"][0]
        return cls(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))

    def difference(self, other: "Answer", tolerance: float) -> str:
        """Empty: none, but for the tolerance of log-probabilities."""
        if self.tokens != other.tokens:
            return f"tokens {list(self.tokens)} alone, {list(other.tokens)} by two"
        far = distance(self.logprobs, other.logprobs)
        if far <= tolerance:
            return ""
        return f"log-probabilities differ by {far:.2g}, more than {tolerance:g}"


def distance(some: Sequence[float], others: Sequence[float]) -> float:
    """The largest; infinite where there is none on one side, or what is not a number."""
    pairs = zip_longest(some, others, fillvalue=float("inf"))
    apart = [abs(one - other) for one, other in pairs]
    return max((far if far == far else float("inf") for far in apart), default=float("inf"))
