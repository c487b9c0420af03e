"""SGLang's disaggregation (read in SGLang 0.5.23).

Both engines get the client's request at once, with the address of the prefill engine's bootstrap
server and the number of a room, in which the two legs meet. The first token comes from the prefill
engine, within the room: so it needs the client's sampling fields, and stops after one token by
itself. Several answers of one request are in the rooms that follow.

An engine in one of these modes serves no request outside of a room. If one leg ends, the other
waits for its peer for minutes, so it is aborted by its `rid`.
"""

from __future__ import annotations

from random import getrandbits
from typing import Any

from router.common.exact_json import dumps
from router.fleet.engine import Engine, Place, engine_of
from router.fleet.kv_protocol import SGLANG
from router.proxy.kv_protocols.protocol import Abort, LegPair, TransferProtocol
from router.proxy.messages import CLIENTS, new_leg_id
from router.proxy.ranks import header_line, rank_chosen_by_client
from router.proxy.request import Request

# Rooms are numbers of 63 bits. The rest is room for the answers that follow the first one.
ROOM_BITS = 62


class SGLang(TransferProtocol):
    name = SGLANG
    runs_together = True
    decoder_prefills = False

    def pair(self, request: Request, place: Place, decoder: Engine) -> LegPair | None:
        engine = engine_of(place)
        rid = new_leg_id(request.record.request_id)
        fields: dict[str, Any] = {
            "bootstrap_host": engine.spec.address.host,
            "bootstrap_port": engine.capabilities.kv_peer.bootstrap_port,
            "bootstrap_room": getrandbits(ROOM_BITS),
            "rid": rid,
        }
        prefill = dumps(fields)[1:-1]
        rank = rank_chosen_by_client(request)
        if rank is not None and rank.isdigit() and len(rank) < 8:
            # Without it the decode engine looks for the KV at the rank of the room's number.
            fields["disagg_prefill_dp_rank"] = int(rank)
        return LegPair(
            place,
            pinned=header_line(request, place),
            prefill_fields=prefill,
            lengths=CLIENTS,
            decode_fields=dumps(fields)[1:-1],
            abort=Abort("/abort_request", {"rid": rid}),
        )
