"""Push: both legs at once, so that the prefiller writes its blocks into those of a waiting decoder.

The decoder is told where the prefiller is before that has answered, so its coordinates must be
known: from its identity page, or learned from an answer of its own. Engines match the two legs by
`transfer_id`, or by an X-Request-Id that both share and nobody else has ever had.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import uuid4

from router.common.exact_json import dumps
from router.fleet.capabilities import RankEndpoint
from router.fleet.engine import Engine
from router.proxy.prefill_answer import KvParams
from router.proxy.request import Request

PUSHES = "push"
# The header that names one data-parallel rank of an engine behind one address.
RANK_HEADER = b"x-data-parallel-rank"


class PushParams(NamedTuple):
    """What the two legs of one attempt share. `pinned`: a header line for the prefiller, of which
    one data-parallel rank is meant; `params` are the decoder's."""

    leg_id: str
    transfer_id: str
    pinned: bytes
    params: KvParams


def make_push(
    request: Request, prefiller: Engine, decoder: Engine, forced: bool
) -> PushParams | None:
    """None where these two cannot, or nobody knows where the prefiller is."""
    if not (
        forced or (prefiller.capabilities.supports_push and decoder.capabilities.supports_push)
    ):
        return None
    found = _choose_rank(request, prefiller)
    if found is None:
        return None
    at, pinned = found
    leg_id, transfer_id = request.leg_id(), f"xfer-{uuid4()}"
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": leg_id,
        "transfer_id": transfer_id,
        **at._asdict(),
    }
    if prefiller.capabilities.verifies_prefix:
        # As its answer would show. Else the decoder takes it for a stock engine, which cannot be
        # told that a turn is gone, and keeps each for its whole time, though it be to leave.
        params["proves_prefix"] = True
    return PushParams(leg_id, transfer_id, pinned, KvParams(dumps(params)))


def _choose_rank(request: Request, prefiller: Engine) -> tuple[RankEndpoint, bytes] | None:
    """The client's choice, if it made one; else each rank in turn."""
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
