"""Serve OpenAI's Responses and Anthropic's Messages as chat completions.

A DialectExchange stands between the server and the proxy: the proxy sees a chat completion, and the
client sees its own dialect. Bodies are translated as they pass, whole or streamed. The last events
of a stream are sent after the answer was stored for the next request, so that a client that has
read them can continue the conversation at once.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import orjson

from router.auth.api_keys import AUTHORIZATION, X_API_KEY
from router.common.exact_json import dumps
from router.conversations.stored_responses import ResponseStore, StoredResponse
from router.http_client.answer_limits import Reservation
from router.http_client.engine_answer import NO_ROOM
from router.http_client.errors import AnswersFullError, BrokenAnswerError, UnreadableEventError
from router.http_client.sse import DONE, data_in, events_in
from router.openai.answers import Json, parse_object
from router.openai.anthropic_messages import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    STOP_REASONS,
    MessageOutput,
    anthropic_error,
    chat_from_messages,
    count_request_from_messages,
)
from router.openai.dialects import (
    AnswerBlocks,
    DialectOutput,
    LeftOut,
    UntranslatableError,
    read_dialect_fields,
    require_text,
)
from router.openai.errors import UnsupportedFinishError, error_body, type_of_status
from router.openai.request_fields import MAX_COMPLETION_TOKENS, MAX_OUTPUT_TOKENS, MAX_TOKENS
from router.openai.responses import (
    RESPONSES_PATH,
    ResponseOutput,
    assistant_message,
    chat_from_response,
)
from router.proxy.exchange import BodySource, BodySourceWrapper, Exchange, ExchangeWrapper, Header
from router.proxy.gateway import Gateway
from router.proxy.large_bodies import LARGE_BYTES
from router.proxy.messages import EVENT_STREAM_TYPE, as_stream, encode_body
from router.proxy.request import PASSED, Request, check_fields, check_json, parse_body, take_body
from router.routing.prompt_chunks import estimate_tokens

CHAT_PATH, TOKENIZE_PATH = "/v1/chat/completions", "/tokenize"
UNTRANSLATABLE = "an engine's answer cannot be translated to this API"


class ApiDialect(ABC):
    """One request in a dialect. `answer` collects what the engine sends, and `output` writes it."""

    output: DialectOutput

    def __init__(self, stored: ResponseStore) -> None:
        self.answer = AnswerBlocks()
        self.is_streamed = False
        self.stored = stored

    @abstractmethod
    async def read(self, request: Request, gateway: Gateway, body: Json) -> None:
        """Fill in `request` with the chat completion for `body`. Raises RequestError."""

    @abstractmethod
    def error(self, status: int, error: Json) -> Json:
        """Return the error body for OpenAI's error object."""

    def request_headers(self, headers: Sequence[Header]) -> Sequence[Header]:
        """Return the request's headers as a client of chat completions would send them."""
        return headers

    def whole_answer(self, content: Json) -> Json:
        """Return an unstreamed answer; `content` is the engine's."""
        return self.output.whole()

    def require_known_finish(self) -> None:
        """Raise UnsupportedFinishError if the dialect cannot express the finish reason of an answer
        that was closed."""
        return

    async def store(self) -> None:
        """Store an answer that was closed, if a later request may refer to it."""
        return


class MessagesDialect(ApiDialect):
    def __init__(self, stored: ResponseStore) -> None:
        super().__init__(stored)
        self._id = f"msg_{secrets.token_hex(12)}"
        self.output = MessageOutput(self.answer, self._id, "")

    async def read(self, request: Request, gateway: Gateway, body: Json) -> None:
        left_out = LeftOut()
        chat = chat_from_messages(body, left_out, gateway.limits.changing_prompt_lines)
        self.is_streamed = bool(body.get("stream"))
        self.output = MessageOutput(self.answer, self._id, str(body.get("model", "")))
        _lower_max_tokens(chat, gateway, MAX_TOKENS)
        _take_chat(request, gateway, chat)
        _log_left_out(gateway, MESSAGES_PATH, left_out)

    def request_headers(self, headers: Sequence[Header]) -> Sequence[Header]:
        """Move x-api-key to Authorization, the only credential that engines know."""
        names = {name for name, _ in headers}
        if X_API_KEY not in names:
            return headers
        rest = [header for header in headers if header[0] != X_API_KEY]
        if AUTHORIZATION in names:
            return rest
        key = next(value for name, value in headers if name == X_API_KEY)
        return [*rest, (AUTHORIZATION, b"Bearer " + key)]

    def error(self, status: int, error: Json) -> Json:
        return anthropic_error(status, error)

    def require_known_finish(self) -> None:
        if self.answer.has_unknown_finish and self.answer.finish_reason not in STOP_REASONS:
            reason = self.answer.finish_reason
            raise UnsupportedFinishError(f"the answer ended for the reason {reason!r}")


class CountTokensDialect(MessagesDialect):
    """Counts the tokens of a message with an engine's /tokenize."""

    async def read(self, request: Request, gateway: Gateway, body: Json) -> None:
        limits = gateway.limits
        counted = count_request_from_messages(body, LeftOut(), limits.changing_prompt_lines)
        take_body(request, counted, limits, None, gateway.aliases)
        request.path, request.decode_only_reason, request.threshold = TOKENIZE_PATH, PASSED, 0.0

    def whole_answer(self, content: Json) -> Json:
        if type(count := content.get("count")) is int:
            self.answer.error = None
        return {"input_tokens": count}


class ResponsesDialect(ApiDialect):
    def __init__(self, stored: ResponseStore) -> None:
        super().__init__(stored)
        self._tenant = ""
        self._id = self._root = f"resp_{secrets.token_hex(16)}"
        self.output: ResponseOutput = ResponseOutput(self.answer, {}, self._id, 0)
        self._history: list[Json] = []
        self._is_stored = False

    async def read(self, request: Request, gateway: Gateway, body: Json) -> None:
        self._tenant = self.stored.tenant_of(request.exchange.headers)
        before: list[Json] = []
        has_previous = body.get("previous_response_id") is not None
        if has_previous:
            name = require_text(body, "previous_response_id")
            found = await self.stored.find(self._tenant, name)
            before, self._root = found.messages, found.root
        if isinstance(items := body.get("input"), list):
            items = await self.stored.resolve_references(self._tenant, items)
            body = {**body, "input": items}
        left_out = LeftOut()
        chat, self._history, names = chat_from_response(body, before, left_out)
        self.is_streamed = bool(body.get("stream"))
        self._is_stored = body.get("store") is not False
        echoed = {name: value for name, value in body.items() if name != "input"}
        encode_body({"a": {"a": {"a": echoed}}})  # fails if it is nested too deep for the response
        self.output = ResponseOutput(self.answer, echoed, self._id, int(time.time()), names)
        _lower_max_tokens(chat, gateway, MAX_COMPLETION_TOKENS)
        _take_chat(request, gateway, chat, self._root if has_previous else "")
        _log_left_out(gateway, RESPONSES_PATH, left_out)

    def error(self, status: int, error: Json) -> Json:
        message = str(error.get("message", "")).replace(MAX_COMPLETION_TOKENS, MAX_OUTPUT_TOKENS)
        param = error.get("param")
        if param == MAX_COMPLETION_TOKENS:
            param = MAX_OUTPUT_TOKENS
        return {"error": {**error, "message": message, "param": param}}

    async def store(self) -> None:
        if self._is_stored and self.answer.error is None and not self.answer.has_unknown_finish:
            messages = [*self._history, assistant_message(self.answer)]
            response = StoredResponse(self._root, messages, self.output.whole())
            if not await self.stored.keep(self._tenant, self._id, response):
                self.output.mark_unstored()


DIALECTS: dict[str, type[ApiDialect]] = {
    RESPONSES_PATH: ResponsesDialect,
    MESSAGES_PATH: MessagesDialect,
    COUNT_TOKENS_PATH: CountTokensDialect,
}


def _log_left_out(gateway: Gateway, path: str, left_out: set[str]) -> None:
    for what in left_out:
        gateway.left_out.info(f"requests to {path}: {what} are left out")


def _lower_max_tokens(chat: Json, gateway: Gateway, name: str) -> None:
    """Lower the field `name` to the context length. Clients ask for as many tokens as the models of
    the API's maker allow, and do not know the engines' context."""
    model, asked = chat.get("model") or gateway.fleet.snapshot.default_model, chat.get(name)
    model = gateway.aliases.target_of(model) or model
    context = gateway.fleet.snapshot.context_lengths.get(model) if type(model) is str else None
    if context is not None and isinstance(asked, int | float) and asked > context:
        chat[name] = context


def _take_chat(request: Request, gateway: Gateway, chat: Json, previous_response: str = "") -> None:
    request.path = CHAT_PATH
    take_body(
        request, chat, gateway.limits, gateway.conversations, gateway.aliases, previous_response
    )
    request.tokens = max(request.tokens, estimate_tokens(chat))  # the stored messages count, too
    check_fields(request, gateway.fleet.snapshot.context_lengths)


class DialectExchange(ExchangeWrapper):
    """An Exchange that translates between the server's exchange and the proxy.

    It must be released: until then it reserves the memory of the answer that it holds.
    """

    def __init__(self, inner: Exchange, dialect: ApiDialect, gateway: Gateway) -> None:
        super().__init__(inner)
        self.headers = dialect.request_headers(inner.headers)
        self._dialect, self._pacer = dialect, gateway.pacer
        self._reservation = Reservation(gateway.memory.answers)
        self._is_ended = False
        # Events that were translated before an unsupported end, or before an event that cannot be
        # translated.
        self._unsent = b""

    async def read(self, request: Request, gateway: Gateway) -> None:
        """Raises RequestError."""
        check_json(self.headers)
        body = read_dialect_fields(parse_body(self.body))
        await self._dialect.read(request, gateway, body)

    def release(self) -> None:
        self._reservation.release()

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if status != 200:  # an error: translating it must not fail
            await self._respond_error(max(status, 502) if status < 400 else status, headers, body)
            return
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if kind.startswith(EVENT_STREAM_TYPE):
            events = self._translate(body)
            self._dialect.require_known_finish()
            events += await self._close()
            await self._inner.respond(status, headers, events)
            return
        await self._pause(body)
        content = parse_object(body)
        if content is None:
            raise BrokenAnswerError(UNTRANSLATABLE)
        await self._pause(body)
        await self._respond_answer(status, headers, content, body)

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        translated = TranslatedStream(answer, self._translate, self._reserve)
        await self._inner.relay(status, headers, translated, idle, latest)
        if translated.error is not None and not translated.is_over:
            raise translated.error
        if translated.is_over:  # with heartbeats the proxy does not call `finish`
            try:
                if translated.error is not None:
                    raise translated.error
                self._require_supported_end()
            except (UnsupportedFinishError, UnreadableEventError) as error:
                self._dialect.answer.error = {"message": str(error)}
                await self._end(self._unsent)
                raise
            await self._end(b"")

    async def finish(self, tail: bytes) -> None:
        self._unsent = self._translate(tail)
        self._require_supported_end()
        await self._end(self._unsent)

    def _require_supported_end(self) -> None:
        """Raise UnsupportedFinishError also for a stream that ends without a finish reason."""
        answer = self._dialect.answer
        if answer.error is None and answer.finish_reason is None:
            raise UnsupportedFinishError("the answer ended without a finish reason")
        self._dialect.require_known_finish()

    def _reserve(self) -> bool:
        """Reserve memory for the text of a stream, all of which its last events repeat."""
        return self._reservation.resize(self._dialect.answer.memory)

    async def _pause(self, body: bytes) -> None:
        """Let other clients be served before the next step with a large answer."""
        if len(body) > LARGE_BYTES:
            await self._pacer.turn()

    async def _respond_answer(
        self, status: int, headers: Sequence[Header], content: Json, body: bytes
    ) -> None:
        dialect = self._dialect
        try:
            steps = [*dialect.answer.add(content), *dialect.answer.close()]
        except UntranslatableError as error:
            raise self._untranslatable() from error
        dialect.require_known_finish()
        await dialect.store()
        await self._pause(body)
        if dialect.is_streamed:
            kind, output = EVENT_STREAM_TYPE + b"; charset=utf-8", dialect.output
            headers = as_stream(headers)
            whole = b"".join([*output.events(steps), *output.last_events()])
        else:
            kind = b"application/json"
            try:
                answer = dialect.whole_answer(content)
                await self._pause(body)
                whole = dumps(answer)
            except orjson.JSONEncodeError as error:
                raise self._untranslatable() from error
        if dialect.answer.error is not None:
            raise self._untranslatable()
        await self._inner.respond(status, _with_type(headers, kind), whole)

    def _untranslatable(self) -> BrokenAnswerError:
        self._dialect.output.restart()
        return BrokenAnswerError(UNTRANSLATABLE)

    async def _respond_error(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        content = parse_object(body) or {}
        error = content.get("error", content)
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            error = _openai_error(status, error, body)
        try:
            translated = dumps(self._dialect.error(status, error))
        except orjson.JSONEncodeError:
            error = _openai_error(status, UNTRANSLATABLE, b"")
            translated = dumps(self._dialect.error(status, error))
        await self._inner.respond(status, _with_type(headers, b"application/json"), translated)

    def _translate(self, block: bytes) -> bytes:
        """Translate whole events. A block that begins with a comment is a heartbeat.

        Raises UnreadableEventError for an event that cannot be translated. The events before it
        wait in `_unsent` for the error, or are forgotten if the client has nothing of the answer.
        """
        dialect = self._dialect
        events, self._unsent = [self._unsent], b""
        if block.startswith(b":") and next(events_in(block, at_end=True)).data is None:
            events += dialect.output.heartbeat()
        try:
            for data in data_in(block):
                if data.strip() and not data.startswith(DONE):
                    events += dialect.output.events(dialect.answer.add(_chunk_of(data)))
        except UntranslatableError as error:
            if self.started:
                self._unsent = b"".join(events)
            else:
                dialect.output.restart()
            raise UnreadableEventError(f"an event that cannot be translated: {error}") from error
        return b"".join(events)

    async def _close(self) -> bytes:
        """Close and store the answer. Return the last events, which show whether it is stored."""
        dialect = self._dialect
        closing = b"".join(dialect.output.events(dialect.answer.close()))
        await dialect.store()
        return closing + b"".join(dialect.output.last_events())

    async def _end(self, events: bytes) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        await self._inner.finish(events + await self._close())


class TranslatedStream(BodySourceWrapper):
    """A stream whose blocks are translated and whose end waits, because more events follow it.

    The stream fails once there is no memory for what the translation holds, and with an event that
    cannot be translated (`error`).
    """

    def __init__(
        self, answer: BodySource, translate: Callable[[bytes], bytes], reserve: Callable[[], bool]
    ) -> None:
        super().__init__(answer)
        self._translate, self._reserve = translate, reserve
        self.is_over = False
        self.error: BrokenAnswerError | None = None

    def write(self, block: bytes, last: bool) -> None:
        assert self._sink is not None
        if self.error is not None:
            if not last:
                return
            self.error = None  # this block reports it
        self.is_over = self.is_over or last
        try:
            events = self._translate(block) if block else b""
        except UnreadableEventError as error:
            self.error = error
            self.fail(error)
            return
        if events:
            self._sink.write(events, False)
        if not self._reserve():
            self.fail(AnswersFullError(NO_ROOM))


def _chunk_of(data: bytes) -> Json:
    """Return the content of an event. Raises UntranslatableError."""
    if (content := parse_object(data)) is None:
        raise UntranslatableError("no JSON object")
    return content


def _openai_error(status: int, error: object, body: bytes) -> Json:
    """Return OpenAI's error object for an error of another shape, such as FastAPI's `detail`."""
    detail = error.get("detail") if isinstance(error, dict) else error
    message = detail if isinstance(detail, str) and detail else body.decode("utf-8", "replace")
    made = error_body(status, type_of_status(status), message[:1000] or UNTRANSLATABLE)
    own: Json = orjson.loads(made)["error"]
    return own


def _with_type(headers: Sequence[Header], kind: bytes) -> list[Header]:
    rest = [header for header in headers if header[0] != b"content-type"]
    return [(b"content-type", kind), *rest]
