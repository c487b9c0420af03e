"""Clients that ask one question after the other, and hold each answer against the right one.

Whatever a client of a real service would call a failure is one here.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from router.commands.bench.load import Client, drive, request_bytes
from tests.integration.oracle import (
    Answer,
    Prompt,
    body_of,
    complete,
    differences,
    text_of,
    tokens_of,
)
from tests.integration.processes import Server, wait_for

ANSWER_TIMEOUT_S = 60.0
LASTING = 500
"""Tokens: seconds of a stream."""


@dataclass(frozen=True)
class Turn:
    """`fields` are the request's, besides the usual ones."""

    prompt: Prompt
    expected: Answer
    fields: Mapping[str, Any]


Script = Sequence[Turn]
"""What one client says from beginning to end; several turns are a conversation."""


@dataclass(frozen=True)
class Outcome:
    """`trouble` is empty for the right answer."""

    turn: Turn
    began: float
    ended: float
    trouble: str = ""


class Load:
    """Runs in a `with` block, at whose end clients finish what they have begun."""

    def __init__(self, url: str, scripts: Sequence[Script], clients: int) -> None:
        self.outcomes: list[Outcome] = []
        parts = urlsplit(url)
        host, port = str(parts.hostname), int(parts.port or 80)
        self._clients = [Client(host, port) for _ in range(clients)]
        self._scripts = itertools.cycle(scripts)
        self._numbers = itertools.count()
        self._over = Event()
        self._thread = ThreadPoolExecutor(1)
        self._working: Future[float] | None = None

    def __enter__(self) -> Self:
        self._working = self._thread.submit(asyncio.run, self._drive())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.shutdown()
        if kind is None and self._working is not None:
            self._working.result()

    @property
    def troubles(self) -> list[str]:
        return [one.trouble for one in self.outcomes if one.trouble]

    def goes_on(self, answers: int, seconds: float = 60) -> None:
        """Waits until there are so many more answers to questions that are asked from now on.
        Raises AssertionError at the first that is wrong."""
        began = time.monotonic()

        def have_come() -> bool:
            assert not self.troubles, self.troubles[:5]
            return sum(one.began > began for one in self.outcomes) >= answers

        wait_for(have_come, f"{answers} more answers", seconds, 0.05)

    async def _drive(self) -> float:
        try:
            return await drive(self._clients, self._until_over(), self._hold)
        finally:
            for client in self._clients:
                client.close()

    def _until_over(self) -> Iterator[Script]:
        while not self._over.is_set():
            yield next(self._scripts)

    async def _hold(self, client: Client, script: Script) -> None:
        name = f"talk-{next(self._numbers)}"
        talk = {"conversation_id": name} if len(script) > 1 else {}
        for turn in script:
            outcome = await _asked(client, turn, talk)
            self.outcomes.append(outcome)
            if outcome.trouble or self._over.is_set():
                break


async def _asked(client: Client, turn: Turn, talk: Mapping[str, str]) -> Outcome:
    body = {**body_of(turn.prompt, turn.fields), **talk}
    request = request_bytes("/v1/completions", json.dumps(body).encode())
    exchange = await client.send(request, ANSWER_TIMEOUT_S)
    text = exchange.body.decode(errors="replace")
    try:
        if exchange.problem or exchange.status != 200:
            raise ValueError(f"{exchange.problem} {exchange.status} {text[:500]}")
        is_stream = body.get("stream")
        answer = Answer.in_events(text) if is_stream else Answer.in_body(json.loads(text))
        found = differences([turn.expected], [answer])
        trouble = f"wrong: {found[0]}" if found else ""
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    trouble = trouble and f"{turn.fields} {talk}: {trouble}"
    return Outcome(turn, exchange.started, exchange.ended, trouble)


def scripts(oracle: Server, count: int) -> list[Script]:
    """So many short answers, as many streams, none with another's prefix, and as many conversations
    of three turns; with what one engine alone answers. One of the streams lasts, so that at any
    time some client is in the midst of it."""
    numbers = range(count)
    whole = [_single(oracle, 40 + 57 * n, n, {}) for n in numbers]
    lengths = [24 + 12 * n if n else LASTING for n in numbers]
    streams = [
        _single(oracle, 40 + 57 * n, 100 + n, {"stream": True, "max_tokens": length})
        for n, length in enumerate(lengths)
    ]
    talks = [_talk(oracle, 200 + n, {"stream": n % 2 == 0}) for n in numbers]
    return [script for three in zip(whole, streams, talks, strict=True) for script in three]


def _single(oracle: Server, length: int, seed: int, fields: Mapping[str, Any]) -> Script:
    return [_turn(oracle, text_of(length, seed), fields)]


def _talk(oracle: Server, seed: int, fields: Mapping[str, Any]) -> Script:
    said, prompt = [], tokens_of(200, seed)
    for number in range(3):
        said.append(_turn(oracle, prompt, fields))
        prompt = [*prompt, *said[-1].expected.tokens, *tokens_of(30, 10 * seed + number)]
    return said


def _turn(oracle: Server, prompt: Prompt, fields: Mapping[str, Any]) -> Turn:
    wanted = {name: value for name, value in fields.items() if name != "stream"}
    return Turn(prompt, complete(oracle, prompt, **wanted), fields)
