"""GET /v1/models: what a request can really be served with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.auth.api_keys import ApiKey
from router.common.exact_json import dumps
from router.fleet.engine import Engine
from router.fleet.engine_spec import LEGS, EngineRole
from router.fleet.probes import ANSWER_LIMIT, Model, models_in
from router.http_client.deadlines import now
from router.http_client.errors import UpstreamError
from router.http_client.pool import CompleteAnswer
from router.openai.answers import parse_object
from router.openai.errors import NoEngineError, UnknownModelError
from router.proxy.gateway import Gateway
from router.server.access_guard import CALLER

router = APIRouter(tags=["OpenAI"])
TIMEOUT = 5.0


class Told(NamedTuple):
    engine: Engine
    answer: CompleteAnswer


@router.get("/v1/models", summary="The models that requests are served with")
async def models(request: Request) -> Response:
    found = await _models(request)
    if isinstance(found, Response):
        return found
    return _json({"object": "list", "data": found})


@router.get("/v1/models/{name:path}", summary="One of them")
async def one_model(name: str, request: Request) -> Response:
    found = await _models(request)
    if isinstance(found, Response):
        return found
    for model in found:
        if model["id"] == name:
            return _json(model)
    raise UnknownModelError(name)


async def _models(request: Request) -> Sequence[Model] | Response:
    """Or an engine's own refusal."""
    gateway: Gateway = request.app.state.gateway
    shown = "" if gateway.hides_credentials else request.headers.get("authorization", "")
    caller: ApiKey | None = request.scope.get(CALLER)
    engines = [engine for engine in gateway.fleet.engines if engine.is_usable]
    asked = await asyncio.gather(*(_ask(engine, shown) for engine in engines))
    answers = [told for told in asked if told is not None]
    lists = [
        (told.engine, found)
        for told in answers
        if told.answer.status == 200
        and (found := models_in(parse_object(told.answer.body))) is not None
    ]
    if lists:
        alone = gateway.limits.without_prefiller == "decode"
        served_now = served(lists, alone)
        if caller is None:
            return served_now
        return [model for model in served_now if caller.allows_model(model["id"])]
    for _, answer in () if gateway.hides_credentials else answers:
        if 400 <= answer.status < 500:
            kind = dict(answer.headers).get(b"content-type", b"application/json")
            return Response(answer.body, answer.status, media_type=kind.decode("latin-1"))
    raise NoEngineError("no engine answers")


def served(lists: Iterable[tuple[Engine, Sequence[Model]]], alone: bool) -> Sequence[Model]:
    """Those for which one group has a decoder and a prefiller, or a decoder that does it `alone`
    because the group has no prefiller to ask."""
    found: dict[str, Model] = {}
    roles: dict[tuple[str, str], set[EngineRole]] = {}
    for engine, said in lists:
        for model in said:
            found.setdefault(model["id"], model)
            plays = roles.setdefault((model["id"], engine.group), set())
            plays.update(role for role in LEGS if engine.role.plays(role))
    complete = {
        name
        for (name, _), plays in roles.items()
        if EngineRole.DECODE in plays and (alone or EngineRole.PREFILL in plays)
    }
    return [model for name, model in found.items() if name in complete]


def _json(content: object) -> Response:
    return Response(dumps(content), media_type="application/json")


async def _ask(engine: Engine, shown: str) -> Told | None:
    try:
        told = await engine.get("/v1/models", now() + TIMEOUT, ANSWER_LIMIT, shown)
        return Told(engine, told)
    except UpstreamError:
        return None
