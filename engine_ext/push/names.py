"""How two engines that never spoke recognise the same request."""

import re

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def base_id(request_id: str) -> str:
    """The id without the eight hex digits that each engine appends to what the router sent."""
    return _RANDOM_SUFFIX.sub("", request_id)
