"""The record of one request for metrics, the access log and its trace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from router.telemetry.trace_context import Trace

logger = logging.getLogger("disagg_router")
MAX_BATCH_DELAY_S = 0.1
MAX_BATCH_RECORDS = 512


class Tokens(NamedTuple):
    """Token counts of a request; None where unknown. `cached` prompt tokens came from a cache."""

    prompt: int | None
    completion: int | None
    cached: int | None


class Record(Struct, eq=False):
    """Facts about one request, filled in while the request runs.

    Times are seconds of the monotonic clock. A Struct, because making a dataclass with so many
    fields takes ten times as long.

    `stage` is where the request is: "receive", "queue", "prefill", "decode", "stream" or "done".
    `outcome` is "ok", "refused" (a 4xx from the router or an engine), "engine_error" (an engine's
    5xx, passed on), "failed" (the router failed), "broken_stream" (an error after the first byte)
    or "disconnected" (the client disconnected).
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
    """The outcome of reusing the last turn's KV; empty outside conversations."""
    reused_from: str = ""
    """The decode engine from which the prefill engine pulled the last turn's KV."""
    prefill_started: float | None = None
    prefill_done: float | None = None
    decode_started: float | None = None
    first_byte: float | None = None
    ended: float | None = None
    error: str = ""
    usage: bytes = b""
    """The usage object of the answer, not parsed yet; see `token_usage`."""
    prefill_usage: bytes = b""
    """The usage object of the prefill answer, not parsed yet."""
    transfer_params: bytes = b""
    """The kv_transfer_params that the decode engine got, not parsed yet. Set only if access log
    lines report the number of blocks."""
    failures: tuple[str, ...] = ()
    """A line for each failed leg and what followed."""
    model: str = ""
    """The model that the client named, if that is a valid name."""
    key: str = ""
    """The name of the client's API key, if the router checks keys."""
    group: str = ""
    streamed: bool = False
    retries: int = 0
    queued: float | None = None
    """When the request began to wait for a slot at an engine."""
    admitted: float | None = None
    """When the request got a slot."""
    tokens: Tokens | None = None
    """Parsed once by `token_usage.tokens_of`."""
    trace: Trace | None = None


RecordReader = Callable[[Sequence[Record]], None]


class RecordBatches:
    """Passes the records of ended requests to `readers`, many together.

    Batches make each record cheaper, and the work happens when no client waits for it. An exception
    in one reader does not affect the others.
    """

    def __init__(
        self, readers: Sequence[RecordReader], max_delay_s: float = MAX_BATCH_DELAY_S
    ) -> None:
        self._readers = readers
        self._max_delay_s = max_delay_s
        self._ended: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: Record) -> None:
        self._ended.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_delay_s, self.flush)
        elif len(self._ended) >= MAX_BATCH_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Pass on all records now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        if not ended:
            return
        for read in self._readers:
            try:
                read(ended)
            except Exception:
                logger.exception("%d records of requests could not be processed", len(ended))
