"""The last list of a source, saved for a process that replaces a failed one.

The processes of one router share a folder. A process that starts while a source fails (its file is
broken, its API server is away) uses the saved list, like the other processes, until the source
works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from router.fleet.engine import ListedEngine
from router.fleet.sources.source import (
    EngineSource,
    SourceReport,
)

logger = logging.getLogger("disagg_router.fleet")
# Reports wait this long for the list to be saved; a slower write continues in its thread.
SAVE_TIMEOUT_S = 5.0


class SavedListing:
    """A source whose last list is saved in `file` by each process that receives it."""

    def __init__(self, source: EngineSource, file: Path) -> None:
        self.name = source.name
        self._source = source
        self._file = file
        self._saved: tuple[ListedEngine, ...] | None = None
        self._failed: tuple[ListedEngine, ...] | None = None
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

    async def _save(self, listed: tuple[ListedEngine, ...]) -> None:
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


def save_listing(file: Path, listed: tuple[ListedEngine, ...]) -> None:
    """Replace the file atomically. Raises OSError."""
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(listed))
    fresh.replace(file)


def load_listing(file: Path) -> tuple[ListedEngine, ...] | None:
    """Return the saved list; None if there is none that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[ListedEngine, ...])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, ValueError) as error:
        logger.warning("the saved list of a source cannot be read: %s", error)
        return None
