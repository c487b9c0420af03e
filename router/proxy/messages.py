"""The HTTP messages of the legs, and the headers that the client gets.

Bodies: both legs share nearly all fields. The router writes these once, from the parsed body, so
both engines get the same prompt even if the client's body contains a field twice. The few fields of
one leg follow the shared ones.

Headers: both engines get the client's headers, except those of one connection, those that describe
the body (the router writes a new one), and X-Request-Id (each leg has its own).
X-data-parallel-rank passes unchanged; if the client sends none, `ranks` may choose a rank.
Both engines are asked for uncompressed answers, because the router reads them.
X-Forwarded-*, Forwarded, traceparent and tracestate pass unchanged as well. The router adds nothing
to them and does not rely on them. With tracing (router.telemetry.tracing) each leg gets a
traceparent of its own, below the client's.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from enum import Enum, auto
from itertools import count
from random import getrandbits

import orjson

from router.auth.api_keys import CREDENTIALS
from router.common.exact_json import dumps
from router.http_client.head_cache import once_per_head
from router.openai.errors import BadRequestError
from router.openai.request_fields import MAX_COMPLETION_TOKENS, MIN_TOKENS
from router.proxy.exchange import Header
from router.proxy.internal_fields import ROUTING_HEADER_PREFIX, ROUTING_HEADERS, quotes_params
from router.proxy.kv_params import KvParams
from router.proxy.request import CONVERSATION_STREAM, KV_PARAMS, THRESHOLD, Body
from router.proxy.resume_buffer import ResumeBuffer

# Makes a prefill engine hold its blocks for a decode engine (vLLM's NixlConnector).
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Makes a prefill engine read retained KV as well, at the place that the last turn's params name
# (vLLM's bidirectional mode).
PULL_TURN = {"do_remote_decode": True, "do_remote_prefill": False}
# Fields that differ between the legs.
LEG_FIELDS = frozenset(
    (
        "stream",
        "max_tokens",
        MAX_COMPLETION_TOKENS,
        "stream_options",
        "min_tokens",
        "min_completion_tokens",
        "n",
        THRESHOLD,
        KV_PARAMS,
    )
)
# Sent always, because an engine may have a default threshold.
NO_THRESHOLD = b'"cache_hit_threshold":0'
# The prefill engine computes the prompt and one token.
ONE_TOKEN = b'"max_tokens":1,"stream":false,' + NO_THRESHOLD
RETURN_IDS = b'"return_token_ids":true'
ONE_COMPLETION_TOKEN = b'"max_completion_tokens":1'
# Sent for a hand-over: the token of the prefill engine must be one that the client would get.
MIN_ONE_TOKEN = b'"min_tokens":1'
KEEP_BLOCKS = b'"kv_transfer_params":' + dumps(PREFILL_PARAMS)
# Up to this size, a copy costs less than a memoryview.
MAX_COPIED_BYTES = 8192
# Ids of legs are this process's own: two clients may send the same X-Request-Id, and in push mode
# legs of the same id are one request.
_process, _legs = f"{getrandbits(40):010x}", count()
# The shared fields and those of the leg. `leg_message` joins them with the request's head.
BodyHalves = tuple[bytes | memoryview, bytes]


class PrefillLengths(Enum):
    """The max_tokens and min_tokens of a prefill leg of another KV protocol."""

    ONE = auto()
    ONE_AND_ON = auto()
    """One token that is no end of the answer: engines free the KV of a finished answer."""
    CLIENTS = auto()
    """The client's own values: the engine stops after one token by itself."""


ONE, ONE_AND_ON, CLIENTS = PrefillLengths


class LegBodies:
    """The bodies of one request's legs.

    `returns_ids`: engines are to report the token ids of prompt and answer. `checks_prompt`: the
    prefill engine is to report those of the prompt, whatever the decode engine does. `prompt_ids`:
    a JSON array of the ids that engines compute instead of the messages, empty for the messages.

    Raises BadRequestError for a client's body that cannot be written as JSON.
    """

    __slots__ = (
        "_comma", "_own", "_start", "_threshold", "checks_prompt", "prompt_ids", "returns_ids",
    )  # fmt: skip

    def __init__(self, body: Body) -> None:
        self.returns_ids, self.checks_prompt, self.prompt_ids = False, False, b""
        own = {name: body[name] for name in body if name in LEG_FIELDS}
        if own:
            body = body.copy()
            for name in own:
                del body[name]
        self._threshold = own.pop(THRESHOLD, None)
        self._own = own
        written = encode_body(body)
        # The shared fields without the closing brace.
        self._start = written[:-1] if len(written) < MAX_COPIED_BYTES else memoryview(written)[:-1]
        self._comma = b"," if body else b""

    def of(self, body: Body) -> LegBodies:
        """Return the legs' bodies for a changed body."""
        other = type(self)(body)
        other.returns_ids, other.checks_prompt = self.returns_ids, self.checks_prompt
        other.prompt_ids = self.prompt_ids
        return other

    @property
    def asks_prefiller_for_ids(self) -> bool:
        return self.returns_ids or self.checks_prompt

    def prefill(
        self,
        last_turn: Body | None = None,
        transfer_id: str = "",
        hands_over: bool = False,
        buffer: ResumeBuffer | None = None,
        holders: bytes = b"",
    ) -> BodyHalves:
        """Return the body of a prefill leg.

        `last_turn`: params of retained KV, which the prefill engine loads instead of computing it.
        `transfer_id`: the id that both legs of a push share. `hands_over`: a decode engine is to
        continue from the token that the prefill engine samples. `buffer`: generated tokens, which
        the prefill engine computes as a part of the prompt. `holders`: a field of the params that
        names engines to borrow from.
        """
        if buffer is not None:
            return self._with(self._resume_fields(buffer))
        fields = self._one_token(1 if hands_over and self._own.get(MIN_TOKENS) else 0)
        if self.asks_prefiller_for_ids:
            fields.append(RETURN_IDS)
        if last_turn is None and not transfer_id and not hands_over:
            fields.append(KEEP_BLOCKS)
        else:
            params = PREFILL_PARAMS if last_turn is None else {**last_turn, **PULL_TURN}
            named: Body = {"transfer_id": transfer_id} if transfer_id else {}
            if hands_over:
                named["hand_over"] = True
            fields.append(b'"kv_transfer_params":' + encode_body({**params, **named}))
        if holders:
            fields[-1] = b"%s,%s}" % (fields[-1][:-1], holders)
        if self.prompt_ids:
            fields[-1] = b'%s,"prompt_token_ids":%s}' % (fields[-1][:-1], self.prompt_ids)
        return self._with(fields)

    def _one_token(self, least: int = 0) -> list[bytes]:
        """Return the fields that let an engine sample one token. With `least` 1 it is one that ends
        no answer."""
        fields = [ONE_TOKEN]
        if least:
            fields.append(MIN_ONE_TOKEN)
        if MAX_COMPLETION_TOKENS in self._own:
            fields.append(ONE_COMPLETION_TOKEN)
        return fields

    def prefill_with(self, fields: bytes, lengths: PrefillLengths) -> BodyHalves:
        """Return the body of a prefill leg of another KV protocol than the NixlConnector's, with
        its `fields`."""
        if self.prompt_ids:
            params = fields[:-1] + b"," if fields else b'"kv_transfer_params":{'
            fields = b'%b"prompt_token_ids":%b}' % (params, self.prompt_ids)
        if lengths is not CLIENTS:
            own_fields = self._one_token(1 if lengths is ONE_AND_ON else 0)
            return self._with([*own_fields, fields] if fields else own_fields)
        own = {**self._own, "stream": False}
        own.pop("stream_options", None)
        return self._with([encode_body(own)[1:-1], fields])

    def decode_with(self, fields: bytes) -> BodyHalves:
        """Return the body of a decode leg whose engine knows no field of vLLM, with `fields`."""
        own = [encode_body(self._own)[1:-1]] if self._own else []
        return self._with([*own, fields] if fields else own)

    def _resume_fields(self, buffer: ResumeBuffer) -> list[bytes]:
        """Return the fields for a prefill of generated tokens. These count for max_tokens. The one
        token that the engine samples beyond them is not used."""
        most = buffer.num_tokens + 1
        fields = [b'"max_tokens":%d,"stream":false,%s' % (most, NO_THRESHOLD)]
        if MAX_COMPLETION_TOKENS in self._own:
            fields.append(b'"max_completion_tokens":%d' % most)
        return [*fields, b'%s,"begun":%s}' % (KEEP_BLOCKS[:-1], buffer.begun())]

    def decode(
        self,
        params: KvParams | None,
        threshold: float = 0.0,
        whole: bool = False,
        retains: bool = False,
        returns_ids: bool = False,
    ) -> BodyHalves:
        """Return the body of a decode leg.

        `threshold` is the share of the prompt that the decode engine must have in its cache; with 0
        the engine must answer. With `whole` the answer is not streamed. With `retains` the engine
        retains the answer's KV for the next turn. Otherwise params say that it shall not, because
        engine_ext retains the KV if the field is missing. Stock vLLM ignores the field. With
        `returns_ids` the engine reports token ids, even if `self.returns_ids` is False.
        """
        own = self._own
        if whole:
            own = {**own, "stream": False}
            own.pop("stream_options", None)
        has_params = retains or params is not None or bool(self.prompt_ids)
        if has_params and KV_PARAMS in own:
            own = {name: own[name] for name in own if name != KV_PARAMS}
        fields = [encode_body(own)[1:-1]] if own else []
        if not threshold:
            fields.append(NO_THRESHOLD)
        else:  # an int stays an int if the client wrote one
            asked = self._threshold if self._threshold == threshold else threshold
            fields.append(b'"cache_hit_threshold":' + dumps(asked))
        if returns_ids or self.returns_ids:
            fields.append(RETURN_IDS)
        if has_params:
            start = b"{" if params is None or params.raw == b"{}" else params.raw[:-1] + b","
            if self.prompt_ids:
                start += b'"prompt_token_ids":%s,' % self.prompt_ids
            retained = b'"retain":true}' if retains else b'"retain":false}'
            fields.append(b"".join((b'"kv_transfer_params":', start, retained)))
        return self._with(fields)

    def passed(self) -> BodyHalves:
        """Return the client's body for an endpoint that is not generation."""
        return self._with([encode_body(self._own)[1:-1]] if self._own else [])

    def _with(self, fields: list[bytes]) -> BodyHalves:
        return self._start, self._comma + b",".join(fields) + b"}" if fields else b"}"


class RawBody(LegBodies):
    """A client's body that goes to the engine byte for byte."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def passed(self) -> BodyHalves:
        return self._raw, b""


def encode_body(content: Mapping[str, object]) -> bytes:
    """Return the content as JSON.

    Raises BadRequestError for content that orjson can read but not write: nesting beyond 250
    levels.
    """
    try:
        return orjson.dumps(content)
    except orjson.JSONEncodeError:  # numbers that only `dumps` writes
        pass
    try:
        return dumps(content)
    except orjson.JSONEncodeError as error:
        raise BadRequestError(f"the body cannot be forwarded: {error}") from error


def error_text(answer: bytes) -> str:
    """Return the message of an engine's error answer as ": text", or "" if there is none."""
    try:
        error = orjson.loads(answer)["error"]
        message = error["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return ""
    if not isinstance(message, str) or quotes_params(message):
        return ""
    return f": {message[:1000]}"


REQUEST_ID = b"x-request-id"
# Hop-by-hop headers. The Connection header may name further ones.
HOP_BY_HOP = frozenset(
    (
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
CONVERSATION_ID = b"x-conversation-id"
DIGITS = re.compile(rb"[0-9]{1,9}")
# Headers about the very bytes of a body (RFC 9110, 8; RFC 9530). They are wrong about a body that
# the router has written.
BODY_HEADERS = frozenset(
    (
        b"accept-ranges",
        b"content-digest",
        b"content-encoding",
        b"content-md5",
        b"content-range",
        b"digest",
        b"etag",
        b"last-modified",
        b"repr-digest",
    )
)
# Headers of every event stream: nginx and others that read X-Accel-Buffering pass events on as they
# come, even if nginx compresses them, and no cache keeps the stream.
STREAM_HEADERS: tuple[Header, ...] = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
EVENT_STREAM_TYPE = b"text/event-stream"
MAX_RETRY_AFTER_S = 3600
NOT_TO_ENGINE = (HOP_BY_HOP | BODY_HEADERS) | {
    REQUEST_ID,
    CONVERSATION_ID,
    CONVERSATION_STREAM,
    b"connection",
    b"accept-encoding",
    b"content-length",
    b"content-type",
    b"expect",
    b"host",
}
# Credentials are among them because an engine may echo the headers that it got.
NOT_TO_CLIENT = (
    HOP_BY_HOP
    | CREDENTIALS
    | ROUTING_HEADERS
    | {
        REQUEST_ID,
        b"content-length",
        b"date",
        b"server",
        # The router has its own CORS setting, while engines allow all origins.
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-expose-headers",
    }
)
NOT_OF_OWN_BODY = NOT_TO_CLIENT | BODY_HEADERS


@once_per_head
def _passing(headers: Sequence[Header], dropped: Container[bytes]) -> Sequence[Header]:
    """Return the headers that pass on: without those `dropped`, and without Connection and those
    that it names. Servers may read an underscore as a hyphen."""
    kept = [header for header in headers if header[0].replace(b"_", b"-") not in dropped]
    if ROUTING_HEADER_PREFIX in dropped:
        kept = [header for header in kept if not header[0].startswith(ROUTING_HEADER_PREFIX)]
    options = [value for name, value in headers if name == b"connection"]
    if not options:
        return kept
    named = {b"connection", *map(bytes.strip, b",".join(options).lower().split(b","))}
    return [header for header in kept if header[0] not in named]


@once_per_head
def _passing_lines(headers: Sequence[Header], dropped: Container[bytes]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in _passing(headers, dropped)])


def header_lines(headers: Sequence[Header], dropped: Container[bytes] = NOT_TO_ENGINE) -> bytes:
    """Return the lines of the client's headers that both legs share, without those `dropped`."""
    return _passing_lines(headers, dropped)


def to_client(
    headers: Sequence[Header], request_id: str, is_stream: bool = False, is_as_sent: bool = False
) -> list[Header]:
    """Return the headers of an engine's answer for the client.

    `is_as_sent`: the client gets the engine's very body, so headers about its bytes are right.
    """
    kept = _passing(headers, NOT_TO_CLIENT if is_as_sent else NOT_OF_OWN_BODY)
    if is_stream:
        kept = as_stream(kept)
    return [*kept, (REQUEST_ID, request_id.encode("ascii"))]


def as_stream(headers: Sequence[Header]) -> list[Header]:
    """Return the headers with those of an event stream."""
    names = [name for name, _ in STREAM_HEADERS]
    return [*(header for header in headers if header[0] not in names), *STREAM_HEADERS]


def retry_after(headers: Sequence[Header]) -> int | None:
    """Return the seconds of an answer's Retry-After, 1 for a date or an invalid value, or None if
    the answer has no Retry-After."""
    given = next((value for name, value in headers if name == b"retry-after"), None)
    if given is None:
        return None
    return min(int(given), MAX_RETRY_AFTER_S) if DIGITS.fullmatch(given) else 1


def new_leg_id(request_id: str) -> str:
    """Return a new X-Request-Id for one attempt of a leg. It begins with the client's id."""
    return f"{request_id}.{_process}{next(_legs)}"


def client_id_of(leg_id: str) -> str:
    """Return the client's id in the X-Request-Id of a leg of this process; other ids unchanged."""
    return leg_id.partition(f".{_process}")[0]


def leg_message(
    path: str,
    host: str,
    request_id: str,
    shared: bytes,
    content: tuple[bytes | memoryview, bytes],
    form: bytes = b"",
) -> bytes:
    """Return a complete HTTP request for an engine.

    `shared` are the lines of `header_lines`, `content` the halves of the body. `form`
    is the Content-Type of a body that is not JSON.
    """
    start, end = content
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\nx-request-id: {request_id}\r\n"
        f"accept-encoding: identity\r\ncontent-length: {len(start) + len(end)}\r\ncontent-type: "
    )
    kind = form or b"application/json"
    return b"".join((head.encode("ascii"), kind, b"\r\n", shared, b"\r\n", start, end))
