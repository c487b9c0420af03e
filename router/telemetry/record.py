"""What one request leaves behind for metrics and the access line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Record:
    """Filled in by the flow as it goes. Times are seconds of the monotonic clock.

    `stage` is where the request is: "receive", "queue", "prefill", "decode", "stream" or "done".
    `conversation` is what became of the last turn's KV, empty outside conversations.
    `outcome` is "ok", "refused" (a 4xx, whoever said so), "engine_error" (an engine's 5xx, passed
    on), "failed" (the router's), "broken_stream" (an error after the first byte) or "disconnected"
    (the client left).
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
    failures: tuple[str, ...] = ()
    """Legs that failed, and what followed, one line each. Few requests have any."""
