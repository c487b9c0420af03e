"""SGLang's disaggregation (read in SGLang 0.5.23).

Both engines get the client's request at once, with the address of the prefill engine's bootstrap
server and the number of a room, in which the two legs meet. The first token comes from the prefill
engine, within the room: so it needs the client's sampling fields, and stops after one token by
itself. The prompts of a list are in the rooms that follow. All answers to one prompt (`n`) would be
in one room, where they never end or get each other's KV, so such a request is refused.

An engine in one of these modes serves no request outside of a room. If one leg ends, the other
waits for its peer for 300 s, so it is aborted by its `rid`. Legs of several prompts have another
`rid` for each one. These end as SGLang sees that their connection is closed, within 4 s.
"""

from __future__ import annotations

from random import getrandbits
from typing import Any

from router.common.exact_json import dumps
from router.fleet.engine import Engine, Place, engine_of
from router.fleet.kv_protocol import SGLANG
from router.openai.errors import BadRequestError
from router.proxy.kv_protocols.protocol import Abort, LegPair, TransferProtocol
from router.proxy.messages import CLIENTS, new_leg_id
from router.proxy.ranks import header_line, rank_chosen_by_client
from router.proxy.request import Request

# Rooms are numbers of 63 bits. The prompts of a list take the numbers that follow.
ROOM_BITS = 62
# Fields by which clients name a data-parallel rank, the newer one first.
RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")
MAX_RANK_BYTES = 8


class SGLang(TransferProtocol):
    name = SGLANG
    runs_together = True
    decoder_prefills = False

    def pair(self, request: Request, place: Place, decoder: Engine) -> LegPair | None:
        engine = engine_of(place)
        peer = engine.capabilities.kv_peer
        if not (peer.moves_kv and decoder.capabilities.kv_peer.moves_kv):
            return None
        number = request.body.get("n")
        if isinstance(number, int) and number > 1:
            raise BadRequestError("SGLang's disaggregation serves only n = 1", "n")
        # SGLang aborts all requests whose rid begins with the given one, so no rid may be the
        # beginning of another.
        rid = f"{new_leg_id(request.record.request_id)}-"
        fields: dict[str, Any] = {
            "bootstrap_host": engine.spec.address.host,
            "bootstrap_port": peer.bootstrap_port,
            "bootstrap_room": getrandbits(ROOM_BITS),
            "rid": rid,
        }
        rank = _find_rank(request)
        if rank is not None:
            # Without it the decode engine looks for the KV at the rank of the room's number, and
            # any other rank of the prefill engine fails the request.
            fields["disagg_prefill_dp_rank"] = rank
        written = dumps(fields)[1:-1]
        return LegPair(
            place,
            pinned=header_line(request, place),
            prefill_fields=written,
            lengths=CLIENTS,
            decode_fields=written,
            abort=Abort("/abort_request", {"rid": rid}),
        )


def _find_rank(request: Request) -> int | None:
    """Return the data-parallel rank that the client names, as SGLang reads it."""
    header = rank_chosen_by_client(request)
    if header is not None:
        try:
            return int(header) if len(header) < MAX_RANK_BYTES else None
        except ValueError:
            return None
    fields = (request.body.get(name) for name in RANK_FIELDS)
    return next((rank for rank in fields if type(rank) is int), None)
