"""What all wire formats share: versions, number types, and one error for malformed messages."""

from typing import Annotated

import msgspec

from engine_ext.common.config import MOST_SECONDS

CONNECTOR_VERSION = 14
"""The version of the stock protocol that we follow. Fields that later versions add are optional."""
EXTENSION_VERSION = 3
"""The version of the messages about leases and pushes between engines with our extension.

Engines of two versions move no KV, in either direction. The version is part of the handshake, and
the dialer compares: a READ, a registration and a WRITE are refused by name (worker/peers.py). An
engine from before that rule takes another version for stock, and would read without asking whether
the lease still holds. It finds our prefix hashes unreadable, so it reads nothing. Therefore VERSION
in common/prefix_hashes.py is raised together with this version. Two versions still exchange one
stock message: that a lease will not be read.
"""

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for malformed bytes."""

Unsigned = Annotated[int, msgspec.Meta(ge=0)]

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

Duration = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
"""Seconds for which a peer promises something. It is bounded, because we may have to wait for
it."""

Instant = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Seconds of a peer's monotonic clock."""

MAX_IDS = 4096
"""Ids in one notification. Ours are shorter, see `batch_ids`."""

Rank = tuple[int, int]
"""(pipeline rank, tensor rank)."""


class WireError(Exception):
    """A peer sent something that the protocol does not allow."""
