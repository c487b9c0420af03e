"""`GET /disagg/leases`: an engine's leases, its quarantined blocks, its peers and its latest
transfers.

A client that knows a request's id can release its blocks (release.py), and the random part of an
id is short. Therefore the page shows ids hashed with a key of the engine's process. A client that
knows an id can look it up with `?request_id=`. Ended transfers are listed by the client's part of
the id, which gives no rights. That part is hashed without a key, so that a router recognises its
own requests and cannot identify others.
"""

import re
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from engine_ext.common.inspection import (
    Inspection,
    LeaseSeen,
    MovedSeen,
    PeerSeen,
    QuarantineSeen,
    TransferSeen,
)

PATH = "/disagg/leases"
ASKED = "request_id"
ANSWER_SECONDS = 10.0
"""The time in which an engine must answer. It answers between two steps."""

_NAME = re.compile(
    # The choice, the kind, the client's part, our router's attempt, the prompt, the engine's part.
    r"(?:(?:\d+_)?(?:chat)?cmpl-)?(.+?)(?:\.[0-9a-f]{10}\d+)?(?:-\d+)?(?:-[0-9a-f]{8})?"
)
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")
"""Characters that engines may replace in a client's id."""


def new_key() -> bytes:
    return secrets.token_bytes(16)


def hashed(request_id: str, key: bytes) -> str:
    return blake2b(request_id.encode(), digest_size=8, key=key).hexdigest()


def found_by(request_id: str) -> str:
    """Return the hash of the client's `X-Request-Id`, which is part of the engine's request id."""
    name = _NAME.fullmatch(request_id)
    own = _FOREIGN.sub("-", name[1] if name else request_id)
    return blake2b(own.encode(), digest_size=8).hexdigest()


def page(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"ranks": list(ranks)}


def rank(seen: Inspection, key: bytes, dp_rank: int = 0) -> dict[str, Any]:
    """Return the part of one tensor rank as JSON."""
    return {
        "dp_rank": dp_rank,
        "tp_rank": seen.tp_rank,
        "leases": [_lease(one, key) for one in seen.leases],
        "num_leases": seen.num_leases,
        "quarantined": [_quarantined(one, key) for one in seen.quarantined],
        "num_quarantined": seen.num_quarantined,
        "peers": [_peer(one) for one in seen.peers],
        "num_peers": seen.num_peers,
        "engine_id": seen.engine_id,
        "transfers": [_transfer(one) for one in seen.transfers],
        "moved": [_moved(one) for one in seen.moved],
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


def _transfer(one: TransferSeen) -> dict[str, Any]:
    return {
        "what": one.what,
        "found_by": found_by(one.request_id),
        "engine_id": one.engine_id,
        "blocks": one.num_blocks,
        "bytes": one.num_bytes,
        "seconds": round(one.seconds, 6),
        "age_seconds": _rounded(one.age),
    }


def _moved(one: MovedSeen) -> dict[str, Any]:
    return {
        "what": one.what,
        "engine_id": one.engine_id,
        "transfers": one.num_transfers,
        "bytes": one.num_bytes,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
