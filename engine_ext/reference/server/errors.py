"""What an endpoint can answer besides an answer.

ApiError
├── EngineBadRequestError      400  the request is wrong, and the message says how
├── EngineNotFoundError        404  unknown model
├── EngineRequestTimeoutError  408  the body did not come
├── EngineBodyTooLargeError    413  the body is over the limit
├── EngineFailureError         500  this request failed inside the engine
└── UnavailableError           503  the engine is dead, or on its way down
"""

from http import HTTPStatus
from typing import Any

from engine_ext.common.load_failure import KEY


class ApiError(Exception):
    status = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param)


class EngineBadRequestError(ApiError):
    status = HTTPStatus.BAD_REQUEST


class EngineNotFoundError(ApiError):
    status = HTTPStatus.NOT_FOUND


class EngineRequestTimeoutError(ApiError):
    status = HTTPStatus.REQUEST_TIMEOUT


class EngineBodyTooLargeError(ApiError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class EngineFailureError(ApiError):
    load_failure: dict[str, Any] | None = None
    """Of the request's KV, if that is the reason."""

    def body(self) -> dict[str, Any]:
        body = super().body()
        if self.load_failure is not None:
            body["error"][KEY] = self.load_failure
        return body


class UnavailableError(ApiError):
    status = HTTPStatus.SERVICE_UNAVAILABLE


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, with vLLM's names for `type`: the status's phrase and `Error`."""
    kind = HTTPStatus(status).phrase.replace(" ", "").removesuffix("Error") + "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}
