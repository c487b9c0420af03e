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
from engine_ext.reference.server import answer, generation
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
from engine_ext.reference.server.generation import EngineLike
from engine_ext.reference.server.job import Job, prepare_chat, prepare_completion, remote_params
from engine_ext.reference.server.metrics import exposition, registry_of
from engine_ext.reference.server.prompts import detokenize, tokenize
from engine_ext.reference.server.served_model import ServedModel

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left. Nobody reads it."""

NAMELESS = identity.EngineDescription(name="disagg-engine", versions={})

Prepare = Callable[[ServedModel, bytes, str | None], Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    body_bytes: int = 32 * 2**20
    body_seconds: float = 60.0


class Endpoints:
    """The handlers. They own nothing but the way from a request to the engine and back."""

    def __init__(
        self,
        model: ServedModel,
        engine: EngineLike,
        limits: BodyLimits,
        itself: identity.EngineDescription,
    ) -> None:
        self._model = model
        self._engine = engine
        self._limits = limits
        self._itself = itself
        self._registry = registry_of(engine, model.name)
        self._key = leases.new_key()

    def routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        return [
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.one_model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.metrics),
            ("GET", identity.PATH, self.identity),
            ("POST", release.PATH, self.release),
            ("GET", leases.PATH, self.leases),
        ]

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, prepare_completion, CompletionDialect)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, prepare_chat, ChatDialect)

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._card(name) for name in self._model.names]})

    async def one_model(self, name: str, request: Request) -> Response:
        if not name:
            return RedirectResponse(request.url.replace(path="/v1/models"))
        if name not in self._model.names:
            raise EngineNotFoundError(f"The model `{name}` does not exist.", "model")
        return _json(self._card(name))

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        return _json(await asyncio.to_thread(tokenize, self._model, body))

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        return _json(await asyncio.to_thread(detokenize, self._model, body))

    async def health(self) -> Response:
        self._check_health()
        return Response()

    async def version(self) -> Response:
        return _json({"version": package_version()})

    async def metrics(self) -> Response:
        return Response(exposition(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def identity(self) -> Response:
        try:
            return _json(await asyncio.to_thread(identity.identity, self._itself))
        except identity.IdentityError as error:
            raise UnavailableError(str(error)) from None

    async def release(self, request: Request) -> Response:
        try:
            names = release.parse(json_object(await self._body(request)))
        except ValueError as error:
            raise EngineBadRequestError(str(error)) from None
        return _json({"released": await self._engine.release(*names)})

    async def leases(self, request: Request) -> Response:
        asked = request.query_params.get(leases.ASKED)
        try:
            seen = await asyncio.to_thread(self._engine.inspect, asked)
        except TimeoutError:
            raise UnavailableError("the connector's thread does not answer") from None
        return _json(leases.page([leases.rank(seen, self._key)] if seen else []))

    async def _generate(
        self, request: Request, prepare: Prepare, dialect_of: type[AnswerFormat]
    ) -> Response:
        content = await self._body(request)
        self._check_health()
        id_header = request.headers.get("x-request-id")
        try:
            job = await asyncio.to_thread(prepare, self._model, content, id_header)
        except ApiError:
            await self._decline(content)
            raise
        dialect = dialect_of(job, self._model.tokenizer)
        outputs = generation.run(self._engine, job)
        try:
            if not job.stream:
                body = await until_disconnect(request.receive, answer.whole(dialect, outputs))
                if await request.is_disconnected():
                    raise ClientGoneError
                return _json(body)
            events = answer.streamed(dialect, outputs)
            # Until the first token an error can still have its own status.
            first = await until_disconnect(request.receive, anext(events))
            return EventStream(first, events)
        except ClientGoneError:
            logger.info("%s: the client left", job.id)
            for each in job.engine_requests():
                self._engine.abort(each.request_id)
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _decline(self, content: bytes) -> None:
        """Nobody reads what a remote keeps for a request that was refused."""
        params = await asyncio.to_thread(remote_params, content)
        if params is not None:
            self._engine.decline(params)

    async def _body(self, request: Request) -> bytes:
        limits = self._limits
        return await read_body(request, limit=limits.body_bytes, timeout=limits.body_seconds)

    def _check_health(self) -> None:
        if not self._engine.is_healthy:
            raise UnavailableError("the engine is dead; see its log")

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "disagg-engine",
            "root": self._model.name,
            "parent": None,
            "max_model_len": self._model.max_model_len,
            "permission": [],
        }


def build_app(
    model: ServedModel,
    engine: EngineLike,
    limits: BodyLimits | None = None,
    itself: identity.EngineDescription | None = None,
) -> FastAPI:
    """`itself`: what the engine says of itself at `/disagg/identity`."""
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
    )
    endpoints = Endpoints(model, engine, limits or BodyLimits(), itself or NAMELESS)
    for method, path, handler in endpoints.routes():
        app.add_api_route(path, handler, methods=[method], response_class=Response)
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
