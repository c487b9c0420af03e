"""Pull: prefill first, then the decoder fetches the blocks that the prefiller keeps for it.

Nothing waits between the two: the blocks are leased, 30 s by default.
"""

from __future__ import annotations

from router.fleet.engine import Role
from router.flows.gateway import Gateway
from router.flows.request import Request
from router.flows.steps import decode, prefill


async def pull(request: Request, gateway: Gateway) -> None:
    gateway.require(Role.PREFILL, Role.DECODE)
    params = await prefill(request, gateway)
    if params is None:
        gateway.metrics.prefill_without_params.inc()
        gateway.throttle.warn(
            "a prefiller answered without kv_transfer_params, so the decoder prefills again",
            request.record.prefiller,
        )
    await decode(request, gateway, params)
