"""Carries out a plan: its legs one after the other, or both at once, each tried as often as the
table of failures and the budget allow.

Nothing waits between a prefiller's answer and the decoder's being asked: the blocks are leased,
30 s by default.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from router.conversations.conversations import RecallOutcome
from router.fleet.engine import Engine
from router.fleet.engine_spec import DECODE, PREFILL, EngineRole
from router.http_client.deadlines import now
from router.http_client.errors import ConnectRefusedError
from router.openai.errors import (
    EngineOverloadedError,
    EngineRejectedError,
    LoadFailedError,
    NoEngineError,
    PreemptedError,
    RejectedMidStreamError,
    UnknownModelError,
)
from router.proxy import release
from router.proxy.crash_guard import MOST_DEATHS, is_suspicious, require_few
from router.proxy.gateway import Gateway
from router.proxy.hedging import Scatter, places
from router.proxy.leg_bodies import Bodies, Halves
from router.proxy.legs import (
    AFRESH,
    ANSWERED,
    CUT,
    ITSELF,
    LEG_ERRORS,
    REJECTED,
    UNASKED,
    Came,
    LegError,
)
from router.proxy.plan import ALONE, PULL, SAME_ENGINE, Plan, may_reject
from router.proxy.prefill_answer import RETAIN, Params, Prefilled
from router.proxy.push import PUSHES, Push, push_of
from router.proxy.relay import deliver_prefilled
from router.proxy.request import PASSED, Body, Request
from router.proxy.resume import Moves, can_go_on
from router.proxy.resume_buffer import ResumeBuffer
from router.proxy.retry_rules import RULES, Next, next_of
from router.proxy.traced_legs import legs_of
from router.proxy.turn_reuse import USED_UP, Offer
from router.routing.prompt_chunks import tokens_of
from router.telemetry.record import Record

# Seconds that a prefiller may take to end its leg, once its KV was read.
PARTING = 5.0
# Legs that may fail of one request, before it is given up.
MOST_FAILED = 4
# Of these, loads of KV, before a decoder is to prefill by itself, if it may.
MOST_UNLOADED = 3
# Seconds after a prefiller's answer in which its blocks surely still wait, if nobody renews.
HELD = 20.0

NONE: frozenset[str] = frozenset()
# For the books of a turn that needed no prefiller.
DECODER_ALONE = Offer("decoder_alone")


# For people.
FOLLOWS = {
    Next.AGAIN: "asked once more",
    Next.ELSEWHERE: "another was asked",
    Next.AFRESH: "prefilled afresh",
    Next.GIVE_UP: "given up",
    Next.RESUME: "another goes on",
    Next.END: "given up",
}

Failure = tuple[LegError, Engine, EngineRole]


class Run:
    """One request under way: what failed so far, and what is held for it at engines."""

    __slots__ = ("_bodies", "_chances", "_failed", "_failure", "_fresh", "_gateway", "_is_spent",
                 "_left", "_legs", "_mate", "_moves", "_offer", "_plan", "_preempted", "_request",
                 "_suspects", "_unloaded", "_unread")  # fmt: skip

    def __init__(self, request: Request, bodies: Bodies, plan: Plan, gateway: Gateway) -> None:
        self._request = request
        self._bodies = bodies
        self._plan = plan
        self._gateway = gateway
        self._legs = legs_of(request, plan, gateway)
        self._failed: list[Engine] = []
        # Engines that may have crashed during this request, and the Unix time of each failure.
        self._suspects: dict[Engine, float] = {}
        # Of those that failed, who was asked besides others.
        self._chances = 0
        # Decode engines that could not load KV, once for each leg: the last choice from then on.
        self._unloaded: list[Engine] = []
        # Groups where nobody was left to ask. None is returned to, so this comes to an end.
        self._left: frozenset[str] = NONE
        self._failure: LegError | None = None
        # Made for engines that can begin in mid-answer, or hand one back.
        self._moves: Moves | None = None
        # Decoders that had no room for all of the answer.
        self._preempted: Sequence[Engine] = ()
        self._fresh = False
        # The prefiller whose KV the decoder is to read.
        self._mate: Engine | None = None
        # Of a turn: what the last one left, as long as no prefiller has read it.
        self._unread = None if plan.reuse is None else plan.reuse.turn.entry
        self._is_spent = False
        self._offer = USED_UP

    async def answer(self) -> None:
        """Raises UpstreamError, EngineError, NoEngineError, or EngineRejectedError with a 4xx."""
        plan = self._plan
        if plan.was_skipped:
            self._gateway.metrics.decode_first.add(("skipped",))
        notes = plan.route.decode_feedback
        if notes is not None and not plan.scatter:
            # Before it is: by then the next one alike has come.
            notes.sent(plan.route.decoders[0].name)
        try:
            if plan.threshold and await self._decoder_first():
                return
            if plan.mode is PULL:
                await self._pull()
            elif plan.mode is ALONE:
                await self._alone(plan.why_alone)
            else:
                await self._push()
        finally:
            if self._legs.holder is not None:
                self._legs.let_go()
            if self._unread is not None:
                self._give_up_unread()
            route = self._plan.route  # that of the group where it ended
            if route.has_feedback:
                route.end_feedback()

    async def _decoder_first(self) -> bool:
        """Whether a decoder has answered by itself."""
        several = places(self._plan.scatter, self._request, self._gateway)
        if several:
            came = await self._first_of(several)
        else:
            came = await self._decode(self._keeping(None), self._plan.threshold)
        outcome = {REJECTED: "rejected", UNASKED: "skipped", AFRESH: "failed"}.get(came, "answered")
        self._gateway.metrics.decode_first.add((outcome,))
        if came is ANSWERED:
            self._count(DECODER_ALONE)
        return came is ANSWERED

    async def _first_of(self, engines: Sequence[Engine]) -> Came:
        """Of several decoders that are asked at once, the one that accepts first."""
        scatter, threshold = Scatter(self._request, self._gateway), self._plan.threshold
        for engine in engines:
            told = self._told(self._keeping(None), engine, is_chance=True)
            scatter.add(engine, self._decode_body(told, threshold))
        ended = await scatter.run(self._legs, self._fresh, threshold)
        for failure in ended.others:
            self._drop(*failure)
        if ended.failure is not None:
            return CUT if self._after(*ended.failure) is Next.RESUME else AFRESH
        return REJECTED if ended.is_rejected else ANSWERED

    def _suspect(self, engine: Engine, error: BaseException | None) -> None:
        """Remember the engine if the failure of its leg may be a crash."""
        if isinstance(error, LEG_ERRORS) and is_suspicious(error.kind, error):
            self._suspects.setdefault(engine, time.time())

    def _drop(self, error: LegError, engine: Engine, role: EngineRole) -> None:
        """A leg has failed that nobody waits for."""
        self._gateway.note_failure(engine, role, error)
        if now() < self._request.latest:
            _blame(self._gateway, engine, error, RULES[error.kind].blames_engine)
        self._suspect(engine, error)
        if error.kind != "stale":
            self._failed.append(engine)
            self._chances += 1

    async def _alone(self, why: str) -> None:
        self._gateway.metrics.decode_only.labels(why).inc()
        if await self._decode(self._keeping(None)) is CUT:
            return await self._pull()
        self._count(DECODER_ALONE)

    async def _pull(self) -> None:
        if not self._plan.route.decoders:
            raise NoEngineError("no decode engine is healthy")
        while True:
            prefilled = await self._prefill()
            if prefilled is None:
                return await self._alone("no_prefiller")
            if prefilled.is_all:
                self._legs.let_go()
                release.give_up(self._request, self._gateway, prefilled.params, None)
                return await deliver_prefilled(self._request, self._gateway, prefilled)
            prefilled.keep_params()
            params = self._keeping(prefilled.params)
            try:
                came = await self._decode(params)
            except BaseException as cause:
                release.give_up(self._request, self._gateway, prefilled.params, cause)
                raise
            if came is ANSWERED:
                return None
            self._legs.let_go()
            release.give_up(self._request, self._gateway, prefilled.params, None)
            if came is ITSELF:
                self._mate = None
                return await self._alone(SAME_ENGINE)
            if self._lacks_pair():
                return await self._alone("no_pair")

    # Pull: one leg after the other.

    async def _prefill(self) -> Prefilled | None:
        """None: there is no prefiller, and a decoder may do without."""
        self._mate = None
        while True:
            if len(self._suspects) >= MOST_DEATHS:
                await require_few(self._suspects)
            buffer = self._going_on
            engine = self._prefiller()
            if engine is None:
                if self._has_moved():
                    continue
                if buffer is None:
                    self._require_short()
                return None
            offered = None if self._plan.reuse is None else self._offer_at(engine)
            hands_over = engine.capabilities.supports_hand_over and self._hands_over(engine)
            body = self._bodies.prefill(offered, "", hands_over, buffer)
            try:
                is_offered = offered is not None
                prefilled = await self._legs.prefill(
                    engine, body, self._fresh, is_offered=is_offered
                )
            except LEG_ERRORS as error:
                self._after(error, engine, PREFILL)
            except EngineRejectedError:
                if self._moves is None or not self._moves.starts_over():
                    raise
            else:
                if self._plan.reuse is not None:
                    self._note_read()
                self._mate = engine
                if hands_over:
                    outcome = prefilled.begin()
                    self._gateway.metrics.handed_over.add((outcome,))
                return prefilled

    async def _decode(self, params: Params | None, threshold: float = 0.0) -> Came:
        mate = self._mate
        while True:
            if len(self._suspects) >= MOST_DEATHS:
                await require_few(self._suspects)
            engine = self._first(self._plan.route.decoders, mate) or self._another(DECODE, mate)
            if engine is None:
                if self._moves is not None and self._moves.starts_over():
                    return CUT
                if not self._has_moved():
                    raise self._nobody_is_left()
                if mate is not None:
                    return AFRESH
                continue
            if engine is mate:
                return ITSELF
            if threshold and not may_reject(self._request, engine):
                return UNASKED
            told = self._told(params, engine)
            try:
                return await self._legs.decode(
                    engine, self._decode_body(told, threshold), self._fresh, threshold
                )
            except EngineRejectedError as error:
                if self._moves is None:
                    raise
                if self._moves.starts_over():
                    return CUT
                if told is None or not told.begins or not self._moves.hands_nothing(engine, error):
                    raise
                return AFRESH
            except LEG_ERRORS as error:
                what = self._after(error, engine, DECODE)
                if what is Next.RESUME or error.kind == PreemptedError.kind:
                    return CUT
                is_afresh = mate is not None and (what is Next.AFRESH or not self._is_held())
                if is_afresh and self._another(DECODE, mate) not in (None, mate):
                    return AFRESH

    def _nobody_is_left(self) -> Exception:
        if self._failure is None:
            return NoEngineError("no decode engine is healthy")
        if self._request.exchange.started:
            self._gateway.metrics.resumes.add((self._failure.kind, "given_up"))
        return self._failure

    # Push: both at once.

    async def _push(self) -> None:
        limits, route = self._gateway.limits, self._plan.route
        while True:
            if len(self._suspects) >= MOST_DEATHS:
                await require_few(self._suspects)
            if self._going_on is not None:
                return await self._pull()
            prefiller = self._prefiller()
            decoder = self._first(route.decoders, prefiller) or self._another(DECODE, prefiller)
            if prefiller is None or decoder in (None, prefiller):
                return await self._pull()
            forced = limits.transfer_mode == PUSHES
            push = push_of(self._request, prefiller, decoder, forced)
            if push is None:
                return await self._pull()  # its answer tells where the prefiller is
            failure = await self._both(prefiller, decoder, push)
            if failure is None:
                return None
            if not isinstance(failure[0], PreemptedError):
                prefiller.capabilities.note_push_failed()
            self._after(*failure)
            if self._lacks_pair():
                return await self._alone("no_pair")

    async def _both(self, prefiller: Engine, decoder: Engine, push: Push) -> Failure | None:
        """Asks both at once; the failure of one ends the other. None: the client has its answer."""
        loop = self._request.exchange.loop
        prefilling = loop.create_task(self._prefill_for(push, prefiller))
        decoding = loop.create_task(self._decode_of(push, decoder))
        prefilling.add_done_callback(_note_end)
        try:
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            if not decoding.done() and (self._is_relaying or not _has_failed(prefilling)):
                await asyncio.wait((decoding,))
        finally:
            is_answered = decoding.done() and not _has_failed(decoding)
            try:
                await _end(decoding, 0)
            except asyncio.CancelledError:  # the client has disconnected in this very moment
                prefilling.cancel()
                raise
            if is_answered and not prefilling.done():  # its KV was read: it is about to end
                self._gateway.spawn(_end(prefilling, PARTING))
            else:
                await _end(prefilling, 0)
                if not is_answered and not prefilling.cancelled() and not _has_failed(prefilling):
                    params = prefilling.result().params
                    release.give_up(self._request, self._gateway, params, None)
        if is_answered:
            return None
        for leg, engine in ((prefilling, prefiller), (decoding, decoder)):
            if _has_failed(leg):
                self._suspect(engine, leg.exception())
        if prefilling.done() and _has_failed(prefilling):
            return _failure_of(prefilling, prefiller, PREFILL)
        return _failure_of(decoding, decoder, DECODE)

    async def _prefill_for(self, push: Push, engine: Engine) -> Prefilled:
        offered = None if self._plan.reuse is None else self._offer_at(engine)
        body = self._bodies.prefill(offered, push.transfer_id)
        is_offered = offered is not None
        prefilled = await self._legs.prefill(engine, body, self._fresh, push, is_offered)
        if self._plan.reuse is not None:
            self._note_read()
        return prefilled

    async def _decode_of(self, push: Push, engine: Engine) -> Came:
        body = self._decode_body(self._told(self._keeping(push.params), engine), 0.0)
        return await self._legs.decode(engine, body, self._fresh, push=push)

    @property
    def _is_relaying(self) -> bool:
        """A decoder answers, so it has its KV."""
        return self._request.record.stage == "stream"

    # Who is asked, and for what.

    def _first(self, order: Sequence[Engine], mate: Engine | None = None) -> Engine | None:
        """Of the plan, unless something has failed or speaks against it by now."""
        if not order or self._failed or self._preempted or not order[0].is_available:
            return None
        if self._unloaded:
            return None
        if mate is None:
            return order[0]
        is_fit = self._may_read(order[0], mate) and not self._is_avoided(mate, order[0])
        return order[0] if is_fit else None

    def _prefiller(self) -> Engine | None:
        """Return the next prefill engine, preferably one from which a decode engine can load. A
        conversation's decode engine is kept, because it caches a part of the prompt."""
        route = self._plan.route
        engine = self._first(route.prefillers)
        if engine is not None and route.decoders and self._is_avoided(engine, route.decoders[0]):
            pair = (engine.name, route.decoders[0].name)
            is_kept = (
                self._plan.reuse is None
                and self._gateway.fleet.unreachable_pairs.keeps_prefiller(*pair)
            )
            others = self._able(DECODE) if is_kept else ()
            if not any(self._can_pair(engine, decoder) for decoder in others):
                engine = None
        return engine or self._another(PREFILL)

    def _is_avoided(self, prefiller: Engine, decoder: Engine) -> bool:
        pairs = self._gateway.fleet.unreachable_pairs
        return bool(pairs) and pairs.is_avoided(prefiller.name, decoder.name, now())

    def _can_pair(self, prefiller: Engine, decoder: Engine) -> bool:
        return self._may_read(decoder, prefiller) and not self._is_avoided(prefiller, decoder)

    def _lacks_pair(self) -> bool:
        """Return True if a load has failed and no other pair of any group can exchange KV, or if
        MOST_UNLOADED loads have failed. Raises the failure if no decode engine may prefill a prompt
        of this length."""
        if not isinstance(self._failure, LoadFailedError):
            return False
        if len(self._unloaded) < MOST_UNLOADED or not self._may_do_without():
            able = self._able(DECODE)
            if any(self._can_pair(p, d) for p in self._able(PREFILL) for d in able):
                return False
            if self._has_moved():
                return False
        self._require_short()
        self._mate = None
        return True

    def _may_do_without(self) -> bool:
        """Return True if a decode engine may prefill a prompt of this length."""
        limits = self._gateway.limits
        most = 0 if limits.without_prefiller == "refuse" else limits.without_prefiller_tokens
        return tokens_of(self._request.body) <= most

    def _another(self, role: EngineRole, mate: Engine | None = None) -> Engine | None:
        """The next in the plan that has not failed this request, else whoever has come since; and
        before those against whom something speaks by now, any other. Where KV is to come from a
        `mate`: one that may read it, else the mate itself, if it plays both roles."""
        able = self._able(role)
        if mate is not None:
            able = [o for o in able if self._may_read(o, mate)] or [o for o in able if o is mate]
        if self._gateway.fleet.unreachable_pairs and len(able) > 1:
            able = self._paired(able, mate)
        seat, asked = self._request.seat, [one for one in able if one.is_available]
        left = asked or able
        left = [one for one in left if one not in self._preempted] or left
        return next(iter(left), None) if seat is None else seat.roomiest(left)

    def _able(self, role: EngineRole) -> list[Engine]:
        """Those of the planned group that may be asked and have not failed this request, in the
        plan's order."""
        route = self._plan.route
        order = route.prefillers if role is PREFILL else route.decoders
        known = (*order, *self._gateway.others(self._request, route, role))
        fit = [one for one in known if one.is_usable and one.role.plays(role)]
        able = [one for one in fit if one not in self._failed]
        buffer = self._going_on
        if buffer is not None:
            able = [one for one in able if can_go_on(one, role, buffer)]
        return sorted(able, key=self._unloaded.count) if self._unloaded else able

    def _paired(self, able: list[Engine], mate: Engine | None) -> list[Engine]:
        """Return the decode engines that can load from `mate`. Without a `mate`, return the prefill
        engines from which the first decode engine can load, else those from which any can. Returns
        `able` if there is no such engine."""
        if mate is not None:
            return [one for one in able if not self._is_avoided(mate, one)] or able
        decoders = self._able(DECODE)
        for wanted in (decoders[:1], decoders):
            found = [p for p in able if any(self._can_pair(p, d) for d in wanted)]
            if found:
                return found
        return able

    def _may_read(self, decoder: Engine, mate: Engine) -> bool:
        """As things are now: either may have become another since it was planned for."""
        if self._request.is_several and not decoder.capabilities.shares_kv_loads:
            return False
        return decoder is not mate and decoder.group == mate.group

    def _has_moved(self) -> bool:
        """To another group, where the planned one has nobody left to ask. What was prefilled stays
        behind: KV moves only within a group."""
        plan = self._plan
        try:
            self._left |= {plan.route.group}
            found = self._gateway.route(self._request, but=self._left)
        except (NoEngineError, UnknownModelError):
            return False
        if not found.decoders:
            return False
        plan.route.end_feedback()
        self._plan = self._legs.plan = replace(plan, route=found)
        self._request.record.group = found.group
        return True

    def _require_short(self) -> None:
        """Raises the last failure, or NoEngineError, where no decoder may prefill so much."""
        limits, request = self._gateway.limits, self._request
        if limits.without_prefiller == "refuse":
            raise self._failure or NoEngineError("no prefill engine is healthy")
        if tokens_of(request.body) > limits.without_prefiller_tokens:
            raise self._failure or NoEngineError(
                "no prefill engine is healthy, and the prompt is too long for a decoder alone"
            )

    def _decode_body(self, params: Params | None, threshold: float) -> Halves:
        if self._request.alone == PASSED:
            return self._bodies.passed()
        whole = self._request.exact and self._plan.reuse is not None
        return self._bodies.decode(params, threshold, whole)

    def _hands_over(self, prefiller: Engine) -> bool:
        """Whether a decoder is to go on from the token that this prefiller samples."""
        order = self._plan.route.decoders
        decoder = self._first(order, prefiller) or self._another(DECODE, prefiller)
        if decoder is None:
            return False
        return self._made_moves().hands_over(prefiller, decoder)

    def _made_moves(self) -> Moves:
        if self._moves is None:
            self._moves = Moves(self._request, self._gateway)
            self._preempted = self._moves.preempted
        return self._moves

    @property
    def _going_on(self) -> ResumeBuffer | None:
        """Where another engine is to go on with what was said."""
        return None if self._moves is None else self._moves.going_on

    def _told(
        self, params: Params | None, decoder: Engine, is_chance: bool = False
    ) -> Params | None:
        """`is_chance`: of several that are asked, who may lose. What it would hand back then would
        be nobody's."""
        capabilities = decoder.capabilities
        if (
            self._moves is None
            and not capabilities.supports_resume
            and not capabilities.returns_preempted
        ):
            return params
        moves = self._made_moves()
        told, self._legs.may_come_back = moves.told(params, decoder, self._mate, is_chance)
        return told

    def _keeping(self, params: Params | None) -> Params | None:
        """Asks the decoder to keep a turn's KV, unless it could not be found again."""
        reuse = self._plan.reuse
        keeps = reuse is not None and reuse.turn.recalled is not RecallOutcome.STORE_FAILED
        if params is None:
            return RETAIN if keeps else None
        return params.retaining() if keeps else params.not_retaining()

    def _is_held(self) -> bool:
        """Whether the prefiller's blocks surely wait still."""
        done = self._request.record.prefill_done
        return done is not None and now() - done < HELD

    def _after(self, error: LegError, engine: Engine, role: EngineRole) -> Next:
        """What follows from a leg's failure, for the engine and for the request. Raises it where
        there is nothing left to try."""
        gateway, request, moves = self._gateway, self._request, self._made_moves()
        moment, rule = now(), RULES[error.kind]
        is_late = moment >= request.latest
        # Perhaps it is what the last turn left that failed: then the same prefiller can do without.
        was_offered = role is PREFILL and self._offer.params is not None
        is_of_turn = was_offered and not rule.is_free
        if isinstance(error, PreemptedError):
            moves.take_back(error, engine)
        else:
            gateway.note_failure(engine, role, error)
        if not is_late:
            _blame(gateway, engine, error, rule.blames_engine and not is_of_turn)
        may_go_on = moves.may_go_on(role, error)
        what = next_of(error.kind, role, request.exchange.started, may_go_on)
        self._failure = error
        self._suspect(engine, error)
        if is_of_turn or (was_offered and error.kind == "stale"):
            self._is_spent = True  # it may have been read, and is read once
        if error.kind == "stale":
            self._fresh = True
        elif isinstance(error, PreemptedError) and moves.left > 0:  # as it was asked to
            moves.left -= 1
            moves.preempted.append(engine)
        elif isinstance(error, LoadFailedError):
            self._unloaded.append(engine)
        elif not is_of_turn or error.kind == "overloaded":
            self._failed.append(engine)
        is_over = what in (Next.END, Next.GIVE_UP) or is_late
        num_failed = len(self._failed) - self._chances + len(self._unloaded)
        is_over = is_over or num_failed >= MOST_FAILED
        is_free = rule.is_free or (isinstance(error, LoadFailedError) and error.is_of_pair)
        if is_over or not (is_free or gateway.budget.take(moment)):
            if request.exchange.started:
                gateway.metrics.resumes.add((error.kind, moves.why_not()))
            _note(request.record, engine, role, error.kind, Next.GIVE_UP)
            raise error
        if what is Next.RESUME or isinstance(error, PreemptedError):
            moves.note(error)
        _note(request.record, engine, role, error.kind, what)
        request.record.retries += 1
        gateway.metrics.retries.labels(role, error.kind).inc()
        return what

    # A turn.

    def _offer_at(self, engine: Engine) -> Body | None:
        """What of the last turn this prefiller may pull, unless another was told to already."""
        reuse = self._plan.reuse
        assert reuse is not None
        self._offer = USED_UP if self._is_spent else reuse.offer(engine)
        return self._offer.params

    def _note_read(self) -> None:
        """A prefiller has answered, and pulled by then what it was offered."""
        self._count(self._offer)
        if self._offer.params is None:
            self._give_up_unread()
        self._unread, self._is_spent = None, True

    def _count(self, offer: Offer) -> None:
        record = self._request.record
        if self._plan.reuse is not None and not record.conversation:  # once, however often it tries
            metrics = self._gateway.metrics
            record.conversation = offer.outcome
            if offer.params is not None and self._plan.reuse.entry is not None:
                record.reused_from = self._plan.reuse.entry.decoder
            metrics.conversation_turns.add((offer.outcome, offer.reason))
            metrics.conversation_tokens.add((), offer.tokens)

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


def _note_end(leg: asyncio.Task[Any]) -> None:
    """Retrieves an error that nobody waits for any more: asyncio would log it."""
    if not leg.cancelled():
        leg.exception()


def _has_failed(leg: asyncio.Task[Any]) -> bool:
    return not leg.cancelled() and leg.exception() is not None


def _failure_of(leg: asyncio.Task[Any], engine: Engine, role: EngineRole) -> Failure:
    """Raises what is no engine's failure, but an answer, or a fault of ours."""
    error = leg.exception()
    if isinstance(error, LEG_ERRORS):
        return error, engine, role
    assert error is not None
    raise error


def _note(record: Record, engine: Engine, role: EngineRole, kind: str, what: Next) -> None:
    record.failures += (f"{role} at {engine.name}: {kind}; {FOLLOWS[what]}",)


def _blame(gateway: Gateway, engine: Engine, error: LegError, is_its_fault: bool) -> None:
    if isinstance(error, ConnectRefusedError):
        gateway.fleet.note_unreachable(engine, str(error))
    elif isinstance(error, EngineOverloadedError):
        gateway.fleet.cool_down(engine, error.retry_after or 1)
    elif is_its_fault and not isinstance(error, RejectedMidStreamError):
        gateway.fleet.note_leg_failed(engine, str(error))
