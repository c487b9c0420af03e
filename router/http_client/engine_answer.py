"""One engine's answer to one request, while it arrives.

Its life: *waiting* (asked) → *ready* (something to act on) → *done*. An event stream is ready at
the first byte of its body and a 5xx with its head, for nobody waits for the rest of a failure;
anything else when it is done, or when HIGH_WATER bytes of it are here.
Until then a failure can still become an honest status line.

Bytes are held until someone takes them. An answer that holds more than HIGH_WATER bytes stops
reading the engine's socket, unless it is being read whole: so a slow client slows the engine down
and does not fill the router's memory. What is read whole is reserved in AnswerMemory until the
answer is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from router.http_client.answer_memory import AnswerMemory, Reservation
from router.http_client.deadlines import Deadlines, now
from router.http_client.errors import (
    AnswersFullError,
    AnswerTimeoutError,
    AnswerTooLargeError,
    EventTooLargeError,
    ReaderStalledError,
    SilenceError,
    UpstreamError,
)
from router.http_client.sse import SseReader, end_of_last_event

Headers = Sequence[tuple[bytes, bytes]]
HIGH_WATER = 256 * 1024
NO_ROOM = "large answers take all of --max-held-answers"
# What is remembered of a body that was relayed: the ends of its last blocks.
LAST_BLOCKS = 4
LAST_BYTES = 2048
DONE = b"[DONE]"


class AnswerConnection(Protocol):
    """What an answer needs of the connection that it arrives on."""

    loop: asyncio.AbstractEventLoop

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...
    def half_close(self) -> None: ...


class AnswerTap(Protocol):
    """Looks at a body that is relayed, changes it, and says its end itself, when all is relayed."""

    def passing(self, block: bytes, last: bool) -> bytes: ...


class Resumable(Protocol):
    @property
    def can_resume(self) -> bool: ...


class AnswerSink(Protocol):
    """Where a relayed body goes: one call for all that arrived together, the last one marked."""

    def write(self, block: bytes, last: bool) -> None: ...


class EngineAnswer:
    """Times are seconds of the monotonic clock. What its head says is filled in by the connection,
    and `error` set where it has failed. `resume_buffer`: keeps what the reader has, for another
    engine to go on with. `memory`: where its bytes are reserved while it is read whole, None for an
    answer that is never refused. `reservation`: those bytes, once there are some. `watch`: sees
    whole events of a stream before anything else, or what comes of a long answer, and what it
    returns passes, unless it has set `error`."""

    __slots__ = ("_done", "_gate", "_held", "_held_size", "_idle", "_latest", "_recent", "_sink",
                 "_stalled", "_waiter", "_whole_limit", "_wire", "deadline", "deadlines", "error",
                 "first_body_at", "headers", "is_event_stream", "length", "memory", "reservation",
                 "resume_buffer", "status", "tap", "watch")  # fmt: skip

    def __init__(
        self,
        wire: AnswerConnection,
        deadlines: Deadlines,
        deadline: float,
        memory: AnswerMemory | None = None,
    ) -> None:
        self._wire = wire
        self.deadlines = deadlines
        self.deadline = deadline
        self.status = 0
        self.headers: Headers = ()
        self.length: int | None = None
        self.is_event_stream = self._done = self._stalled = False
        self.first_body_at: float | None = None
        self.tap: AnswerTap | None = None
        self.watch: Callable[[bytes], bytes] | None = None
        self.resume_buffer: Resumable | None = None
        self.error: UpstreamError | None = None
        self.memory = memory
        self.reservation: Reservation | None = None
        self._whole_limit: int | None = None
        self._held: list[bytes] = []
        self._held_size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._sink: AnswerSink | None = None
        self._gate: SseReader | None = None
        self._idle = self._latest = 0.0
        self._recent: deque[bytes] | None = None

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    # The engine's side: the connection calls these, and fills in what the head says.

    def note_server_error(self) -> None:
        """The head is here, and says that there will be no answer."""
        if self._whole_limit is None:
            self._wake()

    def feed_complete(self, status: int, headers: Headers, body: bytes) -> None:
        """All of an answer that is no stream and no failure came at once, and is the first to come.
        As `feed` would have it, in half the steps."""
        self.status = status
        self.headers = headers
        self.length = self._held_size = len(body)
        if body:
            self.first_body_at = now()
            self._held = [body]
        self._done = True
        self.deadlines.drop(self)
        if self._whole_limit is not None:
            self._limit_held()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def feed(self, block: bytes, done: bool) -> None:
        """Takes what one read of the socket brought of the body."""
        if block and self.first_body_at is None:
            self.first_body_at = now()
        if done:
            self._done = True
            self.deadlines.drop(self)
        sink = self._sink
        if sink is not None:
            self._pass_on(sink, block)
            if done:
                self._wake()
            return
        if block:
            self._held.append(block)
            self._held_size += len(block)
        if not done or self._whole_limit is not None:
            self._limit_held()
        if done or self._is_ready():
            self._wake()

    def fail(self, error: UpstreamError) -> None:
        """The first failure counts, and none once the end has arrived."""
        if not self._done and self.error is None:
            self.error = error
            self.deadlines.drop(self)
            self._wake()

    def expire(self) -> None:
        if self._stalled:
            self.fail(ReaderStalledError("the client stopped reading"))
        else:
            kind = AnswerTimeoutError if self.status else SilenceError
            self.fail(kind("no answer in time"))
        self.close()

    # The reader's side.

    def ready(self) -> asyncio.Future[None]:
        """Done when there is something to act on, or a failure: that is for `check` to say.

        No coroutine: each costs a hundredth of all that a request costs.
        """
        self._waiter = waiter = self._wire.loop.create_future()
        if (self.status or self.error is not None) and self._is_ready():
            self._wake()
        return waiter

    def raise_if_failed(self) -> None:
        """Raises UpstreamError when the answer has failed."""
        if self.error is not None:
            raise self.error

    def take_if_complete(self, limit: int) -> bytes | None:
        """The body, if all of it is here; it is then taken. No coroutine, as `ready`."""
        if not self._done or self._sink is not None or self._held_size > limit:
            return None
        held = self._held
        self._held = []
        self._held_size = 0
        return held[0] if len(held) == 1 else b"".join(held)

    async def read(self, limit: int) -> bytes:
        """The rest of the body. Raises UpstreamError, AnswerTooLargeError beyond `limit` bytes,
        AnswersFullError."""
        if self._done and self._held_size <= limit:
            return self._take()
        self._whole_limit = limit
        self._limit_held()
        if not self._done:
            self._wire.resume()
            await self.ready()
        self.raise_if_failed()
        return self._take()

    def replace_body(self, body: bytes) -> None:
        """In the place of all that is here."""
        self._held, self._held_size = [body], len(body)

    async def read_in_place(self, limit: int) -> bytes:
        """The same, left in place."""
        body = await self.read(limit)
        self.replace_body(body)
        return body

    def peek(self) -> bytes:
        """What is here, left in place: in one piece from now on, however often it is asked."""
        if len(self._held) > 1:
            self._held = [b"".join(self._held)]
        return self._held[0] if self._held else b""

    async def peek_until(self, enough: Callable[[bytes], bool]) -> bytes:
        """What has come so far, left in place, as soon as `enough` of it is here.

        Or when all is here, or HIGH_WATER bytes, of a stream in whole events. Raises UpstreamError.
        """
        while True:
            self.raise_if_failed()
            block = self.peek()
            if self._done or enough(block):
                return block
            ended = end_of_last_event(block) if self.is_event_stream else len(block)
            if ended > HIGH_WATER:
                return block
            if self.is_event_stream:
                await self._end_of_event(block[ended:])
            else:
                await self._news()

    async def _end_of_event(self, begun: bytes) -> None:
        """Return when a started event has ended, or the body. Raises UpstreamError."""
        gate, looked_at = SseReader(), len(self._held)
        passed = gate.whole_events(begun)
        while not passed and not self._done:
            if self._held_size > HIGH_WATER:  # reading has stopped, and this event is not all here
                self._wire.resume()
            await self._news()
            self.raise_if_failed()
            for piece in self._held[looked_at:]:
                passed += gate.whole_events(piece)
            looked_at = len(self._held)

    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None:
        """Passes the body to `sink` as it arrives, until it ends.

        `idle` is the longest silence in seconds, `latest` the loop time when all must be over.
        Raises UpstreamError; `sink` then gets no more and was never told of an end.
        """
        self._sink, self._idle, self._latest = sink, idle, latest
        self._recent = deque(maxlen=LAST_BLOCKS)
        if self.is_event_stream:
            self._gate = SseReader()
        self._pass_on(sink, self._take())
        self.raise_if_failed()
        if self._done:
            return
        self.deadlines.watch(self)
        if not self._stalled:
            self._wire.resume()
        await self._news()
        self.raise_if_failed()

    @property
    def is_complete(self) -> bool:
        """Whether all of the body is here."""
        return self._done

    @property
    def tail(self) -> bytes:
        """About the last that was relayed, as it came."""
        return b"".join(self._recent or ())

    @property
    def is_delivered(self) -> bool:
        """Whether a stream's last event was passed on to a reader that keeps up: clients leave
        when they have it, and do not wait for the body's end."""
        return self.is_event_stream and not self._stalled and self.tail.rstrip().endswith(DONE)

    def pause(self) -> None:
        """The reader's buffers are full: stop reading from the engine."""
        self._stalled = True
        if not self._done:
            self._wire.pause()

    def resume(self) -> None:
        self._stalled = False
        if not self._done:
            self._wire.resume()

    def close(self) -> None:
        """Gives the answer up; an unfinished one costs its connection. May be called twice."""
        self._sink = None
        if self.reservation is not None:
            self.reservation.release()
        if not self._done:
            self.deadlines.drop(self)
            self._wire.abort()

    def half_close(self) -> None:
        """Tells the engine that nobody waits for more, and leaves open what it has sent by then."""
        if not self._done:
            self._wire.half_close()

    def _is_ready(self) -> bool:
        if self._done or self.error is not None:
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
            if self._held_size > HIGH_WATER and not self._done:
                self._wire.pause()
        elif self._held_size > self._whole_limit:
            error = AnswerTooLargeError(f"an answer of more than {self._whole_limit} bytes")
            self._refuse(error)
        elif self._held_size > HIGH_WATER and not self._reserve(self._whole_limit):
            self._refuse(AnswersFullError(NO_ROOM))

    def _reserve(self, limit: int) -> bool:
        """Reserve what is here, or all that is announced. Returns False if there is no room."""
        if self.memory is None:
            return True
        if self.reservation is None:
            self.reservation = Reservation(self.memory)
        return self.reservation.resize(max(self._held_size, min(self.length or 0, limit)))

    def _refuse(self, error: UpstreamError) -> None:
        self.error = error
        self._held, self._held_size = [], 0
        self.close()
        self._wake()

    def _take(self) -> bytes:
        held, self._held, self._held_size = self._held, [], 0
        return held[0] if len(held) == 1 else b"".join(held)

    def _pass_on(self, sink: AnswerSink, block: bytes) -> None:
        deadline = now() + self._idle
        self.deadline = deadline if deadline < self._latest else self._latest
        if self._gate is not None:
            try:
                block = self._gate.whole_events(block)
            except EventTooLargeError as error:
                self.error = error
                self.close()
                self._wake()
                return
            if self._done:
                block += self._gate.rest()
        if block and self.watch is not None:
            block = self.watch(block)
            if self.error is not None:
                self.close()
                self._wake()
                return
        if block and self._recent is not None:
            self._recent.append(block[-LAST_BYTES:])
        if self.tap is not None:
            if block := self.tap.passing(block, self._done):
                sink.write(block, False)
        elif block or self._done:
            sink.write(block, self._done)

    def _news(self) -> asyncio.Future[None]:
        self._waiter = waiter = self._wire.loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
