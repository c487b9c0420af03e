"""GET /v1/models: what the engines serve, together."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.fleet.engine import Engine, State
from router.flows.errors import NoEngineError

router = APIRouter(tags=["OpenAI"])
TIMEOUT = 5.0


@router.get("/v1/models", summary="The models of all engines")
async def models(request: Request) -> Response:
    gateway, client = request.app.state.gateway, request.app.state.client
    engines = [e for e in gateway.fleet.engines if e.state is not State.UNHEALTHY]
    asked = [_ask(client, engine, request.headers.get("authorization")) for engine in engines]
    answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
    lists = [found for answer in answers if (found := _models_in(answer)) is not None]
    if lists:
        return JSONResponse({"object": "list", "data": _union(lists)})
    for answer in answers:
        if 400 <= answer.status_code < 500:
            kind = answer.headers.get("content-type")
            return Response(answer.content, answer.status_code, media_type=kind)
    raise NoEngineError("no engine answers")


async def _ask(
    client: httpx.AsyncClient, engine: Engine, authorization: str | None
) -> httpx.Response | None:
    headers = {"authorization": authorization} if authorization else {}
    try:
        return await client.get(f"{engine.url}/v1/models", headers=headers, timeout=TIMEOUT)
    except httpx.HTTPError:
        return None


def _models_in(answer: httpx.Response) -> list[dict[str, Any]] | None:
    if answer.status_code != 200:
        return None
    try:
        data = answer.json()["data"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(data, list):
        return None
    return [model for model in data if isinstance(model, dict) and "id" in model]


def _union(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for models in lists:
        for model in models:
            found.setdefault(str(model["id"]), model)
    return list(found.values())
