"""Log lines: one format for people, one for machines, all to standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import modf
from select import PIPE_BUF
from typing import Any, Literal, Protocol, TextIO

import orjson

LogFormat = Literal["auto", "text", "short", "json"]
LINES = "lines"
MILLISECONDS = tuple(f".{number:03d}Z" for number in range(1000))


class Line(Protocol):
    """One of the many lines that a log record may carry as LINES; `at` is Unix time."""

    @property
    def at(self) -> float: ...
    def text(self) -> str: ...
    def short(self) -> str: ...
    def json(self) -> str: ...


class VisibleFormatter(logging.Formatter):
    """Formats a record as one line, of which no part can start another line or move a cursor.

    Engines and clients choose parts of many messages. The lines of a traceback follow, indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 # logging's name
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 # logging's name
        return "\n".join(f"    {visible(one)}" for one in super().formatException(ei).split("\n"))


class TextFormatter(VisibleFormatter):
    def format(self, record: logging.LogRecord) -> str:
        lines: list[Line] | None = getattr(record, LINES, None)
        if lines is not None:
            level = record.levelname
            return "\n".join(
                [f"{_moment(line.at)} {level} {visible(line.text())}" for line in lines]
            )
        return f"{_moment(record.created)} {record.levelname} {super().format(record)}"


class ShortFormatter(VisibleFormatter):
    """For a person who watches: the time of day, no level below warning."""

    def format(self, record: logging.LogRecord) -> str:
        lines: list[Line] | None = getattr(record, LINES, None)
        if lines is not None:
            return "\n".join([f"{_time_of_day(line.at)} {visible(line.short())}" for line in lines])
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"{_time_of_day(record.created)} {level}{super().format(record)}"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {"level": record.levelname.lower(), "logger": record.name}
        lines: list[Line] | None = getattr(record, LINES, None)
        if lines is not None:
            common = _json(head)[1:-1]
            return "\n".join(
                [f'{{"time":"{_moment(line.at)}",{common},{line.json()}}}' for line in lines]
            )
        content: dict[str, object] = {
            "time": _moment(record.created),
            **head,
            "message": record.getMessage(),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return _json(content)


FORMATTERS: dict[str, type[logging.Formatter]] = {
    "text": TextFormatter,
    "short": ShortFormatter,
    "json": JsonFormatter,
}


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes whole lines, so many at a time as a pipe takes in one piece from several processes."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for block in _blocks(self.format(record) + "\n"):
                self.stream.write(block)
                self.flush()
        except Exception:
            self.handleError(record)


def configure(level: str, log_format: LogFormat) -> None:
    """Sets the process's logging up. Library chatter below warning is left out."""
    handler = LineHandler()
    handler.setFormatter(formatter_for(log_format, sys.stderr.isatty()))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def formatter_for(log_format: LogFormat, is_terminal: bool) -> logging.Formatter:
    return FORMATTERS[_chosen(log_format, is_terminal)]()


def is_short(log_format: LogFormat) -> bool:
    """Whether a person watches."""
    return _chosen(log_format, sys.stderr.isatty()) == "short"


def _chosen(log_format: LogFormat, is_terminal: bool) -> str:
    if log_format == "auto":
        return "short" if is_terminal else "json"
    return log_format


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def visible(text: str) -> str:
    """`text` with control and format characters (line breaks, ESC, bidirectional marks) escaped."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _blocks(text: str) -> Iterator[str]:
    """`text` cut behind lines, into pieces of PIPE_BUF characters where lines allow that."""
    start = 0
    while len(text) - start > PIPE_BUF:
        latest = text.rfind("\n", start, start + PIPE_BUF) + 1
        end = latest or text.find("\n", start) + 1
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _json(content: Mapping[str, object]) -> str:
    return orjson.dumps(content, default=str).decode()


def _time_of_day(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _moment(at: float) -> str:
    fraction, second = modf(at)
    return _second(second) + MILLISECONDS[int(fraction * 1000)]


@lru_cache(maxsize=8)
def _second(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
