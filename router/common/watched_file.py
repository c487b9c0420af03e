"""Watches files by reading them periodically.

Each time a file is read whole and compared with its last content. That is cheap, and it notices any
change: renamed, linked or mounted files, as Kubernetes updates secrets. `FileReader` returns what
has changed, and `WatchedFiles` applies it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("disagg_router")
POLL_INTERVAL_S = 1.0
# A file that is written in place has changed again after this time.
SETTLE_INTERVAL_S = 0.05
MAX_SETTLE_READS = 20
READ_TIMEOUT_S = 5.0


class UnreadableError(ValueError):
    """A file cannot be read; the message does not name the file."""


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises UnreadableError, also for pipes and larger files."""
    try:
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableError("is not a regular file")
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from None
    if len(content) > max_bytes:
        raise UnreadableError(f"is larger than {max_bytes // 1024 // 1024} MiB")
    return content


class FileReader:
    """Files that belong together, such as a certificate and its key."""

    def __init__(self, paths: tuple[Path, ...], max_bytes: int) -> None:
        self._paths = paths
        self._max_bytes = max_bytes
        self._known: tuple[bytes, ...] | None = None
        self._reading: asyncio.Task[tuple[bytes, ...]] | None = None

    def read(self) -> tuple[bytes, ...]:
        """Return the files' contents, in order. Raises UnreadableError."""
        content = self._read()
        self._known = _digest(content)
        return content

    async def read_changed(self) -> tuple[bytes, ...] | None:
        """Return the files' contents once they have settled; None if they are as before.

        Reads in a thread, because a disk or a network mount may hang. Raises UnreadableError, also
        after READ_TIMEOUT_S; the next call then waits for the same thread.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(self._read_settled))
        done, _ = await asyncio.wait([self._reading], timeout=READ_TIMEOUT_S)
        if not done:
            raise UnreadableError(f"cannot be read within {READ_TIMEOUT_S:g} s")
        reading, self._reading = self._reading, None
        content = reading.result()
        before, self._known = self._known, _digest(content)
        return None if self._known == before else content

    def _read_settled(self) -> tuple[bytes, ...]:
        content = self._read()
        if _digest(content) == self._known:
            return content
        for _ in range(MAX_SETTLE_READS):
            time.sleep(SETTLE_INTERVAL_S)
            before, content = content, self._read()
            if content == before:
                return content
        raise UnreadableError("changed at each read")

    def _read(self) -> tuple[bytes, ...]:
        """Raises UnreadableError, which names the file if there are several."""
        found = []
        for path in self._paths:
            try:
                found.append(read_regular_file(path, self._max_bytes))
            except UnreadableError as error:
                where = f"{path}: " if len(self._paths) > 1 else ""
                raise UnreadableError(f"{where}{error}") from None
        return tuple(found)


def _digest(content: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return digests to compare with, so that a private key is not kept in memory."""
    return tuple(hashlib.sha256(one).digest() for one in content)


class WatchedFiles:
    """Files whose contents are applied at first and after each change.

    `apply` is called on the event loop. It raises ValueError, in one line, for contents that cannot
    be used; the old ones then stay in force, and `trouble` is the reason. `on_trouble` is called
    when `trouble` changes; it is empty while the files' contents are in force.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        max_bytes: int,
        apply: Callable[[tuple[bytes, ...]], None],
        on_trouble: Callable[[str], None],
        interval: float = POLL_INTERVAL_S,
    ) -> None:
        """Read the files. Raises ValueError if they cannot be used."""
        self.trouble = self._refusal = ""
        self._name = paths[0]
        self._reader = FileReader(paths, max_bytes)
        self._apply = apply
        self._on_trouble = on_trouble
        self._interval = interval
        self._wake_up = asyncio.Event()
        apply(self._reader.read())

    async def run(self) -> None:
        """Watch the files until this task is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._wake_up.wait()
            self._wake_up.clear()
            trouble = await self._check()
            if trouble != self.trouble:
                self.trouble = trouble
                self._on_trouble(trouble)

    def check_soon(self) -> None:
        """Read the files now. Call it on the event loop."""
        self._wake_up.set()

    async def _check(self) -> str:
        try:
            content = await self._reader.read_changed()
        except Exception as error:
            return self._reason(error)
        if content is not None:
            self._refusal = ""
            try:
                self._apply(content)
            except Exception as error:
                self._refusal = self._reason(error)
        return self._refusal

    def _reason(self, error: Exception) -> str:
        if isinstance(error, ValueError):
            return str(error)
        logger.error("%s could not be loaded", self._name, exc_info=error)  # keep watching
        return f"{type(error).__name__}: {error}"
