"""One client request as a record. `request_parser` fills it in."""

from __future__ import annotations

from itertools import count
from random import getrandbits
from typing import Any

from router.common.structs import IdentityStruct
from router.conversations.conversations import Turn
from router.proxy.exchange import Exchange
from router.telemetry.record import Record

Body = dict[str, Any]
COMPLETIONS = "/v1/completions"
KV_PARAMS = "kv_transfer_params"
THRESHOLD = "cache_hit_threshold"
# Reasons why one engine must do all the work (Request.alone).
CLIENT_PARAMS = "client_params"
# Several answers, unless decode engines load KV once for all of them.
SEVERAL = "n"
# An endpoint that one engine answers: see router.proxy.passthrough.
PASSED = "passed"
# Requests whose params are the client's, or which have none.
AS_SENT = frozenset((PASSED, CLIENT_PARAMS))
# Ids of legs are this process's own: two clients may send the same X-Request-Id, and in push mode
# legs of the same id are one request.
_process, _legs = f"{getrandbits(40):010x}", count()
next_number = count().__next__


class Request(IdentityStruct):
    """One client request, as the router has read it."""

    exchange: Exchange
    """The connection to the client. It may be wrapped: by heartbeats, by the key's limits."""
    record: Record
    """The data for metrics, the access log and the trace."""
    shared_headers: bytes
    """Header lines for all legs."""
    latest: float
    """The loop time of the request's deadline."""
    number: int
    """The number of the request in this process, which spreads requests over engines."""
    body: Body = {}  # noqa: RUF012 - each Struct has its own
    """The part of the client's body that engines may see. It is never changed."""
    alone: str = ""
    """Why one engine must do all the work; empty if two can share it."""
    turn: Turn | None = None
    """The turn of a conversation, if the request names one."""
    threshold: float = 0.0
    """Above 0: a decode engine that has this share of the prompt in its cache answers alone."""
    exact: bool = False
    """See the setting conversation_stream."""
    event_stream: bool = False
    """The client gets an event stream, so errors are events from now on."""
    path: str = ""
    """The path at the engines, if it is not the client's own endpoint."""
    form: bytes = b""
    """The Content-Type of a body that is not JSON and goes to an engine as it is."""
    tokens: int = 0
    """The prompt's tokens, estimated by its bytes: a measure of load."""
    is_several: bool = False
    """Several answers are asked for, of decode engines that load KV once for all of them."""

    @property
    def model(self) -> object:
        return self.body.get("model")

    def leg_id(self) -> str:
        """Return a new X-Request-Id for one attempt of a leg. It begins with the client's id."""
        return f"{self.record.request_id}.{_process}{next(_legs)}"
