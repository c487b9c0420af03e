"""Pull: prefill first, then the decoder fetches the blocks that the prefiller keeps for it.

Nothing waits between the two: the blocks are leased, 30 s by default.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.engine import Engine, Role
from router.flows.gateway import Gateway
from router.flows.release import give_up
from router.flows.request import Request
from router.flows.steps import decode, prefill


async def pull(
    request: Request, gateway: Gateway, decoders: Sequence[Engine] | None = None
) -> None:
    gateway.require(Role.PREFILL, Role.DECODE)
    params = (await prefill(request, gateway)).params
    if params is None:
        note_no_params(request, gateway)
    try:
        told = None if params is None else params.not_retaining()
        await decode(request, gateway, request.content_with(told), decoders)
    except BaseException as cause:
        give_up(request, gateway, params, cause)
        raise


def note_no_params(request: Request, gateway: Gateway) -> None:
    gateway.metrics.prefill_without_params.inc()
    gateway.throttle.warn(
        "a prefiller answered without kv_transfer_params, so the decoder prefills again",
        request.record.prefiller,
    )
