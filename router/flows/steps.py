"""The two legs that plans are made of."""

from __future__ import annotations

import asyncio

from router.fleet.engine import Engine, Role
from router.flows import headers, legs
from router.flows.errors import EngineError, EngineOverloadedError, RejectedError
from router.flows.gateway import Gateway
from router.flows.request import Request, write_body
from router.upstream.answer import Answer
from router.upstream.errors import BrokenAnswerError


async def prefill(request: Request, gateway: Gateway) -> legs.Body | None:
    """Asks a prefiller; returns its kv_transfer_params, if it gave any.

    Raises UpstreamError, EngineError, or RejectedError with the prefiller's own 4xx.
    """
    record, settings = request.record, gateway.settings
    record.stage = "prefill"
    content = write_body(legs.prefill_body(request.body))
    started = _now()

    async def leg(engine: Engine) -> legs.Body | None:
        record.prefiller = engine.name
        deadline = min(_now() + settings.prefill_timeout, request.latest)
        answer = await engine.pool.ask(_message(request, engine, content), deadline)
        try:
            body = await answer.read(settings.max_answer_size)
        finally:
            answer.close()
        _check(answer, engine, body)
        return legs.params_of(body)

    params = await gateway.on_engine(Role.PREFILL, leg)
    record.prefill_done = _now()
    gateway.metrics.prefill_seconds.observe(record.prefill_done - started)
    return params


async def decode(request: Request, gateway: Gateway, params: legs.Body | None) -> None:
    """Asks a decoder and relays its answer to the client.

    Raises UpstreamError, EngineError, or RejectedError with the decoder's own 4xx.
    """
    record, settings = request.record, gateway.settings
    record.stage = "decode"
    content = write_body(legs.decode_body(request.body, params))

    async def leg(engine: Engine) -> None:
        record.decoder, record.decode_started = engine.name, _now()
        deadline = min(record.decode_started + settings.decode_first_byte_timeout, request.latest)
        answer = await engine.pool.ask(_message(request, engine, content), deadline)
        try:
            if answer.status != 200:
                _check(answer, engine, await answer.read(settings.max_answer_size))
            await _relay(request, gateway, answer)
        finally:
            answer.close()

    await gateway.on_engine(Role.DECODE, leg)


async def _relay(request: Request, gateway: Gateway, answer: Answer) -> None:
    record = request.record
    record.stage, record.status, record.first_byte = "stream", answer.status, answer.first_body_at
    request.event_stream = answer.is_event_stream
    await request.exchange.relay(
        answer.status,
        headers.to_client(answer.headers, record.request_id),
        answer,
        gateway.settings.stream_idle_timeout,
        request.latest,
    )
    record.stage, record.outcome = "done", "ok"


def _message(request: Request, engine: Engine, content: bytes) -> list[bytes]:
    head = headers.leg_head(
        request.record.endpoint,
        engine.name,
        request.shared_headers,
        request.record.request_id,
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


def _now() -> float:
    return asyncio.get_running_loop().time()
