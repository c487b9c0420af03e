"""Small requests of the router's own, sent beside a client's request and with its headers.

One of them probes whether an engine supports `cache_hit_threshold`. A cache never holds the last
token of a prompt, so it holds nothing of a prompt of one token. An engine that supports the field
rejects such a prompt at threshold 1. Other engines answer it, with almost no work.
"""

from __future__ import annotations

import contextlib
from time import monotonic as now
from typing import Protocol

from msgspec import Struct

from router.fleet.engine import Engine
from router.http_client.errors import UpstreamError
from router.http_client.pool import CompleteAnswer
from router.openai.answers import is_rejection, parse_object
from router.proxy import messages
from router.proxy.kv_protocols.protocol import Abort
from router.proxy.messages import encode_body
from router.proxy.request import COMPLETIONS, THRESHOLD, Body, Request
from router.telemetry.record import Record

SIDE_REQUEST_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1024 * 1024


class Cause(Protocol):
    """The client request because of which the router sends one of its own."""

    @property
    def record(self) -> Record: ...

    @property
    def shared_headers(self) -> bytes: ...


class ControlRequest(Struct, frozen=True):
    """A client request that has no legs. See `Request` for the fields."""

    record: Record
    shared_headers: bytes


async def send_side_request(
    request: Cause,
    engine: Engine,
    path: str,
    body: Body,
    purpose: str,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> CompleteAnswer:
    """Send a JSON body to an engine and return the answer of at most `max_bytes`. Raises
    UpstreamError.

    The X-Request-Id is that of a leg of `request`, with `purpose` at its end. In a trace the
    engine's work belongs to the span of the client's request.
    """
    content = encode_body(body)
    trace = request.record.trace
    trace_line = b"" if trace is None else trace.header_lines(trace.span_id)
    leg_id = f"{messages.new_leg_id(request.record.request_id)}-{purpose}"
    message = messages.leg_message(
        path, engine.name, leg_id, trace_line + request.shared_headers, (content, b"")
    )
    return await engine.pool.fetch(message, now() + SIDE_REQUEST_TIMEOUT_S, max_bytes)


async def abort_leg(request: Request, engine: Engine, abort: Abort) -> None:
    """Tell an engine that its leg has ended. Never raises an UpstreamError: an engine that does not
    answer has no leg, or notices the closed connection."""
    with contextlib.suppress(UpstreamError):
        await send_side_request(request, engine, abort.path, abort.body, "abort")


def one_token_body(model: object) -> Body:
    """Return the body of a completion of one token for a prompt of one token."""
    body: Body = {"prompt": [1], "max_tokens": 1, "stream": False}
    return body if model is None else {"model": model, **body}


async def probe_threshold(request: Request, engine: Engine) -> None:
    """Record that the engine supports `cache_hit_threshold`, if it rejects the probe. Never raises
    an UpstreamError."""
    body = {**one_token_body(request.model), THRESHOLD: 1}
    try:
        response = await send_side_request(request, engine, COMPLETIONS, body, "trial")
    except UpstreamError:
        return
    answer = parse_object(response.body) if response.status == 200 else None
    if answer is not None and is_rejection(answer):
        engine.capabilities.note_threshold_rejected()
