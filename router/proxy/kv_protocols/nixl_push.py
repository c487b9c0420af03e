"""Push between vLLM's NixlConnectors: both legs run at once, and the prefill engine writes its
blocks into the decode engine.

The decode engine needs the prefill engine's address before that engine has answered. The router
knows the address from the engine's identity page, or from an earlier answer of the engine. Engines
match the two legs by `transfer_id`, or by an X-Request-Id that no other request has had.
"""

from __future__ import annotations

from msgspec import structs

from router.common.exact_json import dumps
from router.fleet.capabilities import RankEndpoint
from router.fleet.engine import Engine, EngineRank, Place, engine_of
from router.proxy.kv_params import KvParams
from router.proxy.kv_protocols.protocol import LegPair, new_transfer_id
from router.proxy.messages import new_leg_id
from router.proxy.ranks import header_line, rank_number_chosen_by_client
from router.proxy.request import Request

PUSHES = "push"


def make_push(request: Request, place: Place, decoder: Engine, forced: bool) -> LegPair | None:
    """Return what the legs of a push share, or None if the prefill engine's address is not known.

    `place` is the prefill engine or one of its ranks. Unless `forced`, return None as well if not
    both engines support push.
    """
    prefiller = engine_of(place)
    if not (
        forced or (prefiller.capabilities.supports_push and decoder.capabilities.supports_push)
    ):
        return None
    found = _choose_rank(request, place)
    if found is None:
        return None
    at, pinned = found
    leg_id, transfer_id = new_leg_id(request.record.request_id), new_transfer_id()
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": leg_id,
        "transfer_id": transfer_id,
        **structs.asdict(at),
    }
    if prefiller.capabilities.verifies_prefix:
        # Without this the decode engine takes the prefill engine for stock vLLM. It would then
        # hold each retained turn until it expires, even while it drains.
        params["proves_prefix"] = True
    return LegPair(place, KvParams(dumps(params)), leg_id, transfer_id, pinned)


def _choose_rank(request: Request, place: Place) -> tuple[RankEndpoint, bytes] | None:
    """Return the address of a data-parallel rank and the header line that selects it.

    The rank is `place` or the client's choice, or else each rank in turn. Return None if its
    address is not known.
    """
    capabilities = engine_of(place).capabilities
    endpoints, known = capabilities.rank_endpoints, None
    wanted = rank_number_chosen_by_client(request)
    if isinstance(place, EngineRank):
        number = place.number
    elif wanted is not None:
        number = wanted + min(endpoints, default=0) if wanted >= 0 else -1
    elif endpoints:
        number = sorted(endpoints)[request.number % len(endpoints)]
        known = capabilities.header_value(number) if len(endpoints) > 1 else None
    else:
        return None
    at = endpoints.get(number)
    return None if at is None else (at, header_line(request, place, known))
