"""The access log: one line for each request that has ended."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence

import orjson
from msgspec import Struct

from router.telemetry.logs import LINES
from router.telemetry.record import Record
from router.telemetry.token_usage import tokens_of

logger = logging.getLogger("disagg_router.access")
MESSAGE = "request"
# The block ids in kv_transfer_params, for one group of layers or several.
BLOCK_IDS = re.compile(rb'"remote_block_ids":\s*(\[[][\d,\s]*\])')
DIGITS = re.compile(rb"\d+")


def _text(r: Record, prefill: int, first_byte: int, total: int) -> str:
    return (
        f"{MESSAGE} request_id={r.request_id} endpoint={r.endpoint} status={r.status} "
        f"outcome={r.outcome} flow={r.flow} prefiller={r.prefiller} decoder={r.decoder} "
        f"prefill_ms={prefill} first_byte_ms={first_byte} total_ms={total}"
    )


def _json(r: Record, prefill: int, first_byte: int, total: int) -> str:
    return (
        f'"message":"{MESSAGE}","request_id":"{r.request_id}","endpoint":"{r.endpoint}",'
        f'"status":{r.status},"outcome":"{r.outcome}","flow":"{r.flow}",'
        f'"prefiller":"{r.prefiller}","decoder":"{r.decoder}","prefill_ms":{prefill},'
        f'"first_byte_ms":{first_byte},"total_ms":{total}'
    )


class LineFormat(Struct, frozen=True):
    """How the common line is written: its beginning, the key's name, and the text before the
    prompt, completion and cached tokens."""

    line: Callable[[Record, int, int, int], str]
    key: str
    tokens: tuple[str, str, str]


TEXT = LineFormat(_text, " key=%s", (" prompt_tokens=", " completion_tokens=", " cached_tokens="))
JSON = LineFormat(
    _json, ',"key":"%s"', (',"prompt_tokens":', ',"completion_tokens":', ',"cached_tokens":')
)


def write_lines(ended: Sequence[Record]) -> None:
    """Log a line for each request, in one log record."""
    if logger.isEnabledFor(logging.INFO):
        unix = time.time() - time.monotonic()
        lines = [AccessLine(record, unix + (record.ended or 0.0)) for record in ended]
        logger.info("%d requests ended", len(ended), extra={LINES: lines})


class AccessLine(Struct, frozen=True):
    """The line of one ended request; times are milliseconds since its arrival."""

    _record: Record
    at: float

    def text(self) -> str:
        return _common(self._record, TEXT) or _uncommon(self.content())

    def json(self) -> str:
        """Return the members of a JSON object, without braces."""
        return _common(self._record, JSON) or orjson.dumps(self.content()).decode()[1:-1]

    def short(self) -> str:
        return _short(self._record)

    def content(self) -> dict[str, object]:
        record = self._record
        known: dict[str, object] = {
            "message": MESSAGE,
            "request_id": record.request_id,
            "endpoint": record.endpoint,
            "status": record.status,
            "outcome": record.outcome,
            "flow": record.flow,
        }
        for name in ("key", "conversation", "prefiller", "decoder"):
            if value := getattr(record, name):
                known[name] = value
        for name, moment in (
            ("prefill_ms", record.prefill_done),
            ("first_byte_ms", record.first_byte),
            ("total_ms", record.ended),
        ):
            if moment is not None:
                known[name] = _milliseconds(record, moment)
        for name, number in tokens_of(record)._asdict().items():
            if number is not None:
                known[f"{name}_tokens"] = number
        if record.stage != "done":
            known["stage"] = record.stage
        if record.error:
            known["error"] = repr(record.error)
        return known


def _milliseconds(record: Record, moment: float) -> int:
    return int((moment - record.started) * 1000 + 0.5)


def _uncommon(content: dict[str, object]) -> str:
    message = content.pop("message")
    return f"{message}{''.join([f' {name}={value}' for name, value in content.items()])}"


def _common(r: Record, form: LineFormat) -> str | None:
    """Return the common line at a fifth of the cost, or None for an uncommon request.

    No value in it needs escaping: ids, endpoints, names of engines and constants.
    """
    prefilled, began, ended = r.prefill_done, r.first_byte, r.ended
    if prefilled is None or began is None or ended is None or r.stage != "done":
        return None
    if r.conversation or r.error or not (r.prefiller and r.decoder):
        return None
    line = form.line(
        r, _milliseconds(r, prefilled), _milliseconds(r, began), _milliseconds(r, ended)
    )
    if r.key:
        line += form.key % r.key
    prompt, completion, cached = r.tokens or tokens_of(r)
    of_prompt, of_completion, of_cached = form.tokens
    if prompt is not None:
        line += f"{of_prompt}{prompt}"
    if completion is not None:
        line += f"{of_completion}{completion}"
    return line if cached is None else f"{line}{of_cached}{cached}"


def _short(r: Record) -> str:
    """Return the line for a person: outcome, latencies, engines, reuse."""
    parts = [f"{r.status} {r.endpoint.removeprefix('/v1/')}"]
    prompt, completion, cached = tokens_of(r)
    if prompt is not None:
        parts.append(f"{prompt} tokens in" + (f", {completion} out" if completion else ""))
    if r.first_byte is not None and r.ended is not None:
        parts.append(f"first after {_seconds(r, r.first_byte)}, all after {_seconds(r, r.ended)}")
    parts += filter(None, (_engines(r), _moved(r), _reused(prompt, cached, r.conversation)))
    if r.outcome != "ok":
        parts.append(f"{r.outcome}{' at ' + r.stage if r.stage != 'done' else ''}")
    if r.error:
        parts.append(" ".join(r.error.split())[:200])
    return "; ".join(parts)


def _engines(r: Record) -> str:
    if r.prefiller and r.decoder:
        return f"prefill {r.prefiller} -> decode {r.decoder}"
    return f"{r.decoder or r.prefiller} alone" if r.decoder or r.prefiller else ""


def _moved(r: Record) -> str:
    """Return the number of blocks that the decode engine was to read; it skips cached ones."""
    found = BLOCK_IDS.search(r.transfer_params) if r.prefiller and r.decoder else None
    count = len(DIGITS.findall(found[1])) if found else 0
    return f"{count} block{'s' if count > 1 else ''} moved" if count else ""


def _reused(prompt: int | None, cached: int | None, conversation: str) -> str:
    turn = f" (turn: {conversation})" if conversation else ""
    if prompt is None or cached is None:
        return turn.strip(" ()")
    return f"reused {cached} of {prompt}{turn}"


def _seconds(record: Record, moment: float) -> str:
    return f"{moment - record.started:.2f} s"
