"""What one request leaves behind for metrics, the access line and its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from router.telemetry.trace_context import Trace


class Tokens(NamedTuple):
    """None: not known. `cached`: of the prompt, what nobody computed for this request."""

    prompt: int | None
    completion: int | None
    cached: int | None


class Record(Struct, eq=False):
    """Filled in by the flow as it goes. A Struct, for one of so many fields is made at a tenth of
    a dataclass's price. Times are seconds of the monotonic clock.

    `stage` is where the request is: "receive", "queue", "prefill", "decode", "stream" or "done".
    `conversation` is what became of the last turn's KV, empty outside conversations.
    `outcome` is "ok", "refused" (a 4xx, whoever said so), "engine_error" (an engine's 5xx, passed
    on), "failed" (the router's), "broken_stream" (an error after the first byte) or "disconnected"
    (the client left). `model` is what the client asked for, if that can be a name.
    """

    endpoint: str
    started: float
    request_id: str = ""
    flow: str = "none"
    stage: str = "receive"
    outcome: str = "failed"
    status: int = 0
    prefiller: str = ""
    decoder: str = ""
    conversation: str = ""
    reused_from: str = ""
    """The decoder whose turn a prefiller was told to pull."""
    prefill_started: float | None = None
    prefill_done: float | None = None
    decode_started: float | None = None
    first_byte: float | None = None
    ended: float | None = None
    error: str = ""
    usage: bytes = b""
    """Where the answer says how many tokens it has, not read yet (see `usage`); so is the next."""
    prefill_usage: bytes = b""
    offered: bytes = b""
    """The params of the prefiller that a decoder was sent with, not read yet: where lines tell how
    much was moved."""
    failures: tuple[str, ...] = ()
    """Legs that failed, and what followed, one line each. Few requests have any."""
    model: str = ""
    key: str = ""
    """The name of the router's API key that was shown, where there are such keys."""
    group: str = ""
    streamed: bool = False
    retries: int = 0
    queued: float | None = None
    """When it began to wait for room at engines, and when that was over."""
    seated: float | None = None
    tokens: Tokens | None = None
    """Read once, by who needs them first: see `usage.tokens_of`."""
    trace: Trace | None = None
