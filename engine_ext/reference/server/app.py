"""The HTTP face of one engine: OpenAI's endpoints, and vLLM's beside them."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from engine_ext.http import identity, leases, release
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.server.answers import (
    AnswerFormat,
    ChatDialect,
    CompletionDialect,
    streamed_answer,
    whole_answer,
    with_errors,
)
from engine_ext.reference.server.job import ServedModel, prepare, remote_params, tokenize
from engine_ext.reference.server.metrics import EngineCollector
from engine_ext.reference.server.requests import (
    ApiError,
    ChatBody,
    CompletionBody,
    EngineBadRequestError,
    error_body,
    json_object,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has left; it is only logged."""
NAMELESS = identity.EngineDescription(name="disagg-engine", versions={})


class ClientGoneError(Exception):
    """The client has disconnected: there is no one to answer."""


def build_app(
    model: ServedModel, engine: ReferenceEngine, itself: identity.EngineDescription = NAMELESS
) -> FastAPI:
    """`itself`: the engine's description at `/disagg/identity`."""
    app = FastAPI(
        title="disagg-engine",
        docs_url=None,
        redoc_url=None,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _internal_error,
        },
        default_response_class=Response,
    )
    registry, key = CollectorRegistry(), leases.new_key()
    registry.register(EngineCollector(engine, model.name))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(model, engine, request, CompletionBody, CompletionDialect)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(model, engine, request, ChatBody, ChatDialect)

    @app.get("/v1/models")
    async def models() -> Response:
        card = {
            "object": "model",
            "created": model.created,
            "owned_by": "disagg-engine",
            "max_model_len": model.max_model_len,
        }
        return _json({"object": "list", "data": [{"id": name, **card} for name in model.names]})

    @app.post("/tokenize")
    async def tokenize_text(request: Request) -> Response:
        return _json(await asyncio.to_thread(tokenize, model, await request.body()))

    @app.get("/health")
    async def health() -> Response:
        _check_health(engine)
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get(identity.PATH)
    async def identity_page() -> Response:
        try:
            model = engine.step_model
            known = replace(itself, step_models={0: model}) if model else itself
            return _json(await asyncio.to_thread(identity.identity, known))
        except identity.IdentityError as error:
            raise _unavailable(str(error)) from None

    @app.post(release.PATH)
    async def release_kv(request: Request) -> Response:
        try:
            names = release.parse(json_object(await request.body()))
        except ValueError as error:
            raise EngineBadRequestError(str(error)) from None
        return _json({"released": await engine.release(*names)})

    @app.get(leases.PATH)
    async def leases_page(request: Request) -> Response:
        asked = request.query_params.get(leases.ASKED)
        try:
            seen = await asyncio.to_thread(engine.inspect, asked)
        except TimeoutError:
            raise _unavailable("the connector's thread does not answer") from None
        return _json(leases.page([leases.rank(seen, key)] if seen else []))

    return app


def _check_health(engine: ReferenceEngine) -> None:
    if not engine.is_healthy:
        raise _unavailable("the engine is dead; see its log")


async def _generate(
    model: ServedModel,
    engine: ReferenceEngine,
    request: Request,
    kind: type[CompletionBody | ChatBody],
    dialect_of: type[AnswerFormat],
) -> Response:
    content = await request.body()
    _check_health(engine)
    try:
        id_header = request.headers.get("x-request-id")
        job = await asyncio.to_thread(prepare, kind, model, content, id_header)
    except ApiError:
        # A remote engine may keep KV for the refused request.
        params = await asyncio.to_thread(remote_params, content)
        if params is not None:
            engine.decline(params)
        raise
    dialect = dialect_of(job, model.tokenizer)
    outputs = engine.generate(job.request, job.resumed)
    try:
        if not job.body.stream:
            body = await _until_disconnect(request.receive, whole_answer(dialect, outputs))
            if await request.is_disconnected():
                raise ClientGoneError
            return _json(body)
        events = streamed_answer(dialect, outputs)
        # Until the first token an error can still have its own status.
        first = await _until_disconnect(request.receive, anext(events))
    except ClientGoneError:
        logger.info("%s: the client left", job.id)
        engine.abort(job.request.request_id)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return StreamingResponse(
        with_errors(first, events),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache"},
    )


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then ClientGoneError.

    The request's body must have been read to its end.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    watching = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _unavailable(message: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body, error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = _json(error_body(error.status_code, message), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    return _json(error_body(500, "internal error; see the engine's log"), 500)
