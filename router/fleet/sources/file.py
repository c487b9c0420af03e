"""Engines in a YAML file, which is read repeatedly.

    engines:
      - {url: http://p1:8100, role: prefill, models: [m], group: blue, weight: 1}
      - {url: https://d1:8200, role: decode, draining: true}
      - {url: http://p2:8100, role: prefill, kv_protocol: mooncake, bootstrap_port: 8998}

A file that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import yaml

from router.common.watched_file import POLL_INTERVAL_S, FileReader, UnreadableError
from router.common.yaml_list import parse_yaml_list
from router.fleet.engine import DEFAULT_GROUP, EngineRole, EngineSpec, Intent
from router.fleet.kv_protocol import KvProtocol
from router.fleet.sources.source import SourceError, SourceReport
from router.settings import GROUP_NAME, HOST_NAME, MAX_GROUP_WEIGHT, TLS_SCHEME, Address, canonical

DEFAULT_PORTS = {"http": 80, "https": 443}
# About ten thousand engines.
MAX_FILE_BYTES = 1024 * 1024

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Group = Annotated[str, msgspec.Meta(pattern=rf"\A{GROUP_NAME.pattern}\Z")]


class EngineFileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    role: EngineRole
    models: tuple[Text, ...] = ()
    group: Group = DEFAULT_GROUP
    weight: float = 1.0
    draining: bool = False
    kv_protocol: KvProtocol | None = None
    bootstrap_port: Port = 0


class FileSource:
    """The engines of a file that is read every `interval` seconds."""

    def __init__(self, path: Path, interval: float = POLL_INTERVAL_S) -> None:
        self.name = "file"
        self._path = path
        self._interval = interval
        self._file = FileReader((path,), MAX_FILE_BYTES)
        try:
            self.first = self._report(self._file.read())
        except UnreadableError as error:
            self.first = SourceReport(None, f"{path}: {error}")
        self._latest = self.first

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        while True:
            await asyncio.sleep(self._interval)
            try:
                content = await self._file.read_changed()
            except UnreadableError as error:
                yield SourceReport(None, f"{self._path}: {error}")
                continue
            if content is not None:
                self._latest = await asyncio.to_thread(self._report, content)
            yield self._latest

    def _report(self, content: tuple[bytes, ...]) -> SourceReport:
        try:
            return SourceReport(parse(content[0]))
        except SourceError as error:
            return SourceReport(None, f"{self._path}: {error}")


def parse(content: bytes) -> tuple[EngineSpec, ...]:
    """Return the engines of a file. Raises SourceError, which names the first error."""
    try:
        entries = parse_yaml_list(content, "engines")
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise SourceError(_one_line(error)) from None
    listed: dict[Address, EngineSpec] = {}
    for number, entry in enumerate(entries, 1):
        try:
            one = parse_entry(entry)
        except SourceError as error:
            raise SourceError(f"engine {number}: {error}") from None
        if one.address in listed:
            raise SourceError(f"engine {number}: {one.address} is listed twice")
        listed[one.address] = one
    return tuple(listed.values())


def parse_entry(content: object) -> EngineSpec:
    """Return the engine of one entry. Raises SourceError."""
    try:
        entry = msgspec.convert(content, EngineFileEntry)
        if not 0 <= entry.weight <= MAX_GROUP_WEIGHT:  # rejects NaN, too
            raise ValueError(f"weight: not a number from 0 to {MAX_GROUP_WEIGHT:g}")
        address, models = address_of(entry.url), frozenset(entry.models)
    except (msgspec.ValidationError, ValueError) as error:
        raise SourceError(_one_line(error)) from None
    tls = entry.url.startswith(TLS_SCHEME)
    intent = Intent.DRAINING if entry.draining else Intent.SERVING
    return EngineSpec(
        entry.role,
        address,
        models,
        entry.group,
        entry.weight,
        tls,
        intent,
        entry.kv_protocol,
        entry.bootstrap_port,
    )


def address_of(url: str) -> Address:
    """Return the address in a URL of only scheme, host and port. Raises ValueError."""
    shown = "it contains an @, so it" if "@" in url else _one_line(repr(url))
    wrong = ValueError(f"url: {shown} is not of the form http://host:8100")
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
