"""Exception handlers for a FastAPI application that answer with OpenAI's error objects, or with
Anthropic's below /v1/messages."""

from __future__ import annotations

import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from router.openai.anthropic_messages import error_body_for
from router.openai.errors import (
    RequestError,
    body_of,
    error_body,
    headers_of,
    shape_of,
    type_of_status,
)

API_PREFIX = "/v1"
SLASHES = re.compile("/{2,}")


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path}: {error.detail}"
    if status == 404:
        message += _base_url_advice(request)
    body = error_body(status, type_of_status(status), message)
    body = error_body_for(request.url.path, status, body)
    return Response(body, status, error.headers, "application/json")


def _base_url_advice(request: Request) -> str:
    """Return what is wrong with the base URL of the client, if that explains the path."""
    given = request.url.path
    path = SLASHES.sub("/", given)
    guesses = {API_PREFIX + path: f"that ends in {API_PREFIX}"}
    if path != given:
        guesses[path] = "without a slash at its end"
    if path.startswith(f"{API_PREFIX}{API_PREFIX}/"):
        guesses[path.removeprefix(API_PREFIX)] = f"that does not end in {API_PREFIX}"
    routes = request.app.router.routes
    for path, advice in guesses.items():
        if any(r.matches({**request.scope, "path": path})[0] is Match.FULL for r in routes):
            return f". The endpoint is {path}: give the client a base URL {advice}."
    return ""


async def validation_error(_: Request, error: Exception) -> Response:
    return Response(error_body(422, type_of_status(422), str(error)), 422, None, "application/json")


async def failure(request: Request, error: Exception) -> Response:
    given = {name.decode(): value.decode("latin-1") for name, value in headers_of(error)}
    status = shape_of(error).status
    return Response(error_body_for(request.url.path, status, body_of(error)), status, given)


def install(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(RequestError, failure)
    app.add_exception_handler(Exception, failure)
