"""The names by which two engines recognise the same request before they have exchanged a message.

Each name begins with its kind, so that a client cannot choose a name of another kind.
"""

import re

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def base_id(request_id: str) -> str:
    """Return the id without the eight hex digits that each engine appends to the router's id."""
    return _RANDOM_SUFFIX.sub("", request_id)


def whole_id(request_id: str) -> str:
    return f"id {request_id}"


def names_of(
    request_id: str, transfer_id: str | None, remote_request_id: str | None = None
) -> tuple[str, ...]:
    """Return the names, the most certain first. `remote_request_id`: P's own id, or the id that the
    router sent to D."""
    names = [] if transfer_id is None else [f"transfer {transfer_id}"]
    if remote_request_id is not None:
        names += [whole_id(remote_request_id), f"base {remote_request_id}"]
    names += [whole_id(request_id), f"base {base_id(request_id)}"]
    return tuple(dict.fromkeys(names))


def stock_names_of(
    request_id: str, transfer_id: str | None, trusts_request_ids: bool
) -> tuple[str, ...]:
    """Return the names of a registration by a stock engine, whose prompt P cannot compare.

    vLLM 0.32 sends only its own request id; later versions also send the router's `transfer_id`.
    Both engines derive their ids from `X-Request-Id`, which a client may choose. Two clients that
    chose the same one would get each other's KV, and so would a stranger who knows a client's. So
    an id counts only with the suffix that P made and sent in its answer. With `trusts_request_ids`
    the router makes a new `X-Request-Id` for each attempt, and an id without suffix counts too.
    """
    names = names_of(request_id, transfer_id)
    if trusts_request_ids:
        return names
    without_base = names[:-1]
    return without_base if base_id(request_id) != request_id else without_base[:-1]
