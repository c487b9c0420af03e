"""Relay a decode engine's answer to the client, and keep what a turn leaves for the next turn.

The decode engine's kv_transfer_params name the KV that the next turn can reuse. The router asked
for them, so the client does not see them. They are stored before the client sees the end of the
answer: its next turn then finds them, at whichever router it arrives. Retained KV that no turn will
find is released.

A stream is not decoded while it passes, but searched for the params. Once the stream has ended with
params, the answer is read from a copy.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Sequence
from functools import partial
from time import monotonic as now
from typing import Any

import orjson

from router.common.exact_json import dumps
from router.conversations.conversations import Turn
from router.fleet.engine import DECODE, Engine
from router.http_client.answer_limits import UNCOUNTED_BYTES, Reservation
from router.http_client.engine_answer import HIGH_WATER, LAST_BLOCKS, EngineAnswer
from router.http_client.errors import BrokenAnswerError
from router.http_client.sse import data_in
from router.openai.answers import (
    AnswerChoice,
    Json,
    can_stream,
    chunks_in,
    parse_object,
    read_choice,
    read_streamed_choice,
    stream_events,
)
from router.openai.errors import EngineUnavailableError, PreemptedError
from router.proxy import messages
from router.proxy.answer_check import (
    LongAnswerCheck,
    PrefillAnswer,
    StreamValidator,
    failure_midway,
    failure_of,
    is_broken_off,
)
from router.proxy.exchange import Header
from router.proxy.gateway import Gateway
from router.proxy.id_resume import IdBuffer
from router.proxy.internal_fields import (
    answer_without_internal_fields,
    count_internal_fields,
    hide_fields_of_long_answer,
    mentions_internal_fields,
    take_fields_from_events,
    take_internal_fields,
)
from router.proxy.request import CLIENT_PARAMS, KV_PARAMS, PASSED, Request
from router.proxy.resume_buffer import ResumeBuffer
from router.proxy.run import Run
from router.proxy.token_ids import MARK, RETURN_TOKEN_IDS, StreamedIds, take_token_ids
from router.telemetry.logs import LogThrottle
from router.telemetry.metrics import Metrics
from router.telemetry.request_metrics import USAGE_SEARCH_BYTES, usage_in

logger = logging.getLogger("disagg_router.proxy")
MAX_COPY_BYTES = 4 * 1024 * 1024
DONE = "done"
OUTPUT_EVENT, ROLE_KEY = re.compile(rb'"choices"\s*:\s*\[\s*\{'), b'"role"'
Keeping = Coroutine[Any, Any, None]
EVENT_STREAM: list[Header] = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON: list[Header] = [(b"content-type", b"application/json")]


async def deliver(run: Run, answer: EngineAnswer, validator: StreamValidator | None) -> None:
    """Relay the decode engine's answer to the client as it arrives. `validator` checks a stream."""
    request, gateway = run.request, run.gateway
    record, limits, exchange = request.record, gateway.limits, request.exchange
    note_first_byte(run, answer)
    raw: bytes | None = answer.checked
    if not raw or len(raw) > limits.max_answer_size:
        if answer.is_event_stream:
            raw = None
        elif request.path:  # the server translates the answer, whole
            raw = await answer.read(limits.max_answer_size)
        else:
            raw = answer.take_if_complete(limits.max_answer_size)
        is_long = raw is not None and len(raw) > HIGH_WATER
        if raw and is_long and request.decode_only_reason != PASSED and is_broken_off(raw):
            raise BrokenAnswerError("an answer that the engine aborted")
    hides_fields = request.decode_only_reason != CLIENT_PARAMS
    if raw is not None:
        record.answer_end, sent = raw[-USAGE_SEARCH_BYTES:], raw
        if hides_fields:
            raw = answer_without_internal_fields(raw)
        is_passed = request.decode_only_reason == PASSED and not request.path
        is_as_sent = is_passed and raw is sent
        passed = messages.to_client(answer.headers, record.request_id, is_as_sent=is_as_sent)
        await exchange.respond(answer.status, passed, raw)
        record.stage, record.outcome = DONE, "ok"
        return
    request.event_stream = record.streamed = answer.is_event_stream
    passed = messages.to_client(answer.headers, record.request_id, answer.is_event_stream)
    buffer = run.resume.buffer if answer.is_event_stream else None
    if buffer is not None:
        _record(buffer, gateway.metrics, None)
        answer.tap = answer.resume_buffer = buffer
    elif validator is not None:
        answer.tap, validator.hides_fields = validator, hides_fields
    elif request.decode_only_reason != PASSED:
        answer.watch = LongAnswerCheck(answer).passing
    if hides_fields and not answer.is_event_stream:
        hide_fields_of_long_answer(answer)
    _count_events(run, answer)
    try:
        await exchange.relay(
            answer.status, passed, answer, limits.stream_idle_timeout, request.latest
        )
    except asyncio.CancelledError:
        if answer.is_delivered and (validator is None or validator.failure is None):
            record.stage, record.outcome = DONE, "ok"
        raise
    finally:
        if buffer is not None:
            record.streamed_tokens = buffer.num_tokens
        # An engine that continues by ids counts a longer prompt than the client's.
        end = b"" if buffer is None else buffer.last[-USAGE_SEARCH_BYTES:]
        end = end or b"".join(answer.recent or ())
        if end.rfind(b'"usage"') >= 0:
            record.usage = stream_usage(end) if answer.is_event_stream else usage_in(end)
    if buffer is not None:
        require_end(buffer)
        await exchange.finish(buffer.last)
    elif validator is not None:
        if validator.failure is not None:
            raise validator.failure
        await exchange.finish(validator.last)
    record.stage, record.outcome = DONE, "ok"


def _count_events(run: Run, answer: EngineAnswer) -> None:
    """Count a stream's events with output while the dashboard is open: the stream may report no
    usage. Quotes inside of JSON strings are escaped, so a model's text is never counted."""
    if run.gateway.watch is None or not answer.is_event_stream:
        return
    record, before = run.request.record, answer.watch

    def count(block: bytes) -> bytes:
        if not record.streamed_events and block.find(ROLE_KEY) >= 0:
            record.streamed_events = -1  # the first event of a chat has no output
        record.streamed_events += len(OUTPUT_EVENT.findall(block))
        return block if before is None else before(block)

    answer.watch = count


async def deliver_prefilled(run: Run, prefilled: PrefillAnswer) -> None:
    """Send a prefill engine's answer whose one token is the whole answer."""
    request = run.request
    record, body = request.record, request.body
    content = parse_object(prefilled.raw)
    if content is None or not can_stream(content):
        raise BrokenAnswerError("an answer without choices")
    take_internal_fields(content)
    take_token_ids(content, body.get(RETURN_TOKEN_IDS) is True)
    record.stage, record.status, record.first_byte = "stream", 200, now()
    record.answer_end = prefilled.raw[-USAGE_SEARCH_BYTES:]
    if request.turn is not None:
        record.kept = "not_kept"
    if body.get("stream") is True:
        request.event_stream = record.streamed = True
        raw, kind = stream_events(content, body), EVENT_STREAM
    else:
        raw, kind = _written(content), JSON
    passed = messages.to_client(kind, record.request_id, request.event_stream)
    await request.exchange.respond(200, passed, raw)
    note_done(request)


async def deliver_turn(
    run: Run, turn: Turn, engine: Engine, answer: EngineAnswer, validator: StreamValidator | None
) -> None:
    """Relay the answer as `deliver` does, and keep what it leaves for the conversation's next
    turn."""
    request, gateway = run.request, run.gateway
    record, limits = request.record, gateway.limits
    note_first_byte(run, answer)
    keep = partial(_keep, request, gateway, turn, engine, run.prompt_tokens)
    if validator is not None:
        await _relay_turn(run, engine, answer, validator, keep)
        record.stage, record.outcome = DONE, "ok"
        return
    raw, given = answer.checked, answer.headers
    is_checked = 0 < len(raw) <= limits.max_answer_size
    if not is_checked:
        raw = await answer.read(limits.max_answer_size)
    record.answer_end = raw[-USAGE_SEARCH_BYTES:]
    content = parse_object(raw)
    if content is None:
        raise BrokenAnswerError("an answer that is not a JSON object")
    if not is_checked and (failure := failure_of(content, engine.role)) is not None:
        raise failure
    params = content.pop(KV_PARAMS, None)
    num_others = count_internal_fields(raw) - (params is not None)
    others = take_internal_fields(content) if num_others else None
    token_ids: Sequence[int] | None = None
    has_ids = run.bodies.returns_ids and raw.find(MARK) >= 0
    if has_ids:
        token_ids = take_token_ids(content, request.body.get(RETURN_TOKEN_IDS) is True)
    if params is not None or others or has_ids:
        raw = _written(content)
    if run.retains_turn:
        engine.capabilities.note_whole_params(params is not None)
    await _finish(gateway, keep(params, read_choice(content), run.proven_ids(token_ids)))
    if request.exact_stream and request.body.get("stream") is True and can_stream(content):
        raw, given = stream_events(content, request.body), EVENT_STREAM
    passed = messages.to_client(given, record.request_id, given is EVENT_STREAM)
    await request.exchange.respond(answer.status, passed, raw)
    record.stage, record.outcome = DONE, "ok"


async def _relay_turn(
    run: Run,
    engine: Engine,
    answer: EngineAnswer,
    validator: StreamValidator,
    keep: partial[Keeping],
) -> None:
    request, gateway = run.request, run.gateway
    request.event_stream = request.record.streamed = True
    passed = messages.to_client(answer.headers, request.record.request_id, is_stream=True)
    buffer = run.resume.buffer
    tail = TurnTail(run.answers_held.reserve())
    if run.bodies.returns_ids:
        tail.ids = StreamedIds(request.body.get(RETURN_TOKEN_IDS) is True)
    if buffer is not None:
        if isinstance(buffer.inner, TurnTail):  # another engine has sent the beginning
            tail = buffer.inner
            if tail.ids is not None and isinstance(buffer, IdBuffer):
                tail.ids.cut(buffer.num_tokens)
        _record(buffer, gateway.metrics, tail)
        answer.tap = answer.resume_buffer = buffer
    else:
        validator.inner, answer.tap = tail, validator
    exchange, idle = request.exchange, gateway.limits.stream_idle_timeout
    _count_events(run, answer)
    try:
        await exchange.relay(answer.status, passed, answer, idle, request.latest)
    except BaseException as error:
        if tail.params is not None:  # the answer is complete, though its client left
            ids = run.proven_ids(tail.token_ids)
            gateway.tasks.spawn(keep(tail.params, tail.choice(), ids))
        elif (
            isinstance(error, asyncio.CancelledError)
            and answer.is_delivered
            and not validator.failure
        ):
            note_done(request)
        raise
    finally:
        if buffer is not None:
            request.record.streamed_tokens = buffer.num_tokens
        request.record.usage = stream_usage(tail.end)
    if buffer is not None:
        require_end(buffer)
    elif validator.failure is not None:
        raise validator.failure
    if run.retains_turn:
        _note_stream(request, gateway.throttle, engine, tail.params is not None)
    if tail.params is None and answer.is_delivered:
        note_done(request)  # its client has the last event, and may leave now
    await _finish(gateway, keep(tail.params, tail.choice(), run.proven_ids(tail.token_ids)))
    await exchange.finish(tail.last)


async def _finish(gateway: Gateway, keeping: Keeping) -> None:
    """Run `keeping` to its end, even if the request is cancelled meanwhile."""
    conversations = gateway.conversations
    if conversations is not None and conversations.store.does_io:
        await gateway.tasks.finish(keeping)
    else:
        await keeping


async def _keep(
    request: Request,
    gateway: Gateway,
    turn: Turn,
    engine: Engine,
    prompt_tokens: int | None,
    params: object,
    choice: AnswerChoice | None,
    token_ids: Sequence[int] | None,
) -> None:
    """Store `params` for the next turn, if they name retained KV."""
    conversations, kept = gateway.conversations, "not_offered" if turn.retains else "not_kept"
    if conversations is not None and isinstance(params, dict) and _name_retained_kv(params):
        if params.get("remote_engine_id") != engine.capabilities.engine_id:
            engine.capabilities.note_engine_id(params)
        if prompt_tokens is None and choice is not None:
            prompt_tokens = choice.prompt_tokens
        left = await conversations.keep(turn, engine.name, params, choice, prompt_tokens, token_ids)
        kept = "kept" if left.is_kept else "not_kept"
        for entry in left.unreachable:
            gateway.releaser.release_turn(request, entry)
    elif params is None and request.names_conversation:
        note_no_turns(engine)
    if request.record.ended is None:
        request.record.kept = kept
    else:  # its client left before the end
        gateway.metrics.requests.conversation_kept.add((kept,))


def note_first_byte(run: Run, answer: EngineAnswer) -> None:
    record, buffer = run.request.record, run.resume.buffer
    record.stage, record.status, record.first_byte = "stream", answer.status, answer.first_body_at
    if buffer is not None:  # perhaps another engine sent the first byte
        buffer.first_byte = record.first_byte = buffer.first_byte or answer.first_body_at


def _record(buffer: ResumeBuffer, metrics: Metrics, inner: TurnTail | None) -> None:
    """Record this engine's answer, and count a resume that has begun."""
    buffer.start_leg(inner)
    cause, buffer.resume_cause = buffer.resume_cause, ""
    if cause:
        metrics.resumes.add((cause, "resumed"))


def require_end(buffer: ResumeBuffer) -> None:
    """Raise PreemptedError or another EngineError if the engine ended the stream before the end of
    the answer."""
    if buffer.is_preempted:
        raise PreemptedError
    _, failure = failure_midway(buffer.error, DECODE, at_end=True)
    if failure is not None:
        raise failure
    if buffer.is_cut:
        raise EngineUnavailableError("the decode engine ended a stream before its end")


def note_done(request: Request) -> None:
    request.record.stage, request.record.outcome = DONE, "ok"


def _written(content: Json) -> bytes:
    """Return JSON. Raises BrokenAnswerError for content that is nested beyond 250 levels: it can be
    read, but not written."""
    try:
        return dumps(content)
    except orjson.JSONEncodeError as error:
        raise BrokenAnswerError(f"it cannot be passed on: {error}") from error


def _name_retained_kv(params: Json) -> bool:
    """Return False for the params of an engine that has nothing, and reports why."""
    return any(name.startswith("remote_") for name in params)


def _note_stream(request: Request, throttle: LogThrottle, engine: Engine, has_params: bool) -> None:
    capabilities = engine.capabilities
    capabilities.note_stream_params(has_params)
    is_wanted = request.names_conversation and not capabilities.lacks_turns
    if is_wanted and capabilities.streams_kv_params is False:
        throttle.warn(
            "a decode engine does not stream kv_transfer_params: its turns are reused only with "
            "conversation_stream exact, and with bidirectional_kv_xfer at the engine",
            engine.name,
        )


def note_no_turns(engine: Engine) -> None:
    """Log once per engine that the engine reports that it retains no KV for next turns."""
    capabilities = engine.capabilities
    if capabilities.lacks_turns and not capabilities.is_lack_logged:
        capabilities.is_lack_logged = True
        logger.warning(
            "%s %s retains no KV for the next turn: it was started without "
            '"bidirectional_kv_xfer": true in its kv_connector_extra_config, or its model has '
            "layers with a state (Mamba)",
            engine.role.engine,
            engine.name,
        )


def stream_usage(tail: bytes) -> bytes:
    """Return the last usage in the last bytes of a stream, as `usage_in` does for an answer."""
    if tail.rfind(b'"usage"') < 0:
        return b""
    usage = usage_in(tail)
    if usage and b"\n" not in usage and b"\r" not in usage:
        return usage
    # Its event may have several lines of data.
    return usage_in(b"\n".join(data_in(tail)))


class TurnTail:
    """An AnswerTap that takes the params out of a turn's stream, and holds the stream's end back.

    Clients stop reading at [DONE], before the body ends. From the params on, which come with the
    end of the answer, each block therefore waits for the next one. The last block waits as `last`
    until the turn is kept. The tap copies what passes, to find out later what the answer was. The
    copy takes memory that is reserved for answers; if there is none, or the copy is too large, the
    turn is kept without the answer.
    """

    def __init__(self, reservation: Reservation | None = None) -> None:
        self._reservation = reservation
        self.ids: StreamedIds | None = None
        self.params: Json | None = None
        self.last = b""
        self._copy: list[bytes] = []
        self._size = 0

    def passing(self, block: bytes, last: bool) -> bytes:
        if self.ids is not None:
            block = self.ids.passing(block)
        if mentions_internal_fields(block):
            block, taken = take_fields_from_events(block)
            params = taken.get(KV_PARAMS)
            self.params = params if isinstance(params, dict) else self.params
        self._size += len(block)
        if self._has_room():
            self._copy.append(block)
        if last:
            self.last += block
            return b""
        if self.params is not None:
            block, self.last = self.last, block
        return block

    @property
    def token_ids(self) -> Sequence[int] | None:
        """The ids of prompt and answer, None if the engine did not report them."""
        return None if self.ids is None else self.ids.all

    @property
    def end(self) -> bytes:
        """About the last bytes that passed."""
        return b"".join(self._copy[-LAST_BLOCKS:])[-USAGE_SEARCH_BYTES:]

    def choice(self) -> AnswerChoice | None:
        """Return the choice of an answer with params. Another leaves nothing for the next turn."""
        if self.params is None or self._size > MAX_COPY_BYTES:
            return None
        return read_streamed_choice(chunks_in(b"".join(self._copy)))

    def _has_room(self) -> bool:
        if self._size <= UNCOUNTED_BYTES:
            return True
        if self._size > MAX_COPY_BYTES:
            return False
        if self._reservation is None or self._reservation.resize(self._size):
            return True
        self._size = MAX_COPY_BYTES + 1
        self._copy.clear()
        self._reservation.release()
        return False
