"""What each leg is sent. Pure.

What both engines must read alike, which is nearly all, is written once, from what was parsed: so
they are sent the same prompt, whatever a strange body says twice. The few fields that are a leg's
own come behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from router.common.exact_json import dumps
from router.openai.errors import BadRequestError
from router.openai.request_fields import MAX_COMPLETION_TOKENS, MIN_TOKENS
from router.proxy.prefill_answer import KvParams
from router.proxy.request import KV_PARAMS, THRESHOLD, Body
from router.proxy.resume_buffer import ResumeBuffer

# What a prefiller needs to keep its blocks for a decoder (vLLM's NixlConnector).
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Of the last turn's decoder, whose params then say where its blocks are (bidirectional mode).
PULL_TURN = {"do_remote_decode": True, "do_remote_prefill": False}
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
# An engine may have a threshold of its own for requests that name none.
NO_THRESHOLD = b'"cache_hit_threshold":0'
# One token, not streamed, once: the prefiller computes the prompt and keeps its blocks.
ONE_TOKEN = b'"max_tokens":1,"stream":false,' + NO_THRESHOLD
ONE_COMPLETION_TOKEN = b'"max_completion_tokens":1'
# The token that it samples is the answer's first: so it is what the client would get.
MIN_ONE_TOKEN = b'"min_tokens":1'
KEEP_BLOCKS = b'"kv_transfer_params":' + dumps(PREFILL_PARAMS)


# Bytes of which a copy costs less than a view.
MAX_COPIED_BYTES = 8192
# The two halves of a body, which are put together once: with the head that goes before them.
BodyHalves = tuple[bytes | memoryview, bytes]


class LegBodies:
    """The bodies that one request becomes. Raises BadRequestError for what cannot be written."""

    __slots__ = ("_comma", "_own", "_start", "_threshold")

    def __init__(self, body: Body) -> None:
        own = {name: body[name] for name in body if name in LEG_FIELDS}
        if own:
            body = body.copy()
            for name in own:
                del body[name]
        self._threshold = own.pop(THRESHOLD, None)
        self._own = own
        written = encode_body(body)
        # Up to where a leg's own fields begin; not copied where it is large.
        self._start = written[:-1] if len(written) < MAX_COPIED_BYTES else memoryview(written)[:-1]
        self._comma = b"," if body else b""

    def prefill(
        self,
        last_turn: Body | None = None,
        transfer_id: str = "",
        hands_over: bool = False,
        buffer: ResumeBuffer | None = None,
    ) -> BodyHalves:
        """`last_turn` are a decoder's params: the prefiller pulls from there what it need not
        compute. `hands_over`: a decoder is to go on from the token that it samples. `buffer`: of
        what was said, which it computes like the prompt."""
        if buffer is not None:
            return self._with(self._going_on(buffer))
        fields = [ONE_TOKEN]
        if hands_over and self._own.get(MIN_TOKENS):
            fields.append(MIN_ONE_TOKEN)
        if MAX_COMPLETION_TOKENS in self._own:
            fields.append(ONE_COMPLETION_TOKEN)
        if last_turn is None and not transfer_id and not hands_over:
            fields.append(KEEP_BLOCKS)
        else:
            params = PREFILL_PARAMS if last_turn is None else {**last_turn, **PULL_TURN}
            named: Body = {"transfer_id": transfer_id} if transfer_id else {}
            if hands_over:
                named["hand_over"] = True
            fields.append(_field(KV_PARAMS, {**params, **named}))
        return self._with(fields)

    def _going_on(self, buffer: ResumeBuffer) -> list[bytes]:
        """What was said counts; one token more is sampled, and not used."""
        most = buffer.num_tokens + 1
        fields = [b'"max_tokens":%d,"stream":false,%s' % (most, NO_THRESHOLD)]
        if MAX_COMPLETION_TOKENS in self._own:
            fields.append(b'"max_completion_tokens":%d' % most)
        return [*fields, b'%s,"begun":%s}' % (KEEP_BLOCKS[:-1], buffer.begun())]

    def decode(
        self, params: KvParams | None, threshold: float = 0.0, whole: bool = False
    ) -> BodyHalves:
        """Return the body of a decode leg. `threshold` is the share of the prompt that the decode
        engine must have cached; with 0 the engine must answer. `whole`: without streaming."""
        own = self._own
        if whole:
            own = {**own, "stream": False}
            own.pop("stream_options", None)
        if params is not None and KV_PARAMS in own:
            own = {name: own[name] for name in own if name != KV_PARAMS}
        fields = [encode_body(own)[1:-1]] if own else []
        if not threshold:
            fields.append(NO_THRESHOLD)
        else:  # as the client has written it, if it is the client's
            asked = self._threshold if self._threshold == threshold else threshold
            fields.append(b'"cache_hit_threshold":' + dumps(asked))
        if params is not None:
            fields.append(b'"kv_transfer_params":' + params.raw)
        return self._with(fields)

    def passed(self) -> BodyHalves:
        """Return the client's body for an endpoint that is not generation."""
        return self._with([encode_body(self._own)[1:-1]] if self._own else [])

    def _with(self, fields: list[bytes]) -> BodyHalves:
        return self._start, self._comma + b",".join(fields) + b"}" if fields else b"}"


class RawBody(LegBodies):
    """A body that is not written anew."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def passed(self) -> BodyHalves:
        return self._raw, b""


def _field(name: str, value: Mapping[str, object]) -> bytes:
    return b'"%s":' % name.encode("ascii") + encode_body(value)


def encode_body(content: Mapping[str, object]) -> bytes:
    """Raises BadRequestError for what can be read but not written: nesting beyond 250 levels."""
    try:
        return dumps(content)
    except orjson.JSONEncodeError as error:
        raise BadRequestError(f"the body cannot be forwarded: {error}") from error


def error_text(answer: bytes) -> str:
    """What an engine's error object says, as ": text", or nothing."""
    try:
        error = orjson.loads(answer)["error"]
        message = error["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return ""
    return f": {message[:1000]}" if isinstance(message, str) else ""
