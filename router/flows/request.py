"""One request on its way through a flow."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from router.flows.errors import BadRequestError
from router.flows.exchange import Exchange
from router.flows.legs import KV_PARAMS, Body, decode_body
from router.flows.prefilled import Params
from router.telemetry.record import Record

OPEN_PARAMS = f',"{KV_PARAMS}":'.encode("ascii")


@dataclass(slots=True)
class Request:
    """`latest` is the loop time when everything must be over; `shared_headers` go to both legs.

    `body` is the client's until a plan puts another in its place; it is never changed itself.
    """

    exchange: Exchange
    record: Record
    body: Body
    shared_headers: bytes
    latest: float
    event_stream: bool = False
    attempt: int = 0
    given: Body | None = None

    def parse(self) -> None:
        """Raises BadRequestError."""
        self.body = self.given = parse_body(self.exchange.body)

    def content_with(self, params: Params | None) -> bytes:
        """The body for a decoder, with these kv_transfer_params; raises BadRequestError.

        The client's own bytes where nothing else was changed: they need not be written again.
        """
        if self.body is not self.given or not self.body:
            return write_body(decode_body(self.body, params))
        raw = self.exchange.body
        if params is None:
            return raw
        return b"".join((raw[: raw.rindex(b"}")], OPEN_PARAMS, params.raw, b"}"))

    @property
    def leg_id(self) -> str:
        """The X-Request-Id of this attempt's legs: push mode matches on it, so never twice."""
        request_id = self.record.request_id
        return request_id if self.attempt == 0 else f"{request_id}-{self.attempt}"


def parse_body(raw: bytes) -> Body:
    """The request's JSON object. Raises BadRequestError."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def write_body(body: Body) -> bytes:
    """Raises BadRequestError for what can be read but not written: nesting beyond 250 levels."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise BadRequestError(f"the body cannot be forwarded: {error}") from error
