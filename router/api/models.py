"""GET /v1/models: what a request can really be served with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.fleet.engine import Engine
from router.fleet.spec import Role
from router.flows.errors import NoEngineError
from router.flows.gateway import Gateway
from router.upstream.answer import Headers
from router.upstream.deadlines import now
from router.upstream.errors import UpstreamError

router = APIRouter(tags=["OpenAI"])
TIMEOUT = 5.0
ANSWER_LIMIT = 1024 * 1024
Model = dict[str, Any]


class Told(NamedTuple):
    engine: Engine
    status: int
    headers: Headers
    body: bytes

    @property
    def models(self) -> list[Model] | None:
        if self.status != 200:
            return None
        try:
            data = orjson.loads(self.body)["data"]
        except (ValueError, KeyError, TypeError):
            return None
        if not isinstance(data, list):
            return None
        return [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)]


@router.get("/v1/models", summary="The models that requests are served with")
async def models(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    key = request.headers.get("authorization")
    engines = [engine for engine in gateway.fleet.engines if engine.is_wanted]
    asked = await asyncio.gather(*(_ask(engine, key) for engine in engines))
    answers = [told for told in asked if told is not None]
    lists = [(told.engine, found) for told in answers if (found := told.models) is not None]
    if lists:
        alone = gateway.limits.without_prefiller == "decode"
        return JSONResponse({"object": "list", "data": served(lists, alone)})
    for told in answers:
        if 400 <= told.status < 500:
            kind = dict(told.headers).get(b"content-type", b"application/json")
            return Response(told.body, told.status, media_type=kind.decode("latin-1"))
    raise NoEngineError("no engine answers")


def served(lists: Iterable[tuple[Engine, list[Model]]], alone: bool) -> list[Model]:
    """Those for which one group has a decoder and a prefiller, or a decoder that does it `alone`
    because the group has no prefiller to ask."""
    found: dict[str, Model] = {}
    roles: dict[tuple[str, str], set[Role]] = {}
    for engine, said in lists:
        for model in said:
            found.setdefault(model["id"], model)
            plays = roles.setdefault((model["id"], engine.spec.group), set())
            plays.update(role for role in Role if engine.role.plays(role))
    complete = {
        name
        for (name, _), plays in roles.items()
        if Role.DECODE in plays and (alone or Role.PREFILL in plays)
    }
    return [model for name, model in found.items() if name in complete]


async def _ask(engine: Engine, key: str | None) -> Told | None:
    lines = ["GET /v1/models HTTP/1.1", f"host: {engine.name}"]
    if key:
        lines.append(f"authorization: {key}")
    message = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    try:
        answer = await engine.pool.ask(message, now() + TIMEOUT, fresh=True)
    except UpstreamError:
        return None
    try:
        return Told(engine, answer.status, answer.headers, await answer.read(ANSWER_LIMIT))
    except UpstreamError:
        return None
    finally:
        answer.close()
