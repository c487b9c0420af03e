"""One line per request, when it has ended."""

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
# In kv_transfer_params, of one group of layers or several.
BLOCKS = re.compile(rb'"remote_block_ids":\s*(\[[][\d,\s]*\])')
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


class Form(Struct, frozen=True):
    """How the usual line is written: its beginning, who asked, and what stands before each number
    of tokens, in their order."""

    line: Callable[[Record, int, int, int], str]
    key: str
    tokens: tuple[str, str, str]


TEXT = Form(_text, " key=%s", (" prompt_tokens=", " completion_tokens=", " cached_tokens="))
JSON = Form(
    _json, ',"key":"%s"', (',"prompt_tokens":', ',"completion_tokens":', ',"cached_tokens":')
)


def write_lines(ended: Sequence[Record]) -> None:
    """A line for each, in one log record."""
    if logger.isEnabledFor(logging.INFO):
        unix = time.time() - time.monotonic()
        lines = [AccessLine(record, unix + (record.ended or 0.0)) for record in ended]
        logger.info("%d requests ended", len(ended), extra={LINES: lines})


class AccessLine(Struct, frozen=True):
    """What is known of a request that has ended; times in milliseconds since its arrival."""

    _record: Record
    at: float

    def text(self) -> str:
        return _usual(self._record, TEXT) or _any(self.content())

    def json(self) -> str:
        """The inside of an object."""
        return _usual(self._record, JSON) or orjson.dumps(self.content()).decode()[1:-1]

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
        if record.key:
            known["key"] = record.key
        if record.conversation:
            known["conversation"] = record.conversation
        if record.prefiller:
            known["prefiller"] = record.prefiller
        if record.decoder:
            known["decoder"] = record.decoder
        if record.prefill_done is not None:
            known["prefill_ms"] = _since(record, record.prefill_done)
        if record.first_byte is not None:
            known["first_byte_ms"] = _since(record, record.first_byte)
        if record.ended is not None:
            known["total_ms"] = _since(record, record.ended)
        for name, number in tokens_of(record)._asdict().items():
            if number is not None:
                known[f"{name}_tokens"] = number
        if record.stage != "done":
            known["stage"] = record.stage
        if record.error:
            known["error"] = repr(record.error)
        return known


def _since(record: Record, moment: float) -> int:
    return int((moment - record.started) * 1000 + 0.5)


def _any(content: dict[str, object]) -> str:
    message = content.pop("message")
    return f"{message}{''.join([f' {name}={value}' for name, value in content.items()])}"


def _usual(r: Record, form: Form) -> str | None:
    """The line of most requests, at a fifth of the price; None for the others. Nothing in it needs
    to be escaped: ids, endpoints, names of engines and words of ours."""
    start, prefilled, began, ended = r.started, r.prefill_done, r.first_byte, r.ended
    if prefilled is None or began is None or ended is None or r.stage != "done":
        return None
    if r.conversation or r.error or not (r.prefiller and r.decoder):
        return None
    usual = form.line(
        r,
        int((prefilled - start) * 1000 + 0.5),
        int((began - start) * 1000 + 0.5),
        int((ended - start) * 1000 + 0.5),
    )
    if r.key:
        usual += form.key % r.key
    prompt, completion, cached = r.tokens or tokens_of(r)
    of_prompt, of_completion, of_cached = form.tokens
    if prompt is not None:
        usual += f"{of_prompt}{prompt}"
    if completion is not None:
        usual += f"{of_completion}{completion}"
    return usual if cached is None else f"{usual}{of_cached}{cached}"


def _short(r: Record) -> str:
    """For a person: what came of it, how fast, over which engines, what was reused."""
    parts = [f"{r.status} {r.endpoint.removeprefix('/v1/')}"]
    prompt, completion, cached = tokens_of(r)
    if prompt is not None:
        parts.append(f"{prompt} tokens in" + (f", {completion} out" if completion else ""))
    if r.first_byte is not None and r.ended is not None:
        parts.append(f"first after {_seconds(r, r.first_byte)}, all after {_seconds(r, r.ended)}")
    parts += filter(None, (_way(r), _moved(r), _reused(prompt, cached, r.conversation)))
    if r.outcome != "ok":
        parts.append(f"{r.outcome}{' at ' + r.stage if r.stage != 'done' else ''}")
    if r.error:
        parts.append(" ".join(r.error.split())[:200])
    return "; ".join(parts)


def _way(r: Record) -> str:
    if r.prefiller and r.decoder:
        return f"prefill {r.prefiller} -> decode {r.decoder}"
    return f"{r.decoder or r.prefiller} alone" if r.decoder or r.prefiller else ""


def _moved(r: Record) -> str:
    """What the decoder was told to read; blocks that it had already, it leaves."""
    found = BLOCKS.search(r.offered) if r.prefiller and r.decoder else None
    count = len(DIGITS.findall(found[1])) if found else 0
    return f"{count} block{'s' if count > 1 else ''} moved" if count else ""


def _reused(prompt: int | None, cached: int | None, conversation: str) -> str:
    turn = f" (turn: {conversation})" if conversation else ""
    if prompt is None or cached is None:
        return turn.strip(" ()")
    return f"reused {cached} of {prompt}{turn}"


def _seconds(record: Record, moment: float) -> str:
    return f"{moment - record.started:.2f} s"
