"""`GET /disagg/leases`: what an engine holds for others, what it cannot let go of, whom it knows.

A request's name entitles to release its blocks, and the part of it that nobody can guess is short:
names are shown hashed with a key of the engine's process. Who knows a name may ask for it alone,
with `?request_id=`.
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from engine_ext.base.inspection import Inspection, LeaseSeen, PeerSeen, QuarantineSeen

PATH = "/disagg/leases"
ASKED = "request_id"
ANSWER_SECONDS = 10.0
"""That an engine has to answer in, which it does between two steps."""


def new_key() -> bytes:
    return secrets.token_bytes(16)


def hashed(request_id: str, key: bytes) -> str:
    return blake2b(request_id.encode(), digest_size=8, key=key).hexdigest()


def page(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"ranks": list(ranks)}


def rank(seen: Inspection, key: bytes, dp_rank: int = 0) -> dict[str, Any]:
    """One tensor rank's part of the page, as JSON."""
    return {
        "dp_rank": dp_rank,
        "tp_rank": seen.tp_rank,
        "leases": [_lease(one, key) for one in seen.leases],
        "num_leases": seen.num_leases,
        "quarantined": [_quarantined(one, key) for one in seen.quarantined],
        "num_quarantined": seen.num_quarantined,
        "peers": [_peer(one) for one in seen.peers],
        "num_peers": seen.num_peers,
    }


def _lease(lease: LeaseSeen, key: bytes) -> dict[str, Any]:
    return {
        "request": hashed(lease.request_id, key),
        "state": lease.state,
        "age_seconds": _rounded(lease.age),
        "seconds_left": _rounded(lease.seconds_left),
        "readers": [
            {"agent": reader.agent, "seconds_left": _rounded(reader.seconds_left)}
            for reader in lease.readers
        ],
    }


def _quarantined(one: QuarantineSeen, key: bytes) -> dict[str, Any]:
    return {
        "request": hashed(one.request_id, key),
        "engine_id": one.engine_id,
        "num_blocks": one.num_blocks,
        "overdue_seconds": _rounded(one.overdue),
    }


def _peer(peer: PeerSeen) -> dict[str, Any]:
    return {
        "engine_id": peer.engine_id,
        "host": peer.host,
        "port": peer.port,
        "rank": peer.rank,
        "connected_seconds": _rounded(peer.age),
        "in_use": peer.is_in_use,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
