"""What a load asks: chats of several turns, each with words of its own, the same for a seed."""

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
class Wish:
    """`words` of each question, about as many tokens; `tokens` is the longest answer."""

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

    def body(self, history: Sequence[Message], wish: Wish) -> dict[str, Any]:
        return {
            "model": wish.model,
            "messages": list(history),
            "conversation_id": self.name,
            "max_tokens": wish.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def chats(wish: Wish, run: str) -> Iterator[Chat]:
    """So many that there are `requests` questions in all. `run` tells one load from another."""
    left, number = wish.requests, 0
    while left > 0:
        chance = random.Random(f"{wish.seed}/{number}")
        turns = min(left, wish.turns)
        questions = [_question(chance, wish.words) for _ in range(turns)]
        yield Chat(f"bench-{run}-{number}", questions)
        left, number = left - turns, number + 1


def _question(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))
