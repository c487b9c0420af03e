"""What a source listed last, for the process that takes the place of one that died.

The processes of one router share a folder. Who begins while a source cannot tell (its file is
broken, its API server is away) goes on with what the others go on with, until the source is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from router.fleet.engine_spec import ListedEngine
from router.fleet.sources.source import EngineSource, SourceReport

logger = logging.getLogger("disagg_router.fleet")
# Seconds to write it down; what takes longer is left to itself.
PATIENCE = 5.0


class SavedListing:
    """A source, whose last listing is in `file`: written by whichever process hears of it."""

    def __init__(self, source: EngineSource, file: Path) -> None:
        self.name = source.name
        self._source = source
        self._file = file
        self._written: tuple[ListedEngine, ...] | None = None
        self._refused: tuple[ListedEngine, ...] | None = None
        self._writing: asyncio.Task[None] | None = None
        self.first = source.first
        if self.first.listed is None:
            self.first = SourceReport(recalled(file), self.first.problem)

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        async with contextlib.aclosing(self._source.watch()) as reports:
            async for report in reports:
                yield report
                if report.listed is not None and report.listed != self._written:
                    await self._write(report.listed)

    async def _write(self, listed: tuple[ListedEngine, ...]) -> None:
        """In a thread, and one at a time. A failure is no trouble of the source's; it is told once,
        and tried again with the next report."""
        if self._writing is not None and not await self._has_ended(self._writing):
            return
        if listed != self._written:
            self._written = listed
            self._writing = asyncio.create_task(asyncio.to_thread(remember, self._file, listed))
            await self._has_ended(self._writing)

    async def _has_ended(self, writing: asyncio.Task[None]) -> bool:
        done, _ = await asyncio.wait([writing], timeout=PATIENCE)
        if not done:
            return False
        self._writing, error = None, writing.exception()
        if error is not None:
            refused, self._refused, self._written = self._refused, self._written, None
            if refused != self._refused:
                logger.warning("what source %s lists cannot be written down: %s", self.name, error)
        return True


def remember(file: Path, listed: tuple[ListedEngine, ...]) -> None:
    """Whole or not at all, whoever reads or dies meanwhile. Raises OSError."""
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(listed))
    fresh.replace(file)


def recalled(file: Path) -> tuple[ListedEngine, ...] | None:
    """None where nobody has written anything, or nothing that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[ListedEngine, ...])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, ValueError) as error:
        logger.warning("what a source listed last cannot be read: %s", error)
        return None
