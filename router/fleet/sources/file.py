"""Engines that a YAML file lists, read again and again.

    engines:
      - {url: http://p1:8100, role: prefill, models: [m], group: blue, weight: 1}
      - {url: https://d1:8200, role: decode, draining: true}

One that cannot be used changes nothing.
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
from router.fleet.engine_spec import DEFAULT_GROUP, EngineRole, EngineSpec, Intent, ListedEngine
from router.fleet.sources.source import SourceError, SourceReport
from router.settings import GROUP_NAME, HOST_NAME, MAX_GROUP_WEIGHT, TLS_SCHEME, Address, canonical

PORTS = {"http": 80, "https": 443}
# About ten thousand engines.
MOST_BYTES = 1024 * 1024

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
    """`trouble` is why the content lists nothing that can be used."""

    content: bytes
    listed: tuple[ListedEngine, ...] | None
    problem: str


class FileSource:
    def __init__(self, path: Path, interval: float = POLL_INTERVAL_S) -> None:
        self.name = "file"
        self._path = path
        self._interval = interval
        self._read: EngineFileContent | None = None
        self._reading: asyncio.Task[EngineFileContent] | None = None
        self.first = self._report(lambda: read(path, None))

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        while True:
            await asyncio.sleep(self._interval)
            yield await self._look()

    async def _look(self) -> SourceReport:
        """In a thread: a file's disk may be slow, or far away and gone."""
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(read, self._path, self._read))
        done, _ = await asyncio.wait([self._reading], timeout=READ_TIMEOUT_S)
        if not done:
            return SourceReport(None, f"{self._path}: cannot be read within {READ_TIMEOUT_S:g} s")
        reading, self._reading = self._reading, None
        return self._report(reading.result)

    def _report(self, reading: Callable[[], EngineFileContent]) -> SourceReport:
        try:
            self._read = reading()
        except SourceError as error:
            return SourceReport(None, f"{self._path}: {error}")
        _, listed, trouble = self._read
        return SourceReport(listed, f"{self._path}: {trouble}" if trouble else "")


def read(path: Path, before: EngineFileContent | None) -> EngineFileContent:
    """What the file says; `before` itself, if it says the same. Raises SourceError."""
    try:
        content = _content(path)
        if before is not None and content == before.content:
            return before
        if before is not None:
            content = read_until_settled(lambda: _content(path), content)
    except UnreadableError as error:
        raise SourceError(str(error)) from None
    try:
        return EngineFileContent(content, parse(content), "")
    except SourceError as error:
        return EngineFileContent(content, None, str(error))


def parse(content: bytes) -> tuple[ListedEngine, ...]:
    """Raises SourceError, which names the first thing that is wrong."""
    entries = _entries(content)
    listed: dict[Address, ListedEngine] = {}
    for number, entry in enumerate(entries, 1):
        try:
            one = listed_in(entry)
        except SourceError as error:
            raise SourceError(f"engine {number}: {error}") from None
        if one.address in listed:
            raise SourceError(f"engine {number}: {one.address} is listed twice")
        listed[one.address] = one
    return tuple(listed.values())


def listed_in(entry: object) -> ListedEngine:
    """What one entry lists. Raises SourceError."""
    try:
        return _listed(msgspec.convert(entry, EngineFileEntry))
    except (msgspec.ValidationError, ValueError) as error:
        raise SourceError(_line(error)) from None


def _content(path: Path) -> bytes:
    """Raises UnreadableError."""
    return read_regular_file(path, MOST_BYTES)


def _entries(content: bytes) -> list[object]:
    """Raises SourceError."""
    try:
        return parse_yaml_list(content, "engines")
    except MissingListError as error:
        raise SourceError(str(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise SourceError(_line(error)) from None


def _listed(entry: EngineFileEntry) -> ListedEngine:
    """Raises ValueError."""
    if not (math.isfinite(entry.weight) and 0 <= entry.weight <= MAX_GROUP_WEIGHT):
        raise ValueError(f"weight: not a number from 0 to {MAX_GROUP_WEIGHT:g}")
    address, models = address_of(entry.url), frozenset(entry.models)
    tls = entry.url.startswith(TLS_SCHEME)
    spec = EngineSpec(entry.role, address, models, entry.group, entry.weight, tls)
    return ListedEngine(spec, Intent.DRAINING if entry.draining else Intent.SERVING)


def address_of(url: str) -> Address:
    """Of a URL that is scheme, host and port and nothing else. Raises ValueError."""
    wrong = ValueError(f"url: {_line(repr(url))} is not as in http://host:8100")
    try:
        parts = urlsplit(url)
        usual = PORTS.get(parts.scheme, 0)
        host, port = parts.hostname or "", usual if parts.port is None else parts.port
    except ValueError:
        raise wrong from None
    rest = parts.path.strip("/"), parts.query, parts.fragment, "@" in parts.netloc
    if parts.scheme not in PORTS or any(rest) or not url.isascii() or not url.isprintable():
        raise wrong
    is_host = ":" in host if "[" in parts.netloc else HOST_NAME.fullmatch(host)
    if not is_host or not 0 < port < 65536 or "?" in url or "#" in url:
        raise wrong
    try:
        return Address(canonical(host), port)
    except ValueError:
        raise wrong from None


def _line(what: object) -> str:
    text = str(what).replace('in "<byte string>", ', "in ")
    return textwrap.shorten(" ".join(text.split()), 300)
