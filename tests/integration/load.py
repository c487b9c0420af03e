"""Clients that ask one question after the other, and hold each answer against the right one.

Whatever a client of a real service would call a failure is one here.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from types import TracebackType
from typing import Any, Self

import httpx

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

PATIENCE = 60.0
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
        self._url = url
        self._scripts = itertools.cycle(scripts)
        self._numbers = itertools.count()
        self._clients = clients
        self._over = Event()
        self._threads = ThreadPoolExecutor(clients)
        self._working: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._working = [self._threads.submit(self._work) for _ in range(self._clients)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._threads.shutdown()
        if kind is None:
            for client in self._working:
                client.result()

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

    def _work(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE, trust_env=False) as client:
            while not self._over.is_set():
                script, name = next(self._scripts), f"talk-{next(self._numbers)}"
                talk = {"conversation_id": name} if len(script) > 1 else {}
                for turn in script:
                    outcome = _asked(client, turn, talk)
                    self.outcomes.append(outcome)
                    if outcome.trouble or self._over.is_set():
                        break


def _asked(client: httpx.Client, turn: Turn, talk: Mapping[str, str]) -> Outcome:
    began = time.monotonic()
    try:
        answer = _answer(client, {**body_of(turn.prompt, turn.fields), **talk})
        found = differences([turn.expected], [answer])
        trouble = f"wrong: {found[0]}" if found else ""
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    return Outcome(turn, began, time.monotonic(), trouble and f"{turn.fields} {talk}: {trouble}")


def _answer(client: httpx.Client, body: dict[str, Any]) -> Answer:
    """Raises whatever a client may meet."""
    with client.stream("POST", "/v1/completions", json=body) as response:
        text = response.read().decode()
    if response.status_code != 200:
        raise ValueError(f"{response.status_code} {text[:500]}")
    return Answer.in_events(text) if body.get("stream") else Answer.in_body(json.loads(text))


def scripts(oracle: Server, count: int, seed: int = 0) -> list[Script]:
    """So many short answers, as many streams, none with another's prefix, and as many conversations
    of three turns; with what one engine alone answers. One of the streams lasts, so that at any
    time some client is in the midst of it."""
    numbers = range(count)
    whole = [_single(oracle, 40 + 57 * n, seed + n, {}) for n in numbers]
    lengths = [24 + 12 * n if n else LASTING for n in numbers]
    streams = [
        _single(oracle, 40 + 57 * n, seed + 100 + n, {"stream": True, "max_tokens": length})
        for n, length in enumerate(lengths)
    ]
    talks = [_talk(oracle, seed + 200 + n, {"stream": n % 2 == 0}) for n in numbers]
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
