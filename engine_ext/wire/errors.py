"""What all wire formats have in common: whatever is not what it should be is one error."""

from typing import Annotated

import msgspec

CONNECTOR_VERSION = 14
EXTENSION_VERSION = 2

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""

Unsigned = Annotated[int, msgspec.Meta(ge=0)]

Seconds = Annotated[float, msgspec.Meta(ge=0)]

Rank = tuple[int, int]
"""(pipeline rank, tensor rank)."""


class WireError(Exception):
    """What a peer sent is not what the protocol says."""
