"""The HTTP face of one engine: OpenAI's endpoints, and vLLM's beside them."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response

from engine_ext.http import identity, leases, release
from engine_ext.reference.server.connection import (
    ClientGoneError,
    EventStream,
    json_object,
    read_body,
    until_disconnect,
)
from engine_ext.reference.server.dialect import AnswerFormat, ChatDialect, CompletionDialect
from engine_ext.reference.server.errors import (
    ApiError,
    EngineBadRequestError,
    EngineNotFoundError,
    UnavailableError,
    error_body,
)
from engine_ext.reference.server.generation import (
    EngineLike,
    run,
    streamed_answer,
    whole_answer,
)
from engine_ext.reference.server.job import Job, prepare_chat, prepare_completion, remote_params
from engine_ext.reference.server.metrics import exposition, registry_of
from engine_ext.reference.server.prompts import detokenize, tokenize
from engine_ext.reference.server.served_model import ServedModel

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has left; it is only logged."""
NAMELESS = identity.EngineDescription(name="disagg-engine", versions={})

Prepare = Callable[[ServedModel, bytes, str | None], Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    body_bytes: int = 32 * 2**20
    body_seconds: float = 60.0


def build_app(
    model: ServedModel,
    engine: EngineLike,
    limits: BodyLimits | None = None,
    itself: identity.EngineDescription = NAMELESS,
) -> FastAPI:
    """`itself`: the engine's description at `/disagg/identity`."""
    limits = limits or BodyLimits()
    app = FastAPI(
        title="disagg-engine",
        version=package_version(),
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
    registry, key = registry_of(engine, model.name), leases.new_key()

    async def body_of(request: Request) -> bytes:
        return await read_body(request, limit=limits.body_bytes, timeout=limits.body_seconds)

    def check_health() -> None:
        if not engine.is_healthy:
            raise UnavailableError("the engine is dead; see its log")

    async def generate(
        request: Request, prepare: Prepare, dialect_of: type[AnswerFormat]
    ) -> Response:
        content = await body_of(request)
        check_health()
        try:
            id_header = request.headers.get("x-request-id")
            job = await asyncio.to_thread(prepare, model, content, id_header)
        except ApiError:
            # A remote engine may keep KV for the refused request.
            params = await asyncio.to_thread(remote_params, content)
            if params is not None:
                engine.decline(params)
            raise
        dialect = dialect_of(job, model.tokenizer)
        outputs = run(engine, job)
        try:
            if not job.request.stream:
                body = await until_disconnect(request.receive, whole_answer(dialect, outputs))
                if await request.is_disconnected():
                    raise ClientGoneError
                return _json(body)
            events = streamed_answer(dialect, outputs)
            # Until the first token an error can still have its own status.
            first = await until_disconnect(request.receive, anext(events))
            return EventStream(first, events)
        except ClientGoneError:
            logger.info("%s: the client left", job.id)
            for each in job.engine_requests():
                engine.abort(each.request_id)
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, prepare_completion, CompletionDialect)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, prepare_chat, ChatDialect)

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "disagg-engine",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
            "permission": [],
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in model.names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> Response:
        if not name:
            return RedirectResponse(request.url.replace(path="/v1/models"))
        if name not in model.names:
            raise EngineNotFoundError(f"The model `{name}` does not exist.", "model")
        return _json(card(name))

    @app.post("/tokenize")
    async def tokenize_text(request: Request) -> Response:
        return _json(await asyncio.to_thread(tokenize, model, await body_of(request)))

    @app.post("/detokenize")
    async def detokenize_ids(request: Request) -> Response:
        return _json(await asyncio.to_thread(detokenize, model, await body_of(request)))

    @app.get("/health")
    async def health() -> Response:
        check_health()
        return Response()

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": package_version()})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get(identity.PATH)
    async def identity_page() -> Response:
        try:
            return _json(await asyncio.to_thread(identity.identity, itself))
        except identity.IdentityError as error:
            raise UnavailableError(str(error)) from None

    @app.post(release.PATH)
    async def release_kv(request: Request) -> Response:
        try:
            names = release.parse(json_object(await body_of(request)))
        except ValueError as error:
            raise EngineBadRequestError(str(error)) from None
        return _json({"released": await engine.release(*names)})

    @app.get(leases.PATH)
    async def leases_page(request: Request) -> Response:
        asked = request.query_params.get(leases.ASKED)
        try:
            seen = await asyncio.to_thread(engine.inspect, asked)
        except TimeoutError:
            raise UnavailableError("the connector's thread does not answer") from None
        return _json(leases.page([leases.rank(seen, key)] if seen else []))

    return app


def package_version() -> str:
    return identity.installed_version("disagg-router")


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body(), error.status)


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
