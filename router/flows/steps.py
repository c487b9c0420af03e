"""The two legs that plans are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from router.fleet.engine import Engine, Role
from router.flows import headers, legs
from router.flows.errors import EngineError, EngineOverloadedError, RejectedError
from router.flows.gateway import Gateway
from router.flows.request import Request, write_body
from router.upstream.answer import Answer
from router.upstream.deadlines import now
from router.upstream.errors import BrokenAnswerError

Deliver = Callable[[Request, Gateway, Engine, Answer], Awaitable[None]]
LastTurn = Callable[[Engine], legs.Body | None]


async def prefill(
    request: Request,
    gateway: Gateway,
    order: Sequence[Engine] | None = None,
    last_turn: LastTurn | None = None,
) -> legs.Prefilled:
    """Asks a prefiller; returns its kv_transfer_params, if it gave any.

    `last_turn` says what each prefiller may pull from the last turn's decoder.

    Raises UpstreamError, EngineError, or RejectedError with the prefiller's own 4xx.
    """
    record, settings = request.record, gateway.settings
    record.stage = "prefill"
    started = now()

    async def leg(engine: Engine) -> legs.Prefilled:
        record.prefiller = engine.name
        held = None if last_turn is None else last_turn(engine)
        content = write_body(legs.prefill_body(request.body, held))
        deadline = min(now() + settings.prefill_timeout, request.latest)
        # A decoder's blocks can be read once: what asks for them is not sent a second time.
        once = held is not None
        answer = await engine.pool.ask(_message(request, engine, content), deadline, once)
        try:
            body = await answer.read(settings.max_answer_size)
        finally:
            answer.close()
        _check(answer, engine, body)
        result = legs.prefilled(body)
        engine.learned.note_prefill(result.params)
        return result

    result = await gateway.on_engine(Role.PREFILL, leg, order)
    record.prefill_done = now()
    gateway.metrics.prefill_seconds.observe(record.prefill_done - started)
    return result


async def relay(request: Request, gateway: Gateway, engine: Engine, answer: Answer) -> None:
    """Passes the decoder's answer to the client as it comes."""
    note_first_byte(request, answer)
    request.event_stream = answer.is_event_stream
    await request.exchange.relay(
        answer.status,
        headers.to_client(answer.headers, request.record.request_id),
        answer,
        gateway.settings.stream_idle_timeout,
        request.latest,
    )
    note_done(request)


async def decode(
    request: Request,
    gateway: Gateway,
    body: legs.Body,
    order: Sequence[Engine] | None = None,
    deliver: Deliver = relay,
) -> None:
    """Asks a decoder with `body` and delivers its answer to the client.

    Raises UpstreamError, EngineError, or RejectedError with the decoder's own 4xx.
    """
    record, settings = request.record, gateway.settings
    record.stage = "decode"
    content = write_body(body)

    async def leg(engine: Engine) -> None:
        record.decoder, record.decode_started = engine.name, now()
        deadline = min(record.decode_started + settings.decode_first_byte_timeout, request.latest)
        answer = await engine.pool.ask(_message(request, engine, content), deadline)
        try:
            if answer.status != 200:
                _check(answer, engine, await answer.read(settings.max_answer_size))
            await deliver(request, gateway, engine, answer)
        finally:
            answer.close()

    await gateway.on_engine(Role.DECODE, leg, order)


def note_first_byte(request: Request, answer: Answer) -> None:
    record = request.record
    record.stage, record.status, record.first_byte = "stream", answer.status, answer.first_body_at


def note_done(request: Request) -> None:
    request.record.stage, request.record.outcome = "done", "ok"


def _message(request: Request, engine: Engine, content: bytes) -> list[bytes]:
    head = headers.leg_head(
        request.record.endpoint,
        engine.name,
        request.shared_headers,
        request.leg_id,
        len(content),
    )
    return [head, content]


def _check(answer: Answer, engine: Engine, body: bytes) -> None:
    """200 is an answer; 4xx is for the client as it is; anything else is the engine's failure."""
    if answer.status == 200:
        return
    if 400 <= answer.status < 500:
        raise RejectedError(answer.status, answer.headers, body)
    if answer.status < 400:
        raise BrokenAnswerError(f"an answer with status {answer.status}")
    kind = EngineOverloadedError if answer.status == 503 else EngineError
    raise kind(f"the {engine.role} engine answered {answer.status}{legs.message_in(body)}")
