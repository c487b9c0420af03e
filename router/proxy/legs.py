"""One leg: one upstream request to one engine on behalf of a client request.

A leg sends the request, judges the answer, and records what the answer shows about the engine. The
outcome is a value: an answer, a failure that has a row in `retry.RULES`, or an engine's 4xx. What
follows from the outcome is for `strategies`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum, auto
from functools import partial
from time import monotonic as now
from typing import Any, NamedTuple, TypeVar

from router.common.deadlines import Deadlines, TimeLimit
from router.fleet.engine import BOTH, DECODE, HALF_OPEN, PREFILL, Engine, EngineRole, Place
from router.http_client.answer_limits import UNCOUNTED_BYTES
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import BrokenAnswerError, UpstreamError
from router.openai.answers import Json, error_in, is_rejection, parse_object
from router.openai.errors import (
    JSON,
    EngineError,
    EngineOverloadedError,
    EngineRejectedError,
    EngineUnavailableError,
    LoadFailedError,
    NoKvOfferedError,
    UnservedModelError,
    error_body,
    type_of_status,
)
from router.openai.request_fields import restate_prompt_limit
from router.proxy import messages
from router.proxy.answer_check import (
    PrefillAnswer,
    StreamValidator,
    cached_share,
    failure_of,
    generation_content,
    passthrough_content,
    preemption_in,
)
from router.proxy.kv_params import KvParams, with_field
from router.proxy.load_failure import (
    LoadFailure,
    LoadFailureWatch,
    failure_in,
    failure_in_error,
    take_failure_from_answer,
)
from router.proxy.loans import LegLoan, find_loan
from router.proxy.messages import error_text
from router.proxy.plan import queue_local_prefill, queue_prefill
from router.proxy.push import PushParams
from router.proxy.ranks import rank_of_leg
from router.proxy.relay import deliver, deliver_turn, note_no_turns
from router.proxy.request import AS_SENT, PASSED, SEVERAL_ANSWERS, Body
from router.proxy.retry import LegError
from router.proxy.run import Run, may_prefill_on_decoder
from router.proxy.side_requests import probe_threshold
from router.routing.local_prefill import QueuedPrefill
from router.telemetry.record import Record, TracedLeg
from router.telemetry.request_metrics import tokens_in, tokens_of, usage_in

logger = logging.getLogger("disagg_router.proxy")
# Seconds for which a kept connection may have been idle if the leg can be sent only once. Servers
# keep idle connections for five seconds and more, so the engine is hardly closing this one.
SOUND_CONNECTION_IDLE_S = 1.0
# For the error body of an engine that has failed.
ERROR_BODY_TIMEOUT_S = 1.0
MAX_ERROR_BODY_BYTES = 256 * 1024
NOT_LOADED = "the decode engine could not load the KV of this prompt"
# What servers say of an unknown path, besides the path.
NOT_FOUND = ("not found", "not found: post ", "post : not found")
NOT_BORROWED = "the engine could not load the KV that it was to borrow"
T = TypeVar("T")


class LegFailure(NamedTuple):
    """The leg failed; another engine may do better."""

    error: LegError
    engine: Engine
    role: EngineRole


class LegRefusal(NamedTuple):
    """The engine refused the request with a 4xx, which is the answer to the request."""

    error: EngineRejectedError
    engine: Engine


class DecodeLegResult(Enum):
    ANSWERED = auto()
    """The client has the whole answer."""
    REJECTED = auto()
    """The engine has less of the prompt in its cache than the leg's threshold."""


PrefillOutcome = PrefillAnswer | LegFailure | LegRefusal
DecodeOutcome = DecodeLegResult | LegFailure | LegRefusal


def prefill_leg(
    run: Run,
    engine: Engine,
    push: PushParams | None = None,
    last_turn: Body | None = None,
    hands_over: bool = False,
) -> Coroutine[Any, Any, PrefillOutcome]:
    """Send the prefill leg and return its outcome. The engine then holds KV for a decode engine.

    `push`: what this leg shares with the decode leg that runs at the same time. `last_turn`: params
    of retained KV that the engine is to read, which it can do only once. `hands_over`: a decode
    engine is to continue from the token that this engine samples.
    """
    trace = run.request.record.trace
    if trace is None:
        return _prefill_leg(run, engine, push, last_turn, hands_over, b"")
    span = trace.add_leg(PREFILL, engine.name, now())
    leg = _prefill_leg(run, engine, push, last_turn, hands_over, span.headers)
    return _traced_prefill(span, leg)


async def _traced_prefill(span: TracedLeg, leg: Awaitable[PrefillOutcome]) -> PrefillOutcome:
    outcome = await _in_span(span, leg)
    if isinstance(outcome, PrefillAnswer):
        span.usage = outcome.usage
    return outcome


async def _prefill_leg(
    run: Run,
    engine: Engine,
    push: PushParams | None,
    last_turn: Body | None,
    hands_over: bool,
    trace_line: bytes,
) -> PrefillOutcome:
    request, gateway, slot = run.request, run.gateway, run.slot
    record, limits, capabilities = request.record, gateway.limits, engine.capabilities
    record.stage, record.prefiller = "prefill", engine.name
    record.first_byte = None  # of a decode engine that has read this
    run.is_read = False
    record.prefill_started = started = now()
    if slot is not None:
        slot.move_prefill_to(engine)
    place: Place = engine
    rank_line = b""
    if push is not None:
        place, rank_line = push.place, push.pinned
    elif engine.ranks:
        place, rank_line = rank_of_leg(run, engine, PREFILL)
    notes, tokens = run.route.prefill_feedback, request.tokens
    loan: LegLoan | None = None
    if capabilities.borrows and last_turn is None:
        loan = find_loan(run, place, PREFILL)
    if notes is not None:
        tokens = max(0, tokens - notes.expected_tokens(place.name) - (loan.tokens if loan else 0))
        notes.sent(place.name)
    answer: EngineAnswer | None = None
    computed: int | None = None
    queued: QueuedPrefill | None = None
    load = tokens
    if engine.role is BOTH:
        reuse = None if last_turn is None else run.plan.reuse
        read_share = 0.0 if reuse is None else reuse.cached_share
        queued, load = queue_prefill(request, run.route, engine, place, tokens, read_share), 0
    place.add_load(1, load)
    if engine.breaker.circuit is HALF_OPEN:
        gateway.fleet.note_leg_started(engine, run)
    try:
        transfer_id, leg_id = ("", "") if push is None else (push.transfer_id, push.leg_id)
        begun = None if run.resume.buffer is None else run.resume.continued
        message = messages.leg_message(
            request.path or record.endpoint,
            engine.name,
            leg_id or messages.new_leg_id(record.request_id),
            rank_line + trace_line + request.shared_headers,
            run.bodies.prefill(
                last_turn, transfer_id, hands_over, begun, loan.field if loan else b""
            ),
            request.form,
        )
        latest = started + limits.prefill_timeout
        if latest > request.latest:
            latest = request.latest
        longest_idle = SOUND_CONNECTION_IDLE_S if last_turn is not None else None
        answer = None if run.is_fresh else engine.pool.send_on_idle(message, latest, longest_idle)
        if answer is None:
            answer = await engine.pool.send(message, latest, fresh=True)
        message = b""  # it may be large, and the answer may take minutes
        await answer.ready()
        if answer.error is not None:
            raise answer.error
        if answer.status != 200:
            raise await _error_answer(run, engine, answer, loan, request.body)
        raw = answer.held[0] if answer.is_complete and len(answer.held) == 1 else b""
        if not raw or len(raw) > limits.max_answer_size:
            raw = await answer.read(limits.max_answer_size)
            run.answers_held.keep(answer)
        answer = None  # it is complete

        # The engine has answered: take its params, and learn from what it reports.
        prefilled = PrefillAnswer(raw)
        if prefilled.may_fail and (content := parse_object(raw)) is not None:
            _require_answer(run, engine, content)
        if prefilled.params is None:
            _note_no_params(run, engine, prefilled, is_push=push is not None)
        record.prefill_done, record.prefill_usage = now(), prefilled.usage
        if slot is not None:
            slot.release_prefiller()
        gateway.metrics.requests.prefill_seconds.observe(record.prefill_done - started)
        prompt, _, cached = tokens_in(prefilled.usage)
        computed = tokens if prompt is None or cached is None else max(0, prompt - cached)
        if notes is not None:
            notes.answered(place.name, cached)
        if run.plan.reuse is not None:
            run.prompt_tokens = prompt
            if request.names_conversation and capabilities.lacks_turns:
                note_no_turns(engine)
        params = prefilled.params
        if loan is not None:
            if params is not None:
                loan.read(params.raw)
            loan.end(prompt, None, cached)
        if params is not None:
            # The params are decoded only until the engine is known to send prefix hashes.
            capabilities.verifies_prefix = prefilled.mentions_prefix_hashes and (
                capabilities.verifies_prefix or params.has_prefix_hashes
            )
            if not capabilities.rank_endpoints and limits.transfer_mode != "pull":
                capabilities.note_kv_params(params.content)
            if gateway.logs_moved_blocks and len(params.raw) <= UNCOUNTED_BYTES:
                record.transfer_params = params.raw
        if engine.breaker.record_success():
            gateway.fleet.note_recovered(engine)
        return prefilled
    except (UpstreamError, EngineError) as error:
        return LegFailure(error, engine, PREFILL)
    except EngineRejectedError as error:
        return LegRefusal(error, engine)
    except asyncio.CancelledError:
        if answer is not None:
            gateway.releaser.release_late_prefill(request, answer)
            answer = None
        raise
    finally:
        place.note_prefill(started, now(), computed)
        if loan is not None:
            loan.close()
        place.add_load(-1, -load)
        if queued is not None:
            queued.end()
        if answer is not None:
            answer.close()
        if engine.breaker.trial is run:
            gateway.fleet.note_trial_abandoned(engine)


def decode_leg(
    run: Run,
    engine: Engine,
    params: KvParams | None,
    threshold: float = 0.0,
    push: PushParams | None = None,
    accept: Callable[[], None] | None = None,
) -> Coroutine[Any, Any, DecodeOutcome]:
    """Send the decode leg, relay the answer until the client has all of it, and return the outcome.

    `params` are the leg's KV transfer params. `threshold`: the share of the prompt that the engine
    must have in its cache, or it may reject. `accept` is called when a hedged leg is about to be
    relayed; the other legs end then.
    """
    trace = run.request.record.trace
    if trace is None:
        return _decode_leg(run, engine, params, threshold, push, accept, b"")
    span = trace.add_leg(DECODE, engine.name, now())
    leg = _decode_leg(run, engine, params, threshold, push, accept, span.headers)
    return _traced_decode(run.request.record, engine, span, leg)


async def _traced_decode(
    record: Record, engine: Engine, span: TracedLeg, leg: Awaitable[DecodeOutcome]
) -> DecodeOutcome:
    try:
        outcome = await _in_span(span, leg)
    finally:
        if record.decoder == engine.name:  # not of other hedged legs
            span.first_byte = record.first_byte
            span.usage = record.usage or usage_in(record.answer_end)
    if outcome is DecodeLegResult.REJECTED:
        span.kind = "rejected"
    return outcome


async def _decode_leg(
    run: Run,
    engine: Engine,
    params: KvParams | None,
    threshold: float,
    push: PushParams | None,
    accept: Callable[[], None] | None,
    trace_line: bytes,
) -> DecodeOutcome:
    request, gateway, capabilities = run.request, run.gateway, engine.capabilities
    slot, reuse, started = run.slot, run.plan.reuse, now()
    notes, tokens = run.route.decode_feedback, request.tokens
    is_passed = request.decode_only_reason == PASSED
    place: Place = engine
    rank_line = b""
    if engine.ranks or (reuse is not None and reuse.rank is not None):
        place, rank_line = rank_of_leg(run, engine, DECODE)
    if accept is None:
        _note_decoder(run, engine, place, started)
    _note_loading(run, engine, push, started)
    answer: EngineAnswer | None = None
    watch: LoadFailureWatch | None = None
    queued: QueuedPrefill | None = None
    if run.prefiller is None and push is None and not threshold and capabilities.max_step_tokens:
        queued = queue_local_prefill(request, run.route, reuse, engine, place)
    loan: LegLoan | None = None
    if capabilities.borrows and run.prefiller is None and push is None and accept is None:
        loan = None if threshold else find_loan(run, place, DECODE)
        params = params if loan is None else with_field(params, loan.field)
    place.add_load(1, tokens)
    if engine.breaker.circuit is HALF_OPEN:
        gateway.fleet.note_leg_started(engine, run)
    try:
        is_whole = request.exact_stream and reuse is not None
        message = messages.leg_message(
            request.path or request.record.endpoint,
            engine.name,
            push.leg_id if push is not None else messages.new_leg_id(request.record.request_id),
            rank_line + trace_line + request.shared_headers,
            run.bodies.passed()
            if is_passed
            else run.bodies.decode(params, threshold, is_whole, run.retains_turn),
            request.form,
        )
        latest = started + gateway.limits.decode_first_byte_timeout
        if latest > request.latest:
            latest = request.latest
        answer = None if run.is_fresh else engine.pool.send_on_idle(message, latest)
        if answer is None:
            answer = await engine.pool.send(message, latest, fresh=True)
        params, message = None, b""  # they may be large, and the answer may take minutes
        await answer.ready()
        if answer.error is not None:
            raise answer.error
        if answer.status != 200:
            raise await _error_answer(run, engine, answer, loan)
        if capabilities.reports_load_failures or not capabilities.is_identity_known:
            watch = _watch_for_load_failure(run, engine, answer)
        if loan is not None:
            if not answer.is_event_stream and not answer.is_complete:
                # The report may be at its end.
                await answer.read_in_place(gateway.limits.max_answer_size)
            loan.watch(answer)
        validator: StreamValidator | None = None
        content: Json | None = None
        held = answer.held[0] if len(answer.held) == 1 else answer.peek()
        if answer.is_event_stream:
            validator = StreamValidator(
                engine.role,
                None,
                not is_passed,
                request.is_several or request.decode_only_reason in SEVERAL_ANSWERS,
            )
            if not validator.accepts(held):
                content = await _first_output(run, answer, validator)
        elif run.may_return or request.exchange.started or is_passed:
            content = await _partial_content(run, answer)
        else:
            content = generation_content(answer, held)
        held = b""
        is_rejected = content is not None and _is_rejected(run, engine, answer, content, threshold)
        if queued is not None:
            queued.end()
        if threshold and not is_rejected and capabilities.supports_threshold is None:
            await _learn_threshold(run, engine, answer, threshold)
        if engine.breaker.record_success():
            gateway.fleet.note_recovered(engine)
        if is_rejected:
            return DecodeLegResult.REJECTED

        # The engine answers the request.
        if accept is not None:
            accept()
            accept = None
            _note_decoder(run, engine, place, started)
        run.is_read = True
        if run.holder is not None:
            run.holder.kv_leases -= 1
            run.holder.kv_lease_tokens -= request.tokens
            run.holder = None
        if notes is not None:
            was_given_all = request.record.prefill_done is not None
            notes.answered(place.name, tokens if was_given_all else None)
        if slot is not None:
            slot.release_prefiller()
        if reuse is None:
            await deliver(run, answer, validator)
        else:
            await deliver_turn(run, reuse.turn, engine, answer, validator)
        if loan is not None:
            loan.end(*tokens_of(request.record))
        if run.loads_from and gateway.fleet.unreachable_pairs.failing:
            _note_loaded(run, engine)
        return DecodeLegResult.ANSWERED
    except (UpstreamError, EngineError) as error:
        if isinstance(error, EngineError) and watch is not None and watch.has_ended:
            is_of_pair = run.load_failure is not None and run.load_failure.is_of_pair
            return LegFailure(LoadFailedError(NOT_LOADED, is_of_pair), engine, DECODE)
        return LegFailure(error, engine, DECODE)
    except EngineRejectedError as error:
        return LegRefusal(error, engine)
    except asyncio.CancelledError:
        if answer is not None and accept is not None and reuse is not None:
            gateway.releaser.release_late_turn(request, engine, answer)
            answer = None
        raise
    finally:
        if queued is not None:
            queued.end()
        if loan is not None:
            loan.close()
        place.add_load(-1, -tokens)
        if answer is not None and (answer.reservation is not None or not answer.is_complete):
            answer.close()
        if engine.breaker.trial is run:
            gateway.fleet.note_trial_abandoned(engine)


async def _in_span(span: TracedLeg, leg: Awaitable[T]) -> T:
    """Await a leg and record in its span how it ended."""
    try:
        outcome = await leg
    except asyncio.CancelledError:
        span.kind = "cancelled"
        raise
    except Exception as error:
        span.kind = span.error = type(error).__name__
        raise
    finally:
        span.ended = now()
    if isinstance(outcome, LegFailure):
        span.kind, span.error = outcome.error.kind, str(outcome.error)
    elif isinstance(outcome, LegRefusal):
        span.kind = span.error = f"status_{outcome.error.status}"
    return outcome


def _note_success(run: Run, engine: Engine) -> None:
    """Count an answer for the engine's circuit breaker. A justified 4xx is an answer, too."""
    if engine.breaker.record_success():
        run.gateway.fleet.note_recovered(engine)


def _note_no_params(run: Run, engine: Engine, answer: PrefillAnswer, is_push: bool) -> None:
    """Record that a prefill engine holds no KV for the decode engine. Raises NoKvOfferedError if no
    decode engine may prefill the prompt.

    Engines keep no KV of an answer that ends with its first token. In a push they have written it.
    """
    run.gateway.metrics.prefill_without_params.inc()
    run.request.record.without_transfer = f"{engine.name} offered no KV"
    is_over = is_push or answer.finish_reason == "stop"
    if not is_over and run.resume.continued is None and not may_prefill_on_decoder(run):
        _note_success(run, engine)
        raise NoKvOfferedError("the prefill engine answered without kv_transfer_params")
    run.gateway.throttle.warn(
        "a prefill engine answered without kv_transfer_params, so the decode engine prefills again",
        engine.name,
    )


def _note_decoder(run: Run, engine: Engine, place: Place, started: float) -> None:
    """Record which decode engine answers, and since when."""
    record, notes = run.request.record, run.route.decode_feedback
    record.stage, record.decoder, record.decode_started = "decode", engine.name, started
    record.first_byte = None  # of this leg, until it has one: the one before may have failed
    run.is_read = False
    if run.slot is not None:
        run.slot.move_decode_to(engine)
    if notes is not None:
        notes.sent(place.name)


# Reading an engine's answer.


async def _error_answer(
    run: Run,
    engine: Engine,
    answer: EngineAnswer,
    loan: LegLoan | None,
    asked: Body | None = None,
) -> Exception:
    """Return the error for an answer with another status than 200.

    A 4xx goes to the client as it is. `asked`: the client's body, if the engine was asked for one
    token of the client's answer.
    """
    if run.request.decode_only_reason == PASSED:
        # An endpoint that the engine lacks does not count against it.
        body = await answer.read(run.gateway.limits.max_answer_size)
        run.answers_held.keep(answer)
        passed = EngineRejectedError(answer.status, answer.headers, body)
        return (
            _unserved_model(run, engine, passed) or _lacking_endpoint(run, engine, passed) or passed
        )
    if answer.status >= 500:
        body = await _error_body(answer, engine.pool.deadlines)
        failure = failure_in_error(body) if asked is None or loan is not None else None
        if failure is not None:
            if loan is not None:
                loan.note_failure(failure)
                return LoadFailedError(NOT_BORROWED, failure.is_of_pair)
            _note_load_failure(run, engine, failure)
            return LoadFailedError(NOT_LOADED, failure.is_of_pair)
    else:
        body = await answer.read(run.gateway.limits.max_answer_size)
        run.answers_held.keep(answer)
        if asked is not None and answer.status == 400:
            body = restate_prompt_limit(body, asked)
        if answer.status >= 400:
            _note_success(run, engine)
    status = answer.status
    if status < 400:
        return BrokenAnswerError(f"an answer with status {status}")
    rejected = EngineRejectedError(status, answer.headers, body) if status < 500 else None
    text = f"the {engine.role.engine} answered {status}{error_text(body)}"
    seconds = messages.retry_after(answer.headers) if status in (429, 503) else None
    if seconds is not None:
        return EngineOverloadedError(text, seconds, rejected)
    if rejected is not None:
        return _unserved_model(run, engine, rejected) or rejected
    return (EngineUnavailableError if status == 503 else EngineError)(text)


def _unserved_model(
    run: Run, engine: Engine, rejected: EngineRejectedError
) -> UnservedModelError | None:
    """Return the error for a 404 that says that the engine does not serve the request's model; None
    for any other answer. A 404 may be about an endpoint, too."""
    model = run.request.model
    if rejected.status != 404 or not isinstance(model, str):
        return None
    error = error_in(parse_object(rejected.body) or {})
    if not isinstance(error, dict):
        return None
    message = error.get("message")
    if (
        error.get("param") == "model"
        or error.get("code") == "model_not_found"
        or (isinstance(message, str) and message.startswith(f"The model `{model}` does not exist"))
    ):
        return UnservedModelError(f"{engine.name} does not serve {model[:128]}", rejected)
    return None


def _lacking_endpoint(
    run: Run, engine: Engine, rejected: EngineRejectedError
) -> EngineRejectedError | None:
    """Return the error for a 404 that says no more than Not Found, with the names of the engine and
    of the endpoint that it lacks; None for any other answer."""
    if rejected.status != 404:
        return None
    content = parse_object(rejected.body) or {}
    error = error_in(content)
    reason = error.get("message") if isinstance(error, dict) else content.get("detail")
    path = run.request.path or run.request.record.endpoint
    says = reason.replace(path, "").lower() if isinstance(reason, str) else NOT_FOUND[0]
    if says not in NOT_FOUND:
        return None
    text = f"{engine.role.engine} {engine.name} has no endpoint {path}"
    return EngineRejectedError(404, JSON, error_body(404, type_of_status(404), text))


async def _error_body(answer: EngineAnswer, deadlines: Deadlines) -> bytes:
    """Return the error body of a failed engine, or b"" if it does not arrive soon."""
    try:
        async with TimeLimit(deadlines, now() + ERROR_BODY_TIMEOUT_S):
            return await answer.read(MAX_ERROR_BODY_BYTES)
    except (TimeoutError, UpstreamError):
        return b""


def _is_rejected(
    run: Run, engine: Engine, answer: EngineAnswer, content: Json, threshold: float
) -> bool:
    """Return True if `content` rejects the request because of the threshold that the engine was
    given. Raises the failure that the content reports."""
    failure = failure_in(content.get("error"))
    if failure is not None:
        _note_load_failure(run, engine, failure)
        raise LoadFailedError(NOT_LOADED, failure.is_of_pair)
    returned = preemption_in(answer, content)
    if returned is not None:
        if run.may_return:
            raise returned
        if run.request.decode_only_reason in AS_SENT:
            return False
        raise EngineUnavailableError(
            "the decode engine returned an unfinished answer although the leg did not allow it"
        )
    if threshold and is_rejection(content):
        engine.capabilities.note_threshold_rejected()
        return True
    _require_answer(run, engine, content)
    return False


async def _learn_threshold(
    run: Run, engine: Engine, answer: EngineAnswer, threshold: float
) -> None:
    """Learn from an answer whether its engine knows thresholds, or send a probe."""
    share = await cached_share(answer)
    if engine.capabilities.note_threshold_accepted(threshold, share):
        run.gateway.tasks.spawn(probe_threshold(run.request, engine))


async def _partial_content(run: Run, answer: EngineAnswer) -> Json | None:
    """Return the content of an answer that is no stream if it may report a failure, else None. What
    is read for that stays in the answer's buffer."""
    request = run.request
    if run.may_return:
        await answer.read_in_place(run.gateway.limits.max_answer_size)
    if request.exchange.started:
        raise BrokenAnswerError("an answer that is not an event stream cannot resume one")
    if request.decode_only_reason == PASSED:
        return passthrough_content(answer, may_be_empty=bool(request.form))
    return generation_content(answer, answer.peek())


async def _first_output(run: Run, answer: EngineAnswer, validator: StreamValidator) -> Json | None:
    """Return the first event of a stream with output if it may report a failure, else None."""
    try:
        return await validator.first_output(answer, run.resume.buffer is None)
    except UpstreamError:  # of an engine that has begun to answer: it has read its KV
        run.request.record.first_byte = answer.first_body_at
        raise


def _require_answer(run: Run, engine: Engine, content: Json) -> None:
    """Raise the failure that an answer with status 200 reports, if it reports one."""
    failure = failure_of(content, engine.role)
    if isinstance(failure, EngineRejectedError):
        _note_success(run, engine)
    if failure is not None:
        raise failure


# KV loads of the decode engine that fail.


def _note_loading(run: Run, decoder: Engine, push: PushParams | None, moment: float) -> None:
    holder = "" if run.holder is None else run.holder.name
    run.loads_from = holder if push is None else run.request.record.prefiller or ""
    if run.load_failure is not None:
        run.load_failure = None
    pairs = run.gateway.fleet.unreachable_pairs
    if pairs.failing and run.loads_from:
        pairs.note_load_started(run.loads_from, decoder.name, moment)


def _watch_for_load_failure(
    run: Run, decoder: Engine, answer: EngineAnswer
) -> LoadFailureWatch | None:
    """Read the report of a failed load from the answer, and remove it from there."""
    if answer.is_event_stream:
        watch = LoadFailureWatch(partial(_note_load_failure, run, decoder))
        answer.watch = watch.passing
        return watch
    failure, rest = take_failure_from_answer(answer.peek())
    if failure is not None:
        _note_load_failure(run, decoder, failure)
        answer.replace_body(rest)
    return None


def _note_load_failure(run: Run, decoder: Engine, failure: LoadFailure) -> None:
    gateway, prefiller = run.gateway, run.loads_from
    run.load_failure = failure
    gateway.metrics.load_failures.add(("pair" if failure.is_of_pair else "request",))
    if not failure.is_of_pair or not prefiller:
        return
    pause = gateway.fleet.unreachable_pairs.record_failure(prefiller, decoder.name, now())
    if pause is not None:
        logger.warning(
            "decode engine %s cannot load KV from prefill engine %s (%s), and is paired with "
            "others for %.0f s: %s",
            decoder.name,
            prefiller,
            failure.remote,
            pause,
            failure.reason,
        )


def _note_loaded(run: Run, decoder: Engine) -> None:
    pairs, prefiller = run.gateway.fleet.unreachable_pairs, run.loads_from
    if run.load_failure is not None:
        return
    if pairs.record_success(prefiller, decoder.name):
        logger.info(
            "decode engine %s loads KV from prefill engine %s again", decoder.name, prefiller
        )
