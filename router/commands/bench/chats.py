"""The chats of a load: several turns, random words, the same for a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT = """
river stone light paper window garden letter music bridge winter morning engine silver market forest
candle ocean number story mountain teacher kitchen travel signal yellow harbour question pocket
summer village answer shadow thunder copper meadow lantern
"""
WORDS = tuple(TEXT.split())
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The chats to send. `words` is the length of a question, about as many tokens; `tokens` is the
    length of an answer."""

    model: str
    requests: int
    turns: int
    words: int
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Chat:
    name: str
    questions: Sequence[str]

    def body(self, history: Sequence[Message], plan: LoadPlan) -> dict[str, Any]:
        return {
            "model": plan.model,
            "messages": list(history),
            "conversation_id": self.name,
            "max_tokens": plan.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def chats(plan: LoadPlan, run: str) -> Iterator[Chat]:
    """Yield chats until there are `requests` questions in all. `run` distinguishes this load."""
    left, number = plan.requests, 0
    while left > 0:
        chance = random.Random(f"{plan.seed}/{number}")
        turns = min(left, plan.turns)
        questions = [_question(chance, plan.words) for _ in range(turns)]
        yield Chat(f"bench-{run}-{number}", questions)
        left, number = left - turns, number + 1


def _question(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))
