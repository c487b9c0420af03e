"""Load and unload LoRA adapters at all engines: prefill and decode engines must have the same ones.

Disabled unless `--lora-updates` is set: engines load an adapter from any path that they are given.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.auth.api_keys import ApiKey, without_credentials
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
from router.proxy import messages
from router.proxy.gateway import Gateway
from router.proxy.key_limits import acquire_permit
from router.proxy.request import check_json, parse_body
from router.server.middleware import CALLER
from router.server.router_state import state_of
from router.telemetry.record import Record

router = APIRouter(tags=["Passed to an engine"])
logger = logging.getLogger("disagg_router.server")
FLOW = "adapters"
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# An engine may have to download the adapter.
LOAD_TIMEOUT_S = 300.0
MAX_BODY_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 1024 * 1024
DISABLED = "adapters are not loaded through this router: it was started without --lora-updates"


@router.post(LOAD_PATH, summary="Load a LoRA adapter at every engine", response_class=Response)
async def load(request: Request) -> Response:
    return await _update(request, LOAD_PATH)


@router.post(UNLOAD_PATH, summary="Unload a LoRA adapter everywhere", response_class=Response)
async def unload(request: Request) -> Response:
    return await _update(request, UNLOAD_PATH)


async def _update(request: Request, path: str) -> Response:
    """Send the request to all engines, and record it like any other request."""
    gateway = state_of(request.app).gateway
    given = request.scope["headers"]
    if gateway.hides_credentials:
        given = without_credentials(given)
    request_id, shared = messages.read_client_headers(given)
    record = Record(path, now(), request_id, flow=FLOW)
    key: ApiKey | None = request.scope.get(CALLER)
    record.key = "" if key is None else key.name
    try:
        check_json(given)
        raw = await _read_body(request, gateway)
        answer = await _update_engines(raw, key, record, shared + gateway.engine_line, gateway)
        record.status, record.stage = answer.status_code, "done"
        if answer.status_code < 400:
            record.outcome = "ok"
        else:
            record.outcome = "refused" if answer.status_code < 500 else "engine_error"
    except Exception as error:
        record.status, record.error = shape_of(error).status, f"{type(error).__name__}: {error}"
        record.outcome = "refused" if record.status < 500 else "failed"
        raise
    finally:
        record.ended = now()
        gateway.metrics.requests.count(record)
        gateway.records.add(record)
    answer.headers["x-request-id"] = request_id
    return answer


async def _read_body(request: Request, gateway: Gateway) -> bytes:
    if not gateway.settings.lora_updates:
        raise ForbiddenError(DISABLED)
    raw = await request.body()
    if len(raw) > MAX_BODY_BYTES:
        raise BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    return raw


async def _update_engines(
    raw: bytes, key: ApiKey | None, record: Record, shared: bytes, gateway: Gateway
) -> Response:
    """Return the first failure of an engine, else the first engine's answer. For the limits of the
    API key it is one request without tokens."""
    body = parse_body(raw)
    name, model = body.get("lora_name"), body.get("model")
    if not isinstance(name, str):
        raise BadRequestError("lora_name must be a string", "lora_name")
    if key is not None and not key.allows_model(name):
        raise ForbiddenModelError(name)
    authenticator, permit = gateway.authenticator, None
    if authenticator is not None and key is not None and key.has_limits:
        permit = await acquire_permit(key, 0, authenticator, gateway.metrics)
    try:
        engines = [e for e in gateway.fleet.engines if e.is_usable and _serves_model(e, model)]
        if not engines:
            raise NoEngineError("no engine is healthy")
        path = record.endpoint
        asking = (_ask(engine, path, record.request_id, shared, raw) for engine in engines)
        answers = list(zip(engines, await asyncio.gather(*asking), strict=True))
    finally:
        if authenticator is not None and permit is not None:
            authenticator.release(permit, 0)
    updated = [engine for engine, answer in answers if _is_success(answer)]
    for engine in updated:  # known at once, and not only after the next probe
        if engine.models is not None:
            models = engine.models | {name} if path == LOAD_PATH else engine.models - {name}
            gateway.fleet.note_models(engine, models, engine.context_lengths)
    logger.info("%s %.128r: done at %d of %d engines", path, name, len(updated), len(engines))
    engine, answer = next((one for one in answers if not _is_success(one[1])), answers[0])
    if answer is None:
        raise EngineError(f"{engine.role} engine {engine.name} did not answer")
    if answer.status == 401 and gateway.hides_credentials:
        raise EngineCredentialError("an engine rejected the router's API key")
    passed = {n.decode(): v.decode("latin-1") for n, v in answer.headers if n == b"content-type"}
    return Response(answer.body, answer.status, passed)


def _serves_model(engine: Engine, model: object) -> bool:
    return not isinstance(model, str) or engine.models is None or model in engine.models


def _is_success(answer: CompleteAnswer | None) -> bool:
    return answer is not None and 200 <= answer.status < 300


async def _ask(
    engine: Engine, path: str, request_id: str, shared: bytes, raw: bytes
) -> CompleteAnswer | None:
    """Return the engine's answer, or None if there is none."""
    message = messages.leg_message(path, engine.name, request_id, shared, (raw, b""))
    try:
        return await engine.pool.fetch(message, now() + LOAD_TIMEOUT_S, MAX_ANSWER_BYTES)
    except UpstreamError as error:
        logger.warning("%s at %s: %s", path, engine.name, error)
        return None
