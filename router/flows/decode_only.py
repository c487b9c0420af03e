"""Decode only: one decoder does everything, for requests whose blocks must not be pulled."""

from __future__ import annotations

from router.fleet.engine import Role
from router.flows import legs
from router.flows.gateway import Gateway
from router.flows.request import Request
from router.flows.steps import decode


async def decode_only(request: Request, gateway: Gateway, reason: str) -> None:
    gateway.metrics.decode_only.labels(reason).inc()
    gateway.require(Role.DECODE)
    if legs.THRESHOLD in request.body:
        request.body = legs.with_threshold(request.body, 0)
    await decode(request, gateway, request.content_with(None))
