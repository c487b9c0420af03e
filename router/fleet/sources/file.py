"""Engines in a YAML file, which is read repeatedly.

    engines:
      - {url: http://p1:8100, role: prefill, models: [m], group: blue, weight: 1}
      - {url: https://d1:8200, role: decode, draining: true}

A file that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import textwrap
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
import yaml

from router.common.watched_file import (
    POLL_INTERVAL_S,
    READ_TIMEOUT_S,
    UnreadableError,
    read_regular_file,
    read_until_settled,
)
from router.common.yaml_list import MissingListError, parse_yaml_list
from router.fleet.engine import DEFAULT_GROUP, EngineRole, EngineSpec, Intent, ListedEngine
from router.fleet.sources.source import (
    SourceError,
    SourceReport,
)
from router.settings import GROUP_NAME, HOST_NAME, MAX_GROUP_WEIGHT, TLS_SCHEME, Address, canonical

DEFAULT_PORTS = {"http": 80, "https": 443}
# About ten thousand engines.
MAX_FILE_BYTES = 1024 * 1024

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Group = Annotated[str, msgspec.Meta(pattern=rf"\A{GROUP_NAME.pattern}\Z")]


class EngineFileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    role: EngineRole
    models: tuple[Text, ...] = ()
    group: Group = DEFAULT_GROUP
    weight: float = 1.0
    draining: bool = False


class EngineFileContent(NamedTuple):
    """A file's content and the engines in it; `problem` is why it has no usable list."""

    content: bytes
    listed: tuple[ListedEngine, ...] | None
    problem: str


class FileSource:
    """The engines of a file that is read every `interval` seconds."""

    def __init__(self, path: Path, interval: float = POLL_INTERVAL_S) -> None:
        self.name = "file"
        self._path = path
        self._interval = interval
        self._content: EngineFileContent | None = None
        self._reading: asyncio.Task[EngineFileContent] | None = None
        self.first = self._report(lambda: read(path, None))

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        while True:
            await asyncio.sleep(self._interval)
            yield await self._look()

    async def _look(self) -> SourceReport:
        """Read in a thread: the file may be on a slow or unreachable disk."""
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(read, self._path, self._content))
        done, _ = await asyncio.wait([self._reading], timeout=READ_TIMEOUT_S)
        if not done:
            return SourceReport(None, f"{self._path}: cannot be read within {READ_TIMEOUT_S:g} s")
        reading, self._reading = self._reading, None
        return self._report(reading.result)

    def _report(self, result: Callable[[], EngineFileContent]) -> SourceReport:
        try:
            self._content = result()
        except SourceError as error:
            return SourceReport(None, f"{self._path}: {error}")
        _, listed, problem = self._content
        return SourceReport(listed, f"{self._path}: {problem}" if problem else "")


def read(path: Path, before: EngineFileContent | None) -> EngineFileContent:
    """Return the file's content; `before` itself if it is unchanged. Raises SourceError."""

    def read_once() -> bytes:
        return read_regular_file(path, MAX_FILE_BYTES)

    try:
        content = read_once()
        if before is not None:
            if content == before.content:
                return before
            content = read_until_settled(read_once, content)
    except UnreadableError as error:
        raise SourceError(str(error)) from None
    try:
        return EngineFileContent(content, parse(content), "")
    except SourceError as error:
        return EngineFileContent(content, None, str(error))


def parse(content: bytes) -> tuple[ListedEngine, ...]:
    """Return the engines of a file. Raises SourceError, which names the first error."""
    try:
        entries = parse_yaml_list(content, "engines")
    except MissingListError as error:
        raise SourceError(str(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise SourceError(_one_line(error)) from None
    listed: dict[Address, ListedEngine] = {}
    for number, entry in enumerate(entries, 1):
        try:
            one = parse_entry(entry)
        except SourceError as error:
            raise SourceError(f"engine {number}: {error}") from None
        if one.address in listed:
            raise SourceError(f"engine {number}: {one.address} is listed twice")
        listed[one.address] = one
    return tuple(listed.values())


def parse_entry(content: object) -> ListedEngine:
    """Return the engine of one entry. Raises SourceError."""
    try:
        entry = msgspec.convert(content, EngineFileEntry)
        if not (math.isfinite(entry.weight) and 0 <= entry.weight <= MAX_GROUP_WEIGHT):
            raise ValueError(f"weight: not a number from 0 to {MAX_GROUP_WEIGHT:g}")
        address, models = address_of(entry.url), frozenset(entry.models)
    except (msgspec.ValidationError, ValueError) as error:
        raise SourceError(_one_line(error)) from None
    tls = entry.url.startswith(TLS_SCHEME)
    spec = EngineSpec(entry.role, address, models, entry.group, entry.weight, tls)
    return ListedEngine(spec, Intent.DRAINING if entry.draining else Intent.SERVING)


def address_of(url: str) -> Address:
    """Return the address in a URL of only scheme, host and port. Raises ValueError."""
    wrong = ValueError(f"url: {_one_line(repr(url))} is not of the form http://host:8100")
    try:
        parts = urlsplit(url)
        default = DEFAULT_PORTS.get(parts.scheme, 0)
        host, port = parts.hostname or "", default if parts.port is None else parts.port
    except ValueError:
        raise wrong from None
    rest = parts.path.strip("/"), parts.query, parts.fragment, "@" in parts.netloc
    if parts.scheme not in DEFAULT_PORTS or any(rest) or not url.isascii():
        raise wrong
    is_host = ":" in host if "[" in parts.netloc else HOST_NAME.fullmatch(host)
    if not is_host or not 0 < port < 65536 or "?" in url or "#" in url or not url.isprintable():
        raise wrong
    try:
        return Address(canonical(host), port)
    except ValueError:
        raise wrong from None


def _one_line(what: object) -> str:
    text = str(what).replace('in "<byte string>", ', "in ")
    return textwrap.shorten(" ".join(text.split()), 300)
