"""What a client is told when something fails: one table, OpenAI's error object.

RequestError
├── BadRequestError          the body is not a JSON object
│   └── MalformedRequestError    not even HTTP
├── HeadTooLargeError
├── BodyTooLargeError
├── RequestTimeoutError      the client did not send its request in time
├── NoEngineError            no engine of a role may be asked
├── EngineError        an engine answered 5xx
│   └── EngineOverloadedError    an engine answered 503
├── ShuttingDownError
└── RejectedError            an engine answered 4xx: no failure of ours, passed on as it is

Together with router.upstream.errors these are all failures that a flow can meet.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson

from router.upstream import errors as upstream
from router.upstream.answer import Headers


class RequestError(Exception):
    pass


class BadRequestError(RequestError):
    pass


class MalformedRequestError(BadRequestError):
    pass


class HeadTooLargeError(RequestError):
    pass


class BodyTooLargeError(RequestError):
    pass


class RequestTimeoutError(RequestError):
    pass


class NoEngineError(RequestError):
    pass


class EngineError(RequestError):
    kind = "status_5xx"
    phrase = "answered with an error"
    role = ""


class EngineOverloadedError(EngineError):
    pass


class ShuttingDownError(RequestError):
    pass


class RejectedError(RequestError):
    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"an engine answered {status}")
        self.status, self.headers, self.body = status, headers, body


class Shape(NamedTuple):
    status: int
    type: str


# The first class of an exception's ancestry that is listed decides.
SHAPES: dict[type[BaseException], Shape] = {
    BadRequestError: Shape(400, "BadRequestError"),
    HeadTooLargeError: Shape(431, "RequestHeaderFieldsTooLargeError"),
    BodyTooLargeError: Shape(413, "RequestEntityTooLargeError"),
    RequestTimeoutError: Shape(408, "RequestTimeoutError"),
    NoEngineError: Shape(503, "ServiceUnavailableError"),
    EngineOverloadedError: Shape(503, "ServiceUnavailableError"),
    EngineError: Shape(502, "BadGatewayError"),
    ShuttingDownError: Shape(503, "ServiceUnavailableError"),
    upstream.ConnectTimeoutError: Shape(504, "GatewayTimeoutError"),
    upstream.ConnectError: Shape(503, "ServiceUnavailableError"),
    upstream.LocalError: Shape(503, "ServiceUnavailableError"),
    upstream.EngineLostError: Shape(503, "ServiceUnavailableError"),
    upstream.DisconnectedError: Shape(503, "ServiceUnavailableError"),
    upstream.AnswerTimeoutError: Shape(504, "GatewayTimeoutError"),
    upstream.BrokenAnswerError: Shape(502, "BadGatewayError"),
    upstream.UpstreamError: Shape(502, "BadGatewayError"),
    Exception: Shape(500, "InternalServerError"),
}
JSON: Headers = [(b"content-type", b"application/json")]
TYPES = {
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    422: "UnprocessableEntityError",
    503: "ServiceUnavailableError",
}


def shape_of(error: Exception) -> Shape:
    return next(SHAPES[kind] for kind in type(error).__mro__ if kind in SHAPES)


def message_of(error: Exception) -> str:
    """What the client may read: never the inside of an unexpected exception."""
    if isinstance(error, RequestError):
        return str(error)
    if isinstance(error, upstream.UpstreamError):
        return f"the {error.role or 'upstream'} engine {error.phrase}"
    return "internal error"


def error_body(status: int, kind: str, message: str) -> bytes:
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}
    )


def body_of(error: Exception) -> bytes:
    shape = shape_of(error)
    return error_body(shape.status, shape.type, message_of(error))


def event_of(error: Exception) -> bytes:
    """The last event of a stream that failed after its first byte."""
    return b"data: " + body_of(error) + b"\n\n"


def type_of_status(status: int) -> str:
    return TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
