"""Read a decode engine's report that it could not load a prompt's KV.

Decode engines with the capability `load_failures` send the report in one of three places
(docs/wire-protocol.md): in the error object of a failed answer, in the `kv_transfer_params` of a
non-streamed answer that they computed themselves, or in a comment of a stream. The router removes
the report from what it sends to the client.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import orjson
from msgspec import Struct

from router.common.exact_json import dumps
from router.http_client.sse import comment_lines, with_data
from router.openai.answers import json_events, parse_object
from router.proxy.request import KV_PARAMS

FIELD = "kv_load_failure"
FIELD_BYTES = FIELD.encode()
# As a key of an object. No text of a model contains it, since quotes in strings are escaped.
KEY = b'"%b"' % FIELD_BYTES
COMMENT = comment_lines(FIELD_BYTES)
MAX_TEXT_CHARS = 200


class LoadFailure(Struct, frozen=True):
    """A failed load. `is_of_pair`: the two engines cannot exchange KV, whatever the request.
    `remote` names the prefill engine. Both texts are safe to log. `is_silent`: the engine reported
    nothing, and its answer showed the failure."""

    is_of_pair: bool
    remote: str
    reason: str
    is_silent: bool = False


def failure_in(content: object) -> LoadFailure | None:
    """Return the failure reported in an object, or None. Never raises."""
    report = content.get(FIELD) if isinstance(content, dict) else None
    if not isinstance(report, dict):
        return None
    name, host, port = (report.get(f"remote_{what}") for what in ("engine_id", "host", "port"))
    remote = f"{name} at {host}:{port}"
    is_of_pair = report.get("scope") == "pair"
    return LoadFailure(is_of_pair, _printable(remote), _printable(report.get("reason")))


def failure_in_error(raw: bytes) -> LoadFailure | None:
    """Return the failure reported in the error object of an answer, or None."""
    content = parse_object(raw) if raw.find(KEY) >= 0 else None
    return None if content is None else failure_in(content.get("error"))


def take_failure_from_answer(raw: bytes) -> tuple[LoadFailure | None, bytes]:
    """Return the failure that a non-streamed answer reports, and the answer without the report."""
    content = parse_object(raw) if raw.find(KEY) >= 0 else None
    params = None if content is None else content.get(KV_PARAMS)
    failure = failure_in(params)
    if failure is None or content is None or not isinstance(params, dict):
        return None, raw
    del params[FIELD]
    content[KV_PARAMS] = params or None
    try:
        return failure, dumps(content)
    except orjson.JSONEncodeError:  # it can be read, but not written: nested too deep
        return failure, raw


class LoadFailureWatch:
    """A watch that removes the reports from the events of a stream and passes them on."""

    __slots__ = ("_on_failure", "has_ended")

    def __init__(self, on_failure: Callable[[LoadFailure], None]) -> None:
        self._on_failure = on_failure
        # True once an error with a report has ended the stream.
        self.has_ended = False

    def passing(self, block: bytes) -> bytes:
        if block.find(FIELD_BYTES) < 0:
            return block
        block = COMMENT.sub(self._read_comment, block)
        return self._without_reports(block) if block.find(KEY) >= 0 else block

    def _read_comment(self, found: re.Match[bytes]) -> bytes:
        self._note(failure_in({FIELD: parse_object(found[1])}))
        return b""

    def _without_reports(self, block: bytes) -> bytes:
        passes, at = b"", 0
        for event, content in json_events(block, at_end=True):
            error = content.get("error")
            if not isinstance(error, dict) or FIELD not in error:
                continue
            self.has_ended = True
            self._note(failure_in(error))
            del error[FIELD]
            with suppress(orjson.JSONEncodeError):  # it can be read, but not written
                written = with_data(block[event.start : event.end], dumps(content))
                passes += block[at : event.start] + written
                at = event.end
        return passes + block[at:]

    def _note(self, failure: LoadFailure | None) -> None:
        if failure is not None:
            self._on_failure(failure)


def _printable(value: object) -> str:
    """Return a value from an engine in a form that is safe to log."""
    text = value if isinstance(value, str) else str(value)
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT_CHARS])
