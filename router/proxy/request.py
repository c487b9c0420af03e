"""One client request as a record, and how the client's body becomes one.

What goes to engines is separated from what is for the router itself.

A foreign web page may have a browser POST text/plain, a form, or a body without a type, without a
preflight request. If the router took such a body for JSON, the page could spend its victim's quota
unseen. Therefore a body must have the right Content-Type. A body without a type is taken for JSON
only from clients that are not web pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from operator import itemgetter
from typing import Any

import msgspec
import orjson
from msgspec import Struct

from router.common.exact_json import SLOW_LIMIT, loads, read_number
from router.conversations.conversations import Conversations, Turn
from router.openai.errors import BadRequestError, UnsupportedTypeError
from router.openai.request_fields import (
    COMPLETION_FIELD_TYPES,
    FIELD_TYPES,
    MAX_COMPLETION_TOKENS,
    MAX_TOKENS,
    MIN_TOKENS,
    STREAM,
    STREAM_OPTIONS,
    USAGE,
    find_invalid_field,
    read_fields,
)
from router.proxy.exchange import Exchange, Header
from router.proxy.first_token import asks_one_token, wants_logprobs
from router.proxy.internal_fields import (
    CONTAINERS,
    EXTRA_ARGS,
    FIELD_PREFIX,
    FIELDS,
    without_internal_fields,
)
from router.proxy.large_bodies import LongIds
from router.proxy.model_aliases import ModelAliases
from router.proxy.request_limits import RequestLimits
from router.routing.prompt_chunks import BYTES_PER_TOKEN, estimate_tokens, has_media
from router.telemetry.record import Record

Body = dict[str, Any]
COMPLETIONS = "/v1/completions"
KV_PARAMS = "kv_transfer_params"
THRESHOLD = "cache_hit_threshold"
# Reasons why one engine must do all the work (Request.decode_only_reason).
CLIENT_PARAMS = "client_params"
# Several answers, unless decode engines load KV once for all of them.
SEVERAL = "n"
# An endpoint that one engine answers: see router.proxy.passthrough.
PASSED = "passed"
PROMPT_LIST = "prompt_list"
SEVERAL_ANSWERS = frozenset((SEVERAL, "best_of", "beam_search", PROMPT_LIST))
# Requests whose params are the client's, or which have none.
AS_SENT = frozenset((PASSED, CLIENT_PARAMS))
next_number = count().__next__


class Request(Struct, eq=False):
    """One client request, as the router has read it."""

    exchange: Exchange
    """The connection to the client. It may be wrapped: by heartbeats, by the key's limits."""
    record: Record
    """The data for metrics, the access log and the trace."""
    shared_headers: bytes
    """Header lines for all legs."""
    latest: float
    """The loop time of the request's deadline."""
    number: int
    """The number of the request in this process, which spreads requests over engines."""
    body: Body = {}
    """The part of the client's body that engines may see. It is never changed."""
    model: object = None
    """The model's name in it."""
    alias: object = None
    """The model's name in the client's body, if the router replaced it by the one of an engine."""
    decode_only_reason: str = ""
    """Why one engine must do all the work; empty if two can share it."""
    turn: Turn | None = None
    """The turn of a conversation, if the request names one."""
    names_conversation: bool = False
    """The client or the operator wants the request to be a turn of a conversation, which is not
    just recognized by its messages."""
    threshold: float = 0.0
    """Above 0: a decode engine that has this share of the prompt in its cache answers alone."""
    exact_stream: bool = False
    """See the setting conversation_stream."""
    event_stream: bool = False
    """The client gets an event stream, so errors are events from now on."""
    path: str = ""
    """The path at the engines, if it is not the client's own endpoint."""
    form: bytes = b""
    """The Content-Type of a body that is not JSON and goes to an engine as it is."""
    form_body: bytes = b""
    """That body, with the name of the model that engines know."""
    tokens: int = 0
    """The prompt's tokens, estimated by its bytes, without those of media: a measure of load."""
    is_several: bool = False
    """Several answers are asked for, of decode engines that load KV once for all of them."""
    long_ids: LongIds | None = None
    """The body, if it has a long list of token ids and was read piece by piece."""
    _prompt_tokens: int = -1

    @property
    def prompt_tokens(self) -> int:
        """The prompt's tokens, estimated by the content of the body, which is read once for it."""
        if self._prompt_tokens < 0:
            self._prompt_tokens = estimate_tokens(self.body)
        return self._prompt_tokens

    @property
    def requested_model(self) -> object:
        """The model's name as the client knows it."""
        return self.alias or self.model


CONVERSATION_STREAM = b"x-conversation-stream"
STREAM_FIELD = "conversation_stream"
# Fields that are for the router alone.
CONSUMED = frozenset(("conversation_id", STREAM_FIELD))
# A body without any of these needs no further look.
LOOKED_AT = CONSUMED | {
    *FIELDS,
    *CONTAINERS,
    THRESHOLD,
    "n",
    "best_of",
    "use_beam_search",
    "prompt_embeds",
    "prompt_logprobs",
    "echo",
}
# Records may be held for a while, so long names of models are not recorded.
MAX_MODEL_CHARS = 256
# A longer prompt may be one with images, whose bytes say little about their tokens.
MANY_TOKENS = 4096
STREAM_MODES = ("auto", "exact")
MAX_SHARED_ANSWERS = 128
JSON, MULTIPART = b"application/json", b"multipart/form-data"
USUAL = (b"content-type", JSON)
NAME = itemgetter(0)


def read_request(
    request: Request,
    limits: RequestLimits,
    conversations: Conversations | None,
    aliases: ModelAliases,
) -> None:
    """Read the request's JSON body. Raises BadRequestError, NoModelError, UnsupportedTypeError."""
    check_json(request.exchange.headers)
    ids = request.long_ids
    body = parse_body(request.exchange.body) if ids is None else ids.body
    take_body(request, body, limits, conversations, aliases)


def take_body(
    request: Request,
    body: Body,
    limits: RequestLimits,
    conversations: Conversations | None,
    aliases: ModelAliases,
    previous_response: str = "",
) -> None:
    """Fill the request in from a parsed body. Raises BadRequestError, NoModelError.

    `previous_response` identifies the conversation if nothing else does.
    """
    request.tokens = len(request.exchange.body) // BYTES_PER_TOKEN
    if request.tokens > MANY_TOKENS and has_media(body):
        request.tokens = min(request.tokens, estimate_tokens(body))
    is_completion = request.exchange.endpoint == COMPLETIONS
    body = read_fields(body, COMPLETION_FIELD_TYPES if is_completion else FIELD_TYPES)
    if (resolved := aliases.resolve(body, request.exchange.caller)) is not body:
        request.alias, body = body.get("model"), resolved
    model = request.model = body.get("model")
    if type(model) is str and len(model) <= MAX_MODEL_CHARS:
        request.record.model = model
    headers = request.exchange.headers
    if conversations is not None and _may_be_turn(conversations, headers, body, previous_response):
        turn = conversations.turn_of(headers, body, previous_response)
        if turn is not None and not turn.is_implicit:
            request.turn, request.names_conversation = turn, True
            mode = _stream_mode(request, body, limits.conversation_stream)
            request.exact_stream = mode == "exact"
        elif turn is not None and not asks_one_token(body):
            # The one token of an answer is the prefill engine's, unless a conversation is named.
            request.turn = turn
    is_plain = LOOKED_AT.isdisjoint(body) and FIELD_PREFIX not in ",".join(body)
    if is_plain and type(body.get("prompt")) is not list:
        request.body, request.threshold = body, limits.decode_first_threshold
        return
    request.threshold = threshold_of(body, limits.decode_first_threshold)
    if STREAM_FIELD in body:
        request.exact_stream = _stream_mode(request, body, limits.conversation_stream) == "exact"
    if not CONSUMED.isdisjoint(body):
        body = {name: body[name] for name in body if name not in CONSUMED}
    body = without_nested(body, THRESHOLD)
    allowed = without_internal_fields(body)
    if allowed is not body and limits.trust_client_kv_params:
        request.decode_only_reason = CLIENT_PARAMS
    else:
        body = allowed
        request.decode_only_reason = find_decode_only_reason(body)
    request.body = body


def _may_be_turn(
    conversations: Conversations, headers: Sequence[Header], body: Body, previous_response: str
) -> bool:
    """Return False for a request that certainly belongs to no conversation, as most do."""
    fleet = conversations.fleet_for_prefix
    return (
        not conversations.headers.isdisjoint(map(NAME, headers))
        or not conversations.fields.isdisjoint(body)
        or conversations.uses_prefix
        or (fleet is not None and fleet.snapshot.has_turns)
        or bool(previous_response)
    )


def share_answers(request: Request) -> None:
    """Let two engines share a request for several answers, because every decode engine of its model
    loads KV once for all of them."""
    number = request.body.get("n")
    if (
        request.decode_only_reason == SEVERAL
        and type(number) is int
        and 1 < number <= MAX_SHARED_ANSWERS
    ):
        request.decode_only_reason, request.is_several = "", True
        # Each of the answers would be kept for the next turn, and judged by a threshold.
        request.turn, request.names_conversation, request.threshold = None, False, 0.0


def check_fields(request: Request, context_lengths: Mapping[str, int]) -> None:
    """Refuse what a decode engine would refuse, before a prefill engine works on it.

    Raises BadRequestError. A request that one engine serves alone is left to that engine.
    """
    if request.decode_only_reason:
        return
    model = request.model
    context = context_lengths.get(model) if type(model) is str else None
    if _is_plainly_valid(request.body, context):
        return
    is_chat = request.exchange.endpoint != COMPLETIONS
    wrong = find_invalid_field(request.body, is_chat, context)
    if wrong is not None:
        raise BadRequestError(wrong.message, wrong.field)


def _is_plainly_valid(body: Body, context: int | None) -> bool:
    """Recognize most valid bodies at a third of the cost of `find_invalid_field`."""
    if MAX_COMPLETION_TOKENS in body or MIN_TOKENS in body:
        return False
    if context is not None and type(body.get("prompt")) is list:
        return False
    most, stream = body.get(MAX_TOKENS), body.get(STREAM)
    if most is not None and not (type(most) is int and 0 < most <= (context or most)):
        return False
    options = body.get(STREAM_OPTIONS)
    if options is None:
        return stream is None or type(stream) is bool
    return stream is True and options == USAGE


def _stream_mode(request: Request, body: Body, default: str) -> str:
    mode = body.get(STREAM_FIELD)
    if mode is None:
        mode, headers = default, request.exchange.headers
        if CONVERSATION_STREAM in map(NAME, headers):
            value = next(value for name, value in headers if name == CONVERSATION_STREAM)
            mode = value.decode("latin-1").lower() or default
    if mode not in STREAM_MODES:
        raise BadRequestError(f"{STREAM_FIELD} must be one of {', '.join(STREAM_MODES)}")
    return str(mode)


_read_body = msgspec.json.Decoder(Body, float_hook=read_number).decode


def parse_body(raw: bytes) -> Body:
    """Return the JSON object in a request body. Raises BadRequestError."""
    if len(raw) <= SLOW_LIMIT and (raw.find(b"-") < 0 or raw.find(b"-0") < 0):  # as in `loads`
        try:
            return _read_body(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # `loads` knows what is wrong
    try:
        body = loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def threshold_of(body: Body, default: float) -> float:
    """Return the cache threshold of the body, else the default. Raises BadRequestError."""
    value = body.get(THRESHOLD)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadRequestError(f"{THRESHOLD} must be a number from 0 to 1")
    return float(value)


def without_nested(body: Body, name: str) -> Body:
    """Return the body without that field of `vllm_xargs`, where vLLM reads it as well."""
    extra = body.get(EXTRA_ARGS)
    if not isinstance(extra, dict) or name not in extra:
        return body
    return {**body, EXTRA_ARGS: {key: extra[key] for key in extra if key != name}}


def find_decode_only_reason(body: Body) -> str:
    """Return why one engine must do all the work for this body, or "" if two can share it.

    A prefill engine frees its blocks when the first reader is done. So two engines share a request
    only if it becomes exactly one sequence, or if decode engines load once for several. And only
    the engine that computes the prompt knows the log-probabilities of the prompt's tokens. A
    completion of no tokens that echoes the prompt decodes nothing.
    """
    if body.get("best_of") not in (None, 1):
        return "best_of"
    if body.get("use_beam_search"):
        return "beam_search"
    if _count(body.get("prompt")) + _count(body.get("prompt_embeds")) > 1:
        return PROMPT_LIST
    # 0 counts, too: it asks for the logprob of each prompt token itself.
    if wants_logprobs(body.get("prompt_logprobs")):
        return "prompt_logprobs"
    if body.get("echo") and (wants_logprobs(body.get("logprobs")) or body.get(MAX_TOKENS) == 0):
        return "echo"
    return "" if body.get("n") in (None, 1) else SEVERAL


def _count(prompt: object) -> int:
    """Return how many sequences a prompt field asks for; a list of token ids is one."""
    if prompt is None:
        return 0
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return len(prompt)
    return 1


def check_json(headers: Sequence[Header]) -> None:
    """Raises UnsupportedTypeError."""
    if USUAL in headers:
        return
    given = dict(headers)
    kind = given.get(b"content-type")
    if kind != JSON and not (_is_json(kind) if kind else b"origin" not in given):
        found = "names no Content-Type" if not kind else f"is {_shown(kind)}"
        raise UnsupportedTypeError(f"the body {found}: this endpoint accepts only application/json")


def check_form(headers: Sequence[Header]) -> None:
    """A form with files, of a client that is no foreign page. Raises UnsupportedTypeError."""
    given = dict(headers)
    kind = given.get(b"content-type", b"")
    if kind.partition(b";")[0].strip().lower() != MULTIPART:
        text = f"the body is {_shown(kind)}: this endpoint accepts only multipart/form-data"
        raise UnsupportedTypeError(text)


def _is_json(kind: bytes) -> bool:
    kind = kind.partition(b";")[0].strip().lower()
    return kind == JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _shown(value: bytes) -> str:
    return value[:100].decode("ascii", "replace") or "of no type"
