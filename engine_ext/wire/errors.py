"""What all wire formats have in common: whatever is not what it should be is one error."""

from typing import Annotated

import msgspec

from engine_ext.common.config import MOST_SECONDS

CONNECTOR_VERSION = 14
"""Of stock's protocol, after which ours is made; what later ones add we can do without."""
EXTENSION_VERSION = 2
"""Of what engines with our extension say to each other about leases and pushes.

Engines of two versions move no KV to or from each other, in either direction. The version is part
of the handshake, and who dials compares: a READ, a registration and a WRITE are refused by name
(transfer/peer.py). An engine from before that rule takes another version for stock and reads
without asking whether the lease still holds. It finds our prefix proofs unreadable, so it reads
nothing: whoever raises this version raises VERSION in base/proof.py with it. What two versions do
say to each other is stock's: that a lease will not be read.
"""

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""

Unsigned = Annotated[int, msgspec.Meta(ge=0)]

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

Duration = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
"""Seconds that a peer promises something for: one that never ends could not be waited for."""

Instant = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Seconds, on somebody's monotonic clock."""

MAX_IDS = 4096
"""In one notification; ours are shorter, see `batches`."""

Rank = tuple[int, int]
"""(pipeline rank, tensor rank)."""


class WireError(Exception):
    """What a peer sent is not what the protocol says."""
