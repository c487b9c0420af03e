"""What a request asks of the router itself, in fields and headers that engines do not get."""

from __future__ import annotations

from dataclasses import dataclass

from router.conversations.conversations import Turn
from router.flows.decode_first import threshold_of
from router.flows.errors import BadRequestError
from router.flows.gateway import Gateway
from router.flows.headers import CONVERSATION_STREAM
from router.flows.request import Request

STREAM_FIELD = "conversation_stream"
CONSUMED = frozenset(("conversation_id", STREAM_FIELD))
MODES = ("auto", "exact")


@dataclass(frozen=True, slots=True)
class Options:
    """`threshold` 0: the decoder is not asked first. `exact`: see the setting."""

    turn: Turn | None
    threshold: float
    exact: bool


def take_options(request: Request, gateway: Gateway) -> Options | None:
    """Reads them and removes them from the body; None for a plain request.

    Raises BadRequestError.
    """
    body, limits = request.body, gateway.limits
    threshold = threshold_of(body, limits.decode_first_threshold)
    turn = None
    if gateway.conversations is not None:
        turn = gateway.conversations.turn_of(request.exchange.headers, body)
    asked = turn is not None or STREAM_FIELD in body
    mode = _mode(request, limits.conversation_stream) if asked else ""
    if not CONSUMED.isdisjoint(body):
        request.body = {name: body[name] for name in body if name not in CONSUMED}
    if turn is None and not threshold:
        return None
    return Options(turn, threshold, mode == "exact")


def _mode(request: Request, default: str) -> str:
    mode = request.body.get(STREAM_FIELD)
    if mode is None:
        headers = request.exchange.headers
        given = next((value for name, value in headers if name == CONVERSATION_STREAM), b"")
        mode = given.decode("latin-1").lower() or default
    if mode not in MODES:
        raise BadRequestError(f"{STREAM_FIELD} must be one of {', '.join(MODES)}")
    return str(mode)
