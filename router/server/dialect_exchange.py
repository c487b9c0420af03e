"""An Exchange that speaks another dialect with its client, and a chat's with the flows.

Its bodies, whole or streamed, are translated as they pass. The last events wait until what the next
turn needs is kept, so that a client that has read them may go on at once.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import orjson

from router.common.exact_json import dumps
from router.conversations.stored_responses import ResponseStore, StoredResponse
from router.http_client.answer_memory import AnswerMemory, Reservation
from router.http_client.engine_answer import NO_ROOM, AnswerSink
from router.http_client.errors import (
    AnswersFullError,
    AnswerTooLargeError,
    BrokenAnswerError,
    UpstreamError,
)
from router.openai import anthropic_messages, responses
from router.openai.answer_blocks import Step, Story
from router.openai.answers import Json, events_in, parse_object
from router.openai.errors import UnsupportedFinishError, error_body, type_of_status
from router.openai.field_checks import text
from router.proxy.content_type import check_json
from router.proxy.exchange import Before, Exchange, Header, Relayed
from router.proxy.gateway import Gateway
from router.proxy.leg_bodies import write
from router.proxy.request import PASSED, Request, parse_body
from router.routing.prompt_chunks import tokens_of

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
EVENT_STREAM = b"text/event-stream"
KEY = b"x-api-key"
STRANGE = "an engine answered with something that cannot be told here"


Translate = Callable[[bytes], bytes]


class Speaker(ABC):
    """One request in a dialect, and its answer."""

    def __init__(self) -> None:
        self.story = Story()
        self.streams = False

    @abstractmethod
    async def read(self, request: Request, gateway: Gateway, asked: Json) -> None:
        """Raises RequestError."""

    @abstractmethod
    def whole(self, content: Json) -> Json:
        """Of a whole answer."""

    @abstractmethod
    def failed(self, status: int, error: Json) -> Json: ...

    @abstractmethod
    def tell(self, steps: Iterable[Step]) -> Iterator[bytes]: ...

    @abstractmethod
    def end(self) -> Iterator[bytes]: ...

    def require_told(self) -> None:
        """Raise UnsupportedFinishError if the dialect has no counterpart for the finish reason.
        Called when the story has ended."""
        return

    async def keep(self) -> None:
        """Store the answer for a later request. Called when the story has ended well."""
        return


class MessagesSpeaker(Speaker):
    def __init__(self) -> None:
        super().__init__()
        self._name, self._model = f"msg_{secrets.token_hex(12)}", ""
        self._events = anthropic_messages.Events(self.story, self._name, "")

    async def read(self, request: Request, gateway: Gateway, asked: Json) -> None:
        chat = anthropic_messages.chat_of(asked)
        self.streams = bool(asked.get("stream"))
        self._model = str(asked.get("model", ""))
        self._events = anthropic_messages.Events(self.story, self._name, self._model)
        _take(request, gateway, chat)

    def whole(self, content: Json) -> Json:
        return anthropic_messages.message_of(self.story, self._name, self._model)

    def failed(self, status: int, error: Json) -> Json:
        return anthropic_messages.error_of(status, error)

    def require_told(self) -> None:
        if self.story.is_odd:
            raise UnsupportedFinishError(f"the answer ended for the reason {self.story.finish!r}")

    def tell(self, steps: Iterable[Step]) -> Iterator[bytes]:
        return self._events.tell(steps)

    def end(self) -> Iterator[bytes]:
        return self._events.end()


class CountSpeaker(MessagesSpeaker):
    """How many tokens a message would have: an engine's /tokenize knows."""

    async def read(self, request: Request, gateway: Gateway, asked: Json) -> None:
        request.take(anthropic_messages.chat_to_count(asked), gateway.limits, None)
        request.path, request.alone, request.threshold = TOKENIZE, PASSED, 0.0

    def whole(self, content: Json) -> Json:
        if type(count := content.get("count")) is int:
            self.story.error = None
        return {"input_tokens": count}


class ResponsesSpeaker(Speaker):
    def __init__(self, kept: ResponseStore, headers: Sequence[Header]) -> None:
        super().__init__()
        self._kept, self._tenant = kept, kept.tenant(headers)
        self._name = f"resp_{secrets.token_hex(16)}"
        self._telling = responses.Telling(self.story, {}, self._name, 0)
        self._history: list[Json] = []
        self._root = self._name
        self._is_kept = False

    async def read(self, request: Request, gateway: Gateway, asked: Json) -> None:
        before: list[Json] = []
        previous = asked.get("previous_response_id")
        if previous is not None:
            name = text(previous, "previous_response_id")
            found = await self._kept.find(self._tenant, name)
            before, self._root = found.messages, found.root
        chat, self._history = responses.chat_of(asked, before)
        self.streams = bool(asked.get("stream"))
        self._is_kept = asked.get("store") is not False
        echoed = {name: value for name, value in asked.items() if name != "input"}
        write({"a": {"a": {"a": echoed}}})  # it can be said back
        self._telling = responses.Telling(self.story, echoed, self._name, int(time.time()))
        if previous is not None:  # it is a conversation, then
            chat.setdefault("conversation_id", self._root)
        _take(request, gateway, chat)

    def whole(self, content: Json) -> Json:
        return self._telling.response()

    def failed(self, status: int, error: Json) -> Json:
        message = str(error.get("message", "")).replace(
            responses.MAX_COMPLETION, responses.MAX_OUTPUT
        )
        param = error.get("param")
        if param == responses.MAX_COMPLETION:
            param = responses.MAX_OUTPUT
        return {"error": {**error, "message": message, "param": param}}

    def tell(self, steps: Iterable[Step]) -> Iterator[bytes]:
        return self._telling.tell(steps)

    def end(self) -> Iterator[bytes]:
        return self._telling.end()

    async def keep(self) -> None:
        if self._is_kept and self.story.error is None and not self.story.is_odd:
            messages = [*self._history, responses.said_in(self.story)]
            kept = StoredResponse(self._root, messages, self._telling.response())
            await self._kept.keep(self._tenant, self._name, kept)


def _take(request: Request, gateway: Gateway, chat: Json) -> None:
    request.path = CHAT
    request.take(chat, gateway.limits, gateway.conversations)
    request.tokens = max(request.tokens, tokens_of(chat))  # of what was said before, too
    request.check(gateway.fleet.snapshot.context_lengths)


def authorized(headers: Sequence[Header]) -> Sequence[Header]:
    """Anthropic's clients send their key by another name than the one that engines know."""
    names = {name for name, _ in headers}
    if KEY not in names:
        return headers
    rest = [header for header in headers if header[0] != KEY]
    if b"authorization" in names:
        return rest
    key = next(value for name, value in headers if name == KEY)
    return [*rest, (b"authorization", b"Bearer " + key)]


class Translated(Before):
    """`most`: bytes of an answer that is no stream. `memory`: where what is held of the answer is
    reserved, until `release`."""

    def __init__(self, front: Exchange, speaker: Speaker, most: int, memory: AnswerMemory) -> None:
        super().__init__(front)
        self._speaker, self._most = speaker, most
        self._reservation = Reservation(memory)
        self._is_ended = False
        # Translated by the time that the answer's end could not be told.
        self._unsent = b""

    async def read(self, request: Request, gateway: Gateway) -> None:
        """Raises RequestError."""
        check_json(self.headers)
        await self._speaker.read(request, gateway, parse_body(self.body))

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if status != 200:  # told of a failure: here nothing may fail any more
            await self._refuse(max(status, 502) if status < 400 else status, headers, body)
            return
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if kind.startswith(EVENT_STREAM):
            told = self._translated(body)
            self._speaker.require_told()
            told += self._last()
            await self._speaker.keep()
            await self._front.respond(status, headers, told)
            return
        content = parse_object(body)
        if content is None:
            raise BrokenAnswerError(STRANGE)
        await self._tell(status, headers, content)

    async def relay(
        self, status: int, headers: Sequence[Header], answer: Relayed, idle: float, latest: float
    ) -> None:
        if not answer.is_event_stream:
            whole = Whole(answer, self._most, self._reservation)
            await answer.relay(whole, idle, latest)
            await self.respond(status, headers, whole.body())
            return
        passing = Passing(answer, self._translated, self._has_room)
        await self._front.relay(status, headers, passing, idle, latest)
        if passing.is_over:  # with heartbeats: the end has come by the same way
            try:
                self._require_told()
            except UnsupportedFinishError as error:
                self._speaker.story.error = {"message": str(error)}
                await self._end(b"")
                raise
            await self._end(b"")

    async def finish(self, tail: bytes) -> None:
        self._unsent += self._translated(tail)
        self._require_told()
        await self._end(self._unsent)

    def _require_told(self) -> None:
        """Of a stream. Raises UnsupportedFinishError for one that says [DONE] and not why, too."""
        story = self._speaker.story
        if story.error is None and story.finish is None:
            raise UnsupportedFinishError("the answer ended for no reason that was said")
        self._speaker.require_told()

    def release(self) -> None:
        """End the reservation: nothing of the answer is held any more."""
        self._reservation.release()

    def _has_room(self) -> bool:
        """Reserve the text of a stream, all of which its last events repeat."""
        return self._reservation.resize(self._speaker.story.memory)

    async def _tell(self, status: int, headers: Sequence[Header], content: Json) -> None:
        speaker = self._speaker
        steps = [*speaker.story.hear(content), *speaker.story.end()]
        speaker.require_told()
        if speaker.streams:
            if speaker.story.error is not None:
                raise self._strange()
            told = b"".join(speaker.tell(steps))
            await speaker.keep()
            given = _with_type(headers, EVENT_STREAM + b"; charset=utf-8")
            await self._front.respond(status, given, told + b"".join(speaker.end()))
            return
        try:
            whole = dumps(speaker.whole(content))
        except orjson.JSONEncodeError as error:
            raise self._strange() from error
        if speaker.story.error is not None:
            raise self._strange()
        await speaker.keep()
        await self._front.respond(status, _with_type(headers, b"application/json"), whole)

    def _strange(self) -> BrokenAnswerError:
        """Of an answer of which nobody has anything."""
        self._speaker.story.begin()
        return BrokenAnswerError(STRANGE)

    async def _refuse(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        content = parse_object(body) or {}
        error = content.get("error", content)
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            error = _own_error(status, error, body)
        try:
            told = dumps(self._speaker.failed(status, error))
        except orjson.JSONEncodeError:
            told = dumps(self._speaker.failed(status, _own_error(status, STRANGE, b"")))
        await self._front.respond(status, _with_type(headers, b"application/json"), told)

    def _translated(self, block: bytes) -> bytes:
        """Of whole events. A comment stays one."""
        if block.startswith(b":") and b"\ndata:" not in block:
            return block
        speaker = self._speaker
        told: list[bytes] = []
        for content in events_in(block):
            told += speaker.tell(speaker.story.hear(content))
        return b"".join(told)

    def _last(self) -> bytes:
        speaker = self._speaker
        closing = b"".join(speaker.tell(speaker.story.end()))
        return closing + b"".join(speaker.end())

    async def _end(self, told: bytes) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        last = self._last()
        await self._speaker.keep()
        await self._front.finish(told + last)


class Passing:
    """A Relayed whose blocks are translated, and whose end is not told: something comes after. It
    fails once there is no room for what the translation holds."""

    is_event_stream = True
    length: int | None = None

    def __init__(self, answer: Relayed, translate: Translate, has_room: Callable[[], bool]) -> None:
        self._answer, self._translate, self._has_room = answer, translate, has_room
        self._sink: AnswerSink | None = None
        self.is_over = False

    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None:
        self._sink = sink
        await self._answer.relay(self, idle, latest)

    def write(self, block: bytes, last: bool) -> None:
        assert self._sink is not None
        self.is_over = self.is_over or last
        if block and (told := self._translate(block)):
            self._sink.write(told, False)
        if not self._has_room():
            self.fail(AnswersFullError(NO_ROOM))

    def pause(self) -> None:
        self._answer.pause()

    def resume(self) -> None:
        self._answer.resume()

    def fail(self, error: UpstreamError) -> None:
        self._answer.fail(error)


class Whole:
    """A Sink that keeps what comes of an answer, which fails once that is too much."""

    def __init__(self, answer: Relayed, most: int, reservation: Reservation) -> None:
        self._answer, self._most, self._reservation = answer, most, reservation
        self._size = 0
        self._pieces: list[bytes] = []
        self._error: UpstreamError | None = None

    def write(self, block: bytes, last: bool) -> None:
        self._size += len(block)
        size = max(self._size, self._answer.length or 0)
        if self._error is not None:
            return
        if size > self._most:
            self._error = AnswerTooLargeError(f"an answer of more than {self._most} bytes")
        elif not self._reservation.resize(size):
            self._error = AnswersFullError(NO_ROOM)
        else:
            self._pieces.append(block)
            return
        self._pieces.clear()
        self._reservation.release()
        self._answer.fail(self._error)

    def body(self) -> bytes:
        """Raises AnswerTooLargeError, AnswersFullError."""
        if self._error is not None:
            raise self._error
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def _own_error(status: int, error: object, body: bytes) -> Json:
    """OpenAI's object, of what is none: FastAPI's has a detail."""
    said = error.get("detail") if isinstance(error, dict) else error
    message = said if isinstance(said, str) and said else body.decode("utf-8", "replace")
    made = error_body(status, type_of_status(status), message[:1000] or STRANGE)
    own: Json = orjson.loads(made)["error"]
    return own


def _with_type(headers: Sequence[Header], kind: bytes) -> list[Header]:
    rest = [header for header in headers if header[0] != b"content-type"]
    return [(b"content-type", kind), *rest]
