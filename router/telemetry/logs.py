"""Log lines on standard error: formats for people and for machines, the access log, and a throttle.

The access log has one line for each request that has ended. A log record carries the lines of many
requests (attribute LINES), and the formatters write each as a line of its own.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import modf
from select import PIPE_BUF
from typing import Any, Literal, TextIO

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from router.telemetry.record import Record

access_logger = logging.getLogger("disagg_router.access")
LogFormat = Literal["auto", "text", "short", "json"]
LINES = "lines"
REQUEST_ENDED = "request"
MAX_LOGGED_ONCE = 100
MILLISECONDS = tuple(f".{number:03d}Z" for number in range(1000))
# The block ids in kv_transfer_params, for one group of layers or several.
BLOCK_IDS = re.compile(rb'"remote_block_ids":\s*(\[[][\d,\s]*\])')
DIGITS = re.compile(rb"\d+")
_encode = msgspec.json.Encoder().encode


# Setup.


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes whole lines, in pieces that a pipe takes atomically from several processes."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for block in _blocks(self.format(record) + "\n"):
                self.stream.write(block)
                self.flush()
        except Exception:
            self.handleError(record)


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


# Formats.


class TextFormatter(logging.Formatter):
    """Formats a record as one line, of which no part can start another line or move a cursor.

    Engines and clients choose parts of many messages. The lines of a traceback follow, indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        lines: list[AccessLine] | None = getattr(record, LINES, None)
        if lines is None:
            return self._prefix(record.created, record) + super().format(record)
        return "\n".join([self._prefix(one.at, record) + visible(self._text(one)) for one in lines])

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 # logging's name
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 # logging's name
        return "\n".join(f"    {visible(one)}" for one in super().formatException(ei).split("\n"))

    def _prefix(self, at: float, record: logging.LogRecord) -> str:
        return f"{_moment(at)} {record.levelname} "

    def _text(self, line: AccessLine) -> str:
        return line.text()


class ShortFormatter(TextFormatter):
    """Formats lines for a person at a terminal: time of day, and no level below warning."""

    def _prefix(self, at: float, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"{time.strftime('%H:%M:%S', time.localtime(at))} {level}"

    def _text(self, line: AccessLine) -> str:
        return line.short()


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        common = _members({"level": record.levelname.lower(), "logger": record.name})
        lines: list[AccessLine] | None = getattr(record, LINES, None)
        if lines is not None:
            return "\n".join(
                [f'{{"time":"{_moment(line.at)}",{common},{line.json()}}}' for line in lines]
            )
        content = {"message": record.getMessage()}
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return f'{{"time":"{_moment(record.created)}",{common},{_members(content)}}}'


FORMATTERS: dict[str, type[logging.Formatter]] = {
    "text": TextFormatter,
    "short": ShortFormatter,
    "json": JsonFormatter,
}


def visible(text: str) -> str:
    """Escape control and format characters (line breaks, ESC, bidirectional marks) in `text`."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _members(content: object) -> str:
    """Return the members of a JSON object, without braces."""
    return str(_encode(content)[1:-1], "utf-8")


def _moment(at: float) -> str:
    fraction, second = modf(at)
    return _second(second) + MILLISECONDS[int(fraction * 1000)]


@lru_cache(maxsize=8)
def _second(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


# The access log.


def write_lines(ended: Sequence[Record]) -> None:
    """Log a line for each request, in one log record."""
    if access_logger.isEnabledFor(logging.INFO):
        unix = time.time() - time.monotonic()
        lines = [AccessLine(record, unix + (record.ended or 0.0)) for record in ended]
        access_logger.info("%d requests ended", len(ended), extra={LINES: lines})


class AccessFields(Struct, omit_defaults=True):
    """The fields of a line, without those that have their default; times since the arrival."""

    message: str
    request_id: str
    endpoint: str
    status: int
    outcome: str
    flow: str
    key: str = ""
    conversation: str = ""
    prefiller: str = ""
    decoder: str = ""
    without_transfer: str = ""
    borrowed_from: str = ""
    borrowed_tokens: int = 0
    retries: int = 0
    resumes: int = 0
    prefill_ms: int | None = None
    first_byte_ms: int | None = None
    total_ms: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    stage: str = "done"
    error: str = ""


class AccessLine(Struct, frozen=True):
    """The line of one request that ended at the Unix time `at`."""

    _record: Record
    at: float

    def text(self) -> str:
        content = self.content()
        del content["message"]
        if "error" in content:
            content["error"] = repr(content["error"])
        return REQUEST_ENDED + "".join([f" {name}={value}" for name, value in content.items()])

    def json(self) -> str:
        """Return the members of a JSON object, without braces."""
        return _members(self._fields())

    def short(self) -> str:
        """Return the line for a person: outcome, latencies, engines, reuse."""
        r = self._record
        parts = [f"{r.status} {r.endpoint.removeprefix('/v1/')}"]
        prompt, completion, cached = astuple(r.tokens)
        if prompt is not None:
            parts.append(f"{prompt} tokens in" + (f", {completion} out" if completion else ""))
        if r.first_byte is not None and r.ended is not None:
            first, whole = r.first_byte - r.started, r.ended - r.started
            parts.append(f"first after {first:.2f} s, all after {whole:.2f} s")
        parts += filter(None, (_engines(r), _offered(r), _reused(prompt, cached, r.conversation)))
        if r.resumes:
            parts.append(f"resumed {'once' if r.resumes == 1 else f'{r.resumes} times'}")
        if r.outcome != "ok":
            parts.append(f"{r.outcome}{' at ' + r.stage if r.stage != 'done' else ''}")
        if r.error:
            parts.append(" ".join(r.error.split())[:200])
        return "; ".join(parts)

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = msgspec.to_builtins(self._fields())
        return content

    def _fields(self) -> AccessFields:
        r = self._record
        started, prefilled, first, end = r.started, r.prefill_done, r.first_byte, r.ended
        tokens = r.tokens
        return AccessFields(
            REQUEST_ENDED,
            r.request_id,
            r.endpoint,
            r.status,
            r.outcome,
            r.flow,
            r.key,
            r.conversation,
            r.prefiller,
            r.decoder,
            r.without_transfer,
            r.borrowed_from,
            r.borrowed_tokens,
            r.retries,
            r.resumes,
            None if prefilled is None else int((prefilled - started) * 1000 + 0.5),
            None if first is None else int((first - started) * 1000 + 0.5),
            None if end is None else int((end - started) * 1000 + 0.5),
            tokens.prompt,
            tokens.completion,
            tokens.cached,
            r.stage,
            r.error,
        )


def _engines(r: Record) -> str:
    if r.decoder and r.without_transfer:
        return f"{r.decoder} alone ({r.without_transfer})"
    if r.prefiller and r.decoder:
        return f"prefill {r.prefiller} -> decode {r.decoder}"
    return f"{r.decoder or r.prefiller} alone" if r.decoder or r.prefiller else ""


def _offered(r: Record) -> str:
    """Return the number of blocks that the decode engine could read.

    Which of them it has read only its own page shows: it skips those that it has.
    """
    found = BLOCK_IDS.search(r.transfer_params) if r.prefiller and r.decoder else None
    count = len(DIGITS.findall(found[1])) if found else 0
    return f"{count} block{'s' if count > 1 else ''} offered" if count else ""


def _reused(prompt: int | None, cached: int | None, conversation: str) -> str:
    turn = f" (turn: {conversation})" if conversation else ""
    if prompt is None or cached is None:
        return turn.strip(" ()")
    return f"reused {cached} of {prompt}{turn}"


# Repeated warnings.


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


class LogOnce:
    """Logs each line once in this process, up to MAX_LOGGED_ONCE lines."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: set[str] = set()

    def info(self, line: str) -> None:
        if len(self._logged) < MAX_LOGGED_ONCE and line not in self._logged:
            self._logged.add(line)
            self._logger.info("%s", line)
