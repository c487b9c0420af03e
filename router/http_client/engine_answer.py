"""One engine's answer to one request, while it arrives.

States: *waiting* (the request was sent) → *ready* (there is something to act on) → *done*. An event
stream is ready with the first byte of its body, and a 5xx with its head, since its body does not
matter. Any other answer is ready when it is complete or when HIGH_WATER bytes of it were received.
Until an answer is ready, a failure can still become the status of the router's own answer.

Received bytes are held until the reader takes them. An answer that holds more than HIGH_WATER bytes
stops reading from the engine, unless it is read whole: so a slow client slows the engine down
instead of filling the router's memory. An answer that is read whole reserves its bytes in
MemoryBudget until it is closed.

`ready` and the like return futures instead of being coroutines: on the hot path a coroutine costs
about a hundredth of a whole request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic as now
from typing import Protocol

from router.common.deadlines import Deadlines
from router.http_client.answer_limits import MemoryBudget, Reservation
from router.http_client.errors import (
    AnswersFullError,
    AnswerTimeoutError,
    AnswerTooLargeError,
    EventTooLargeError,
    ReaderStalledError,
    SilenceError,
    UpstreamError,
)
from router.http_client.head_cache import Headers
from router.http_client.sse import EVENT_ENDS, SseReader, end_of_last_event, says_done

HIGH_WATER = 224 * 1024
NO_ROOM = "large answers take all of --max-held-answers"
# How much of a relayed body is kept as `recent`: the ends of its last blocks.
LAST_BLOCKS = 4
LAST_BLOCK_BYTES = 2048


class AnswerConnection(Protocol):
    """The connection that an answer arrives on, as far as the answer uses it."""

    loop: asyncio.AbstractEventLoop

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...
    def half_close(self) -> None: ...


class AnswerTap(Protocol):
    """Sees each relayed block, returns what to relay instead, and writes the end of the body
    itself after the last one."""

    def passing(self, block: bytes, last: bool) -> bytes: ...


class Resumable(Protocol):
    """The record of a stream from which another engine may continue."""

    @property
    def can_resume(self) -> bool: ...


class AnswerSink(Protocol):
    """Receives a relayed body: one call for all that arrived together; `last` marks the end."""

    def write(self, block: bytes, last: bool) -> None: ...


class EngineAnswer:
    """An answer with its reader's and its connection's side. Its reader must close it.

    Times are seconds of `now`. The connection sets `status` (0 until the head is here), `headers`
    (lower-case names, without Content-Length if a length is announced), `length`,
    `is_event_stream` and, through `fail`, `error`. `first_body_at` is the time of the first body
    byte. `is_complete`: the whole body was received. `held` are the pieces of it that were not
    taken yet. `recent` are the ends of the last blocks that `relay` has passed on.

    The reader may set: `watch`, which sees the whole events of a stream, or the pieces of another
    body, before the tap, and returns what to pass on, or sets `error`; `tap`, see AnswerTap;
    `checked`, the whole body if it is complete and certainly reports no failure;
    `resume_buffer`, which knows whether another engine can continue the stream; `memory`, where the
    bytes of an answer that is read whole are reserved as `reservation`, None for no limit.
    """

    # No Struct, of which each assignment costs more: a stream's deadline is set with each chunk.
    __slots__ = ("_connection", "_deadlines", "_held_size", "_idle", "_latest", "_reader", "_sink",
                 "_stalled", "_waiter", "_whole_limit", "checked", "deadline", "error",
                 "first_body_at", "headers", "held", "is_complete", "is_event_stream", "length",
                 "memory", "recent", "reservation", "resume_buffer", "status", "tap",
                 "watch")  # fmt: skip

    def __init__(
        self,
        connection: AnswerConnection,
        deadlines: Deadlines,
        deadline: float,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._connection = connection
        self._deadlines = deadlines
        self.deadline = deadline
        deadlines.watch(self)
        self.memory = memory
        self.status = 0
        self.headers: Headers = ()
        self.length: int | None = None
        self.is_event_stream = self.is_complete = self._stalled = False
        self.first_body_at: float | None = None
        self.error: UpstreamError | None = None
        self.tap: AnswerTap | None = None
        self.watch: Callable[[bytes], bytes] | None = None
        self.checked = b""
        self.resume_buffer: Resumable | None = None
        self.reservation: Reservation | None = None
        self.held: list[bytes] = []
        self._held_size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._whole_limit: int | None = None
        self._sink: AnswerSink | None = None
        self._reader: SseReader | None = None
        self.recent: deque[bytes] | None = None

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this lower-case name."""
        return next((value for key, value in self.headers if key == name), None)

    # The connection's side.

    def note_server_error(self) -> None:
        """Called with the head of a 5xx: the reader need not wait for its body."""
        if self._whole_limit is None:
            self._wake()

    def feed_complete(self, status: int, headers: Headers, body: bytes) -> None:
        """Take an answer that arrived whole in one read. Like `feed`, in half the steps: nothing
        was fed before, and it is neither a stream nor a 5xx."""
        self.status = status
        self.headers = headers
        self.length = self._held_size = len(body)
        if body:
            self.first_body_at = now()
            self.held = [body]
        self.is_complete = True
        self._deadlines.drop(self)
        if self._whole_limit is not None:
            self._limit_held()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def feed(self, block: bytes, done: bool) -> None:
        """Take the body bytes of one read; `done` marks the end of the body."""
        if done:
            self.is_complete = True
            self._deadlines.drop(self)
        sink = self._sink
        if sink is None:
            self._hold(block)
            return
        # Each chunk of each stream passes here, so the steps of most chunks are not functions.
        deadline = now() + self._idle
        self.deadline = deadline if deadline < self._latest else self._latest
        reader = self._reader
        if reader is not None and (reader.held or not block.endswith(EVENT_ENDS)):
            try:
                block = reader.whole_events(block)
            except EventTooLargeError as error:
                self._give_up(error)
                return
            if done:
                block += reader.rest()
        if block and self.watch is not None:
            block = self.watch(block)
            if self.error is not None:
                self._give_up(self.error)
                return
        if block and self.recent is not None:
            self.recent.append(block[-LAST_BLOCK_BYTES:])
        if self.tap is not None:
            if block := self.tap.passing(block, done):
                sink.write(block, False)
        elif block or done:
            sink.write(block, done)
        if done and self._waiter is not None:
            self._wake()

    def fail(self, error: UpstreamError) -> None:
        """Set the error. Later failures are ignored, and so are all of a complete answer."""
        if not self.is_complete and self.error is None:
            self.error = error
            self._deadlines.drop(self)
            self._wake()

    def expire(self) -> None:
        """Fail, because the deadline is over."""
        if self._stalled:
            self.fail(ReaderStalledError("the client stopped reading"))
        else:
            kind = AnswerTimeoutError if self.status else SilenceError
            self.fail(kind("no answer in time"))
        self.close()

    # The reader's side.

    def ready(self) -> asyncio.Future[None]:
        """Return a future that is done once the answer is ready or has failed; call
        `raise_if_failed` then."""
        self._waiter = waiter = self._connection.loop.create_future()
        if (self.status or self.error is not None) and self._is_ready():
            self._wake()
        return waiter

    def raise_if_failed(self) -> None:
        """Raises UpstreamError if the answer has failed."""
        if self.error is not None:
            raise self.error

    def take_if_complete(self, limit: int) -> bytes | None:
        """Take the body if it is complete and has at most `limit` bytes, else return None."""
        if not self.is_complete or self._sink is not None or self._held_size > limit:
            return None
        held, self.held, self._held_size = self.held, [], 0
        return held[0] if len(held) == 1 else b"".join(held)

    async def read(self, limit: int) -> bytes:
        """Wait for the end of the body and take it. Raises UpstreamError, AnswersFullError, and
        AnswerTooLargeError beyond `limit` bytes."""
        if self.is_complete and self._held_size <= limit:
            return self._take()
        self._whole_limit = limit
        self._limit_held()
        if not self.is_complete:
            self._connection.resume()
            await self.ready()
        self.raise_if_failed()
        return self._take()

    def replace_body(self, body: bytes) -> None:
        """Hold `body` instead of the bytes that are held."""
        self.held, self._held_size = [body], len(body)

    async def read_in_place(self, limit: int) -> bytes:
        """Wait for the whole body like `read` and return it, but keep holding it."""
        body = await self.read(limit)
        self.replace_body(body)
        return body

    def peek(self) -> bytes:
        """Return the held bytes without taking them."""
        if len(self.held) > 1:
            self.held = [b"".join(self.held)]
        return self.held[0] if self.held else b""

    async def peek_until(self, enough: Callable[[bytes], bool]) -> bytes:
        """Return the held bytes without taking them as soon as `enough` accepts them, the body is
        complete, or HIGH_WATER bytes are held. A stream is held to the end of an event. Raises
        UpstreamError."""
        while True:
            self.raise_if_failed()
            block = self.peek()
            if self.is_complete or enough(block):
                return block
            ended = end_of_last_event(block) if self.is_event_stream else len(block)
            if ended > HIGH_WATER:
                return block
            if self.is_event_stream:
                await self._wait_for_end_of_event(block[ended:])
            else:
                await self._new_waiter()

    async def _wait_for_end_of_event(self, begun: bytes) -> None:
        """Wait for the end of the event that begins with `begun`. Raises UpstreamError."""
        gate, num_seen = SseReader(), len(self.held)
        passed = gate.whole_events(begun)
        while not passed and not self.is_complete:
            if self._held_size > HIGH_WATER:  # reading is paused within this event
                self._connection.resume()
            await self._new_waiter()
            self.raise_if_failed()
            for piece in self.held[num_seen:]:
                passed += gate.whole_events(piece)
            num_seen = len(self.held)

    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None:
        """Pass the body to `sink` as it arrives, until it ends.

        `idle` is the longest silence in seconds, `latest` the time of `now` when the body must
        have ended. Raises UpstreamError; `sink` then never gets a last block.
        """
        self._sink, self._idle, self._latest = sink, idle, latest
        self.recent = deque(maxlen=LAST_BLOCKS)
        if self.is_event_stream and not self.is_complete:
            self._reader = SseReader()
        self.feed(self._take(), self.is_complete)
        if self.error is not None:
            raise self.error
        if self.is_complete:
            return
        if not self._stalled:
            self._connection.resume()
        await self._new_waiter()
        self.raise_if_failed()

    @property
    def is_delivered(self) -> bool:
        """A stream's last event was passed on to a reader that keeps up. Clients disconnect once
        they have it, without waiting for the end of the body."""
        return (
            self.is_event_stream
            and not self._stalled
            and says_done(b"".join(self.recent or ()), True)
        )

    def pause(self) -> None:
        """Stop reading from the engine, because the reader's buffers are full."""
        self._stalled = True
        if not self.is_complete:
            self._connection.pause()

    def resume(self) -> None:
        self._stalled = False
        if not self.is_complete:
            self._connection.resume()

    def close(self) -> None:
        """Give the answer up. Aborts the connection of an unfinished one. May be called twice."""
        self._sink = None
        if self.reservation is not None:
            self.reservation.release()
        if not self.is_complete:
            self._deadlines.drop(self)
            self._connection.abort()

    def half_close(self) -> None:
        """Signal a disconnect to the engine and keep reading what it has sent until then."""
        if not self.is_complete:
            self._connection.half_close()

    def _is_ready(self) -> bool:
        if self.is_complete or self.error is not None:
            return True
        if self._whole_limit is not None or not self.status:
            return False
        if self.status >= 500:
            return True
        if self.first_body_at is None:
            return False
        return self._held_size > HIGH_WATER or self.is_event_stream

    def _limit_held(self) -> None:
        if self._whole_limit is None:
            if self._held_size > HIGH_WATER and not self.is_complete:
                self._connection.pause()
        elif self._held_size > self._whole_limit:
            error = AnswerTooLargeError(f"an answer of more than {self._whole_limit} bytes")
            self._give_up(error)
        elif self._held_size > HIGH_WATER and not self._reserve(self._whole_limit):
            self._give_up(AnswersFullError(NO_ROOM))

    def _reserve(self, limit: int) -> bool:
        """Reserve the held bytes, or the announced length. Return False if there is no room."""
        if self.memory is None:
            return True
        if self.reservation is None:
            self.reservation = Reservation(self.memory)
        return self.reservation.resize(max(self._held_size, min(self.length or 0, limit)))

    def _give_up(self, error: UpstreamError) -> None:
        self.error = error
        self.held, self._held_size = [], 0
        self.close()
        self._wake()

    def _take(self) -> bytes:
        held, self.held, self._held_size = self.held, [], 0
        return held[0] if len(held) == 1 else b"".join(held)

    def _hold(self, block: bytes) -> None:
        if block:
            if self.first_body_at is None:
                self.first_body_at = now()
            self.held.append(block)
            self._held_size += len(block)
        if not self.is_complete or self._whole_limit is not None:
            self._limit_held()
        if self._is_ready():
            self._wake()

    def _new_waiter(self) -> asyncio.Future[None]:
        self._waiter = waiter = self._connection.loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
