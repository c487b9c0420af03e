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
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from router.common.exact_json import dumps, loads
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import BrokenAnswerError
from router.http_client.sse import events_in, with_data
from router.openai.answers import parse_object
from router.openai.errors import error_body, event_of, type_of_status

Json = dict[str, Any]
EXTRA_ARGS = "vllm_xargs"
# Objects whose fields engines, or what stands before them, read like those of the request.
CONTAINERS = (EXTRA_ARGS, "extra_body", "nvext")
# Of vLLM, of TensorRT-LLM, of SGLang, which has several that begin with `bootstrap_`, and of
# Dynamo, whose frontends read them in `nvext`.
FIELDS = frozenset((
    "kv_transfer_params", "ec_transfer_params", "disaggregated_params", "decode_tp_size",
    "disagg_prefill_dp_rank", "backend_instance_id", "decode_worker_id", "prefill_dp_rank",
    "prefill_result", "prefill_worker_id",
))  # fmt: skip
FIELD_PREFIX = "bootstrap_"
# Headers by which gateways, SGLang, and the routers of llm-d and Dynamo, name the engines of a
# request, and the `rid` by which the router aborts it.
# Clients may not send any other with the prefix either. X-data-parallel-rank names no other engine.
ROUTING_HEADER_PREFIX = b"x-gateway-destination-endpoint"
ROUTING_HEADERS = frozenset((
    b"x-data-parallel-host-port", b"x-encoder-hosts-ports", b"x-kv-cache-source-host-port",
    b"x-prefiller-host-port", b"x-llm-d-encoder-hosts-ports", b"x-llm-d-kv-cache-source-host-port",
    b"x-llm-d-prefiller-host-port", b"x-llm-d-reserved-host-port", b"x-dynamo-routing-mode",
    b"x-dynamo-token-data", b"x-epp-inject-nvext-token-data", b"x-override-bootstrap-host",
    b"x-override-bootstrap-port", b"x-override-bootstrap-room",
    b"x-override-disagg-prefill-dp-rank", b"x-override-rid", b"x-prefill-dp-rank",
    b"x-prefill-instance-id", b"x-worker-instance-id", ROUTING_HEADER_PREFIX,
    ROUTING_HEADER_PREFIX + b"-served", ROUTING_HEADER_PREFIX + b"-subset",
))  # fmt: skip
# In the name of a form's field, perhaps with more, such as `vllm_xargs[kv_transfer_params]`.
IN_FORM_NAME = re.compile("|".join((*sorted(FIELDS), FIELD_PREFIX)).encode())
# Parts of these keys, behind their underscore: Python finds a first byte fast, and one search is
# faster than six. Behind `_params"` is any value but null; key and value may stand in two lines of
# an event.
OTHERS = (
    rb'(?<=[degpl]_)(?:(?<="bootstrap_)|(?<="prefill_)|(?<="decode_)|(?<="disagg_)'
    rb'|(?<="backend_)instance_id")'
)
FIELD = re.compile(rb'_(?:params"|%b)' % OTHERS)
FIELD_WITH_VALUE = re.compile(rb'_(?:params"[\sdat]*:[\sdat:]*[^\sdat:n]|%b)' % OTHERS)
# A field whose value is an object or a list, in JSON text. A quote in a string has a backslash.
NESTED_FIELD = re.compile(
    rb'(?<!\\)"(?:%b|%b\w*)"\s*:\s*[{\[]'
    % ("|".join(sorted(FIELDS)).encode(), FIELD_PREFIX.encode())
)
SYNTAX = re.compile(rb'\\.?|["{}\[\]]', re.DOTALL)
NESTING = frozenset((dict, list))
OPENING, CLOSING = (b"{", b"["), (b"}", b"]")
# Bytes of a field's name with its colon that may be cut.
SEAM_BYTES = 64


def is_internal(name: str) -> bool:
    return name in FIELDS or name.startswith(FIELD_PREFIX)


# What clients send.


def without_internal_fields(body: Json) -> Json:
    """Return the body without these fields, wherever an engine would read them; `body` itself if it
    has none."""
    rest = _without(body, is_internal)
    for container in CONTAINERS:
        given = rest.get(container)
        if isinstance(given, dict):
            # No engine reads a container within a container.
            kept = _without(given, lambda name: is_internal(name) or name in CONTAINERS)
            rest = rest if kept is given else {**rest, container: kept}
    return rest


def _without(given: Json, is_dropped: Callable[[str], bool]) -> Json:
    dropped = {*filter(is_dropped, given)}
    return {name: given[name] for name in given if name not in dropped} if dropped else given


def is_internal_in_form(name: bytes, value: bytes) -> bool:
    """Return True if this field of a form is, or may have, such a field."""
    if name.decode("latin-1") not in CONTAINERS:
        return IN_FORM_NAME.search(name) is not None
    extra = parse_object(value)
    return extra is None or any(map(is_internal, extra))


# What engines answer.


def mentions_internal_fields(text: bytes) -> bool:
    """Return False if certainly no such field with a value is in (a part of) an answer."""
    return FIELD_WITH_VALUE.search(text) is not None


def count_internal_fields(text: bytes) -> int:
    """Return how many such fields with a value are at most in an answer."""
    return len(FIELD_WITH_VALUE.findall(text))


def may_have_fields(text: bytes) -> bool:
    """Return False if certainly no such field is in the text, not even with the value null."""
    return FIELD.search(text) is not None


def take_internal_fields(content: Json | list[Any]) -> Json:
    """Remove the fields from JSON content, however deep they are. Return those with a value."""
    taken: Json = {}
    parts: list[Json | list[Any]] = [content]
    while parts:
        part = parts.pop()
        values: Iterable[Any] = part
        if isinstance(part, dict):
            for name in [*filter(is_internal, part)]:
                if value := part.pop(name):
                    taken.setdefault(name, value)
            values = part.values()
        if not NESTING.isdisjoint(map(type, values)):  # a list of token ids may be long
            parts += [one for one in values if isinstance(one, dict | list)]
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


def error_without_internal_fields(status: int, raw: bytes) -> bytes:
    """Return an engine's error without the fields. Engines quote invalid requests as text, and the
    router has added its params to them: such an error is replaced. Raises BrokenAnswerError."""
    raw = answer_without_internal_fields(raw)
    if not quotes_params(raw.decode("latin-1")):
        return raw
    text = "the engine rejected the request with an error that quotes the router's own fields"
    return error_body(status, type_of_status(status), text)


def quotes_params(text: str) -> bool:
    """Return True for a text with params that name an engine."""
    return "_transfer_params" in text and "remote_" in text


def hide_fields_of_long_answer(answer: EngineAnswer) -> None:
    """Empty the fields of an answer that is no stream while it is relayed."""
    remove, before = LongAnswerFields().passing, answer.watch
    answer.watch = remove if before is None else lambda block: remove(before(block))


def events_without_fields(block: bytes) -> bytes:
    """Return events of a stream without the fields."""
    if not may_have_fields(block):
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
        begins_field = self._depth or may_have_fields(self._seam + piece[:SEAM_BYTES])
        if not begins_field and len(piece) >= SEAM_BYTES and not may_have_fields(piece):
            self._seam = piece[-SEAM_BYTES:]
            return piece  # large, and not copied
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
