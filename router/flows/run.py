"""Carries out a plan: its legs one after the other, or both at once, each tried as often as the
table of failures and the budget allow. All that a request does at engines is done here.

Nothing waits between a prefiller's answer and the decoder's being asked: the blocks are leased,
30 s by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import Enum, auto
from typing import Any, NoReturn

from router.conversations.conversations import Found
from router.fleet.breaker import Circuit
from router.fleet.engine import Engine
from router.fleet.learned import Learned
from router.fleet.spec import Role
from router.flows import headers, release
from router.flows.attempts import RULES, Next, next_of
from router.flows.deliver import deliver, deliver_turn
from router.flows.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    NoEngineError,
    RejectedError,
)
from router.flows.gateway import Gateway
from router.flows.legs import Bodies, message_in
from router.flows.plan import Mode, Plan
from router.flows.prefilled import RETAIN, Params, Prefilled
from router.flows.push import PUSHES, Push, push_of
from router.flows.request import Body, Request
from router.flows.reuse import USED_UP, Offer
from router.flows.screen import cached_share, is_rejected
from router.flows.trial import try_threshold
from router.policies.chunks import tokens_of
from router.upstream.answer import Answer
from router.upstream.deadlines import now
from router.upstream.errors import BrokenAnswerError, ConnectRefusedError, UpstreamError

LegError = UpstreamError | EngineError
LEG_ERRORS = (UpstreamError, EngineError)
# Seconds that a prefiller may take to end its leg, once its KV was read.
PARTING = 5.0
# Legs that may fail of one request, before it is given up.
MOST_FAILED = 4
# Seconds after a prefiller's answer in which its blocks surely still wait, if nobody renews.
HELD = 20.0
# Seconds and bytes for an engine that has failed to say why.
LAST_WORDS = 1.0
LAST_WORDS_SIZE = 256 * 1024


# For the books of a turn that needed no prefiller.
ALONE = Offer("decoder_alone")


Failure = tuple[LegError, Engine, Role]


class Came(Enum):
    """What became of a decode leg that did not fail for good."""

    ANSWERED = auto()
    REJECTED = auto()
    AFRESH = auto()


class Run:
    """One request under way: what failed so far, and what is held for it at engines."""

    __slots__ = ("_bodies", "_failed", "_failure", "_fresh", "_gateway", "_is_spent", "_offer",
                 "_plan", "_prompt_tokens", "_rejected", "_request", "_unread")  # fmt: skip

    def __init__(self, request: Request, bodies: Bodies, plan: Plan, gateway: Gateway) -> None:
        self._request = request
        self._bodies = bodies
        self._plan = plan
        self._gateway = gateway
        self._failed: list[Engine] = []
        self._failure: LegError | None = None
        self._fresh = False
        self._rejected = False
        self._prompt_tokens: int | None = None
        # Of a turn: what the last one left, as long as no prefiller has read it.
        self._unread = None if plan.reuse is None else plan.reuse.turn.entry
        self._is_spent = False
        self._offer = USED_UP

    async def answer(self) -> None:
        """Raises UpstreamError, EngineError, NoEngineError, or RejectedError with a 4xx."""
        plan = self._plan
        if plan.was_skipped:
            self._gateway.metrics.decode_first.add(("skipped",))
        notes = plan.route.decode_notes
        if notes is not None:
            # Before it is: by then the next one alike has come.
            notes.sent(plan.route.decoders[0].name)
        try:
            if plan.threshold and await self._decoder_first():
                return
            if plan.mode is Mode.ALONE:
                await self._alone(plan.why_alone)
            elif plan.mode is Mode.PULL:
                await self._pull()
            else:
                await self._push()
        finally:
            if self._unread is not None:
                self._give_up_unread()
            if plan.route.is_noted:
                plan.route.end_notes()

    async def _decoder_first(self) -> bool:
        """Whether a decoder has answered by itself."""
        came = await self._decode(self._keeping(None), self._plan.threshold)
        self._rejected = came is Came.REJECTED
        outcome = "rejected" if self._rejected else "answered"
        self._gateway.metrics.decode_first.add((outcome,))
        if not self._rejected:
            self._count(ALONE)
        return not self._rejected

    async def _alone(self, why: str) -> None:
        self._gateway.metrics.decode_only.labels(why).inc()
        await self._decode(self._keeping(None))
        self._count(ALONE)

    async def _pull(self) -> None:
        if not self._plan.route.decoders:
            raise NoEngineError("no decode engine is healthy")
        while True:
            prefilled = await self._prefill()
            if prefilled is None:
                return await self._alone("no_prefiller")
            params = self._keeping(prefilled.params)
            try:
                came = await self._decode(params, after_prefill=True)
            except BaseException as cause:
                release.give_up(self._request, self._gateway, prefilled.params, cause)
                raise
            if came is Came.ANSWERED:
                return None
            release.give_up(self._request, self._gateway, prefilled.params, None)

    async def _push(self) -> None:
        limits = self._gateway.limits
        while True:
            prefiller, decoder = self._next(Role.PREFILL), self._next(Role.DECODE)
            if prefiller is None or decoder is None:
                return await self._pull()
            forced = limits.transfer_mode == PUSHES
            push = push_of(self._request, prefiller, decoder, forced)
            if push is None:
                return await self._pull()  # its answer tells where the prefiller is
            failure = await self._both(prefiller, decoder, push)
            if failure is None:
                return None
            prefiller.learned.note_missed()
            self._after(*failure)

    async def _both(self, prefiller: Engine, decoder: Engine, push: Push) -> Failure | None:
        """Asks both at once; the failure of one ends the other. None: the client has its answer."""
        loop, params = self._request.exchange.loop, self._keeping(push.params)
        prefilling = loop.create_task(self._prefill_at(prefiller, push))
        decoding = loop.create_task(self._decode_at(decoder, params, push=push))
        try:
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            if not decoding.done() and (self._is_relaying or not _has_failed(prefilling)):
                await asyncio.wait((decoding,))
        finally:
            is_answered = decoding.done() and not _has_failed(decoding)
            await _end(decoding, 0)
            if is_answered and not prefilling.done():  # its KV was read: it is about to end
                self._gateway.spawn(_end(prefilling, PARTING))
            else:
                await _end(prefilling, 0)
                if not is_answered and not prefilling.cancelled() and not _has_failed(prefilling):
                    params = prefilling.result().params
                    release.give_up(self._request, self._gateway, params, None)
        if is_answered:
            return None
        if prefilling.done() and _has_failed(prefilling):
            return _failure_of(prefilling, prefiller, Role.PREFILL)
        return _failure_of(decoding, decoder, Role.DECODE)

    @property
    def _is_relaying(self) -> bool:
        """A decoder answers, so it has its KV."""
        return self._request.record.stage == "stream"

    # The prefill leg.

    async def _prefill(self) -> Prefilled | None:
        """None: there is no prefiller, and a decoder may do without."""
        while True:
            engine = self._next(Role.PREFILL)
            if engine is None:
                self._require_short()
                return None
            try:
                return await self._prefill_at(engine)
            except LEG_ERRORS as error:
                self._after(error, engine, Role.PREFILL)

    async def _prefill_at(self, engine: Engine, push: Push | None = None) -> Prefilled:
        request, gateway, record = self._request, self._gateway, self._request.record
        limits = gateway.limits
        offered = None if self._plan.reuse is None else self._offer_at(engine)
        transfer_id = "" if push is None else push.transfer_id
        body = self._bodies.prefill(offered, transfer_id, no_threshold=self._rejected)
        record.stage, record.prefiller = "prefill", engine.name
        started = now()
        answer: Answer | None = None
        if request.seat is not None:
            request.seat.prefill_at(engine)
        notes, tokens = self._plan.route.prefill_notes, request.tokens
        if notes is not None:
            tokens = max(0, tokens - notes.expected(engine.name))
            notes.sent(engine.name)
        self._begin(engine, tokens)
        try:
            # A decoder's blocks are read once: what asks for them is sent on a sound connection.
            is_fresh = self._fresh or offered is not None
            answer = await self._send(
                engine,
                body,
                limits.prefill_timeout,
                is_fresh,
                push.leg_id if push else "",
                push.pinned if push else b"",
            )
            await answer.ready()
            answer.check()
            if answer.status != 200:
                await self._refuse(engine, answer)
            raw = await answer.read(limits.max_answer_size)
            self._succeeded(engine)
            prefilled = Prefilled(raw)
        except asyncio.CancelledError:
            if answer is not None:
                gateway.spawn(release.late(request, gateway, answer))
                answer = None
            raise
        finally:
            self._end(engine, tokens, answer)
        record.prefill_done = moment = now()
        if request.seat is not None:
            request.seat.prefilled()
        gateway.metrics.prefill_seconds.observe(moment - started)
        self._note_prefilled(engine, prefilled)
        return prefilled

    def _note_prefilled(self, engine: Engine, prefilled: Prefilled) -> None:
        notes, params = self._plan.route.prefill_notes, prefilled.params
        if notes is not None:
            notes.answered(engine.name, prefilled.cached_tokens)
        if params is None:
            self._gateway.metrics.prefill_without_params.inc()
            self._gateway.throttle.warn(
                "a prefiller answered without kv_transfer_params, so the decoder prefills again",
                engine.name,
            )
        else:
            _note_proof(engine.learned, params)
            if not engine.learned.ranks and self._gateway.limits.transfer_mode != "pull":
                engine.learned.note_transfer(params.content)
        if self._plan.reuse is not None:
            self._prompt_tokens = prefilled.prompt_tokens
            self._count(self._offer)
            if self._offer.params is None:
                self._give_up_unread()
            self._unread, self._is_spent = None, True

    def _offer_at(self, engine: Engine) -> Body | None:
        """What of the last turn this prefiller may pull, unless another was told to already."""
        reuse = self._plan.reuse
        assert reuse is not None
        self._offer = USED_UP if self._is_spent else reuse.offer(engine)
        return self._offer.params

    def _require_short(self) -> None:
        """Raises the last failure, or NoEngineError, where no decoder may prefill so much."""
        limits, request = self._gateway.limits, self._request
        if limits.without_prefiller == "refuse":
            raise self._failure or NoEngineError("no prefill engine is healthy")
        if tokens_of(request.body) > limits.without_prefiller_tokens:
            raise self._failure or NoEngineError(
                "no prefill engine is healthy, and the prompt is too long for a decoder alone"
            )

    # The decode leg.

    async def _decode(
        self, params: Params | None, threshold: float = 0.0, after_prefill: bool = False
    ) -> Came:
        while True:
            engine = self._next(Role.DECODE)
            if engine is None:
                raise self._failure or NoEngineError("no decode engine is healthy")
            try:
                return await self._decode_at(engine, params, threshold)
            except LEG_ERRORS as error:
                what = self._after(error, engine, Role.DECODE)
                if self._next(Role.DECODE) is None:
                    raise
                if after_prefill and (what is Next.AFRESH or not self._is_held()):
                    return Came.AFRESH

    async def _decode_at(
        self,
        engine: Engine,
        params: Params | None,
        threshold: float = 0.0,
        push: Push | None = None,
    ) -> Came:
        request, gateway, record = self._request, self._gateway, self._request.record
        limits, reuse = gateway.limits, self._plan.reuse
        required = threshold or (0 if self._rejected else None)
        body = self._bodies.decode(params, required, request.exact and reuse is not None)
        record.stage, record.decoder, record.decode_started = "decode", engine.name, now()
        record.first_byte = None  # the one before may have failed inside its first event
        answer: Answer | None = None
        if request.seat is not None:
            request.seat.decode_at(engine)
        notes, tokens = self._plan.route.decode_notes, request.tokens
        if notes is not None:
            notes.sent(engine.name)
        self._begin(engine, tokens)
        try:
            timeout = limits.decode_first_byte_timeout
            leg_id = "" if push is None else push.leg_id
            answer = await self._send(engine, body, timeout, self._fresh, leg_id)
            await answer.ready()
            answer.check()
            if answer.status != 200:
                await self._refuse(engine, answer)
            self._succeeded(engine)
            if threshold and await self._is_rejected(engine, answer, threshold):
                return Came.REJECTED
            if notes is not None:
                was_given_all = record.prefill_done is not None
                notes.answered(engine.name, tokens if was_given_all else None)
            if request.seat is not None:
                request.seat.prefilled()
            if reuse is None:
                await deliver(request, gateway, answer)
            else:
                told = self._prompt_tokens
                await deliver_turn(request, gateway, reuse.turn, engine, answer, told)
            return Came.ANSWERED
        finally:
            self._end(engine, tokens, answer)

    async def _is_rejected(self, engine: Engine, answer: Answer, threshold: float) -> bool:
        learned = engine.learned
        if await is_rejected(answer):
            learned.note_rejected()
            return True
        if learned.knows_threshold is None:
            share = await cached_share(answer)
            if learned.note_accepted(threshold, share):
                self._gateway.spawn(try_threshold(self._request, engine))
        return False

    def _keeping(self, params: Params | None) -> Params | None:
        """Asks the decoder to keep a turn's KV, unless it could not be found again."""
        reuse = self._plan.reuse
        keeps = reuse is not None and reuse.turn.found is not Found.STORE_FAILED
        if params is None:
            return RETAIN if keeps else None
        return params.retaining() if keeps else params.not_retaining()

    def _is_held(self) -> bool:
        """Whether the prefiller's blocks surely wait still."""
        done = self._request.record.prefill_done
        return done is not None and now() - done < HELD

    # Any leg.

    def _next(self, role: Role) -> Engine | None:
        """The one to ask: the first in the plan that has not failed this request, else whoever has
        come since; and before those against whom something speaks by now, any other."""
        route = self._plan.route
        order = route.prefillers if role is Role.PREFILL else route.decoders
        if not self._failed and order and order[0].is_asked:
            return order[0]
        known = (*order, *self._gateway.others(self._request, route, role))
        able = [one for one in known if one.is_wanted and one not in self._failed]
        seat, asked = self._request.seat, [one for one in able if one.is_asked]
        left = asked or able
        return next(iter(left), None) if seat is None else seat.roomiest(left)

    def _begin(self, engine: Engine, tokens: int) -> None:
        engine.in_flight += 1
        engine.tokens_in_flight += tokens
        if engine.breaker.circuit is Circuit.HALF_OPEN:
            self._gateway.fleet.begins(engine, self)

    def _end(self, engine: Engine, tokens: int, answer: Answer | None) -> None:
        engine.in_flight -= 1
        engine.tokens_in_flight -= tokens
        if answer is not None:
            answer.close()
        if engine.breaker.trial is self:
            self._gateway.fleet.left(engine)

    def _send(
        self,
        engine: Engine,
        body: bytes,
        timeout: float,
        fresh: bool,
        leg_id: str = "",
        pinned: bytes = b"",
    ) -> Coroutine[Any, Any, Answer]:
        """Raises UpstreamError."""
        request = self._request
        message = headers.message(
            request.record.endpoint,
            engine.name,
            leg_id or request.leg_id(),
            pinned + request.shared_headers,
            body,
        )
        return engine.pool.send(message, min(now() + timeout, request.latest), fresh)

    async def _refuse(self, engine: Engine, answer: Answer) -> NoReturn:
        """4xx is for the client as it is; anything else is the engine's failure.

        Raises RejectedError, EngineError, UpstreamError."""
        if answer.status >= 500:
            raise _error_of(engine, answer, await _last_words(answer))
        body = await answer.read(self._gateway.limits.max_answer_size)
        if answer.status >= 400:
            self._succeeded(engine)
        raise _error_of(engine, answer, body)

    def _succeeded(self, engine: Engine) -> None:
        """It did what it was asked for, or had every right to refuse."""
        if engine.breaker.succeeded():
            self._gateway.fleet.answered(engine)

    def _after(self, error: LegError, engine: Engine, role: Role) -> Next:
        """What follows from a leg's failure, for the engine and for the request. Raises it where
        there is nothing left to try."""
        gateway, request = self._gateway, self._request
        moment, rule = now(), RULES[error.kind]
        is_late = moment >= request.latest
        # Perhaps it is what the last turn left that failed: then the same prefiller can do without.
        is_of_turn = role is Role.PREFILL and self._offer.params is not None and not rule.is_free
        gateway.note_failure(engine, role, error)
        if not is_late:
            _blame(gateway, engine, error, rule.blames_engine and not is_of_turn)
        what = next_of(error.kind, role, request.exchange.started)
        self._failure = error
        if is_of_turn:
            self._is_spent = True
        if error.kind == "stale":
            self._fresh = True
        elif not is_of_turn or error.kind == "overloaded":
            self._failed.append(engine)
        is_over = what in (Next.END, Next.GIVE_UP) or is_late or len(self._failed) >= MOST_FAILED
        if is_over or not (rule.is_free or gateway.budget.take(moment)):
            raise error
        return what

    # A turn.

    def _count(self, offer: Offer) -> None:
        record = self._request.record
        if self._plan.reuse is not None and not record.conversation:  # once, however often it tries
            metrics = self._gateway.metrics
            record.conversation = offer.outcome
            metrics.conversation_turns.add((offer.outcome, offer.reason))
            metrics.conversation_tokens.inc(offer.tokens)

    def _give_up_unread(self) -> None:
        """What the last turn left, if no prefiller has read it."""
        entry, self._unread = self._unread, None
        if entry is not None:
            release.give_up_turn(self._request, self._gateway, entry)


async def _end(leg: asyncio.Task[Any], patience: float) -> None:
    """Leaves it that many seconds to end by itself. Never raises."""
    if patience and not leg.done():
        await asyncio.wait((leg,), timeout=patience)
    leg.cancel()
    await asyncio.gather(leg, return_exceptions=True)


def _has_failed(leg: asyncio.Task[Any]) -> bool:
    return not leg.cancelled() and leg.exception() is not None


def _failure_of(leg: asyncio.Task[Any], engine: Engine, role: Role) -> Failure:
    """Raises what is no engine's failure, but an answer, or a fault of ours."""
    error = leg.exception()
    if isinstance(error, LEG_ERRORS):
        return error, engine, role
    assert error is not None
    raise error


async def _last_words(answer: Answer) -> bytes:
    """What an engine says soon of its failure; that it has failed is known."""
    try:
        async with asyncio.timeout(LAST_WORDS):
            return await answer.read(LAST_WORDS_SIZE)
    except (TimeoutError, UpstreamError):
        return b""


def _blame(gateway: Gateway, engine: Engine, error: LegError, is_its_fault: bool) -> None:
    if isinstance(error, ConnectRefusedError):
        gateway.fleet.unreachable(engine, str(error))
    elif isinstance(error, EngineOverloadedError):
        gateway.fleet.cool(engine, error.retry_after or 1)
    elif is_its_fault:
        gateway.fleet.failed(engine, str(error))


def _note_proof(learned: Learned, params: Params) -> None:
    """Reads the params of an engine only until it is known to prove what its blocks hold."""
    speaks = params.speaks_of_proof
    learned.proves_prefix = speaks and (learned.proves_prefix or params.is_proven)


def _error_of(engine: Engine, answer: Answer, body: bytes) -> Exception:
    status = answer.status
    if status < 400:
        return BrokenAnswerError(f"an answer with status {status}")
    rejected = RejectedError(status, answer.headers, body) if status < 500 else None
    text = f"the {engine.role} engine answered {status}{message_in(body)}"
    seconds = headers.retry_after(answer.headers) if status in (429, 503) else None
    if seconds is not None:
        return EngineOverloadedError(text, seconds, rejected)
    if rejected is not None:
        return rejected
    return (EngineUnavailableError if status == 503 else EngineError)(text)
