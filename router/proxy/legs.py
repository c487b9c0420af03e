"""One leg of a request at one engine: asked, judged, counted there while it lasts.

What an engine's answer says of the engine is noted here; what follows for the request is for `run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import NoReturn

from router.fleet.capabilities import EngineCapabilities
from router.fleet.circuit_breaker import HALF_OPEN
from router.fleet.engine import Engine
from router.http_client.answer_memory import UNCOUNTED_BYTES
from router.http_client.deadlines import now
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import BrokenAnswerError, UpstreamError
from router.openai.answers import Json
from router.openai.errors import (
    EngineError,
    EngineOverloadedError,
    EngineRejectedError,
    EngineUnavailableError,
    LoadFailedError,
)
from router.openai.prompt_limit import restate_prompt_limit
from router.proxy import headers, release
from router.proxy.answer_check import (
    cached_share,
    failure_of,
    first_word,
    passed_word,
    prefilled_word,
    word_of,
)
from router.proxy.dp_ranks import chosen, line
from router.proxy.gateway import Gateway
from router.proxy.leg_bodies import Halves, message_in
from router.proxy.load_failure import (
    LoadFailure,
    Watch,
    failure_in,
    failure_in_whole,
    failure_of_error,
)
from router.proxy.plan import Plan
from router.proxy.preemption_return import handed_back
from router.proxy.prefill_answer import Params, Prefilled
from router.proxy.push import Push
from router.proxy.relay import deliver, deliver_turn, note_no_turns
from router.proxy.request import AS_SENT, PASSED, Body, Request
from router.proxy.threshold_probe import is_rejection, try_threshold
from router.proxy.turn_reuse import Reuse

logger = logging.getLogger("disagg_router.flows")
LegError = UpstreamError | EngineError
LEG_ERRORS = (UpstreamError, EngineError)
# Seconds for which a kept connection may have been idle, so that its engine is hardly closing it in
# this very moment: servers wait for five and more. If it does, nobody knows what it has read.
SOUND = 1.0
# Seconds and bytes for an engine that has failed to say why.
LAST_WORDS = 1.0
NOT_LOADED = "the decode engine could not load the KV of this prompt"
LAST_WORDS_SIZE = 256 * 1024
SENT: Halves = (b"", b"")


class Came(Enum):
    """What became of a decode leg that did not fail for good. UNASKED: it was to be asked first,
    and may not know that it can reject. ITSELF: the one prefiller that is left to decode has it.
    CUT: some of the answer is there, or was handed back, and another is to go on."""

    ANSWERED = auto()
    CUT = auto()
    UNASKED = auto()
    REJECTED = auto()
    AFRESH = auto()
    ITSELF = auto()


ANSWERED, CUT, UNASKED, REJECTED, AFRESH, ITSELF = Came


class Legs:
    """Those of one request. Each may raise UpstreamError or EngineError, for which there is a row
    in the table of failures, and EngineRejectedError with an engine's 4xx."""

    __slots__ = ("_gateway", "_is_read", "_load_failure", "_loads_from", "_prompt_tokens",
                 "_request", "holder", "may_come_back", "plan")  # fmt: skip

    def __init__(self, request: Request, plan: Plan, gateway: Gateway) -> None:
        self._request = request
        self.plan = plan
        self._gateway = gateway
        self._prompt_tokens: int | None = None
        # Where KV waits for a decoder, unless it was read.
        self.holder: Engine | None = None
        self._is_read = False
        # The prefiller whose KV the decoder is to load, if any; and why it could not.
        self._loads_from = ""
        self._load_failure: LoadFailure | None = None
        # The decoder was asked to hand back what it would have to preempt.
        self.may_come_back = False

    async def prefill(
        self,
        engine: Engine,
        body: Halves,
        fresh: bool,
        push: Push | None = None,
        is_offered: bool = False,
    ) -> Prefilled:
        """`is_offered`: it is to read what a decoder holds, which can be asked for once."""
        request, gateway = self._request, self._gateway
        record, limits, seat = request.record, gateway.limits, request.seat
        record.stage, record.prefiller = "prefill", engine.name
        record.first_byte = None  # of a decoder that has read this
        self._is_read = False
        record.prefill_started = started = now()
        if seat is not None:
            seat.prefill_at(engine)
        notes, tokens = self.plan.route.prefill_feedback, request.tokens
        if notes is not None:
            tokens = max(0, tokens - notes.expected_tokens(engine.name))
            notes.sent(engine.name)
        answer: EngineAnswer | None = None
        self._begin(engine, tokens)
        try:
            pinned = b"" if push is None else push.pinned
            message = self._message(engine, body, push, pinned)
            latest = started + limits.prefill_timeout
            if latest > request.latest:
                latest = request.latest
            longest = SOUND if is_offered else None
            answer = None if fresh else engine.pool.send_on_idle(message, latest, longest)
            if answer is None:
                answer = await engine.pool.send(message, latest, fresh=True)
            body, message = SENT, b""  # they may be large, and the answer may take minutes
            await answer.ready()
            if answer.error is not None:
                raise answer.error
            if answer.status != 200:
                await self._refuse(engine, answer, request.body)
            raw = answer.take_if_complete(limits.max_answer_size)
            if raw is None:
                raw = await answer.read(limits.max_answer_size)
                request.keep(answer)
            prefilled = Prefilled(raw)
            if prefilled.is_none:
                raise BrokenAnswerError("an answer without choices")
            self._require_answer(engine, prefilled_word(raw))
            if engine.breaker.record_success():
                gateway.fleet.note_recovered(engine)
            self._note(engine, prefilled, started)
            return prefilled
        except asyncio.CancelledError:
            if answer is not None:
                gateway.spawn(release.late(request, gateway, answer))
                answer = None
            raise
        finally:
            self._end(engine, tokens, answer)

    def _note(self, engine: Engine, prefilled: Prefilled, started: float) -> None:
        """A prefiller has done its part, and holds KV from now on."""
        request, gateway = self._request, self._gateway
        record, seat, notes = request.record, request.seat, self.plan.route.prefill_feedback
        record.prefill_done = moment = now()
        record.prefill_usage = prefilled.usage
        if seat is not None:
            seat.prefilled()
        gateway.metrics.prefill_seconds.observe(moment - started)
        if notes is not None:
            notes.answered(engine.name, prefilled.cached_tokens)
        if self.plan.reuse is not None:
            self._prompt_tokens = prefilled.prompt_tokens
            note_no_turns(gateway, engine)
        self._learn(engine, prefilled.params)
        if prefilled.params is not None and not self._is_read:
            if self.holder is not None:
                self.let_go()
            engine.kv_leases += 1
            self.holder = engine
            if gateway.tells_moved and len(prefilled.params.raw) <= UNCOUNTED_BYTES:
                record.transfer_params = prefilled.params.raw

    def let_go(self, is_read: bool = False) -> None:
        """No decoder will read what a prefiller holds, or one has."""
        holder, self.holder, self._is_read = self.holder, None, is_read
        if holder is not None:
            holder.kv_leases -= 1

    async def decode(
        self,
        engine: Engine,
        body: Halves,
        fresh: bool,
        threshold: float = 0.0,
        push: Push | None = None,
        accept: Callable[[], None] | None = None,
    ) -> Came:
        """Until the client has it all. `threshold`: what the engine's cache must hold, or it may
        reject. `accept`: others are asked at the same time, and left from then on."""
        request, gateway = self._request, self._gateway
        seat, reuse, started = request.seat, self.plan.reuse, now()
        notes, tokens = self.plan.route.decode_feedback, request.tokens
        if accept is None:
            self._decode_at(engine, started)
        self._note_loading(engine, push, started)
        answer: EngineAnswer | None = None
        watch: Watch | None = None
        self._begin(engine, tokens)
        try:
            pinned = b"" if reuse is None else self._rank_of(reuse, engine)
            message = self._message(engine, body, push, pinned)
            latest = started + gateway.limits.decode_first_byte_timeout
            if latest > request.latest:
                latest = request.latest
            answer = None if fresh else engine.pool.send_on_idle(message, latest)
            if answer is None:
                answer = await engine.pool.send(message, latest, fresh=True)
            body, message = SENT, b""  # they may be large, and the answer may take minutes
            await answer.ready()
            if answer.error is not None:
                raise answer.error
            if answer.status != 200:
                await self._refuse(engine, answer)
            if (
                engine.capabilities.reports_load_failures
                or not engine.capabilities.is_identity_known
            ):
                watch = self._watch(engine, answer)
            is_rejected = await self._is_rejected(engine, answer, threshold)
            if engine.breaker.record_success():
                gateway.fleet.note_recovered(engine)
            if is_rejected:
                return REJECTED
            if accept is not None:
                accept()
                accept = None
                self._decode_at(engine, started)
            self.let_go(is_read=True)
            if notes is not None:
                was_given_all = request.record.prefill_done is not None
                notes.answered(engine.name, tokens if was_given_all else None)
            if seat is not None:
                seat.prefilled()
            if reuse is None:
                await deliver(request, gateway, engine, answer)
            else:
                told = self._prompt_tokens
                await deliver_turn(request, gateway, reuse.turn, engine, answer, told)
            self._note_loaded(engine)
            return ANSWERED
        except EngineError:
            if watch is None or not watch.has_ended:
                raise
            failure = self._load_failure
            raise LoadFailedError(NOT_LOADED, failure is not None and failure.is_of_pair) from None
        except asyncio.CancelledError:
            if answer is not None and accept is not None and reuse is not None:
                gateway.spawn(release.late_turn(request, gateway, engine, answer))
                answer = None
            raise
        finally:
            self._end(engine, tokens, answer)

    def _decode_at(self, engine: Engine, started: float) -> None:
        record, notes = self._request.record, self.plan.route.decode_feedback
        record.stage, record.decoder, record.decode_started = "decode", engine.name, started
        record.first_byte = None  # of this leg, until it has one: the one before may have failed
        self._is_read = False
        if self._request.seat is not None:
            self._request.seat.decode_at(engine)
        if notes is not None:
            notes.sent(engine.name)

    def _rank_of(self, reuse: Reuse, engine: Engine) -> bytes:
        number = reuse.rank_at(engine)
        return b"" if number is None or chosen(self._request) is not None else line(number)

    def _message(
        self, engine: Engine, body: Halves, push: Push | None, pinned: bytes = b""
    ) -> bytes:
        request = self._request
        leg_id = request.leg_id() if push is None else push.leg_id
        lines = pinned + request.shared_headers
        endpoint = request.path or request.record.endpoint
        return headers.message(endpoint, engine.name, leg_id, lines, body, request.form)

    def _begin(self, engine: Engine, tokens: int) -> None:
        engine.in_flight += 1
        engine.tokens_in_flight += tokens
        if engine.breaker.circuit is HALF_OPEN:
            self._gateway.fleet.note_leg_started(engine, self)

    def _end(self, engine: Engine, tokens: int, answer: EngineAnswer | None) -> None:
        engine.in_flight -= 1
        engine.tokens_in_flight -= tokens
        if answer is not None:
            answer.close()
        if engine.breaker.trial is self:
            self._gateway.fleet.note_trial_abandoned(engine)

    async def _refuse(
        self, engine: Engine, answer: EngineAnswer, asked: Body | None = None
    ) -> NoReturn:
        """4xx is for the client as it is; anything else is the engine's failure. `asked`: what the
        client did, where the engine was asked for one token of it."""
        if self._request.alone == PASSED:  # what it does not do speaks not against it
            body = await answer.read(self._gateway.limits.max_answer_size)
            self._request.keep(answer)
            raise EngineRejectedError(answer.status, answer.headers, body)
        if answer.status >= 500:
            words = await _last_words(answer)
            if asked is None:
                self._require_loaded(engine, failure_of_error(words))
            raise _error_of(engine, answer, words)
        body = await answer.read(self._gateway.limits.max_answer_size)
        self._request.keep(answer)
        if asked is not None and answer.status == 400:
            body = restate_prompt_limit(body, asked)
        if answer.status >= 400 and engine.breaker.record_success():  # it had every right to refuse
            self._gateway.fleet.note_recovered(engine)
        raise _error_of(engine, answer, body)

    # Failed KV loads of the decode engine.

    def _note_loading(self, decoder: Engine, push: Push | None, moment: float) -> None:
        holder = "" if self.holder is None else self.holder.name
        self._loads_from = holder if push is None else self._request.record.prefiller or ""
        self._load_failure = None
        pairs = self._gateway.fleet.unreachable_pairs
        if pairs and self._loads_from:
            pairs.note_load_started(self._loads_from, decoder.name, moment)

    def _watch(self, decoder: Engine, answer: EngineAnswer) -> Watch | None:
        """Read the report of a failed load from the answer, and remove it from there."""
        if answer.is_event_stream:
            watch = Watch(partial(self._note_failure, decoder))
            answer.watch = watch.passing
            return watch
        failure, rest = failure_in_whole(answer.peek())
        if failure is not None:
            self._note_failure(decoder, failure)
            answer.replace_body(rest)
        return None

    def _require_loaded(self, decoder: Engine, failure: LoadFailure | None) -> None:
        """Raises LoadFailedError."""
        if failure is not None:
            self._note_failure(decoder, failure)
            raise LoadFailedError(NOT_LOADED, failure.is_of_pair)

    def _note_failure(self, decoder: Engine, failure: LoadFailure) -> None:
        gateway, prefiller = self._gateway, self._loads_from
        self._load_failure = failure
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

    def _note_loaded(self, decoder: Engine) -> None:
        pairs, prefiller = self._gateway.fleet.unreachable_pairs, self._loads_from
        if not pairs or not prefiller or self._load_failure is not None:
            return
        if pairs.record_success(prefiller, decoder.name):
            logger.info(
                "decode engine %s loads KV from prefill engine %s again", decoder.name, prefiller
            )

    def _learn(self, engine: Engine, params: Params | None) -> None:
        gateway, capabilities = self._gateway, engine.capabilities
        if params is None:
            gateway.metrics.prefill_without_params.inc()
            gateway.throttle.warn(
                "a prefiller answered without kv_transfer_params, so the decoder prefills again",
                engine.name,
            )
            return
        _note_proof(capabilities, params)
        if not capabilities.rank_endpoints and gateway.limits.transfer_mode != "pull":
            capabilities.note_kv_params(params.content)

    async def _is_rejected(self, engine: Engine, answer: EngineAnswer, threshold: float) -> bool:
        """Return True if the engine rejects the request because of the threshold it was given. What
        is read for that stays in the answer's buffer. Raises the failure that the answer
        reports."""
        request, capabilities = self._request, engine.capabilities
        if self.may_come_back and not answer.is_event_stream:
            await answer.read_in_place(self._gateway.limits.max_answer_size)
        word = await self._word(answer)
        if word is not None:
            self._require_loaded(engine, failure_in(word.get("error")))
        back = handed_back(answer, word)
        if back is not None:
            if self.may_come_back:
                raise back
            if request.alone not in AS_SENT:  # nobody has asked for that
                raise EngineUnavailableError("the decode engine handed back what it was to answer")
            return False
        if word is not None and threshold and is_rejection(word):
            capabilities.note_threshold_rejected()
            return True
        self._require_answer(engine, word)
        if threshold and capabilities.supports_threshold is None:
            share = await cached_share(answer)
            if capabilities.note_threshold_accepted(threshold, share):
                self._gateway.spawn(try_threshold(request, engine))
        return False

    def _require_answer(self, engine: Engine, word: Json | None) -> None:
        failure = None if word is None else failure_of(word, engine.role)
        if failure is None:
            return
        if isinstance(failure, EngineRejectedError) and engine.breaker.record_success():
            self._gateway.fleet.note_recovered(engine)  # it had every right to refuse
        raise failure

    async def _word(self, answer: EngineAnswer) -> Json | None:
        """Return the content that may report a failure; None if it certainly is an answer."""
        is_passed = self._request.alone == PASSED
        if not answer.is_event_stream:
            if self._request.exchange.started:
                raise BrokenAnswerError("no event stream, where one is to go on")
            is_form = bool(self._request.form)
            return passed_word(answer, is_form) if is_passed else word_of(answer)
        try:
            return await first_word(answer, not is_passed, self._request.resume_buffer is None)
        except UpstreamError:  # of an engine that has begun to answer: it has read its KV
            self._request.record.first_byte = answer.first_body_at
            raise


def _note_proof(capabilities: EngineCapabilities, params: Params) -> None:
    """Reads the params of an engine only until it is known to prove what its blocks hold."""
    speaks = params.speaks_of_proof
    capabilities.verifies_prefix = speaks and (capabilities.verifies_prefix or params.is_proven)


async def _last_words(answer: EngineAnswer) -> bytes:
    """What an engine says soon of its failure; that it has failed is known."""
    try:
        async with asyncio.timeout(LAST_WORDS):
            return await answer.read(LAST_WORDS_SIZE)
    except (TimeoutError, UpstreamError):
        return b""


def _error_of(engine: Engine, answer: EngineAnswer, body: bytes) -> Exception:
    status = answer.status
    if status < 400:
        return BrokenAnswerError(f"an answer with status {status}")
    rejected = EngineRejectedError(status, answer.headers, body) if status < 500 else None
    text = f"the {engine.role} engine answered {status}{message_in(body)}"
    seconds = headers.retry_after(answer.headers) if status in (429, 503) else None
    if seconds is not None:
        return EngineOverloadedError(text, seconds, rejected)
    if rejected is not None:
        return rejected
    return (EngineUnavailableError if status == 503 else EngineError)(text)
