"""Files that are read again and again, and what is new in them.

A file is read whole each time and compared with what it said before: that is cheap, and true
whatever was renamed, linked or mounted over it, as Kubernetes does with secrets.
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
from typing import TypeVar

logger = logging.getLogger("disagg_router")
INTERVAL = 1.0
# Seconds in which a file that is written in place may have got further.
CALM = 0.05
MOST_LOOKS = 20
PATIENCE = 5.0
T = TypeVar("T")


class UnreadableError(Exception):
    """The text says why, without the file's name."""


def content_of(path: Path, most: int) -> bytes:
    """Raises UnreadableError. Never waits for a pipe, nor reads on without end."""
    try:
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableError("is no regular file")
            content = file.read(most + 1)
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from None
    if len(content) > most:
        raise UnreadableError(f"is larger than {most // 1024 // 1024} MiB")
    return content


def settled(read: Callable[[], T], content: T) -> T:
    """What `read` gives once nobody seems to write it any more. Raises UnreadableError."""
    for _ in range(MOST_LOOKS):
        time.sleep(CALM)
        before, content = content, read()
        if content == before:
            return content
    raise UnreadableError("is being written all the time")


def _digest(content: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Enough to compare with: what is in a private key's file is not kept."""
    return tuple(hashlib.sha256(one).digest() for one in content)


class Watched:
    """Something that is made of files, and made anew when they say something else.

    `take` is given the files' content, in their order, on the loop; it raises ValueError, in one
    line, for one that cannot be used, and then whatever was made before stays. `said` is told of
    each change of `trouble`, which is why what is in the files is not in use; empty if it is.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        most: int,
        take: Callable[[tuple[bytes, ...]], None],
        said: Callable[[str], None],
        interval: float = INTERVAL,
    ) -> None:
        """Raises ValueError for files that cannot be used."""
        self.trouble = self._refusal = ""
        self._paths = paths
        self._most = most
        self._take = take
        self._said = said
        self._interval = interval
        self._hurry = asyncio.Event()
        self._reading: asyncio.Task[tuple[bytes, ...]] | None = None
        try:
            content = self._read()
        except UnreadableError as error:
            raise ValueError(str(error)) from None
        self._known = _digest(content)
        take(content)

    async def run(self) -> None:
        """Ends only when it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._hurry.wait()
            self._hurry.clear()
            trouble = await self._look()
            if trouble != self.trouble:
                self.trouble = trouble
                self._said(trouble)

    def look_soon(self) -> None:
        """On the loop."""
        self._hurry.set()

    async def _look(self) -> str:
        """In a thread: a file's disk may be slow, or far away and gone."""
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(self._read_settled))
        done, _ = await asyncio.wait([self._reading], timeout=PATIENCE)
        if not done:
            return f"cannot be read within {PATIENCE:g} s"
        reading, self._reading = self._reading, None
        try:
            content = reading.result()
        except UnreadableError as error:
            return str(error)
        except Exception as error:  # a fault of ours is no reason never to look again
            logger.exception("%s could not be read", self._paths[0])
            return f"{type(error).__name__}: {error}"
        known = _digest(content)
        if known != self._known:
            self._known, self._refusal = known, ""
            try:
                self._take(content)
            except ValueError as error:
                self._refusal = str(error)
            except Exception as error:
                logger.exception("%s could not be taken over", self._paths[0])
                self._refusal = f"{type(error).__name__}: {error}"
        return self._refusal

    def _read_settled(self) -> tuple[bytes, ...]:
        content = self._read()
        return content if _digest(content) == self._known else settled(self._read, content)

    def _read(self) -> tuple[bytes, ...]:
        """Raises UnreadableError, which names the file where there are several."""
        found = []
        for path in self._paths:
            try:
                found.append(content_of(path, self._most))
            except UnreadableError as error:
                where = f"{path}: " if len(self._paths) > 1 else ""
                raise UnreadableError(f"{where}{error}") from None
        return tuple(found)
