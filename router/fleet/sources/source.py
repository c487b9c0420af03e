"""The interface of sources of engines, what several sources use, and lists saved in a file.

The processes of one router share a folder. A process that starts while a source fails (its file is
broken, its API server is away) uses the list that `SavedListing` has saved there, like the other
processes, until the source works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import textwrap
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from router.fleet.engine import EngineSpec

logger = logging.getLogger("disagg_router.fleet")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
# Reports wait this long for the list to be saved; a slower write continues in its thread.
SAVE_TIMEOUT_S = 5.0


class SourceError(Exception):
    """A source cannot list its engines, for an external reason; the text is one line."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """`listed` is all that a source lists, without duplicate addresses and in no order; None if the
    source failed, so that its last list stays valid. `problem` describes a problem in one line;
    empty if there is none."""

    listed: tuple[EngineSpec, ...] | None = None
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

    def reset(self, failures: int = 0) -> None:
        """Continue as after at most so many failures."""
        self._failures = min(self._failures, failures)


def one_line(error: BaseException) -> str:
    """Return the error's type and text as one short line."""
    return textwrap.shorten(" ".join(f"{type(error).__name__}: {error}".split()), 300)


class SavedListing:
    """A source whose last list is saved in `file` by each process that receives it."""

    def __init__(self, source: EngineSource, file: Path) -> None:
        self.name = source.name
        self._source = source
        self._file = file
        self._saved: tuple[EngineSpec, ...] | None = None
        self._failed: tuple[EngineSpec, ...] | None = None
        self._saving: asyncio.Task[None] | None = None
        self.first = source.first
        if self.first.listed is None:
            self.first = SourceReport(load_listing(file), self.first.problem)

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        async with contextlib.aclosing(self._source.watch()) as reports:
            async for report in reports:
                yield report
                if report.listed is not None and report.listed != self._saved:
                    await self._save(report.listed)

    async def _save(self, listed: tuple[EngineSpec, ...]) -> None:
        """Save in a thread, one list at a time. A failure is not a problem of the source: it is
        logged once, and saving is tried again with the next report."""
        if self._saving is not None and not await self._has_ended(self._saving):
            return
        if listed != self._saved:
            self._saved = listed
            self._saving = asyncio.create_task(asyncio.to_thread(save_listing, self._file, listed))
            await self._has_ended(self._saving)

    async def _has_ended(self, saving: asyncio.Task[None]) -> bool:
        done, _ = await asyncio.wait([saving], timeout=SAVE_TIMEOUT_S)
        if not done:
            return False
        self._saving, error = None, saving.exception()
        if error is not None:
            failed, self._failed, self._saved = self._failed, self._saved, None
            if failed != self._failed:
                logger.warning("the list of source %s cannot be saved: %s", self.name, error)
        return True


def save_listing(file: Path, listed: tuple[EngineSpec, ...]) -> None:
    """Replace the file atomically. Raises OSError."""
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(listed))
    fresh.replace(file)


def load_listing(file: Path) -> tuple[EngineSpec, ...] | None:
    """Return the saved list; None if there is none that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[EngineSpec, ...])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, ValueError) as error:
        logger.warning("the saved list of a source cannot be read: %s", error)
        return None
