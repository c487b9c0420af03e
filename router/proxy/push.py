"""Push: both legs run at once, and the prefill engine writes its blocks into the decode engine.

The decode engine needs the prefill engine's address before that engine has answered. The router
knows the address from the engine's identity page, or from an earlier answer of the engine. Engines
match the two legs by `transfer_id`, or by an X-Request-Id that no other request has had.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import uuid4

from msgspec import structs

from router.common.exact_json import dumps
from router.fleet.engine import Engine, RankEndpoint
from router.proxy.messages import new_leg_id
from router.proxy.prefill_answer import KvParams
from router.proxy.request import Request

PUSHES = "push"
# The header that names one data-parallel rank of an engine behind one address.
RANK_HEADER = b"x-data-parallel-rank"


class PushParams(NamedTuple):
    """The values that the two legs of one attempt share."""

    leg_id: str
    """The X-Request-Id of both legs."""
    transfer_id: str
    pinned: bytes
    """The header line that selects a data-parallel rank of the prefill engine, or b""."""
    params: KvParams
    """The KV transfer params of the decode leg."""


def make_push(
    request: Request, prefiller: Engine, decoder: Engine, forced: bool
) -> PushParams | None:
    """Return what the legs of a push share, or None if the prefill engine's address is not known.

    Unless `forced`, return None as well if not both engines support push.
    """
    if not (
        forced or (prefiller.capabilities.supports_push and decoder.capabilities.supports_push)
    ):
        return None
    found = _choose_rank(request, prefiller)
    if found is None:
        return None
    at, pinned = found
    leg_id, transfer_id = new_leg_id(request.record.request_id), f"xfer-{uuid4()}"
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
    return PushParams(leg_id, transfer_id, pinned, KvParams(dumps(params)))


def _choose_rank(request: Request, prefiller: Engine) -> tuple[RankEndpoint, bytes] | None:
    """Return the address of a data-parallel rank and the header line that selects it.

    The rank is the client's choice, or else each rank in turn. Return None if its address is not
    known.
    """
    ranks = prefiller.capabilities.rank_endpoints
    wanted = rank_chosen_by_client(request)
    if wanted is not None:
        at = ranks.get(int(wanted)) if wanted.isdigit() else None
        return None if at is None else (at, b"")
    if not ranks:
        return None
    number = sorted(ranks)[request.number % len(ranks)]
    return ranks[number], b"" if len(ranks) == 1 else rank_header_line(number)


def rank_chosen_by_client(request: Request) -> bytes | None:
    """Return the data-parallel rank that the client names. It holds for both legs."""
    return next((value for name, value in request.exchange.headers if name == RANK_HEADER), None)


def rank_header_line(number: int) -> bytes:
    """Return the header line that names a data-parallel rank."""
    return b"%s: %d\r\n" % (RANK_HEADER, number)
