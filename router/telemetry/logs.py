"""Log lines on standard error: formats for people and for machines, and a throttle."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import modf
from select import PIPE_BUF
from typing import Any, Literal, Protocol, TextIO

import orjson

LogFormat = Literal["auto", "text", "short", "json"]
LINES = "lines"
MILLISECONDS = tuple(f".{number:03d}Z" for number in range(1000))


class LogLine(Protocol):
    """One of the lines that a log record carries in its attribute LINES; `at` is Unix time."""

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
        lines: list[LogLine] | None = getattr(record, LINES, None)
        if lines is not None:
            level = record.levelname
            return "\n".join(
                [f"{_moment(line.at)} {level} {visible(line.text())}" for line in lines]
            )
        return f"{_moment(record.created)} {record.levelname} {super().format(record)}"


class ShortFormatter(VisibleFormatter):
    """Formats lines for a person at a terminal: time of day, and no level below warning."""

    def format(self, record: logging.LogRecord) -> str:
        lines: list[LogLine] | None = getattr(record, LINES, None)
        if lines is not None:
            return "\n".join([f"{_time_of_day(line.at)} {visible(line.short())}" for line in lines])
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"{_time_of_day(record.created)} {level}{super().format(record)}"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {"level": record.levelname.lower(), "logger": record.name}
        lines: list[LogLine] | None = getattr(record, LINES, None)
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
    """Writes whole lines, in pieces that a pipe takes atomically from several processes."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for block in _blocks(self.format(record) + "\n"):
                self.stream.write(block)
                self.flush()
        except Exception:
            self.handleError(record)


def configure(level: str, log_format: LogFormat) -> None:
    """Set up the logging of this process; libraries log only warnings and errors."""
    handler = LineHandler()
    handler.setFormatter(formatter_for(log_format, sys.stderr.isatty()))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def formatter_for(log_format: LogFormat, is_terminal: bool) -> logging.Formatter:
    return FORMATTERS[_chosen(log_format, is_terminal)]()


def is_short(log_format: LogFormat) -> bool:
    """Return True if lines are written for a person at a terminal."""
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
    """Escape control and format characters (line breaks, ESC, bidirectional marks) in `text`."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _blocks(text: str) -> Iterator[str]:
    """Split `text` behind lines into pieces of at most PIPE_BUF characters, if lines allow."""
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


class LogThrottle:
    """Logs each warning at most once per `period_s` seconds, with the number of omitted ones."""

    def __init__(
        self,
        logger: logging.Logger,
        period_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._period_s = period_s
        self._clock = clock
        self._next: dict[str, float] = {}
        self._omitted: dict[str, int] = {}

    def warn(self, message: str, detail: str) -> None:
        """Log `message` with any `detail`. `message` is the key, from a small set."""
        now = self._clock()
        if now < self._next.get(message, now):
            self._omitted[message] = self._omitted.get(message, 0) + 1
            return
        omitted = self._omitted.pop(message, 0)
        self._next[message] = now + self._period_s
        suffix = f" ({omitted} more since the last such line)" if omitted else ""
        self._logger.warning("%s: %s%s", message, detail, suffix)
