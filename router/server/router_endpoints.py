"""The endpoints that the router answers itself: models, stored responses, health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from importlib.metadata import version as installed_version

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.auth.api_keys import ApiKey
from router.common.exact_json import dumps
from router.conversations.stored_responses import UnknownResponseError
from router.fleet.engine import LEGS, Engine, EngineRole
from router.fleet.probes import (
    MAX_ANSWER_BYTES,
    Model,
    models_in,
)
from router.http_client.deadlines import now
from router.http_client.errors import UpstreamError
from router.http_client.pool import CompleteAnswer
from router.openai.answers import parse_object
from router.openai.errors import NoEngineError, NotFoundError, UnknownModelError
from router.openai.responses import RESPONSES_PATH
from router.proxy.gateway import Gateway
from router.server.middleware import CALLER
from router.server.router_state import state_of
from router.telemetry.metrics import CONTENT_TYPE

router = APIRouter()
MODELS_TIMEOUT_S = 5.0


# Models.


@router.get("/v1/models", summary="The models that requests are served with", tags=["OpenAI"])
async def models(request: Request) -> Response:
    found = await _list_models(request)
    return found if isinstance(found, Response) else _json({"object": "list", "data": found})


@router.get("/v1/models/{name:path}", summary="One of them", tags=["OpenAI"])
async def one_model(name: str, request: Request) -> Response:
    found = await _list_models(request)
    if isinstance(found, Response):
        return found
    for model in found:
        if model["id"] == name:
            return _json(model)
    raise UnknownModelError(name)


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
        if answer is not None and answer.status == 200:
            found = models_in(parse_object(answer.body))
            if found is not None:
                lists.append((engine, found))
    if lists:
        served = servable_models(lists, gateway.limits.without_prefiller == "decode")
        return [model for model in served if caller is None or caller.allows_model(model["id"])]
    for answer in () if gateway.hides_credentials else answers:
        if answer is not None and 400 <= answer.status < 500:
            kind = dict(answer.headers).get(b"content-type", b"application/json")
            return Response(answer.body, answer.status, media_type=kind.decode("latin-1"))
    raise NoEngineError("no engine answers")


async def _ask_for_models(engine: Engine, shown: str) -> CompleteAnswer | None:
    try:
        return await engine.get("/v1/models", now() + MODELS_TIMEOUT_S, MAX_ANSWER_BYTES, shown)
    except UpstreamError:
        return None


def servable_models(
    lists: Iterable[tuple[Engine, Sequence[Model]]], decode_alone: bool
) -> Sequence[Model]:
    """Return the models for which one group has a decode engine, and also a prefill engine unless
    `decode_alone` is True."""
    found: dict[str, Model] = {}
    roles: dict[tuple[str, str], set[EngineRole]] = {}
    for engine, listed in lists:
        for model in listed:
            found.setdefault(model["id"], model)
            plays = roles.setdefault((model["id"], engine.group), set())
            plays.update(role for role in LEGS if engine.role.plays(role))
    complete = {
        name
        for (name, _), plays in roles.items()
        if EngineRole.DECODE in plays and (decode_alone or EngineRole.PREFILL in plays)
    }
    return [model for name, model in found.items() if name in complete]


# Stored responses.


@router.get(f"{RESPONSES_PATH}/{{name}}", summary="A stored response", tags=["OpenAI"])
async def get_response(name: str, request: Request) -> Response:
    stored = state_of(request.app).stored_responses
    try:
        found = await stored.find(_tenant(request), name)
    except UnknownResponseError as error:
        raise _not_found(name) from error
    return _json(found.response)


@router.delete(f"{RESPONSES_PATH}/{{name}}", summary="Delete a stored response", tags=["OpenAI"])
async def delete_response(name: str, request: Request) -> Response:
    stored = state_of(request.app).stored_responses
    try:
        await stored.forget(_tenant(request), name)
    except UnknownResponseError as error:
        raise _not_found(name) from error
    return JSONResponse({"id": name, "object": "response", "deleted": True})


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


def _json(content: object) -> Response:
    return Response(dumps(content), media_type="application/json")


# Operations.


@router.get("/health", summary="Whether this process is alive", tags=["Operations"])
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
    summary="Whether a prefill engine and a decode engine are healthy",
    tags=["Operations"],
    responses={503: {"description": "Not ready, with the reasons"}},
)
async def ready(request: Request) -> Response:
    state = state_of(request.app)
    gateway: Gateway = state.gateway
    # A source that fails does not make the router unready: the engines listed last still serve.
    problems = state.registry.problems()
    detail = {"sources": problems} if problems else {}
    reasons = {str(role): why for role, why in gateway.fleet.unavailable_roles().items()}
    if trouble := state.prober.problem():
        reasons["prober"] = trouble
    if gateway.tasks.is_draining:
        reasons["router"] = "shutting down"
    if reasons:
        return JSONResponse({"status": "not ready", "reasons": reasons, **detail}, 503)
    return JSONResponse({"status": "ready", **detail})


@router.get("/metrics", summary="Prometheus metrics", tags=["Operations"], response_class=Response)
async def metrics(request: Request) -> Response:
    content = await asyncio.to_thread(state_of(request.app).exposition)
    return Response(content, headers={"content-type": CONTENT_TYPE})


@router.get("/version", summary="The router's version", tags=["Operations"])
async def version() -> dict[str, str]:
    return {"version": installed_version("disagg-router")}
