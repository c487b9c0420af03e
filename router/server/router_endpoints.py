"""The endpoints that the router answers itself: models, stored responses, LoRA adapters, health and
metrics."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version as installed_version
from time import monotonic as now
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.auth.api_keys import ApiKey
from router.common.exact_json import dumps
from router.conversations.store import StoreError
from router.conversations.stored_responses import UnknownResponseError
from router.fleet.engine import LEGS, Engine, EngineRole
from router.fleet.engine_probe import MAX_ANSWER_BYTES
from router.fleet.probes import Model, models_in
from router.http_client.errors import UpstreamError
from router.http_client.pool import CompleteAnswer
from router.openai.answers import parse_object
from router.openai.anthropic_messages import anthropic_error, anthropic_model
from router.openai.errors import (
    BadRequestError,
    BodyTooLargeError,
    EngineCredentialError,
    EngineError,
    ForbiddenError,
    ForbiddenModelError,
    NoEngineError,
    NotFoundError,
    ResponseStoreError,
    UnknownModelError,
    UnsupportedTypeError,
    shape_of,
)
from router.openai.responses import RESPONSES_PATH
from router.proxy import messages
from router.proxy.dispatch import read_request_id
from router.proxy.gateway import Gateway
from router.proxy.key_limits import acquire_permit
from router.proxy.model_aliases import ModelAliases
from router.proxy.request import check_json, parse_body
from router.proxy.side_requests import ControlRequest
from router.server.content_coding import coding_of
from router.server.middleware import CALLER
from router.server.router_state import state_of
from router.telemetry.metrics import CONTENT_TYPE
from router.telemetry.record import Record

router = APIRouter()
# Only for an application whose metrics have no port of their own.
metrics_router = APIRouter()
logger = logging.getLogger("disagg_router.server")
MODELS_WAIT_S = 5.0
# A header of clients of Anthropic's API.
ANTHROPIC_VERSION = "anthropic-version"
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ABORT_PATH = "/inference/v1/abort_requests"
# An engine may have to download the adapter.
LOAD_TIMEOUT_S = 300.0
MAX_BODY_BYTES = 64 * 1024
# In an error message.
MAX_STATES = 8
# In the body of /ready.
MAX_FINDINGS = 32
DISABLED = "adapters are not loaded through this router: it was started without --lora-updates"
PASSED: Any = {"tags": ["Forwarded to an engine"], "response_class": Response}


# Models.


@router.get("/v1/models", summary="List the models", tags=["OpenAI"])
async def models(request: Request) -> Response:
    found = await _list_models(request)
    if isinstance(found, Response):
        return found
    if ANTHROPIC_VERSION not in request.headers:
        return _json({"object": "list", "data": found})
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
    data = [anthropic_model(model) for model in found]
    return _json({"object": "list", "data": data, "has_more": False, **ends})


@router.get("/v1/models/{name:path}", summary="Show one model", tags=["OpenAI"])
async def one_model(name: str, request: Request) -> Response:
    found = await _list_models(request)
    if isinstance(found, Response):
        return found
    aliases = state_of(request.app).gateway.aliases
    by_name = {model["id"]: model for model in found}
    target = aliases.target_of(name) or name
    is_anthropic = ANTHROPIC_VERSION in request.headers
    if target not in by_name:
        unknown = UnknownModelError(name, by_name)
        if not is_anthropic:
            raise unknown
        return _json(anthropic_error(404, {"message": str(unknown)}), 404)
    model = {**by_name[target], "id": name}
    return _json(anthropic_model(model) if is_anthropic else model)


async def _list_models(request: Request) -> Sequence[Model] | Response:
    """Return the models that the router can serve, or an engine's 4xx if none answers with a
    list."""
    gateway = state_of(request.app).gateway
    shown = "" if gateway.hides_credentials else request.headers.get("authorization", "")
    caller: ApiKey | None = request.scope.get(CALLER)
    engines = [engine for engine in gateway.fleet.engines if engine.is_usable]
    answers = await asyncio.gather(*(_ask_for_models(engine, shown) for engine in engines))
    lists: list[tuple[Engine, Sequence[Model]]] = []
    for engine, answer in zip(engines, answers, strict=True):
        found = None
        if answer is not None and answer.status == 200:
            found = models_in(parse_object(answer.body))
        if engine.spec.models:  # Its requests name these, whatever its own list has.
            by_name = {model["id"]: model for model in found or ()}
            found = [by_name.get(name) or _declared(name) for name in sorted(engine.spec.models)]
        if found is not None:
            lists.append((engine, found))
    if lists:
        served = servable_models(lists, gateway.limits.without_prefiller == "decode")
        served = [model for model in served if caller is None or caller.allows_model(model["id"])]
        return [*served, *_listed_aliases(served, gateway.aliases)]
    for answer in () if gateway.hides_credentials else answers:
        if answer is not None and 400 <= answer.status < 500:
            kind = dict(answer.headers).get(b"content-type", b"application/json")
            return Response(answer.body, answer.status, media_type=kind.decode("latin-1"))
    states = ", ".join(f"{one.name} is {one.health}" for one in gateway.fleet.engines[:MAX_STATES])
    raise NoEngineError(f"no engine answers /v1/models: {states or 'none is known'}")


def _declared(name: str) -> Model:
    return {"id": name, "object": "model", "created": 0, "owned_by": "engines file"}


def _listed_aliases(served: Sequence[Model], aliases: ModelAliases) -> Iterator[Model]:
    by_name = {model["id"]: model for model in served}
    for alias, target in aliases.names_for(by_name.keys()):
        yield {**by_name[target], "id": alias}


async def _ask_for_models(engine: Engine, shown: str) -> CompleteAnswer | None:
    try:
        return await engine.get("/v1/models", now() + MODELS_WAIT_S, MAX_ANSWER_BYTES, shown)
    except UpstreamError:
        return None


def servable_models(
    lists: Iterable[tuple[Engine, Sequence[Model]]], decode_alone: bool
) -> Sequence[Model]:
    """Return the models for which one group has a decode engine, and also a prefill engine unless
    `decode_alone` is True."""
    found: dict[str, Model] = {}
    roles: defaultdict[tuple[str, str], set[EngineRole]] = defaultdict(set)
    for engine, listed in lists:
        for model in listed:
            found.setdefault(model["id"], model)
            roles[model["id"], engine.group].update(r for r in LEGS if engine.role.plays(r))
    needed = {EngineRole.DECODE} if decode_alone else {*LEGS}
    complete = {name for (name, _), played in roles.items() if needed <= played}
    return [model for name, model in found.items() if name in complete]


# Conversations and stored responses.


@router.delete(
    "/v1/conversations/{name:path}",
    summary="End a conversation: no engine retains KV for its next turn",
    tags=["OpenAI"],
)
async def end_conversation(name: str, request: Request) -> Response:
    gateway = state_of(request.app).gateway
    conversations, ended = gateway.conversations, None
    try:
        if conversations is not None:
            ended = await conversations.end(_tenant(request), name)
    except StoreError as error:
        raise ResponseStoreError(
            "the conversation store failed: the conversation cannot be ended now"
        ) from error
    if ended is None:
        raise NotFoundError(f"Conversation with id '{name[:128]}' not found.")
    given, path = request.scope["headers"], request.scope["path"]
    shared = messages.header_lines(given, gateway.not_to_engine) + gateway.engine_line
    cause = ControlRequest(Record(path, now(), read_request_id(given)), shared)
    for entry in ended:
        gateway.releaser.release_turn(cause, entry)
    return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})


@router.get(f"{RESPONSES_PATH}/{{name}}", summary="Get a stored response", tags=["OpenAI"])
async def get_response(name: str, request: Request) -> Response:
    stored = state_of(request.app).stored_responses
    try:
        found = await stored.find(_tenant(request), name)
    except UnknownResponseError as error:
        raise _not_found(name) from error
    return _json(found.response)


@router.post(
    f"{RESPONSES_PATH}/{{name}}/cancel",
    summary="Refused with 400, because no response runs in the background",
    tags=["OpenAI"],
)
async def cancel_response(name: str, request: Request) -> Response:
    """Answer as OpenAI and vLLM do for a response that was created without `background`."""
    await get_response(name, request)  # 404 for an unknown one
    raise BadRequestError("Cannot cancel a synchronous response.", "response_id")


@router.delete(f"{RESPONSES_PATH}/{{name}}", summary="Delete a stored response", tags=["OpenAI"])
async def delete_response(name: str, request: Request) -> Response:
    stored = state_of(request.app).stored_responses
    try:
        await stored.forget(_tenant(request), name)
    except UnknownResponseError as error:
        raise _not_found(name) from error
    return JSONResponse({"id": name, "object": "response", "deleted": True})


@router.api_route(
    f"{RESPONSES_PATH}/{{rest:path}}", methods=["GET", "POST", "DELETE"], include_in_schema=False
)
async def no_response_operation(request: Request) -> Response:
    """Answer 404 for operations such as `compact`: without this route, some would get a 405 because
    the path is that of a stored response."""
    raise NotFoundError(f"{request.method} {request.url.path[:128]}: Not Found")


def _tenant(request: Request) -> str:
    """Return the tenant of a request: the owner of its API key, if the router has API keys."""
    state = state_of(request.app)
    headers, key = request.scope["headers"], request.scope.get(CALLER)
    authenticator = state.gateway.authenticator
    if authenticator is not None and key is not None:
        headers = authenticator.with_owner(headers, key)
    return state.stored_responses.tenant_of(headers)


def _not_found(name: str) -> NotFoundError:
    return NotFoundError(f"Response with id '{name[:128]}' not found.")


def _json(content: object, status: int = 200) -> Response:
    return Response(dumps(content), status, media_type="application/json")


# LoRA adapters: prefill and decode engines must have the same ones, so all engines load them.
# Disabled unless --lora-updates is set: engines load an adapter from any path that they are given.


@router.post(LOAD_PATH, summary="Load a LoRA adapter at every engine", **PASSED)
@router.post(UNLOAD_PATH, summary="Unload a LoRA adapter at every engine", **PASSED)
async def update_adapters(request: Request) -> Response:
    # The request goes to all engines, and is recorded like any other.
    gateway = state_of(request.app).gateway
    given = request.scope["headers"]
    shared = messages.header_lines(given, gateway.not_to_engine)
    request_id = read_request_id(given)
    record = Record(request.scope["path"], now(), request_id, flow="adapters")
    key: ApiKey | None = request.scope.get(CALLER)
    record.key = "" if key is None else key.name
    try:
        if not gateway.settings.lora_updates:
            raise ForbiddenError(DISABLED)
        raw = await _read_small_body(request)
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
        gateway.records.add(record)
    answer.headers["x-request-id"] = request_id
    return answer


async def _read_small_body(request: Request) -> bytes:
    """Raises UnsupportedTypeError, BodyTooLargeError."""
    check_json(request.scope["headers"])
    if coding_of(request.scope["headers"]) is not None:
        raise UnsupportedTypeError("this endpoint accepts no compressed body")
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
    model = model if isinstance(model, str) else None
    if not isinstance(name, str):
        raise BadRequestError("lora_name must be a string", "lora_name")
    if key is not None and not key.allows_model(name):
        raise ForbiddenModelError(name)
    authenticator, permit = gateway.authenticator, None
    if authenticator is not None and key is not None and key.has_limits:
        permit = await acquire_permit(key, 0, authenticator, gateway.metrics)
    try:
        engines = [
            one
            for one in gateway.fleet.engines
            if one.is_usable and (one.models is None or model is None or model in one.models)
        ]
        if not engines:
            raise NoEngineError("no engine is healthy")
        path = record.endpoint
        asking = (_load(engine, path, record.request_id, shared, raw) for engine in engines)
        answers = list(zip(engines, await asyncio.gather(*asking), strict=True))
    finally:
        if authenticator is not None and permit is not None:
            authenticator.release(permit, 0)
    updated = [engine for engine, answer in answers if _is_success(answer)]
    for engine in updated:  # known at once, and not only after the next probe
        if engine.models is not None:
            has = path == LOAD_PATH
            models = engine.models | {name} if has else engine.models - {name}
            adapters = engine.adapters | {name} if has else engine.adapters - {name}
            gateway.fleet.note_models(engine, models, engine.context_lengths, adapters)
    logger.info("%s %.128r: done at %d of %d engines", path, name, len(updated), len(engines))
    engine, answer = next((one for one in answers if not _is_success(one[1])), answers[0])
    if answer is None:
        raise EngineError(f"{engine.role.engine} {engine.name} did not answer")
    if answer.status == 401 and gateway.hides_credentials:
        raise EngineCredentialError("an engine rejected the router's API key")
    passed = {n.decode(): v.decode("latin-1") for n, v in answer.headers if n == b"content-type"}
    return Response(answer.body, answer.status, passed)


def _is_success(answer: CompleteAnswer | None) -> bool:
    return answer is not None and 200 <= answer.status < 300


async def _load(
    engine: Engine, path: str, request_id: str, shared: bytes, raw: bytes
) -> CompleteAnswer | None:
    """Return the engine's answer, or None if there is none."""
    message = messages.leg_message(path, engine.name, request_id, shared, (raw, b""))
    try:
        return await engine.pool.fetch(message, now() + LOAD_TIMEOUT_S, MAX_ANSWER_BYTES)
    except UpstreamError as error:
        logger.warning("%s at %s: %s", path, engine.name, error)
        return None


# Requests of token ids.


@router.post(ABORT_PATH, summary="End running requests of token ids", tags=["Token ids"])
async def abort_requests(request: Request) -> Response:
    ids = parse_body(await _read_small_body(request)).get("request_ids")
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        raise BadRequestError("request_ids must be a list of strings", "request_ids")
    abortable = state_of(request.app).gateway.tasks.abortable
    abortable.abort(ids, request.scope.get(CALLER), request.scope["headers"])
    return Response()


# Operations.


@router.get("/health", summary="Liveness: 200 while this process runs", tags=["Operations"])
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/healthcheck", include_in_schema=False)
async def healthcheck(request: Request) -> dict[str, str | int]:
    """Answer like vLLM's example proxies, for scripts that start one and wait for it."""
    fleet = state_of(request.app).gateway.fleet
    known = {role: len(fleet.usable_engines(role)) for role in LEGS}
    return {
        "status": "ok",
        "prefill_instances": known[EngineRole.PREFILL],
        "decode_instances": known[EngineRole.DECODE],
    }


@router.get(
    "/ready",
    summary="Readiness: 200 if a request would be answered",
    tags=["Operations"],
    responses={503: {"description": "Not ready, with the reasons"}},
)
async def ready(request: Request) -> Response:
    state = state_of(request.app)
    gateway: Gateway = state.gateway
    # A source that fails does not make the router unready: the engines listed last still serve.
    problems = state.registry.problems()
    detail: dict[str, Any] = {"sources": problems} if problems else {}
    found = gateway.assess_readiness(state.prober.problem())
    if findings := gateway.fleet.compare().findings:
        detail["findings"] = [one.content() for one in findings[:MAX_FINDINGS]]
    if found.blocking:
        return JSONResponse({"status": "not ready", "reasons": found.blocking, **detail}, 503)
    if degrading := found.degrading | state.failures():
        return JSONResponse({"status": "degraded", "reasons": degrading, **detail})
    return JSONResponse({"status": "ready", **detail})


@metrics_router.get(
    "/metrics", summary="Prometheus metrics", tags=["Operations"], response_class=Response
)
async def metrics(request: Request) -> Response:
    state = state_of(request.app)
    state.gateway.records.flush()
    content = await asyncio.to_thread(state.exposition)
    return Response(content, headers={"content-type": CONTENT_TYPE})


@router.get("/version", summary="Version of the router", tags=["Operations"])
async def version() -> dict[str, str]:
    return {"version": installed_version("disagg-router")}
