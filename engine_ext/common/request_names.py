"""How two engines that never spoke recognise the same request.

Each kind of name has a word before it, so that none can be written in the place of another.
"""

import re

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def base_id(request_id: str) -> str:
    """The id without the eight hex digits that each engine appends to what the router sent."""
    return _RANDOM_SUFFIX.sub("", request_id)


def whole_id(request_id: str) -> str:
    return f"id {request_id}"


def names_of(
    request_id: str, transfer_id: str | None, remote_request_id: str | None = None
) -> tuple[str, ...]:
    """Most certain first. `remote_request_id`: what the router told D, or P's own id."""
    names = [] if transfer_id is None else [f"transfer {transfer_id}"]
    if remote_request_id is not None:
        names += [whole_id(remote_request_id), f"base {remote_request_id}"]
    names += [whole_id(request_id), f"base {base_id(request_id)}"]
    return tuple(dict.fromkeys(names))


def stock_names_of(
    request_id: str, transfer_id: str | None, trusts_request_ids: bool
) -> tuple[str, ...]:
    """Of a registration by an engine without our extension, whose prompt P cannot compare.

    vLLM 0.32 sends its own request id and nothing else; later versions the router's `transfer_id`,
    too. Both engines make their ids of `X-Request-Id`, which may be a client's: two clients that
    chose the same one would get each other's KV, and a stranger who knows one, theirs. So an id
    counts only with the suffix that P alone could have told, unless the operator says that the
    router makes `X-Request-Id` itself, anew for each attempt.
    """
    names = names_of(request_id, transfer_id)
    if trusts_request_ids:
        return names
    without_base = names[:-1]
    return without_base if base_id(request_id) != request_id else without_base[:-1]
