"""LoRA adapters, loaded and unloaded at every engine at once: prefillers and decoders must agree.

Off unless the setting says so: an engine loads what it is told from wherever it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from router.auth.api_keys import ApiKey
from router.auth.credentials import without_credentials
from router.fleet.engine import Engine
from router.http_client.deadlines import now
from router.http_client.errors import UpstreamError
from router.http_client.pool import CompleteAnswer
from router.openai.errors import (
    BadRequestError,
    BodyTooLargeError,
    EngineCredentialError,
    EngineError,
    ForbiddenError,
    ForbiddenModelError,
    NoEngineError,
    shape_of,
)
from router.proxy import headers
from router.proxy.content_type import check_json
from router.proxy.dispatch import CLIENT_CLOSED_REQUEST
from router.proxy.gateway import Gateway
from router.proxy.key_limits import entered
from router.proxy.request import parse_body
from router.server.middleware import CALLER
from router.server.router_state import state_of
from router.telemetry.record import Record

router = APIRouter(tags=["Passed to an engine"])
logger = logging.getLogger("disagg_router.api")
FLOW = "adapters"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# Seconds: an adapter may have to be fetched.
PATIENCE = 300.0
LARGEST = 64 * 1024
ANSWER_LIMIT = 1024 * 1024
CONTENT_TYPE = b"content-type"
OFF = "adapters are not loaded through this router: it was started without --lora-updates"


class Told(NamedTuple):
    """`answer` is None where there was none."""

    engine: Engine
    answer: CompleteAnswer | None

    @property
    def is_done(self) -> bool:
        return self.answer is not None and 200 <= self.answer.status < 300


@router.post(LOAD, summary="Load a LoRA adapter at every engine", response_class=Response)
async def load(request: Request) -> Response:
    return await _everywhere(request, LOAD)


@router.post(UNLOAD, summary="Unload a LoRA adapter everywhere", response_class=Response)
async def unload(request: Request) -> Response:
    return await _everywhere(request, UNLOAD)


async def _everywhere(request: Request, path: str) -> Response:
    """In the books like any other request."""
    gateway: Gateway = state_of(request.app).gateway
    given = headers.sound(request.scope["headers"])
    if gateway.hides_credentials:
        given = without_credentials(given)
    request_id, shared = headers.read(given)
    record = Record(path, now(), request_id, flow=FLOW)
    key: ApiKey | None = request.scope.get(CALLER)
    record.key = "" if key is None else key.name
    try:
        check_json(given)
        answer = await _answer(request, key, record, shared + gateway.engine_line)
        record.status, record.stage = answer.status_code, "done"
        record.outcome = _outcome(answer.status_code)
    except ClientDisconnect:  # before the end of its body; only other servers pass such a request
        record.status, record.outcome = CLIENT_CLOSED_REQUEST, "disconnected"
        answer = Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:
        record.status, record.error = shape_of(error).status, f"{type(error).__name__}: {error}"
        record.outcome = "refused" if record.status < 500 else "failed"
        raise
    finally:
        record.ended = now()
        gateway.metrics.finish(record)
        gateway.records.add(record)
    answer.headers["x-request-id"] = request_id
    return answer


async def _answer(request: Request, key: ApiKey | None, record: Record, shared: bytes) -> Response:
    gateway: Gateway = state_of(request.app).gateway
    if not gateway.settings.lora_updates:
        raise ForbiddenError(OFF)
    raw = await _body(request)
    body = parse_body(raw)
    name, model = body.get("lora_name"), body.get("model")
    if not isinstance(name, str):
        raise BadRequestError("lora_name must be a string", "lora_name")
    if key is not None and not key.allows_model(name):
        raise ForbiddenModelError(name)
    async with _counted(key, gateway):
        return await _tell(raw, name, model, record, shared, gateway)


@contextlib.asynccontextmanager
async def _counted(key: ApiKey | None, gateway: Gateway) -> AsyncIterator[None]:
    """As one request of its key, without tokens. Raises RateLimitError."""
    authenticator = gateway.authenticator
    if authenticator is None or key is None or not key.has_limits:
        yield
        return
    stay = await entered(key, 0, authenticator, gateway.metrics)
    try:
        yield
    finally:
        authenticator.release(stay, 0)


async def _tell(
    raw: bytes, name: str, model: object, record: Record, shared: bytes, gateway: Gateway
) -> Response:
    """One answer for all: the first failure, else what the first engine said."""
    engines = gateway.fleet.engines
    chosen = [e for e in engines if e.is_usable and _has(e, model)]
    if not chosen:
        raise NoEngineError("no engine is healthy")
    path, request_id = record.endpoint, record.request_id
    told = await asyncio.gather(*(_ask(e, path, request_id, shared, raw) for e in chosen))
    done = [one for one in told if one.is_done]
    _note(gateway, done, name, path)
    logger.info("%s %.128r: done at %d of %d engines", path, name, len(done), len(told))
    worst = next((one for one in told if not one.is_done), told[0])
    if worst.answer is None:
        raise EngineError(f"{worst.engine.role} engine {worst.engine.name} did not answer")
    if worst.answer.status == 401 and gateway.hides_credentials:
        raise EngineCredentialError("an engine refused the router")
    passed = {n.decode(): v.decode("latin-1") for n, v in worst.answer.headers if n == CONTENT_TYPE}
    return Response(worst.answer.body, worst.answer.status, passed)


def _outcome(status: int) -> str:
    if status < 400:
        return "ok"
    return "refused" if status < 500 else "engine_error"


async def _body(request: Request) -> bytes:
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > LARGEST:
            raise BodyTooLargeError(f"the body is larger than {LARGEST} bytes")
    return bytes(raw)


def _has(engine: Engine, model: object) -> bool:
    return not isinstance(model, str) or engine.models is None or model in engine.models


async def _ask(engine: Engine, path: str, request_id: str, shared: bytes, raw: bytes) -> Told:
    message = headers.message(path, engine.name, request_id, shared, (raw, b""))
    try:
        return Told(engine, await engine.pool.fetch(message, now() + PATIENCE, ANSWER_LIMIT))
    except UpstreamError as error:
        logger.warning("%s at %s: %s", path, engine.name, error)
        return Told(engine, None)


def _note(gateway: Gateway, done: list[Told], name: str, path: str) -> None:
    """So that the adapter is known at once, and not when engines are asked the next time."""
    for one in done:
        engine = one.engine
        if engine.models is not None:
            models = engine.models | {name} if path == LOAD else engine.models - {name}
            gateway.fleet.note_models(engine, models, engine.context_lengths)
