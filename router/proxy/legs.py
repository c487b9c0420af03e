"""One leg: one upstream request to one engine on behalf of a client request.

A leg sends the request, judges the answer, and records what the answer shows about the engine. The
outcome is a value: an answer, a failure that has a row in `retry.RULES`, or an engine's 4xx. What
follows from the outcome is for `strategies`.

A leg begins and ends much: load, a breaker trial, a place in the slot, a policy's feedback, a
queued prefill, a loan, the end of a KV lease, a rank and a span of the trace. `LegAccount` is the
one place for them: a feature has a line in each moment that concerns it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from time import monotonic as now
from types import TracebackType
from typing import ClassVar, Final, Generic, NamedTuple, Self, TypeVar

from msgspec.structs import astuple

from router.fleet.engine import BOTH, DECODE, HALF_OPEN, PREFILL, Engine, EngineRole, Place
from router.http_client.answer_limits import UNCOUNTED_BYTES
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import BrokenAnswerError, MigratedError, UpstreamError
from router.openai.answers import Json, is_rejection, parse_object
from router.openai.errors import (
    EngineError,
    EngineRejectedError,
    EngineUnavailableError,
    LoadFailedError,
    NoKvOfferedError,
)
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
from router.proxy.id_resume import IdBuffer
from router.proxy.kv_params import with_field
from router.proxy.kv_protocols.protocol import LegPair
from router.proxy.large_bodies import LARGE_BYTES
from router.proxy.leg_errors import (
    NOT_LOADED,
    error_of_answer,
    note_load_failure,
)
from router.proxy.load_failure import (
    LoadFailure,
    LoadFailureWatch,
    failure_in,
    take_failure_from_answer,
)
from router.proxy.loans import LegLoan, find_loan, find_stream_loan
from router.proxy.messages import BodyHalves
from router.proxy.queued_prefill import QueuedPrefill, queue_local_prefill, queue_prefill
from router.proxy.ranks import rank_of_leg
from router.proxy.relay import deliver, deliver_turn, note_no_turns
from router.proxy.request import AS_SENT, PASSED, SEVERAL_ANSWERS, Body
from router.proxy.resume import NO_PARAMS, DecodeParams
from router.proxy.retry import LegError
from router.proxy.run import Run, may_prefill_on_decoder
from router.proxy.side_requests import probe_threshold
from router.routing.policy import PolicyFeedback
from router.telemetry.record import TracedLeg
from router.telemetry.request_metrics import tokens_in, tokens_of, usage_in

logger = logging.getLogger("disagg_router.proxy")
# Seconds for which a kept connection may have been idle if the leg can be sent only once. Servers
# keep idle connections for five seconds and more, so the engine is hardly closing this one.
SOUND_CONNECTION_IDLE_S = 1.0
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


# A name in the enum costs more than a call of a function.
ANSWERED: Final = DecodeLegResult.ANSWERED
REJECTED: Final = DecodeLegResult.REJECTED

PrefillOutcome = PrefillAnswer | LegFailure | LegRefusal
DecodeOutcome = DecodeLegResult | LegFailure | LegRefusal


async def prefill_leg(
    run: Run,
    engine: Engine,
    pair: LegPair | None = None,
    last_turn: Body | None = None,
    hands_over: bool = False,
) -> PrefillOutcome:
    """Send the prefill leg and return its outcome. The engine then holds KV for a decode engine.

    `pair`: what this leg shares with the decode leg. `last_turn`: params of retained KV that the
    engine is to read, which it can do only once. `hands_over`: a decode engine is to continue from
    the token that this engine samples.
    """
    limits = run.gateway.limits
    with PrefillAccount(run, engine, pair, last_turn) as leg:
        loan_field = leg.loan.field if leg.loan else b""
        if pair is not None and pair.prefill_fields is not None:
            body = run.bodies.prefill_with(pair.prefill_fields, pair.lengths)
        else:
            transfer_id = "" if pair is None else pair.transfer_id
            continued = None if run.resume.buffer is None else run.resume.continued
            begun = None if continued is None or continued.by_request else continued
            body = run.bodies.prefill(last_turn, transfer_id, hands_over, begun, loan_field)
        if run.canary is not None:
            is_usable = not hands_over and run.resume.continued is None
            body = run.canary.prefill_body(engine, body, is_usable)
        answer = await leg.send(
            "" if pair is None else pair.leg_id,
            body,
            limits.prefill_timeout,
            SOUND_CONNECTION_IDLE_S if last_turn is not None else None,
        )
        raw = answer.held[0] if answer.is_complete and len(answer.held) == 1 else b""
        if not raw or len(raw) > limits.max_answer_size:
            raw = await answer.read(limits.max_answer_size)
            run.answers_held.keep(answer)
        leg.answer = None  # it is complete
        leg.outcome = prefilled = PrefillAnswer(raw)
        if prefilled.may_fail and (content := parse_object(raw)) is not None:
            _require_answer(run, engine, content)
        if prefilled.params is None and (pair is None or pair.prefill_fields is None):
            _note_no_params(run, engine, prefilled, is_push=pair is not None)
        if run.canary is not None:
            run.canary.note_prefilled(prefilled)
        leg.answered(prefilled)
    return leg.outcome


async def decode_leg(
    run: Run,
    engine: Engine,
    params: DecodeParams = NO_PARAMS,
    threshold: float = 0.0,
    pair: LegPair | None = None,
    accept: Callable[[], None] | None = None,
) -> DecodeOutcome:
    """Send the decode leg, relay the answer until the client has all of it, and return the outcome.

    `params` are those of `Run.leg_params`. `threshold`: the share of the prompt that the engine
    must have in its cache, or it may reject. `accept` is called when a hedged leg is about to be
    relayed; the other legs end then.
    """
    reuse, limits, capabilities = run.plan.reuse, run.gateway.limits, engine.capabilities
    with DecodeAccount(run, engine, params, threshold, pair, accept) as leg:
        body = leg.body() if leg.canary is None else leg.canary.decode_body(leg.body())
        answer = await leg.send(
            pair.leg_id if pair is not None else "", body, limits.decode_first_byte_timeout
        )
        del body
        if capabilities.reports_load_failures or not capabilities.is_identity_known:
            leg.watch(answer)
        if leg.loan is not None:
            if not answer.is_event_stream and not answer.is_complete:
                # The report may be at its end.
                await answer.read_in_place(limits.max_answer_size)
            leg.loan.watch(answer)
        validator = _validator_of(leg) if answer.is_event_stream else None
        content = await _first_content(leg, answer, validator)
        is_rejected = content is not None and _is_rejected(leg, answer, content)
        leg.answered()
        if is_rejected:
            leg.outcome = REJECTED
            return leg.outcome
        if threshold and capabilities.supports_threshold is None:
            await _learn_threshold(run, engine, answer, threshold)
        if leg.canary is not None:
            if not answer.is_event_stream:
                await answer.read_in_place(limits.max_answer_size)
            await leg.canary.check(run, engine, answer, leg.loads_kv)
        leg.accepted()
        if reuse is None:
            await deliver(run, answer, validator)
        else:
            await deliver_turn(run, reuse.turn, engine, answer, validator)
        leg.delivered()
    return leg.outcome


class LegAccount(Generic[T]):
    """Counts one leg for each feature that follows legs, from the start of the leg to its end.

    A leg uses it as a context manager: `__init__` and `__enter__` run at the start, and `__exit__`
    at the end converts an error of the engine to the outcome. The moments between are methods.

    | feature        | begun | answered | accepted | failed | closed |
    |----------------|-------|----------|----------|--------|--------|
    | load           |   x   |          |          |        |   x    |
    | breaker trial  |   x   |    x     |          |        |   x    |
    | slot           |   x   |    P     |    D     |        |        |
    | feedback       |   x   |    P     |    D     |        |        |
    | queued prefill |   x   |    D     |          |        |   x    |
    | loan           |   x   |    P     |    D     |        |   x    |
    | KV lease       |       |          |    D     |        |        |
    | rank           |   x   |          |          |        |        |
    | trace          |   x   |          |          |   x    |   x    |

    P: of a prefill leg, D: of a decode leg.
    """

    __slots__ = (
        "_computed", "_feedback", "_load", "_queued", "_rank_line", "_span", "_started", "answer",
        "engine", "loan", "outcome", "place", "run",
    )  # fmt: skip
    role: ClassVar[EngineRole]
    outcome: T | LegFailure | LegRefusal

    def __init__(self, run: Run, engine: Engine, feedback: PolicyFeedback | None) -> None:
        self.run, self.engine, self._feedback = run, engine, feedback
        self.place: Place = engine
        self.answer: EngineAnswer | None = None
        """The engine's answer, as long as the leg has to close it."""
        self.loan: LegLoan | None = None
        self._queued: QueuedPrefill | None = None
        self._computed: int | None = None
        """Tokens of the prompt that a prefill engine has computed; None if unknown."""
        self._rank_line = b""
        self._load, self._started = run.request.tokens, now()
        trace = run.request.record.trace
        self._span: TracedLeg | None = (
            None if trace is None else trace.add_leg(self.role, engine.name, self._started)
        )

    def __enter__(self) -> Self:
        self.place.add_load(1, self._load)
        if self.engine.breaker.circuit is HALF_OPEN:
            self.run.gateway.fleet.note_leg_started(self.engine, self.run)
        return self

    async def send(
        self, leg_id: str, body: BodyHalves, timeout: float, longest_idle: float | None = None
    ) -> EngineAnswer:
        """Send the leg, and return the answer once it has begun with status 200.

        `leg_id`: that of a push; "" means a new one. `timeout`: seconds until the first byte.
        `longest_idle`: see SOUND_CONNECTION_IDLE_S. Raises UpstreamError, EngineError,
        EngineRejectedError.
        """
        run, engine, request, span = self.run, self.engine, self.run.request, self._span
        trace_line = b"" if span is None else span.headers
        if len(body[0]) > LARGE_BYTES:
            await run.gateway.pacer.turn()
        message = messages.leg_message(
            request.path or request.record.endpoint,
            engine.name,
            leg_id or messages.new_leg_id(request.record.request_id),
            self._rank_line + trace_line + request.shared_headers,
            body,
            request.form,
        )
        latest = self._started + timeout
        if latest > request.latest:
            latest = request.latest
        answer = None if run.is_fresh else engine.pool.send_on_idle(message, latest, longest_idle)
        if answer is None:
            answer = await engine.pool.send(message, latest, fresh=True)
        self.answer = answer
        del body, message  # they may be large, and the answer may take minutes
        await answer.ready()
        if answer.error is not None:
            raise answer.error
        if answer.status != 200:
            asked = request.body if self.role is PREFILL else None
            raise await error_of_answer(run, engine, answer, self.loan, asked)
        return answer

    def failed(self, error: BaseException | None) -> bool:
        """Take an engine's error as the outcome. Return False for any other error."""
        if isinstance(error, UpstreamError | EngineError):
            self.outcome = LegFailure(error, self.engine, self.role)
        elif isinstance(error, EngineRejectedError):
            self.outcome = LegRefusal(error, self.engine)
        else:
            return False
        return True

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> bool:
        is_outcome = error is not None and self.failed(error)
        if self.role is PREFILL:  # while the leg still counts as load
            self.place.note_prefill(self._started, now(), self._computed)
        if isinstance(error, asyncio.CancelledError):
            self._hand_to_releaser(self.answer)
        if self._queued is not None:
            self._queued.end()
        if self.loan is not None:
            self.loan.close()
        self.place.add_load(-1, -self._load)
        answer = self.answer
        if answer is not None and (answer.reservation is not None or not answer.is_complete):
            answer.close()
        if self.engine.breaker.trial is self.run:
            self.run.gateway.fleet.note_trial_abandoned(self.engine)
        if self._span is not None:
            self._end_span(self._span, None if is_outcome else error)
        return is_outcome

    def _hand_to_releaser(self, answer: EngineAnswer | None) -> None:
        """The leg was cancelled: let the answer be read on, if it shows KV to release. None: the
        request was not sent."""
        raise NotImplementedError

    def _end_span(self, span: TracedLeg, error: BaseException | None) -> None:
        span.ended = now()
        if error is not None:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            span.kind = "cancelled" if is_cancelled else type(error).__name__
            span.error = "" if is_cancelled else span.kind
        elif isinstance(self.outcome, LegFailure):
            span.kind, span.error = self.outcome.error.kind, str(self.outcome.error)
        elif isinstance(self.outcome, LegRefusal):
            span.kind = span.error = f"status_{self.outcome.error.status}"


class PrefillAccount(LegAccount[PrefillAnswer]):
    """The account of a prefill leg; see `prefill_leg`."""

    __slots__ = ("_pair", "_tokens")
    role = PREFILL

    def __init__(
        self, run: Run, engine: Engine, pair: LegPair | None, last_turn: Body | None
    ) -> None:
        # super() would cost 700 instructions more.
        LegAccount.__init__(self, run, engine, run.route.prefill_feedback)
        self._pair = pair
        request, record = run.request, run.request.record
        record.stage, record.prefiller = "prefill", engine.name
        record.prefill_started = self._started
        record.first_byte, run.is_read = None, False  # of a decode engine that has read this
        if run.slot is not None:
            run.slot.move_prefill_to(engine)
        if pair is not None:
            self.place, self._rank_line = pair.place, pair.pinned
        elif engine.ranks:
            self.place, self._rank_line = rank_of_leg(run, engine, PREFILL)
        if engine.capabilities.borrows and last_turn is None:
            self.loan = find_loan(run, self.place, PREFILL)
        if self._feedback is not None:
            held = self._feedback.expected_tokens(self.place.name)
            held += self.loan.tokens if self.loan else 0
            self._load = max(0, self._load - held)
            self._feedback.sent(self.place.name)
        self._tokens = self._load
        if engine.role is BOTH:  # there, prompts count as queued, and answers as load
            reuse = None if last_turn is None else run.plan.reuse
            read_share = 0.0 if reuse is None else reuse.cached_share
            self._queued = queue_prefill(
                request, run.route, engine, self.place, self._tokens, read_share
            )
            self._load = 0

    def answered(self, prefilled: PrefillAnswer) -> None:
        """The engine has computed the prompt: learn from what it reports."""
        run, engine, params = self.run, self.engine, prefilled.params
        record, gateway, capabilities = run.request.record, run.gateway, engine.capabilities
        record.prefill_done = now()
        if run.resume.continued is None:  # its prompt is that of the client
            record.prefill_usage = prefilled.usage
        gateway.metrics.requests.prefill_seconds.observe(record.prefill_done - self._started)
        if run.slot is not None:
            run.slot.release_prefiller()
        reported = tokens_in(prefilled.usage)
        prompt, cached = reported.prompt, reported.cached
        self._computed = self._tokens
        if prompt is not None and cached is not None:
            self._computed = max(0, prompt - cached)
        if self._feedback is not None:
            self._feedback.answered(self.place.name, cached)
        if run.plan.reuse is not None:
            run.prompt_tokens = prompt
            if run.request.names_conversation and capabilities.lacks_turns:
                note_no_turns(engine)
        if self.loan is not None:
            if params is not None:
                self.loan.read(params.raw)
            self.loan.end(prompt, None, cached)
        if params is not None:
            # The params are decoded only until the engine is known to send prefix hashes.
            capabilities.verifies_prefix = prefilled.mentions_prefix_hashes and (
                capabilities.verifies_prefix or params.has_prefix_hashes
            )
            if not capabilities.rank_endpoints and gateway.limits.transfer_mode != "pull":
                capabilities.note_kv_params(params.content)
            if gateway.logs_moved_blocks and len(params.raw) <= UNCOUNTED_BYTES:
                record.transfer_params = params.raw
        gateway.fleet.note_leg_answered(engine)

    def _hand_to_releaser(self, answer: EngineAnswer | None) -> None:
        if answer is not None:
            release = None if self._pair is None else self._pair.release
            releaser = self.run.gateway.releaser
            releaser.release_late_prefill(self.run.request, self.engine.group, answer, release)
            self.answer = None

    def _end_span(self, span: TracedLeg, error: BaseException | None) -> None:
        super()._end_span(span, error)
        if error is None and isinstance(self.outcome, PrefillAnswer):
            span.usage = self.outcome.usage


class DecodeAccount(LegAccount[DecodeLegResult]):
    """The account of a decode leg; see `decode_leg`."""

    __slots__ = ("_accept", "_pair", "_watch", "canary", "params", "threshold")
    role = DECODE

    def __init__(
        self,
        run: Run,
        engine: Engine,
        params: DecodeParams,
        threshold: float,
        pair: LegPair | None,
        accept: Callable[[], None] | None,
    ) -> None:
        LegAccount.__init__(self, run, engine, run.route.decode_feedback)
        request, reuse = run.request, run.plan.reuse
        self.params, self.threshold, self._accept, self._pair = params, threshold, accept, pair
        self._watch: LoadFailureWatch | None = None
        self.canary = run.canary
        if self.canary is not None and (
            threshold or run.resume.continued is not None or not self.canary.compares(self.loads_kv)
        ):
            self.canary = None
        if engine.ranks or (reuse is not None and reuse.rank is not None):
            self.place, self._rank_line = rank_of_leg(run, engine, DECODE)
        if accept is None:
            self._note_decoder()
        self._note_loading(pair)
        if run.prefiller is not None or pair is not None or threshold:
            return
        if run.lender is not None:
            self.loan = find_stream_loan(run, engine)
            if self.loan is not None:
                return
        if engine.capabilities.max_step_tokens:
            self._queued = queue_local_prefill(request, run.route, reuse, engine, self.place)
        if engine.capabilities.borrows and accept is None:
            self.loan = find_loan(run, self.place, DECODE)

    @property
    def loads_kv(self) -> bool:
        """True if the engine loads the KV of a prefill engine, which may still compute it."""
        return self.run.prefiller is not None or self._pair is not None

    def _note_decoder(self) -> None:
        """Record which decode engine answers, and since when."""
        run, record = self.run, self.run.request.record
        record.stage, record.decoder = "decode", self.engine.name
        record.decode_started = self._started
        record.first_byte = None  # of this leg, until it has one: the one before may have failed
        run.is_read = False
        if self.params.buffer is not run.resume.buffer:
            run.resume.take_buffer(self.params.buffer)
        if run.slot is not None:
            run.slot.move_decode_to(self.engine)
        if self._feedback is not None:
            self._feedback.sent(self.place.name)

    def body(self) -> BodyHalves:
        run, request, params = self.run, self.run.request, self.params.params
        if request.decode_only_reason == PASSED:
            return run.bodies.passed()
        if self.params.fields is not None:
            return run.bodies.decode_with(self.params.fields)
        if self.loan is not None:
            params = with_field(params, self.loan.field)
        is_whole = request.exact_stream and run.plan.reuse is not None
        by_ids = isinstance(self.params.buffer, IdBuffer)
        return run.bodies.decode(params, self.threshold, is_whole, run.retains_turn, by_ids)

    def answered(self) -> None:
        """The engine has begun to answer, so it has the prompt's KV."""
        if self._queued is not None:
            self._queued.end()
        self.run.gateway.fleet.note_leg_answered(self.engine)

    def accepted(self) -> None:
        """This engine answers the request."""
        run = self.run
        if self._accept is not None:
            self._accept()
            self._accept = None
            self._note_decoder()
        run.stop_holding(is_read=True)
        if self._feedback is not None:
            was_given_all = run.request.record.prefill_done is not None
            self._feedback.answered(self.place.name, run.request.tokens if was_given_all else None)
        if run.slot is not None:
            run.slot.release_prefiller()

    def delivered(self) -> None:
        """The client has the whole answer."""
        if self.loan is not None:
            self.loan.end(*astuple(tokens_of(self.run.request.record)))
        if self.run.loads_from and self.run.gateway.fleet.unreachable_pairs.failing:
            self._note_loaded()
        self.outcome = ANSWERED

    def failed(self, error: BaseException | None) -> bool:
        watch, failure = self._watch, self.run.load_failure
        if isinstance(error, MigratedError):
            self.run.lender = self.place
            if self.run.resume.buffer is not None:
                self.run.resume.buffer.left = self.engine
        if isinstance(error, EngineError) and watch is not None and watch.has_ended:
            error = LoadFailedError(NOT_LOADED, failure is not None and failure.is_of_pair)
        return super().failed(error)

    def _hand_to_releaser(self, answer: EngineAnswer | None) -> None:
        """Release the KV that a lost hedged leg may have retained. If the client has disconnected,
        wait until the decode engine has read the prefill engine's KV, which frees it."""
        releaser, pair = self.run.gateway.releaser, self._pair
        if pair is not None and pair.keeps_aborted and not self.run.is_read:
            if answer is not None:
                releaser.await_reading(answer)
            elif pair.release is not None:
                releaser.release_by_reading(self.run.request, self.engine.group, pair.release)
            self.answer = None
        elif answer is not None and self._accept is not None and self.run.plan.reuse is not None:
            releaser.release_late_turn(self.run.request, self.engine, answer)
            self.answer = None

    def _end_span(self, span: TracedLeg, error: BaseException | None) -> None:
        super()._end_span(span, error)
        record = self.run.request.record
        if record.decoder == self.engine.name:  # not of other hedged legs
            span.first_byte = record.first_byte
            span.usage = record.usage or usage_in(record.answer_end)
        if error is None and self.outcome is DecodeLegResult.REJECTED:
            span.kind = "rejected"

    # KV loads that fail.

    def _note_loading(self, pair: LegPair | None) -> None:
        run, holder = self.run, self.run.holder
        source = holder.name if holder is not None else ""
        run.loads_from = source if pair is None else run.request.record.prefiller or ""
        run.load_failure = None
        pairs = run.gateway.fleet.unreachable_pairs
        if pairs.failing and run.loads_from:
            pairs.note_load_started(run.loads_from, self.engine.name, self._started)

    def watch(self, answer: EngineAnswer) -> None:
        """Read the report of a failed load from the answer, and remove it from there."""
        if answer.is_event_stream:
            self._watch = LoadFailureWatch(self.note_load_failure)
            answer.watch = self._watch.passing
            return
        failure, rest = take_failure_from_answer(answer.peek())
        if failure is not None:
            self.note_load_failure(failure)
            answer.replace_body(rest)

    def note_load_failure(self, failure: LoadFailure) -> None:
        note_load_failure(self.run, self.engine, failure)

    def _note_loaded(self) -> None:
        run, decoder = self.run, self.engine
        pairs = run.gateway.fleet.unreachable_pairs
        is_compared = self.canary is not None and self.canary.has_agreed
        if run.load_failure is None and pairs.record_success(
            run.loads_from, decoder.name, is_compared
        ):
            logger.info(
                "decode engine %s loads KV from prefill engine %s again",
                decoder.name,
                run.loads_from,
            )


def _note_no_params(run: Run, engine: Engine, answer: PrefillAnswer, is_push: bool) -> None:
    """Record that a prefill engine holds no KV for the decode engine. Raises NoKvOfferedError if no
    decode engine may prefill the prompt.

    Engines keep no KV of an answer that ends with its first token. In a push they have written it.
    """
    run.gateway.metrics.prefill_without_params.inc()
    run.request.record.without_transfer = f"{engine.name} offered no KV"
    is_over = is_push or answer.finish_reason == "stop"
    if not is_over and run.resume.continued is None and not may_prefill_on_decoder(run):
        run.gateway.fleet.note_leg_answered(engine)
        raise NoKvOfferedError("the prefill engine answered without kv_transfer_params")
    run.gateway.throttle.warn(
        "a prefill engine answered without kv_transfer_params, so the decode engine prefills again",
        engine.name,
    )


# What the first part of an answer shows.


def _validator_of(leg: DecodeAccount) -> StreamValidator:
    request = leg.run.request
    is_several = request.is_several or request.decode_only_reason in SEVERAL_ANSWERS
    is_passed = request.decode_only_reason == PASSED
    return StreamValidator(leg.engine.role, None, not is_passed, is_several)


async def _first_content(
    leg: DecodeAccount, answer: EngineAnswer, validator: StreamValidator | None
) -> Json | None:
    """Return the first event with output, or the whole answer if it is no stream, if it may report
    a failure, else None. What is read for that stays in the answer's buffer."""
    run, request = leg.run, leg.run.request
    held = answer.held[0] if len(answer.held) == 1 else answer.peek()
    if validator is not None:
        if validator.accepts(held):
            return None
        try:
            return await validator.first_output(answer, run.resume.buffer is None)
        except UpstreamError:  # of an engine that has begun to answer: it has read its KV
            request.record.first_byte = answer.first_body_at
            raise
    if leg.params.may_return:
        await answer.read_in_place(run.gateway.limits.max_answer_size)
        held = answer.peek()
    if request.exchange.started:
        raise BrokenAnswerError("an answer that is not an event stream cannot resume one")
    if request.decode_only_reason == PASSED:
        return passthrough_content(answer, may_be_empty=bool(request.form))
    return generation_content(answer, held)


def _is_rejected(leg: DecodeAccount, answer: EngineAnswer, content: Json) -> bool:
    """Return True if `content` rejects the request because of the threshold that the engine was
    given. Raises the failure that the content reports."""
    failure = failure_in(content.get("error"))
    if failure is not None:
        leg.note_load_failure(failure)
        raise LoadFailedError(NOT_LOADED, failure.is_of_pair)
    returned = preemption_in(answer, content)
    if returned is not None:
        if leg.params.may_return:
            raise returned
        if leg.run.request.decode_only_reason in AS_SENT:
            return False
        raise EngineUnavailableError(
            "the decode engine returned an unfinished answer although the leg did not allow it"
        )
    if leg.threshold and is_rejection(content):
        leg.engine.capabilities.note_threshold_rejected()
        return True
    _require_answer(leg.run, leg.engine, content)
    return False


async def _learn_threshold(
    run: Run, engine: Engine, answer: EngineAnswer, threshold: float
) -> None:
    """Learn from an answer whether its engine knows thresholds, or send a probe."""
    share = await cached_share(answer)
    if engine.capabilities.note_threshold_accepted(threshold, share):
        run.gateway.tasks.spawn(probe_threshold(run.request, engine))


def _require_answer(run: Run, engine: Engine, content: Json) -> None:
    """Raise the failure that an answer with status 200 reports, if it reports one."""
    failure = failure_of(content, engine.role)
    if isinstance(failure, EngineRejectedError):
        run.gateway.fleet.note_leg_answered(engine)
    if failure is not None:
        raise failure
