"""The requests of a simulated fleet: shapes made from a seed, or a published trace from a file."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, pairwise
from operator import itemgetter
from pathlib import Path

from router.routing.prompt_chunks import TOKENS_PER_CHUNK

# The tokens that one hash of a published trace stands for.
TRACE_BLOCK = 512


@dataclass(slots=True)
class Job:
    """`chunks` are those of the prompt, `after` those of prompt and answer. `pause`: seconds since
    the session's last answer."""

    tokens: int
    output: int
    chunks: tuple[int, ...]
    after: tuple[int, ...]
    session: str = ""
    pause: float = 0.0
    talk: Talk | None = None
    arrived: float = 0.0
    first_token: float = 0.0


@dataclass(slots=True)
class Talk:
    """A conversation, each of whose prompts begins with the last one."""

    name: str
    chunks: list[int]
    tokens: int
    turns_left: int


# Arrivals in bursts: mean seconds of a quiet and of a busy time, and their rates beside the mean.
QUIET, QUIET_RATE = 20.0, 0.5
BURST, BURST_RATE = 5.0, 3.0


class Pauses:
    """The times between arrivals: Poisson, "bursty", or even ("spread")."""

    def __init__(self, rhythm: str, chance: random.Random) -> None:
        self._rhythm, self._random = rhythm, chance
        self._until, self._rate = 0.0, 1.0

    def next(self, now: float, rate: float) -> float:
        """Return the seconds until the next arrival, with `rate` arrivals a second in the mean."""
        if self._rhythm == "spread":
            return 1 / rate
        if self._rhythm == "bursty" and now >= self._until:
            busy = self._rate == QUIET_RATE
            self._rate = BURST_RATE if busy else QUIET_RATE
            self._until = now + self._random.expovariate(1 / (BURST if busy else QUIET))
        return self._random.expovariate(rate * self._rate)


class _Shape:
    """`arrive` of a shape returns the job of a new user."""

    def __init__(self, seed: int, engines: int) -> None:
        self.random = random.Random(seed)
        self.engines = engines
        self.numbers = count(1)

    def follow(self, job: Job) -> tuple[float, Job] | None:
        """Return the job that follows on an answer and the seconds until then, or None."""
        return None

    def job(self, chunks: list[int], tokens: int, output: int) -> Job:
        """Return a job; `chunks` is lengthened to what prompt and answer have."""
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


class Documents(_Shape):
    """Questions about long documents, half of them about a document of recent questions.

    All prompts of a service begin with the same text; a few services have most of the users.
    """

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


SHAPES: dict[str, type[Uniform | Documents | Chat]] = {
    "documents": Documents,
    "chat": Chat,
    "uniform": Uniform,
}


# Traces with their own times.

Arrival = tuple[float, Job]
"""Seconds since the trace's begin, and the job."""
# Traffic that changes: seconds of each phase, whether it has long documents (or else short prompts
# with long answers), and the requests a second.
PHASES = {1: (420.0, True, 5.5), 2: (360.0, False, 13.0), 3: (420.0, True, 5.5)}


def changing(
    seed: int, rhythm: str = "", phases: Sequence[int] = tuple(PHASES)
) -> tuple[list[Arrival], list[tuple[float, float]]]:
    """Documents with short answers, then short prompts with long answers, then documents again:
    20 minutes, for a fleet of about eight engines. Return the begin and end of each phase, too."""
    shape, arrivals, now, times = _Shape(seed, 1), list[Arrival](), 0.0, [0.0]
    recent, pauses = deque[list[int]](maxlen=200), Pauses(rhythm, shape.random)
    for seconds, has_documents, rate in map(PHASES.__getitem__, phases):
        times.append(times[-1] + seconds)
        while (now := now + pauses.next(now, rate)) < times[-1]:
            if not has_documents:
                job = shape.job([], shape.length(900, 0.7, 8000), shape.length(700, 0.6, 3000))
            else:
                if recent and shape.random.random() < 0.25:
                    document = shape.random.choice(recent)
                else:
                    size = shape.length(9000, 0.8, 60_000) // TOKENS_PER_CHUNK
                    document = [next(shape.numbers) for _ in range(size)]
                    recent.append(document)
                tokens = len(document) * TOKENS_PER_CHUNK + shape.length(150, 0.5, 500)
                job = shape.job(list(document), tokens, shape.length(90, 0.7, 600))
            arrivals.append((now, job))
    return arrivals, [*pairwise(times)]


class TraceError(ValueError):
    """A trace cannot be read. The message names the file and the line."""


def published(path: Path, spread: bool) -> list[Arrival]:
    """Read a trace of Mooncake's format: for each request one JSON object with `timestamp` (ms),
    `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens of the prompt. Sessions
    have `session` and `pause` (ms since the session's last answer), too.

    `spread` distributes the requests of one instant evenly until the next. Raises TraceError,
    OSError.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    arrivals = [_arrival(path, number, line) for number, line in enumerate(lines, 1)]
    arrivals.sort(key=itemgetter(0))
    return [*_spread(arrivals)] if spread else arrivals


def _arrival(path: Path, number: int, line: str) -> Arrival:
    try:
        entry = json.loads(line)
        at, tokens, output = (entry[k] for k in ("timestamp", "input_length", "output_length"))
        each = TRACE_BLOCK // TOKENS_PER_CHUNK
        chunks = tuple(each * one + part for one in entry["hash_ids"] for part in range(each))
        chunks = chunks[: tokens // TOKENS_PER_CHUNK]
        # All prompts of a trace may begin with the same block, a conversation's with the next too.
        session = str(*entry["hash_ids"][1:2] or [f"line {number}"])
        session, pause = str(entry.get("session", session)), entry.get("pause", 0) / 1000
        return at / 1000, Job(max(1, tokens), max(1, output), chunks, chunks, session, pause)
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}, line {number}: not a request of a trace ({error})") from None


def at_load(arrivals: Sequence[Arrival], load: float) -> list[Arrival]:
    """Return copies of the arrivals, `load` times as fast."""
    return [(at / load, replace(job, pause=job.pause / load)) for at, job in arrivals]


def _spread(arrivals: list[Arrival]) -> Iterator[Arrival]:
    instants = [[*group] for _, group in groupby(arrivals, key=itemgetter(0))]
    for group, following in zip(instants, [*instants[1:], instants[-1]], strict=True):
        at, gap = group[0][0], following[0][0] - group[0][0]
        yield from ((at + gap * n / len(group), job) for n, (_, job) in enumerate(group))
