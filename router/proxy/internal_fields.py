"""The fields and headers by which engines and the routers before them agree on a transfer.

An engine connects to the peer that such a field names, and its answer names the engine's own
address and leases. So they pass neither from clients to engines nor back. The only exception are
the fields of a client's request with the setting trust_client_kv_params, and of its answer.

Most answers have no such field. They are searched for the bytes of one, and parsed only if they
have it. Stock vLLM writes `"kv_transfer_params":null` into each answer, which shows nothing and
stays.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from router.common.exact_json import dumps, loads
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import BrokenAnswerError
from router.http_client.sse import events_in, with_data
from router.openai.answers import parse_object
from router.openai.errors import event_of

Json = dict[str, Any]
EXTRA_ARGS = "vllm_xargs"
# Of vLLM, of TensorRT-LLM, and of SGLang, which has several that begin with `bootstrap_`.
FIELDS = frozenset(
    (
        "kv_transfer_params",
        "ec_transfer_params",
        "disaggregated_params",
        "disagg_prefill_dp_rank",
    )
)
FIELD_PREFIX = "bootstrap_"
# Headers by which gateways, and the routers of llm-d, name the engines of a request. Clients may
# not send any other with the prefix either.
ROUTING_HEADER_PREFIX = b"x-gateway-destination-endpoint"
ROUTING_HEADERS = frozenset(
    (
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        ROUTING_HEADER_PREFIX,
        ROUTING_HEADER_PREFIX + b"-served",
        ROUTING_HEADER_PREFIX + b"-subset",
    )
)
# In the name of a form's field, perhaps with more, such as `vllm_xargs[kv_transfer_params]`.
IN_FORM_NAME = re.compile("|".join((*sorted(FIELDS), FIELD_PREFIX)).encode())
# The ends of these keys are searched for, as one search is faster than three. Behind them is any
# value but null; key and value may stand in two lines of an event.
PARAMS, BOOTSTRAP = b'_params"', b'"bootstrap_'
PARAMS_VALUE = re.compile(rb'_params"[\sdat]*:[\sdat:]*[^\sdat:n]')
# A field whose value is an object or a list, in JSON text. A quote in a string has a backslash.
NESTED_FIELD = re.compile(
    rb'(?<!\\)"(?:%b|%b\w*)"\s*:\s*[{\[]'
    % ("|".join(sorted(FIELDS)).encode(), FIELD_PREFIX.encode())
)
SYNTAX = re.compile(rb'\\.?|["{}\[\]]', re.DOTALL)
OPENING, CLOSING = (b"{", b"["), (b"}", b"]")
# Bytes of a field's name with its colon that may be cut.
SEAM_BYTES = 64


def is_internal(name: str) -> bool:
    return name in FIELDS or name.startswith(FIELD_PREFIX)


# What clients send.


def has_internal_fields(body: Json) -> bool:
    """Return True if an engine would read such a field, at the top or in `vllm_xargs`."""
    extra = body.get(EXTRA_ARGS)
    return any(map(is_internal, body)) or (isinstance(extra, dict) and any(map(is_internal, extra)))


def without_internal_fields(body: Json) -> Json:
    """Return the body without these fields, wherever an engine would read them."""
    rest = {name: value for name, value in body.items() if not is_internal(name)}
    extra = rest.get(EXTRA_ARGS)
    if isinstance(extra, dict):
        rest[EXTRA_ARGS] = {name: extra[name] for name in extra if not is_internal(name)}
    return rest


def is_internal_in_form(name: bytes, value: bytes) -> bool:
    """Return True if this field of a form is, or may have, such a field."""
    if name != EXTRA_ARGS.encode():
        return IN_FORM_NAME.search(name) is not None
    extra = parse_object(value)
    return extra is None or any(map(is_internal, extra))


# What engines answer.


def mentions_internal_fields(text: bytes) -> bool:
    """Return False if certainly no such field with a value is in (a part of) an answer."""
    if text.rfind(PARAMS) >= 0 and PARAMS_VALUE.search(text) is not None:
        return True
    return text.rfind(BOOTSTRAP) >= 0


def take_internal_fields(content: object) -> Json:
    """Remove the fields from JSON content, however deep they are. Return those with a value."""
    taken: Json = {}
    parts = [content]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            for name in [*filter(is_internal, part)]:
                if value := part.pop(name):
                    taken.setdefault(name, value)
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return taken


def answer_without_internal_fields(raw: bytes) -> bytes:
    """Return a whole answer without the fields. Raises BrokenAnswerError for JSON that cannot be
    read or written."""
    if not mentions_internal_fields(raw) or raw.lstrip()[:1] not in OPENING:
        return raw
    try:
        content = loads(raw)
        return dumps(content) if take_internal_fields(content) else raw
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        raise BrokenAnswerError(f"it cannot be passed on: {error}") from error


def hide_fields_of_long_answer(answer: EngineAnswer) -> None:
    """Empty the fields of an answer that is no stream while it is relayed."""
    remove, before = LongAnswerFields().passing, answer.watch
    answer.watch = remove if before is None else lambda block: remove(before(block))


def events_without_fields(block: bytes) -> bytes:
    """Return events of a stream without the fields."""
    if block.rfind(PARAMS) < 0 and block.rfind(BOOTSTRAP) < 0:
        return block
    return take_fields_from_events(block)[0]


def take_fields_from_events(block: bytes) -> tuple[bytes, Json]:
    """Return the events without the fields, and the fields. An event that cannot be read or written
    becomes an error: it must neither pass nor vanish."""
    passes, at = b"", 0
    taken: Json = {}
    for event in events_in(block, at_end=True):
        if event.data is None or not mentions_internal_fields(event.data):
            continue
        content = parse_object(event.data)
        found = {} if content is None else take_internal_fields(content)
        if content is not None and not found:
            continue
        taken |= found
        passes += block[at : event.start]
        at = event.end
        if content is not None and content.get("choices") == [] and content.get("usage") is None:
            continue  # an event for the params alone, which no client expects
        try:
            written = dumps(content) if content is not None else b""
        except orjson.JSONEncodeError:
            written = b""
        if written:
            passes += with_data(block[event.start : event.end], written)
        else:
            passes += event_of(BrokenAnswerError("an event that cannot be passed on"))
    return passes + block[at:], taken


class LongAnswerFields:
    """Empties the fields of a long JSON answer, which passes in pieces and keeps its length.

    The brackets of a value stay, with spaces between them. A value without brackets passes.
    """

    __slots__ = ("_depth", "_in_string", "_is_escaped", "_seam")

    def __init__(self) -> None:
        self._seam = b""
        # Brackets that are open in a field's value; 0 outside of one.
        self._depth = 0
        self._in_string = self._is_escaped = False

    def passing(self, piece: bytes) -> bytes:
        at, passes = 0, b""
        while at < len(piece):
            if self._depth:
                end = self._end_of_value(piece, at)
                passes += b" " * (end - at)
                at = end
                continue
            seam = self._seam
            found = NESTED_FIELD.search(seam + piece[at:])
            if found is None:
                self._seam = (seam + piece[at:])[-SEAM_BYTES:]
                return passes + piece[at:]
            start = at + found.end() - len(seam)
            passes += piece[at:start]
            at, self._seam, self._depth = start, b"", 1
        return passes

    def _end_of_value(self, piece: bytes, at: int) -> int:
        """Return the offset of the bracket that closes the value, or the length of the piece."""
        at += self._is_escaped  # the byte behind a backslash
        self._is_escaped = False
        for found in SYNTAX.finditer(piece, at):
            what = found[0]
            if what == b'"':
                self._in_string = not self._in_string
            elif what == b"\\":
                self._is_escaped = True
            elif not self._in_string:
                self._depth += (what in OPENING) - (what in CLOSING)
                if not self._depth:
                    return found.start()
        return len(piece)
