"""Engines that share a store of KV: LMCache, MooncakeStore, shared files.

The prefill engine computes the prompt and writes its KV into the store, and the decode engine finds
it there by the tokens. The legs need no field. Whether the decode engine has found anything shows
only in its own `cached_tokens`.
"""

from __future__ import annotations

from router.fleet.engine import Engine, Place
from router.fleet.kv_protocol import STORE
from router.proxy.kv_protocols.protocol import LegPair, TransferProtocol
from router.proxy.ranks import header_line
from router.proxy.request import Request


class KvStore(TransferProtocol):
    name = STORE
    runs_together = False

    def pair(self, request: Request, place: Place, decoder: Engine) -> LegPair | None:
        return LegPair(place, pinned=header_line(request, place), prefill_fields=b"")
