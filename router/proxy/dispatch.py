"""The life of one request: read it, plan it, run it, and answer errors."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from random import getrandbits
from time import monotonic as now

from router.auth.authenticator import QuotaPermit
from router.conversations.conversations import Conversations, Turn
from router.conversations.reuse import find_reuse
from router.http_client.errors import AnswersFullError, BrokenAnswerError, ReaderStalledError
from router.openai import errors
from router.openai.context_errors import body_with_context_code
from router.proxy import key_limits, messages, strategies
from router.proxy.aborts import answer_aborted
from router.proxy.admission import EngineSlot
from router.proxy.canary import CHATS
from router.proxy.exchange import CorsExchange, Exchange, Header, cors_headers
from router.proxy.gateway import Gateway
from router.proxy.heartbeat import HeartbeatExchange
from router.proxy.internal_fields import error_without_internal_fields
from router.proxy.large_bodies import LARGE_BYTES, read_long_ids
from router.proxy.messages import REQUEST_ID, LegBodies, RawBody
from router.proxy.plan import Plan, make_plan
from router.proxy.reasoning_names import BOTH, BothNamesExchange
from router.proxy.relay import DONE
from router.proxy.request import (
    CLIENT_PARAMS,
    NAME,
    PASSED,
    SEVERAL,
    Request,
    check_fields,
    next_number,
    read_request,
    share_answers,
)
from router.proxy.resume import ResumeState
from router.proxy.run import AnswersHeld, Run
from router.proxy.token_requests import GENERATE, TokenBodies
from router.proxy.turn_tokens import wants_token_ids
from router.telemetry.metrics import Metrics
from router.telemetry.record import Record

logger = logging.getLogger("disagg_router.proxy")
BodyReader = Callable[[Request, Gateway], Awaitable[None]]
# vLLM's P2pNccl and MoRIIO connectors take the addresses of engines from ids, so such an id is not
# a client's to choose.
VALID_REQUEST_ID = re.compile(rb"(?!.*___(?:prefill|decode)_addr_)[A-Za-z0-9._:~@+=/-]{1,128}")
CLIENT_CLOSED_REQUEST = 499  # never sent: nginx's status for access logs and metrics


async def serve(exchange: Exchange, gateway: Gateway, reading: BodyReader | None = None) -> None:
    """Serve one client request from its arrival to its access log line.

    `reading` reads the body of an endpoint that is not generation. Raises only CancelledError, when
    the client has disconnected.
    """
    request = _open_record(exchange, gateway)
    task = asyncio.current_task(exchange.loop)
    assert task is not None
    gateway.tasks.running.add(task)
    slot: EngineSlot | None = None
    permit: QuotaPermit | None = None
    run: Run | None = None
    try:
        # Authenticate and read.
        authenticator, limits = gateway.authenticator, gateway.limits
        key = None
        if authenticator is not None:
            key = key_limits.identify_key(request.exchange, authenticator)
        is_large = len(exchange.body) > LARGE_BYTES
        if is_large:
            await gateway.pacer.turn()
            request.long_ids = await read_long_ids(exchange.body, gateway.pacer)
        if reading is None:
            read_request(request, limits, gateway.conversations, gateway.aliases)
            is_several = request.decode_only_reason == SEVERAL
            if is_several and gateway.routes.shares_kv_loads(request.model):
                share_answers(request)
            check_fields(request, gateway.fleet.snapshot.context_lengths)
        else:
            await reading(request, gateway)
        if not request.model and gateway.routes.is_model_ambiguous():
            # The last turn may be of another model.
            request.turn, request.names_conversation = None, False
        if key is not None and authenticator is not None:
            permit = await key_limits.admit_request(request, key, authenticator, gateway.metrics)
        if limits.stream_heartbeat and request.body.get("stream") is True:
            request.exchange = HeartbeatExchange(request, limits)
        request.shared_headers += messages.header_lines(exchange.headers, gateway.not_to_engine)
        if is_large:
            await gateway.pacer.turn()
        bodies = _bodies_of(request)

        # Plan, after a wait for a place at engines that have limits.
        gateway.budget.note_request(request.record.started)
        if gateway.admission is not None:
            pools = gateway.routes.pools(request)
            slot = gateway.admission.admit_at_once(request, pools)
            slot = slot or await gateway.admission.wait_for_slot(request)
        if request.turn is None or request.decode_only_reason or gateway.conversations is None:
            route = gateway.routes.find(request)
            route = route if slot is None else slot.move_to_route(route)
            plan = make_plan(request, route, None, limits, slot is not None)
        else:
            plan = await _plan_turn(request, request.turn, slot, gateway, gateway.conversations)
        request.record.flow, request.record.group = plan.flow, plan.route.group

        # Run the legs, and relay the answer.
        resume = ResumeState(request, gateway, limits.max_resumes)
        held = AnswersHeld(gateway.memory.answers)
        run = Run(request, bodies, plan, gateway, plan.route, resume, held, slot)
        if plan.reuse is not None:
            run.take_turn(plan.reuse.turn)
            bodies.returns_ids = resume.keeps_ids = wants_token_ids(run)
        await strategies.answer(run)
    except asyncio.CancelledError:
        if not gateway.tasks.is_interrupted:
            if not await _end_cancelled(request, gateway, task):
                raise
            return
        await _refuse(request, gateway, errors.ShuttingDownError("the router is shutting down"))
    except Exception as error:
        await _respond_error(request, gateway, error)
    finally:
        gateway.tasks.running.discard(task)
        if run is not None:
            run.close()
        elif slot is not None:
            slot.release()
        if isinstance(request.exchange, HeartbeatExchange):
            request.exchange.close()
        if permit is not None and gateway.authenticator is not None:
            key_limits.release_permit(request, permit, gateway.authenticator)
        _close_record(request.record, gateway)


async def refuse(exchange: Exchange, gateway: Gateway, error: Exception) -> None:
    """Answer with `error` a request that was not received completely."""
    request = _open_record(exchange, gateway)
    await _refuse(request, gateway, error)
    _close_record(request.record, gateway)


async def _end_cancelled(request: Request, gateway: Gateway, task: asyncio.Task[None]) -> bool:
    """Record a request that was cancelled. Return True if it was aborted by its client, which is
    answered; otherwise the client has disconnected."""
    if request.record.stage == DONE:
        return False
    is_aborted = task in gateway.tasks.abortable.aborted
    if is_aborted:
        request.record.status = 200
    _note_disconnect(request.record, gateway.metrics)
    if is_aborted:
        await answer_aborted(request)
    return is_aborted


def _bodies_of(request: Request) -> LegBodies:
    if request.form:
        return RawBody(request.form_body)
    ids, is_of_tokens = request.long_ids, request.exchange.endpoint == GENERATE
    body = request.body if ids is None else ids.writable(request.body)
    return (TokenBodies if is_of_tokens else LegBodies)(body)


def read_request_id(headers: Sequence[Header]) -> str:
    """Return the client's first valid X-Request-Id, or else a new id."""
    if REQUEST_ID in map(NAME, headers):
        for name, value in headers:
            if name == REQUEST_ID and VALID_REQUEST_ID.fullmatch(value):
                return value.decode()
    return getrandbits(128).to_bytes(16, "big").hex()


def _open_record(exchange: Exchange, gateway: Gateway) -> Request:
    latest = exchange.arrived + gateway.limits.request_timeout
    if gateway.limits.cors_origins:
        added = cors_headers(exchange.headers, gateway.limits.cors_origins)
        exchange = CorsExchange(exchange, added) if added else exchange
    record = Record(exchange.endpoint, exchange.arrived, read_request_id(exchange.headers))
    lines = gateway.engine_line
    if gateway.tracer is not None:
        trace = gateway.tracer.begin(exchange.headers, exchange.endpoint, now())
        if trace.is_sampled:
            record.trace = trace
        else:  # all legs share the request's span
            lines = trace.header_lines(trace.span_id) + lines
    if gateway.watch is not None:
        gateway.watch.opened(record)
    request = Request(exchange, record, lines, latest, next_number())
    if gateway.limits.reasoning_names == BOTH and exchange.endpoint == CHATS:
        request.exchange = BothNamesExchange(exchange)
        request.path = CHATS  # so that a long answer is read whole
    return request


def _close_record(record: Record, gateway: Gateway) -> None:
    record.ended = now()
    gateway.records.add(record)
    if gateway.watch is not None:
        gateway.watch.closed(record)


def _note_disconnect(record: Record, metrics: Metrics) -> None:
    record.outcome = "disconnected"
    record.status = record.status or CLIENT_CLOSED_REQUEST
    metrics.client_disconnects.labels(record.stage).inc()


async def _plan_turn(
    request: Request,
    turn: Turn,
    slot: EngineSlot | None,
    gateway: Gateway,
    conversations: Conversations,
) -> Plan:
    """Plan the turn of a conversation, with the KV that the last turn has left.

    Raises UnknownModelError, NoEngineError.
    """
    limits = gateway.limits
    gateway.routes.pools(request)  # raises before the last turn's entry is taken
    await conversations.recall(turn)
    unproven = "off" if turn.is_implicit else limits.conversation_unproven
    reuse = find_reuse(turn, gateway.fleet, gateway.routes.load_bound, unproven)
    try:
        route = gateway.routes.find(request, reuse.decoder)
        route = route if slot is None else slot.move_to_route(route)
        return make_plan(request, route, reuse, limits, slot is not None)
    except Exception:
        if turn.entry is not None:  # the engines have gone meanwhile
            gateway.releaser.release_turn(request, turn.entry)
        raise


async def _respond_error(request: Request, gateway: Gateway, error: Exception) -> None:
    """Answer with an engine's 4xx as it is, or with the router's own error."""
    rejected = _rejected_in(error)
    if rejected is None:
        return await _refuse(request, gateway, error)
    if rejected.status == 401 and gateway.hides_credentials:
        gateway.throttle.warn("an engine rejects the router's API key", str(error))
        error = errors.EngineCredentialError("an engine rejected the router's API key")
        return await _refuse(request, gateway, error)
    if request.exchange.started:
        gateway.throttle.warn("an engine refuses to resume a stream", str(rejected.body))
        gateway.metrics.resumes.add((f"status_{rejected.status}", "refused"))
        error = errors.EngineError("no engine resumed this answer")
        return await _refuse(request, gateway, error)
    await _pass_on(request, gateway, rejected)


def _rejected_in(error: Exception) -> errors.EngineRejectedError | None:
    """An engine's 4xx, which the client gets as it is."""
    if isinstance(error, errors.EngineOverloadedError | errors.UnservedModelError):
        return error.rejected
    return error if isinstance(error, errors.EngineRejectedError) else None


async def _pass_on(
    request: Request, gateway: Gateway, rejected: errors.EngineRejectedError
) -> None:
    record, body = request.record, rejected.body
    if request.decode_only_reason != CLIENT_PARAMS:
        try:
            body = error_without_internal_fields(rejected.status, body)
        except BrokenAnswerError as broken:
            return await _refuse(request, gateway, broken)
    record.status = rejected.status
    record.outcome = "refused" if rejected.status < 500 else "engine_error"
    if rejected.status == 400 and request.decode_only_reason != PASSED:
        body = body_with_context_code(body)
    is_as_sent = body is rejected.body and request.decode_only_reason == PASSED
    passed = messages.to_client(rejected.headers, record.request_id, is_as_sent=is_as_sent)
    await request.exchange.respond(rejected.status, passed, body)


async def _refuse(request: Request, gateway: Gateway, error: Exception) -> None:
    """Send the error: a status before the first byte, an error event in a stream, else close."""
    record, exchange = request.record, request.exchange
    record.error = f"{type(error).__name__}: {error}"
    if isinstance(error, errors.OverloadError):
        gateway.metrics.refusals.add((error.reason,))
    elif isinstance(error, errors.UnauthorizedError):
        gateway.metrics.unauthorized.add((error.reason,))
    elif isinstance(error, AnswersFullError):
        gateway.metrics.refusals.add(("answers",))
    elif isinstance(error, errors.RepeatedCrashError):
        gateway.throttle.warn("a request may crash engines", f"{record.request_id}: {error}")
    shape = errors.shape_of(error)
    if shape.status == 500:
        logger.error("request %s failed", record.request_id, exc_info=error)
    if not exchange.started:
        record.status = shape.status
        record.outcome = "refused" if shape.status < 500 else "failed"
        told = messages.to_client(errors.headers_of(error), record.request_id)
        body = errors.body_of(error)
        body = body_with_context_code(body) if shape.status == 400 else body
        await exchange.respond(shape.status, told, body)
    elif request.event_stream and not isinstance(error, ReaderStalledError):
        record.outcome = "broken_stream"
        await exchange.finish(errors.event_of(error))
    else:
        record.outcome = "broken_stream"
        exchange.abort()
