"""The endpoints whose requests are sent to engines.

The server answers them itself, before they reach the FastAPI application (see client_connection).
FastAPI has routes for them only for the sake of the API documentation (proxied_endpoints.yaml).
"""

from __future__ import annotations

from collections.abc import Coroutine
from importlib.resources import files
from typing import Any

import yaml
from fastapi import APIRouter
from fastapi.responses import Response

from router.conversations.stored_responses import ResponseStore
from router.openai.errors import NotFoundError, RequestError
from router.proxy.dispatch import refuse, serve
from router.proxy.exchange import Exchange
from router.proxy.gateway import Gateway
from router.proxy.passthrough import FORM_PATHS, JSON_PATHS, read_form, read_json
from router.proxy.token_requests import GENERATE, read_tokens
from router.server.dialect_exchange import CHAT_PATH, DIALECTS, DialectExchange

router = APIRouter()
COMPLETIONS_PATH = "/v1/completions"
GENERATION_PATHS = frozenset((CHAT_PATH, COMPLETIONS_PATH))
PASSTHROUGH_READERS = {
    **dict.fromkeys(JSON_PATHS, read_json),
    **dict.fromkeys(FORM_PATHS, read_form),
    GENERATE: read_tokens,
}
# By the path of a request's target; some clients end the paths of completions with a slash.
PROXIED_PATHS = {
    **{path.encode(): path for path in GENERATION_PATHS | DIALECTS.keys() | {*PASSTHROUGH_READERS}},
    **{path.encode() + b"/": path for path in GENERATION_PATHS},
}


def serve_proxied(
    exchange: Exchange, gateway: Gateway, stored: ResponseStore
) -> Coroutine[Any, Any, None]:
    """Answer a request to any proxied endpoint."""
    if exchange.endpoint in DIALECTS:
        return _serve_dialect(exchange, gateway, stored, None)
    return serve(exchange, gateway, PASSTHROUGH_READERS.get(exchange.endpoint))


def refuse_proxied(
    exchange: Exchange, gateway: Gateway, stored: ResponseStore, error: RequestError
) -> Coroutine[Any, Any, None]:
    """Answer a request that was refused before it was complete, with an error of the endpoint's
    dialect."""
    if exchange.endpoint in DIALECTS:
        return _serve_dialect(exchange, gateway, stored, error)
    return refuse(exchange, gateway, error)


async def _serve_dialect(
    exchange: Exchange, gateway: Gateway, stored: ResponseStore, error: RequestError | None
) -> None:
    translated = DialectExchange(exchange, DIALECTS[exchange.endpoint](stored), gateway)
    try:
        if error is None:
            await serve(translated, gateway, translated.read)
        else:
            await refuse(translated, gateway, error)
    finally:
        translated.release()


async def _never_called() -> Response:
    raise NotFoundError("Not Found")  # the server answers these paths before the application can


def _add_routes() -> None:
    """Add a route for each path, so that FastAPI documents it and knows its method."""
    text = (files("router.server") / "proxied_endpoints.yaml").read_text(encoding="utf-8")
    documented = yaml.safe_load(text)["endpoints"]
    others = {path.decode() for path in PROXIED_PATHS} - documented.keys()
    for path in [*documented, *sorted(others)]:
        described = documented.get(path, {"include_in_schema": False})
        router.add_api_route(
            path, _never_called, methods=["POST"], response_class=Response, **described
        )


_add_routes()
