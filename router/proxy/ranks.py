"""Selects the data-parallel rank of an engine for a leg.

vLLM serves several ranks behind one address. Each has its own queue and prefix cache, and a header
names one; without the header, vLLM chooses. A client's own header is passed on and holds for both
legs. Otherwise a turn goes to the rank that has the last turn, and other requests to the rank that
the policy has chosen, if it chooses ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.conversations.reuse import TurnReuse
from router.fleet.engine import DECODE, Engine, EngineRank, EngineRole, Place
from router.proxy.request import PASSED, Request
from router.routing.route import Route

if TYPE_CHECKING:
    from router.proxy.run import Run

# The header that names one data-parallel rank of an engine behind one address.
RANK_HEADER = b"x-data-parallel-rank"
MAX_RANK_DIGITS = 8


def place_of_leg(run: Run, engine: Engine, role: EngineRole) -> Place:
    """Return where a leg at this engine runs: at a data-parallel rank, or at the engine if it has
    no ranks or chooses one itself."""
    return find_place(run.request, run.route, run.plan.reuse, engine, role)


def rank_of_leg(run: Run, engine: Engine, role: EngineRole) -> tuple[Place, bytes]:
    """Return the place of a leg, and the header line that selects it; see `header_line`."""
    place, reuse = place_of_leg(run, engine, role), run.plan.reuse
    has_turn = role is DECODE and reuse is not None and engine is reuse.decoder
    return place, header_line(run.request, place, reuse.rank if has_turn and reuse else None)


def find_place(
    request: Request, route: Route, reuse: TurnReuse | None, engine: Engine, role: EngineRole
) -> Place:
    """Return the place of a leg, as `place_of_leg` does, for a request that has no Run yet."""
    ranks = engine.ranks
    if not ranks:
        return engine
    if request.decode_only_reason == PASSED:
        return engine
    wanted = rank_chosen_by_client(request)
    if wanted is not None:
        return next((rank for rank in ranks if b"%d" % rank.header == wanted), engine)
    if role is DECODE and reuse is not None and engine is reuse.decoder and reuse.rank is not None:
        return next((rank for rank in ranks if rank.header == reuse.rank), engine)
    return route.place(engine, role)


def header_line(request: Request, place: Place, known: int | None = None) -> bytes:
    """Return the header line that names the rank `place`, or else the rank `known`; b"" if there is
    neither, or if the client has sent the header."""
    rank = place.header if isinstance(place, EngineRank) else known
    if rank is None or rank_chosen_by_client(request) is not None:
        return b""
    return b"%s: %d\r\n" % (RANK_HEADER, rank)


def rank_chosen_by_client(request: Request) -> bytes | None:
    """Return the data-parallel rank that the client names. It holds for both legs."""
    return next((value for name, value in request.exchange.headers if name == RANK_HEADER), None)


def rank_number_chosen_by_client(request: Request) -> int | None:
    """Return the header's value as a number; -1 if it is none, None if the client names no rank."""
    wanted = rank_chosen_by_client(request)
    if wanted is None:
        return None
    return int(wanted) if wanted.isdigit() and len(wanted) < MAX_RANK_DIGITS else -1
