"""One request from its arrival to its line in the books: read it, plan, run, tell of failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from router.auth.credentials import without_credentials
from router.http_client.deadlines import now
from router.http_client.errors import AnswersFullError, ReaderStalledError
from router.openai import errors
from router.proxy import headers, key_limits
from router.proxy.cors import Readable, allowing
from router.proxy.exchange import Exchange
from router.proxy.gateway import Gateway
from router.proxy.heartbeat import Beating
from router.proxy.leg_bodies import AsSent, Bodies
from router.proxy.plan import Plan, make_plan
from router.proxy.relay import DONE
from router.proxy.release import give_up_turn
from router.proxy.request import SEVERAL, Request, next_number
from router.proxy.run import Run
from router.proxy.turn_reuse import find_reuse
from router.routing.route import Route
from router.telemetry.record import Record
from router.telemetry.trace_context import without_trace_headers

logger = logging.getLogger("disagg_router.flows")
Reading = Callable[[Request, Gateway], Awaitable[None]]
CLIENT_LEFT = 499  # never sent: nginx's status for the books


async def serve(exchange: Exchange, gateway: Gateway, reading: Reading | None = None) -> None:
    """Answers the exchange, whatever happens, unless its client has left. `reading`: of an endpoint
    that is not generation."""
    request = _open_books(exchange, gateway)
    task = asyncio.current_task(exchange.loop)
    assert task is not None
    gateway.running.add(task)
    try:
        gateway.budget.note_request(request.record.started)
        authenticator = gateway.authenticator
        key = (
            None
            if authenticator is None
            else key_limits.identified(request.exchange, authenticator, gateway.metrics)
        )
        if reading is None:
            request.read(gateway.limits, gateway.conversations)
            if request.alone == SEVERAL and gateway.shares_loads(request.model):
                request.share()
            request.check(gateway.fleet.snapshot.context_lengths)
        else:
            await reading(request, gateway)
        if key is not None and authenticator is not None:
            await key_limits.let_in(request, key, authenticator, gateway.metrics)
        if gateway.limits.stream_heartbeat and request.body.get("stream"):
            request.exchange = Beating(request, gateway.limits)
        bodies = AsSent(request.exchange.body) if request.form else Bodies(request.body)
        if gateway.admission is None and (request.turn is None or request.alone):
            plan = make_plan(request, gateway.route(request), None, gateway.limits)
        else:
            plan = await _plan(request, gateway)
        request.record.flow, request.record.group = plan.flow, plan.route.group
        await Run(request, bodies, plan, gateway).answer()
    except asyncio.CancelledError:
        if not gateway.interrupted:
            if request.record.stage != DONE:
                _note_disconnect(request.record, gateway)
            raise
        await _refuse(request, gateway, errors.ShuttingDownError("the router is shutting down"))
    except Exception as error:
        rejected = _rejected_in(error)
        if rejected is not None and rejected.status == 401 and gateway.hides_credentials:
            gateway.throttle.warn("an engine refuses the router's credential", str(error))
            rejected, error = None, errors.EngineCredentialError("an engine refused the router")
        if rejected is not None and request.exchange.started:
            gateway.throttle.warn("an engine refuses to go on with a stream", str(rejected.body))
            gateway.metrics.resumes.add((f"status_{rejected.status}", "refused"))
            rejected, error = None, errors.EngineError("no engine went on with this answer")
        if rejected is None:
            await _refuse(request, gateway, error)
        else:
            await _pass_on(request, rejected)
    finally:
        gateway.running.discard(task)
        if request.seat is not None:
            request.seat.leave()
        if isinstance(request.exchange, Beating):
            request.exchange.close()
        if request.resume_buffer is not None:
            # Of the first leg, where the last one said nothing.
            request.record.first_byte = (
                request.record.first_byte or request.resume_buffer.first_byte
            )
            request.resume_buffer.close()
        for reservation in request.reservations or ():
            reservation.release()
        if request.quota_permit is not None and gateway.authenticator is not None:
            key_limits.leave(request, gateway.authenticator)
        _close_books(request.record, gateway)


async def refuse(exchange: Exchange, gateway: Gateway, error: Exception) -> None:
    """Answers an exchange whose request was not even received with `error`."""
    request = _open_books(exchange, gateway)
    await _refuse(request, gateway, error)
    _close_books(request.record, gateway)


def _open_books(exchange: Exchange, gateway: Gateway) -> Request:
    latest = exchange.arrived + gateway.limits.request_timeout
    if gateway.limits.cors_origins:
        lines = allowing(exchange.headers, gateway.limits.cors_origins)
        exchange = Readable(exchange, lines) if lines else exchange
    given = exchange.headers
    if gateway.hides_credentials:
        given = without_credentials(given)
    if gateway.tracer is None:
        request_id, shared_headers = headers.read(given)
        record = Record(exchange.endpoint, exchange.arrived, request_id)
    else:
        request_id, shared_headers = headers.read(without_trace_headers(given))
        record = Record(exchange.endpoint, exchange.arrived, request_id)
        trace = gateway.tracer.begin(exchange.headers, exchange.endpoint, now())
        if trace.is_sampled:
            record.trace = trace
        else:  # nobody will see its legs apart
            shared_headers = trace.header_lines(trace.span_id) + shared_headers
    if gateway.engine_line:
        shared_headers += gateway.engine_line
    if gateway.watch is not None:
        gateway.watch.opened(record)
    return Request(exchange, record, shared_headers, latest, next_number())


def _note_disconnect(record: Record, gateway: Gateway) -> None:
    record.outcome = "disconnected"
    record.status = record.status or CLIENT_LEFT
    gateway.metrics.client_disconnects.labels(record.stage).inc()


async def _plan(request: Request, gateway: Gateway) -> Plan:
    """Raises UnknownModelError, NoEngineError, OverloadError."""
    turn, conversations, limits = request.turn, gateway.conversations, gateway.limits
    admission = gateway.admission
    if admission is not None:
        pools = gateway.pools(request.model)
        request.seat = admission.at_once(request, pools) or await admission.wait(request)
    if turn is None or conversations is None or request.alone:  # it had to wait for its seat
        return make_plan(request, _settled(request, gateway.route(request)), None, limits)
    gateway.pools(request.model)  # what was kept is taken only if it can be used
    await conversations.recall(turn)
    reuse = find_reuse(turn, gateway.fleet, gateway.load_bound, limits.conversation_unproven)
    try:
        route = _settled(request, gateway.route(request, reuse.decoder))
        return make_plan(request, route, reuse, limits)
    except Exception:
        if turn.entry is not None:  # the engines have gone meanwhile
            give_up_turn(request, gateway, turn.entry)
        raise


def _settled(request: Request, route: Route) -> Route:
    return route if request.seat is None else request.seat.settle(route)


def _rejected_in(error: Exception) -> errors.EngineRejectedError | None:
    """An engine's 4xx, which the client gets as it is."""
    if isinstance(error, errors.EngineOverloadedError):
        return error.rejected
    return error if isinstance(error, errors.EngineRejectedError) else None


async def _pass_on(request: Request, rejected: errors.EngineRejectedError) -> None:
    record = request.record
    record.status = rejected.status
    record.outcome = "refused" if rejected.status < 500 else "engine_error"
    passed = headers.to_client(rejected.headers, record.request_id)
    await request.exchange.respond(rejected.status, passed, rejected.body)


async def _refuse(request: Request, gateway: Gateway, error: Exception) -> None:
    """Tells the client of a failure as honestly as what it already got allows."""
    record, exchange = request.record, request.exchange
    record.error = f"{type(error).__name__}: {error}"
    if isinstance(error, errors.OverloadError):
        gateway.metrics.refusals.add((error.reason,))
    elif isinstance(error, AnswersFullError):
        gateway.metrics.refusals.add(("answers",))
    elif isinstance(error, errors.RepeatedCrashError):
        gateway.throttle.warn("a request may kill engines", f"{record.request_id}: {error}")
    shape = errors.shape_of(error)
    if shape.status == 500:
        logger.error("request %s failed", record.request_id, exc_info=error)
    if not exchange.started:
        record.status = shape.status
        record.outcome = "refused" if shape.status < 500 else "failed"
        told = headers.to_client(errors.headers_of(error), record.request_id)
        await exchange.respond(shape.status, told, errors.body_of(error))
    elif request.event_stream and not isinstance(error, ReaderStalledError):
        record.outcome = "broken_stream"
        await exchange.finish(errors.event_of(error))
    else:
        record.outcome = "broken_stream"
        exchange.abort()


def _close_books(record: Record, gateway: Gateway) -> None:
    record.ended = now()
    gateway.metrics.finish(record)
    gateway.records.add(record)
    if gateway.watch is not None:
        gateway.watch.closed(record)
