"""Who asks what: jobs of three shapes, from a seed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from router.routing.prompt_chunks import TOKENS_PER_CHUNK


@dataclass(slots=True)
class Job:
    """`chunks` are those of the prompt, `after` those of prompt and answer."""

    tokens: int
    output: int
    chunks: tuple[int, ...]
    after: tuple[int, ...]
    session: str = ""
    talk: Talk | None = None
    arrived: float = 0.0
    first_token: float = 0.0


class Trace(Protocol):
    def arrive(self) -> Job:
        """Somebody asks for the first time."""

    def follow(self, job: Job) -> tuple[float, Job] | None:
        """What is asked after that answer, and how many seconds later."""


@dataclass(slots=True)
class Talk:
    """A conversation: its chunks are numbered on, so each prompt begins as the last one did."""

    name: str
    chunks: list[int]
    tokens: int
    turns_left: int


class _Shape:
    def __init__(self, seed: int, engines: int) -> None:
        self.random = random.Random(seed)
        self.engines = engines
        self.numbers = count(1)

    def follow(self, job: Job) -> tuple[float, Job] | None:
        return None

    def job(self, chunks: list[int], tokens: int, output: int) -> Job:
        """The chunks are made as many as prompt and answer have."""
        while len(chunks) < (tokens + output) // TOKENS_PER_CHUNK:
            chunks.append(next(self.numbers))
        after = tuple(chunks[: (tokens + output) // TOKENS_PER_CHUNK])
        return Job(tokens, output, after[: tokens // TOKENS_PER_CHUNK], after)

    def length(self, median: float, spread: float, most: int) -> int:
        return min(most, max(16, int(median * self.random.lognormvariate(0, spread))))


class Uniform(_Shape):
    """Prompts that have nothing in common."""

    def arrive(self) -> Job:
        return self.job([], self.length(1000, 0.8, 16_000), self.length(200, 0.6, 2000))


class Mooncake(_Shape):
    """Questions about long documents: half of them about one that was asked about lately. All of a
    service's prompts begin with the same text; a few services have most of the users."""

    services = 50

    def __init__(self, seed: int, engines: int) -> None:
        super().__init__(seed, engines)
        lengths = [self.random.randrange(2, 17) for _ in range(self.services)]
        self.heads = [[next(self.numbers) for _ in range(length)] for length in lengths]
        self.weights = [1 / (rank + 1) for rank in range(self.services)]
        self.recent: deque[list[int]] = deque(maxlen=20 * engines)

    def arrive(self) -> Job:
        if self.recent and self.random.random() < 0.5:
            document = self.random.choice(self.recent)
        else:
            head = self.random.choices(self.heads, self.weights)[0]
            size = self.length(5000, 0.8, 60_000) // TOKENS_PER_CHUNK
            document = [*head, *(next(self.numbers) for _ in range(size))]
            self.recent.append(document)
        tokens = len(document) * TOKENS_PER_CHUNK + self.length(100, 0.5, 1000)
        return self.job(list(document), tokens, self.length(150, 0.6, 2000))


class Chat(_Shape):
    """Conversations: each prompt is the last one, its answer, and a new message."""

    def __init__(self, seed: int, engines: int) -> None:
        super().__init__(seed, engines)
        self.heads = [[next(self.numbers) for _ in range(4)] for _ in range(20)]

    def arrive(self) -> Job:
        turns = 1 + int(self.random.expovariate(1 / 5.5))
        head = list(self.random.choice(self.heads))
        talk = Talk(f"talk-{next(self.numbers)}", head, len(head) * TOKENS_PER_CHUNK, turns)
        return self._turn(talk)

    def follow(self, job: Job) -> tuple[float, Job] | None:
        talk = job.talk
        if talk is None or talk.turns_left <= 0:
            return None
        return 1 + self.random.expovariate(1 / 5), self._turn(talk)

    def _turn(self, talk: Talk) -> Job:
        talk.turns_left -= 1
        tokens = talk.tokens + self.length(120, 0.9, 8000)
        job = self.job(talk.chunks, tokens, self.length(200, 0.6, 2000))
        job.session, job.talk = talk.name, talk
        talk.tokens = tokens + job.output
        return job


SHAPES: dict[str, type[Uniform | Mooncake | Chat]] = {
    "mooncake": Mooncake,
    "chat": Chat,
    "uniform": Uniform,
}
