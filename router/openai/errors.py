"""The errors that clients receive, each with its HTTP status and OpenAI error object.

RequestError
├── BadRequestError             the body is invalid
│   └── MalformedRequestError       the request is not valid HTTP
│       └── UnknownCodingError          its transfer coding is not supported
├── HeadTooLargeError
├── BodyTooLargeError
├── ForbiddenError              a setting forbids the operation
├── NotFoundError               the object does not exist or belongs to another tenant
├── ResponseStoreError          a stored response cannot be read now
├── UnsupportedTypeError        the endpoint does not accept the body's content type
│   └── UnsupportedEncodingError    the body is compressed with something else than gzip or deflate
├── RequestTimeoutError         the client did not send its request in time
├── UpgradeRequiredError        the request wants another protocol than HTTP
├── UnauthorizedError           the request has no valid API key
├── RateLimitError              a limit of the API key is exceeded
├── NoEngineError               no engine of a role is usable
├── UnknownModelError           no engine serves the model
├── NoModelError                the request names no model, and engines serve several
├── ForbiddenModelError         the API key may not use the model
├── EngineCredentialError       an engine rejected the router's own credential
├── UnsupportedFinishError      a dialect cannot express how the answer ended
├── EngineError                 an engine answered 5xx
│   ├── EngineUnavailableError      503
│   ├── EngineOverloadedError       503 or 429, with the time to retry after
│   ├── UnservedModelError          an engine does not serve the model, by its 404
│   ├── LoadFailedError             a decode engine could not load the prompt's KV blocks
│   ├── PreemptedError              a decode engine returned an answer for lack of KV blocks
│   ├── RejectedMidStreamError      an engine reported an invalid request in mid-stream
│   └── RepeatedCrashError          several engines crashed during this request
├── ShuttingDownError
├── OverloadError               a limit of the router is reached; `reason` labels the metric
│   └── TenantOverloadError         the tenant's share of the queue is used up
├── OperatorError               the admin API or the dashboard rejects a request
└── EngineRejectedError         an engine answered 4xx: the answer is passed to the client

Together with router.http_client.errors these are all the failures of a request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import orjson

from router.http_client import errors as upstream
from router.http_client.head_cache import Headers
from router.openai.answers import GeneratedTokens

# How many models an error lists, and how much of each name.
MAX_SHOWN_MODELS, MAX_SHOWN_CHARS = 20, 256


class ErrorShape(NamedTuple):
    """The HTTP status and the `type` of the error object."""

    status: int
    type: str


class RequestError(Exception):
    shape = ErrorShape(500, "InternalServerError")
    retry_after: int | None = None
    """Seconds after which the client may retry."""
    code: str | None = None
    """OpenAI's `code` of the error; the status is used if it is None."""
    headers: Headers = []  # noqa: RUF012 # it is never changed


class BadRequestError(RequestError):
    """`param` names the invalid field, if there is one."""

    shape = ErrorShape(400, "BadRequestError")

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MalformedRequestError(BadRequestError):
    pass


class UnknownCodingError(MalformedRequestError):
    shape = ErrorShape(501, "NotImplementedError")


class HeadTooLargeError(RequestError):
    shape = ErrorShape(431, "RequestHeaderFieldsTooLargeError")


class BodyTooLargeError(RequestError):
    shape = ErrorShape(413, "RequestEntityTooLargeError")


class UnsupportedTypeError(RequestError):
    shape = ErrorShape(415, "UnsupportedMediaTypeError")


class UnsupportedEncodingError(UnsupportedTypeError):
    """`headers` names what is accepted (RFC 9110, 12.5.3)."""

    headers: Headers = [(b"accept-encoding", b"gzip, deflate")]  # noqa: RUF012 # never changed

    def __init__(self, given: str) -> None:
        super().__init__(
            f"Content-Encoding {given} is not supported: send the body with one of gzip and "
            "deflate, or uncompressed"
        )


class ForbiddenError(RequestError):
    shape = ErrorShape(403, "PermissionDeniedError")


class NotFoundError(RequestError):
    shape = ErrorShape(404, "NotFoundError")


class ResponseStoreError(RequestError):
    shape = ErrorShape(503, "ServiceUnavailableError")


class RequestTimeoutError(RequestError):
    shape = ErrorShape(408, "RequestTimeoutError")


class UpgradeRequiredError(RequestError):
    """Clients that prefer WebSocket use plain HTTP after this status (RFC 9110, 15.5.22)."""

    shape = ErrorShape(426, "UpgradeRequiredError")
    headers: Headers = [  # noqa: RUF012 # it is never changed
        (b"upgrade", b"HTTP/1.1"),
        (b"connection", b"upgrade"),
    ]

    def __init__(self) -> None:
        super().__init__("WebSocket is not supported: send the request as plain HTTP")


class NoEngineError(RequestError):
    shape = ErrorShape(503, "ServiceUnavailableError")


class UnknownModelError(RequestError):
    """The message begins like vLLM's."""

    shape = ErrorShape(404, "NotFoundError")
    param = "model"

    def __init__(self, model: object, served: Collection[str] = ()) -> None:
        text = f"The model `{str(model)[:MAX_SHOWN_CHARS]}` does not exist."
        super().__init__(text + _list_models("Models that are served", served))


class NoModelError(RequestError):
    shape = ErrorShape(400, "BadRequestError")
    param = "model"

    def __init__(self, served: Collection[str]) -> None:
        text = "The request must name a model, because several are served."
        super().__init__(text + _list_models("Models that are served", served))


class UnauthorizedError(RequestError):
    """The message is OpenAI's; it does not repeat the credential. `reason` is "missing" or
    "incorrect"."""

    shape = ErrorShape(401, "invalid_request_error")
    code = "invalid_api_key"
    headers: Headers = [(b"www-authenticate", b"Bearer")]  # noqa: RUF012 # it is never changed

    def __init__(self, reason: str) -> None:
        super().__init__(NO_KEY if reason == "missing" else WRONG_KEY)
        self.reason = reason


class RateLimitError(RequestError):
    """`kind` is the limit that is exceeded, `seconds` the time until the request would fit."""

    shape = ErrorShape(429, "rate_limit_error")
    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        kind: str = "requests",
        seconds: float = 1.0,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, math.ceil(seconds)
        self.headers = [*headers, (b"retry-after-ms", b"%d" % math.ceil(seconds * 1000))]


class ForbiddenModelError(RequestError):
    """The message begins like OpenAI's, and is the same for a model that does not exist."""

    shape = ErrorShape(404, "invalid_request_error")
    code, param = "model_not_found", "model"

    def __init__(self, model: object, allowed: Collection[str] = ()) -> None:
        shown = str(model)[:MAX_SHOWN_CHARS]
        text = f"The model `{shown}` does not exist or you do not have access to it."
        super().__init__(text + _list_models("Models that this API key may use", allowed))


def _list_models(title: str, models: Collection[str]) -> str:
    if not models:
        return ""
    names = [name[:MAX_SHOWN_CHARS] for name in sorted(models)[:MAX_SHOWN_MODELS]]
    rest = len(models) - len(names)
    return f" {title}: {', '.join(names)}" + (f", and {rest} more." if rest else ".")


class EngineCredentialError(RequestError):
    """The client cannot correct this error."""

    shape = ErrorShape(502, "BadGatewayError")


class UnsupportedFinishError(RequestError):
    """The client's API has no counterpart for the finish reason, so the answer may be cut."""

    shape = ErrorShape(502, "BadGatewayError")


class EngineError(RequestError):
    """`kind` labels the metric of engine errors, `phrase` completes a log line, and `role` is that
    of the engine."""

    shape = ErrorShape(502, "BadGatewayError")
    kind = "status_5xx"
    phrase = "answered with an error"
    role = ""


class EngineUnavailableError(EngineError):
    shape = ErrorShape(503, "ServiceUnavailableError")


class EngineOverloadedError(EngineError):
    """`rejected` is the answer for the client if no other engine can be asked."""

    shape = ErrorShape(503, "ServiceUnavailableError")
    kind = "overloaded"
    phrase = "is overloaded"

    def __init__(
        self, message: str, retry_after: int = 1, rejected: EngineRejectedError | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.rejected = rejected


class UnservedModelError(EngineError):
    """The engine does not serve the model. `rejected` is its answer, for the client if no other
    engine can be asked."""

    shape = ErrorShape(404, "NotFoundError")
    kind = "unserved_model"
    phrase = "does not serve a model"

    def __init__(self, message: str, rejected: EngineRejectedError) -> None:
        super().__init__(message)
        self.rejected = rejected


class NoKvOfferedError(EngineError):
    """A prefill engine keeps no KV of a prompt, and no decode engine may compute the prompt."""

    shape = ErrorShape(503, "ServiceUnavailableError")
    kind = "no_kv"
    phrase = "offered no KV"


class LoadFailedError(EngineError):
    """`is_of_pair` is True if this decode engine cannot load KV blocks from this prefill engine,
    whatever the prompt."""

    kind = "kv_load"
    phrase = "could not load a prompt's KV"

    def __init__(self, message: str, is_of_pair: bool = False) -> None:
        super().__init__(message)
        self.is_of_pair = is_of_pair


class KvDiffersError(LoadFailedError):
    """The decode engine has loaded KV that the prompt does not have."""

    kind = "kv_differs"
    phrase = "loaded wrong KV"


class PreemptedError(EngineError):
    """`begun` holds the tokens that the engine has generated, if the client has none of them."""

    shape = ErrorShape(503, "ServiceUnavailableError")
    kind = "preempted"
    phrase = "returned an answer for lack of KV blocks"

    def __init__(self, begun: GeneratedTokens | None = None) -> None:
        super().__init__("the decode engine ran out of KV blocks before the answer was complete")
        self.begun = begun


class RejectedMidStreamError(EngineError):
    """An engine reports in mid-stream that the request is invalid, with a 4xx `status`. It is not
    the engine's fault."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.shape = ErrorShape(status, type_of_status(status))


class RepeatedCrashError(EngineError):
    """Several engines crashed during this request. A header tells clients not to retry."""

    headers: Headers = [(b"x-should-retry", b"false")]  # noqa: RUF012 # it is never changed


class ShuttingDownError(RequestError):
    shape = ErrorShape(503, "ServiceUnavailableError")


class OverloadError(RequestError):
    shape = ErrorShape(503, "ServiceUnavailableError")

    def __init__(self, message: str, reason: str = "other", retry_after: int = 1) -> None:
        super().__init__(message)
        self.reason, self.retry_after = reason, retry_after


class TenantOverloadError(OverloadError):
    shape = ErrorShape(429, "RateLimitError")


class OperatorError(RequestError):
    """The admin API or the dashboard rejects a request with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.shape = ErrorShape(status, OPERATOR_TYPES.get(status) or type_of_status(status))
        if status == 401:
            self.headers = UnauthorizedError.headers


class EngineRejectedError(RequestError):
    """Holds the whole answer of the engine."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"an engine answered {status}")
        self.status, self.headers, self.body = status, headers, body


def too_many_held_bodies() -> OverloadError:
    return OverloadError(
        "the router holds too many request bodies in memory; retry later", "bodies"
    )


# Errors that are no RequestError; the first listed class among an error's bases decides.
SHAPES: dict[type[BaseException], ErrorShape] = {
    upstream.LocalError: ErrorShape(503, "ServiceUnavailableError"),
    upstream.ConnectTimeoutError: ErrorShape(504, "GatewayTimeoutError"),
    upstream.ConnectError: ErrorShape(503, "ServiceUnavailableError"),
    upstream.EngineLostError: ErrorShape(503, "ServiceUnavailableError"),
    upstream.DisconnectedError: ErrorShape(503, "ServiceUnavailableError"),
    upstream.AnswerTimeoutError: ErrorShape(504, "GatewayTimeoutError"),
    upstream.BrokenAnswerError: ErrorShape(502, "BadGatewayError"),
    upstream.UpstreamError: ErrorShape(502, "BadGatewayError"),
    Exception: ErrorShape(500, "InternalServerError"),
}
NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header "
    "using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
)
WRONG_KEY = "Incorrect API key provided."
JSON: Headers = [(b"content-type", b"application/json")]
OPERATOR_TYPES = {
    403: "PermissionDeniedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
}
TYPES = {
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


def shape_of(error: Exception) -> ErrorShape:
    if isinstance(error, RequestError):
        return error.shape
    return next(SHAPES[kind] for kind in type(error).__mro__ if kind in SHAPES)


def message_of(error: Exception) -> str:
    """Return the message for the client, which reveals nothing of an unexpected exception."""
    if isinstance(error, RequestError):
        return str(error)
    if isinstance(error, upstream.UpstreamError):
        return f"the {error.role or 'upstream'} engine {error.phrase}"
    return "internal error"


def error_body(
    status: int, kind: str, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
    )


def body_of(error: Exception) -> bytes:
    shape = shape_of(error)
    param = getattr(error, "param", None)
    code = error.code if isinstance(error, RequestError) else None
    kind = error.kind if isinstance(error, RateLimitError) else shape.type
    return error_body(shape.status, kind, message_of(error), param, code)


def headers_of(error: Exception) -> Headers:
    if not isinstance(error, RequestError | upstream.AnswersFullError):
        return JSON
    seconds = error.retry_after
    wait = [] if seconds is None else [(b"retry-after", b"%d" % seconds)]
    more = error.headers if isinstance(error, RequestError) else ()
    return [*JSON, *wait, *more]


def event_of(error: Exception) -> bytes:
    """Return the last event of a stream that failed after its first byte."""
    return b"data: " + body_of(error) + b"\n\n"


def type_of_status(status: int) -> str:
    return TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
