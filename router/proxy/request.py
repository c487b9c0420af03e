"""One request, read once: what it asks of engines, and what of the router itself."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from random import getrandbits
from typing import Any

import orjson

from router.common.exact_json import loads
from router.common.structs import IdentityStruct
from router.conversations.conversations import Conversations, Turn
from router.openai.errors import BadRequestError
from router.openai.request_fields import find_invalid_field
from router.proxy.content_type import check_json
from router.proxy.exchange import Exchange
from router.proxy.first_token import is_number
from router.proxy.headers import CONVERSATION_STREAM
from router.proxy.request_limits import Limits
from router.routing.prompt_chunks import BYTES_PER_TOKEN
from router.telemetry.record import Record

Body = dict[str, Any]
COMPLETIONS = "/v1/completions"
KV_PARAMS = "kv_transfer_params"
EXTRA_ARGS = "vllm_xargs"
THRESHOLD = "cache_hit_threshold"
STREAM_FIELD = "conversation_stream"
CONSUMED = frozenset(("conversation_id", STREAM_FIELD))
LOOKED_AT = CONSUMED | {
    KV_PARAMS,
    EXTRA_ARGS,
    THRESHOLD,
    "n",
    "best_of",
    "use_beam_search",
    "prompt_embeds",
    "prompt_logprobs",
    "echo",
}
LONGEST_NAME = 256
MODES = ("auto", "exact")
CLIENT_PARAMS = "client_params"
# Why one engine must do it all, unless decoders read once for several answers: there is no other.
SEVERAL = "n"
MOST_SEVERAL = 128
# An endpoint that one engine answers: see router.proxy.passthrough.
PASSED = "passed"
# Requests whose params are the client's, or which have none.
AS_SENT = frozenset((PASSED, CLIENT_PARAMS))
# Ids of legs are this process's own: two clients may send the same X-Request-Id, and in push mode
# legs of the same id are one request.
_process, _legs = f"{getrandbits(40):010x}", count()
next_number = count().__next__


class Request(IdentityStruct):
    """`latest` is the loop time when everything must be over; `shared_headers` go to both legs.

    `body` is what engines may see of the client's, never changed. `alone` says why two engines
    cannot share the work; empty where they can. `threshold` above 0: a decoder is asked first.
    `exact`: see the setting conversation_stream.
    """

    exchange: Exchange
    record: Record
    shared_headers: bytes
    latest: float
    number: int
    """Of those that this process has had: what spreads requests goes by it."""
    body: Body = {}  # noqa: RUF012 - each Struct has its own
    alone: str = ""
    turn: Turn | None = None
    threshold: float = 0.0
    exact: bool = False
    event_stream: bool = False
    path: str = ""
    """What engines are asked, if it is not the client's own endpoint."""
    form: bytes = b""
    """Content-Type of a body that is no JSON, and goes to an engine as it is."""
    tokens: int = 0
    """Of the prompt, as roughly as its bytes tell: a measure of load."""
    is_several: bool = False
    """Answers: only decoders that read once for all of them may have it."""

    def read(self, limits: Limits, conversations: Conversations | None) -> None:
        """Raises BadRequestError, UnsupportedTypeError."""
        check_json(self.exchange.headers)
        self.take(parse_body(self.exchange.body), limits, conversations)

    def take(self, body: Body, limits: Limits, conversations: Conversations | None) -> None:
        """What was read, or what came of that. Raises BadRequestError."""
        self.tokens = len(self.exchange.body) // BYTES_PER_TOKEN
        model = body.get("model")
        if type(model) is str and len(model) <= LONGEST_NAME:  # records may be held for a while
            self.record.model = model
        if conversations is not None:
            self.turn = conversations.turn_of(self.exchange.headers, body)
        if self.turn is not None:
            self.exact = self._mode(body, limits.conversation_stream) == "exact"
        if LOOKED_AT.isdisjoint(body) and type(body.get("prompt")) is not list:
            self.body, self.threshold = body, limits.decode_first_threshold
        else:
            self._look(body, limits)

    def _look(self, body: Body, limits: Limits) -> None:
        """At what is not for engines, or says that one must do it all. Raises BadRequestError."""
        self.threshold = threshold_of(body, limits.decode_first_threshold)
        if STREAM_FIELD in body:
            self.exact = self._mode(body, limits.conversation_stream) == "exact"
        if not CONSUMED.isdisjoint(body):
            body = {name: body[name] for name in body if name not in CONSUMED}
        body = without_nested(body, THRESHOLD)
        if not has_params(body):
            self.alone = why_alone(body)
        elif limits.trust_client_kv_params:
            self.alone = CLIENT_PARAMS
        else:
            body = without_params(body)
            self.alone = why_alone(body)
        self.body = body

    @property
    def model(self) -> object:
        return self.body.get("model")

    def share(self) -> None:
        """Several answers are asked for, of decoders that read once for all of them."""
        number = self.body.get("n")
        if self.alone == SEVERAL and type(number) is int and 1 < number <= MOST_SEVERAL:
            self.alone, self.is_several = "", True
            # Each of them would be kept for the next turn, and each be judged by a threshold.
            self.turn, self.threshold = None, 0.0

    def check(self, contexts: Mapping[str, int]) -> None:
        """What a prefiller would not see, and a decoder refuse. Raises BadRequestError."""
        body = self.body
        if self.alone:
            return  # one engine sees it all
        model = body.get("model")
        context = contexts.get(model) if type(model) is str else None
        wrong = find_invalid_field(body, self.exchange.endpoint != COMPLETIONS, context)
        if wrong is not None:
            raise BadRequestError(wrong.message, wrong.field)

    def leg_id(self) -> str:
        """A new one for each attempt, with the client's own in front for engines' logs."""
        return f"{self.record.request_id}.{_process}{next(_legs)}"

    def _mode(self, body: Body, default: str) -> str:
        mode = body.get(STREAM_FIELD)
        if mode is None:
            mode = default
            for name, value in self.exchange.headers:
                if name == CONVERSATION_STREAM:
                    mode = value.decode("latin-1").lower() or default
                    break
        if mode not in MODES:
            raise BadRequestError(f"{STREAM_FIELD} must be one of {', '.join(MODES)}")
        return str(mode)


def parse_body(raw: bytes) -> Body:
    """The request's JSON object. Raises BadRequestError."""
    try:
        body = loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def threshold_of(body: Body, default: float) -> float:
    """The request's own threshold, else the default; 0 asks for nothing. Raises BadRequestError."""
    value = body.get(THRESHOLD)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadRequestError(f"{THRESHOLD} must be a number from 0 to 1")
    return float(value)


def has_params(body: Body) -> bool:
    return KV_PARAMS in body or _has_nested_params(body)


def without_params(body: Body) -> Body:
    """The body without kv_transfer_params, wherever an engine would read them."""
    rest = {name: value for name, value in body.items() if name != KV_PARAMS}
    return without_nested(rest, KV_PARAMS)


def without_nested(body: Body, name: str) -> Body:
    """Return the body without that field of `vllm_xargs`, where vLLM reads it as well."""
    extra = body.get(EXTRA_ARGS)
    if not isinstance(extra, dict) or name not in extra:
        return body
    return {**body, EXTRA_ARGS: {key: extra[key] for key in extra if key != name}}


def _has_nested_params(body: Body) -> bool:
    extra = body.get(EXTRA_ARGS)
    return isinstance(extra, dict) and KV_PARAMS in extra


def why_alone(body: Body) -> str:
    """Why one engine must do it all, or nothing.

    A prefiller frees its blocks when the first reader is done, so only a request that becomes
    exactly one sequence is shared, unless a decoder reads once for several; and what is said of a
    prompt's own tokens is known only where the prompt was computed.
    """
    if body.get("best_of") not in (None, 1):
        return "best_of"
    if body.get("use_beam_search"):
        return "beam_search"
    if _count(body.get("prompt")) + _count(body.get("prompt_embeds")) > 1:
        return "prompt_list"
    # Of 0, too: then the logprob of each prompt token itself is answered.
    if is_number(body.get("prompt_logprobs")):
        return "prompt_logprobs"
    if body.get("echo") and is_number(body.get("logprobs")):
        return "echo"
    return "" if body.get("n") in (None, 1) else SEVERAL


def _count(prompt: object) -> int:
    """How many sequences a prompt field asks for; a list of token ids is one."""
    if prompt is None:
        return 0
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        return len(prompt)
    return 1
