"""The interface of sources of engines, and what several sources use."""

from __future__ import annotations

import asyncio
import contextlib
import random
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from router.fleet.engine import ListedEngine

T = TypeVar("T")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0


class SourceError(Exception):
    """A source cannot list its engines, for an external reason; the text is one line."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """`listed` is all that a source lists, without duplicate addresses and in no order; None if the
    source failed, so that its last list stays valid. `problem` describes a problem in one line;
    empty if there is none."""

    listed: tuple[ListedEngine, ...] | None = None
    problem: str = ""


class EngineSource(Protocol):
    """A source of engines. `first` is its report before it is watched."""

    @property
    def name(self) -> str:
        """A name that no other source has; a label of metrics."""

    @property
    def first(self) -> SourceReport: ...

    def watch(self) -> AsyncGenerator[SourceReport, None]:
        """Yield a report after each look, changed or not; end when nothing more will come. External
        failures are reports, not exceptions. Each wait has a deadline."""


class Backoff:
    """Pauses that double with each failure, with jitter, so that many routers do not retry at the
    same moment."""

    def __init__(self, random_share: Callable[[], float] = random.random) -> None:
        self._random = random_share
        self._failures = 0

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        pause = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 16), MAX_PAUSE_S)
        self._failures += 1
        return pause * (0.5 + self._random() / 2)

    def reset(self) -> None:
        self._failures = 0


def one_line(error: BaseException) -> str:
    """Return the error's type and text as one short line."""
    return textwrap.shorten(" ".join(f"{type(error).__name__}: {error}".split()), 300)


async def run_in_own_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a thread and an event loop of its own, because its work would delay
    requests. The coroutine must end without help: neither a cancelled caller nor the end of the
    process waits for it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: object) -> None:
        if not outcome.done():  # the caller still waits
            set_outcome(value)

    def run() -> None:
        set_outcome: Callable[[Any], None]
        try:
            value: object = asyncio.run(make())
            set_outcome = outcome.set_result
        except BaseException as error:
            value, set_outcome = error, outcome.set_exception
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            loop.call_soon_threadsafe(settle, set_outcome, value)

    threading.Thread(target=run, name="source", daemon=True).start()
    return await outcome
