"""What operators and their machines ask: health, readiness, metrics, version."""

from __future__ import annotations

import asyncio
from importlib.metadata import version as installed_version

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.fleet.engine_spec import LEGS, EngineRole
from router.proxy.gateway import Gateway
from router.telemetry.metrics import CONTENT_TYPE

router = APIRouter(tags=["Operations"])


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="Whether this process lives")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/healthcheck", include_in_schema=False)
async def healthcheck(request: Request) -> dict[str, str | int]:
    """What vLLM's example proxies answer: scripts that start one wait for it."""
    fleet = request.app.state.gateway.fleet
    known = {role: len(fleet.usable_engines(role)) for role in LEGS}
    return {
        "status": "ok",
        "prefill_instances": known[EngineRole.PREFILL],
        "decode_instances": known[EngineRole.DECODE],
    }


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready",
    summary="Whether a prefiller and a decoder are healthy",
    responses={503: {"description": "Not ready, with the reasons"}},
)
async def ready(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    # A source that is in trouble takes nothing away: the engines that it listed last still serve.
    troubles = request.app.state.registry.problems()
    detail = {"sources": troubles} if troubles else {}
    reasons = {str(role): why for role, why in gateway.fleet.unavailable_roles().items()}
    if trouble := request.app.state.prober.problem():
        reasons["prober"] = trouble
    if gateway.draining:
        reasons["router"] = "shutting down"
    if reasons:
        return JSONResponse({"status": "not ready", "reasons": reasons, **detail}, 503)
    return JSONResponse({"status": "ready", **detail})


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    content = await asyncio.to_thread(request.app.state.exposition)
    return Response(content, headers={"content-type": CONTENT_TYPE})


@router.get("/version", summary="The router's version")
async def version() -> dict[str, str]:
    return {"version": installed_version("disagg-router")}
