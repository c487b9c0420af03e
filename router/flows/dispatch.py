"""One request from its arrival to its line in the books: choose a plan, run it, answer failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from router.flows import errors, headers, legs
from router.flows.decode_first import decoder_or_both
from router.flows.decode_only import decode_only
from router.flows.exchange import Exchange, Header
from router.flows.gateway import Gateway
from router.flows.options import Options, take_options
from router.flows.pull import pull
from router.flows.request import Request
from router.flows.turn import take_turn
from router.telemetry.record import Record
from router.upstream.deadlines import now
from router.upstream.errors import ReaderStalledError

logger = logging.getLogger("disagg_router.flows")
CLIENT_LEFT = 499  # never sent: nginx's status for the books


async def serve(exchange: Exchange, gateway: Gateway) -> None:
    """Answers the exchange, whatever happens, unless its client has left."""
    request = _open_books(exchange, gateway)
    task = asyncio.current_task(exchange.loop)
    assert task is not None
    gateway.running.add(task)
    try:
        await _run(request, gateway)
    finally:
        gateway.running.discard(task)
        _close_books(request.record, gateway)


async def refuse(exchange: Exchange, gateway: Gateway, error: Exception) -> None:
    """Answers an exchange whose request was not even received with `error`."""
    request = _open_books(exchange, gateway)
    await _refuse(request, error)
    _close_books(request.record, gateway)


def _open_books(exchange: Exchange, gateway: Gateway) -> Request:
    request_id, shared_headers = headers.read(exchange.headers)
    record = Record(exchange.endpoint, exchange.arrived, request_id)
    latest = exchange.arrived + gateway.limits.request_timeout
    return Request(exchange, record, {}, shared_headers, latest)


async def _run(request: Request, gateway: Gateway) -> None:
    try:
        request.parse()
        await _plan(request, gateway)
    except asyncio.CancelledError:
        if not gateway.interrupted:
            _note_disconnect(request.record, gateway)
            raise
        await _refuse(request, errors.ShuttingDownError("the router is shutting down"))
    except errors.RejectedError as rejected:
        await _pass_on(request, rejected)
    except Exception as error:
        await _refuse(request, error)


def _note_disconnect(record: Record, gateway: Gateway) -> None:
    record.outcome = "disconnected"
    record.status = record.status or CLIENT_LEFT
    gateway.metrics.client_disconnects.labels(record.stage).inc()


def _plan(request: Request, gateway: Gateway) -> Coroutine[Any, Any, None]:
    options = take_options(request, gateway)
    if legs.has_params(request.body):
        if gateway.limits.trust_client_kv_params:
            return _decode_only(request, gateway, "client_params")
        request.body = legs.without_params(request.body)
    reason = legs.why_decode_only(request.body)
    if reason is not None:
        return _decode_only(request, gateway, reason)
    if options is not None:
        return _with_options(request, gateway, options)
    request.record.flow = "pull"
    return pull(request, gateway)


def _with_options(
    request: Request, gateway: Gateway, options: Options
) -> Coroutine[Any, Any, None]:
    turn, conversations = options.turn, gateway.conversations
    if turn is not None and conversations is not None:
        request.record.flow = "turn"
        return take_turn(request, gateway, conversations, turn, options)
    request.record.flow = "decode_first"
    return decoder_or_both(request, gateway, options.threshold)


def _decode_only(request: Request, gateway: Gateway, reason: str) -> Coroutine[Any, Any, None]:
    request.record.flow = "decode_only"
    return decode_only(request, gateway, reason)


async def _pass_on(request: Request, rejected: errors.RejectedError) -> None:
    record = request.record
    record.status = rejected.status
    record.outcome = "refused" if rejected.status < 500 else "engine_error"
    passed = headers.to_client(rejected.headers, record.request_id)
    await request.exchange.respond(rejected.status, passed, rejected.body)


async def _refuse(request: Request, error: Exception) -> None:
    """Tells the client of a failure as honestly as what it already got allows."""
    record, exchange = request.record, request.exchange
    record.error = f"{type(error).__name__}: {error}"
    shape = errors.shape_of(error)
    if shape.status == 500:
        logger.error("request %s failed", record.request_id, exc_info=error)
    if not exchange.started:
        record.status = shape.status
        record.outcome = "refused" if shape.status < 500 else "failed"
        await exchange.respond(shape.status, _error_headers(record), errors.body_of(error))
    elif request.event_stream and not isinstance(error, ReaderStalledError):
        record.outcome = "broken_stream"
        await exchange.finish(errors.event_of(error))
    else:
        record.outcome = "broken_stream"
        exchange.abort()


def _error_headers(record: Record) -> list[Header]:
    return headers.to_client(errors.JSON, record.request_id)


def _close_books(record: Record, gateway: Gateway) -> None:
    record.ended = now()
    gateway.metrics.finish(record)
    if gateway.access is not None:
        gateway.access.add(record)
