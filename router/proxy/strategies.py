"""How a request is answered: one function for each strategy.

    pull          A prefill engine computes the prompt and keeps its KV. A decode engine then loads
                  the KV and writes the answer.
    push          Both engines get the request at once. The prefill engine writes its KV into blocks
                  of the decode engine.
    decode_only   One decode engine computes the prompt and writes the answer.
    transfer      Both legs, as another KV protocol than the NixlConnector's wants them.
    decode_first  A decode engine answers alone if it has enough of the prompt in its cache, and
                  rejects the request otherwise. Several engines may get this leg (hedging).

A leg returns its outcome as a value. After a failed leg, `recover` returns what to do next, or
raises the failure if nothing is left to try. No strategy waits between the end of the prefill leg
and the start of the decode leg, because the lease on the prefill engine's blocks has begun; only
`require_engines_alive` does, for seconds, after two engines have died.

If the client disconnects, the server cancels the task. CancelledError passes through every
strategy, which releases KV that was not read on its way. Before the client has a byte, a failed
decode leg is retried. Afterwards `recover` returns Next.RESUME, or raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from time import monotonic as now
from typing import Any

from router.conversations.reuse import TurnOffer
from router.fleet.engine import DECODE, PREFILL, Engine, engine_of
from router.http_client.errors import BrokenAnswerError, MigratedError, UpstreamError
from router.openai.errors import EngineRejectedError, PreemptedError
from router.proxy.answer_check import PrefillAnswer
from router.proxy.canary import Canary, choose_canary
from router.proxy.hedging import HedgedLegs, select_hedged_decoders
from router.proxy.id_resume import IdBuffer, continuing_body, find_cut
from router.proxy.kv_params import KvParams
from router.proxy.kv_protocols import protocol_of
from router.proxy.kv_protocols.nixl_push import PUSHES, make_push
from router.proxy.kv_protocols.protocol import LegPair, TransferProtocol
from router.proxy.legs import ANSWERED as LEG_ANSWERED
from router.proxy.legs import REJECTED as LEG_REJECTED
from router.proxy.legs import (
    LegFailure,
    LegRefusal,
    PrefillOutcome,
    decode_leg,
    prefill_leg,
)
from router.proxy.loans import may_borrow_stream
from router.proxy.plan import (
    DECODE_ONLY,
    ONE_TOKEN_ANSWER,
    PULL,
    PUSH,
    SAME_ENGINE,
    may_reject,
)
from router.proxy.ranks import place_of_leg
from router.proxy.recovery import (
    go_back,
    note_possible_crash,
    record_hedged_failure,
    recover,
    require_engines_alive,
)
from router.proxy.relay import deliver_prefilled
from router.proxy.request import PASSED
from router.proxy.resume import DecodeParams
from router.proxy.retry import LegError, Next
from router.proxy.run import (
    Run,
    another_decoder,
    change_group,
    describe_reason,
    lacks_pair,
    require_lone_decoder,
    require_short_prompt,
    select_decoder,
    select_prefiller,
    usable_decoders,
)
from router.proxy.side_requests import abort_leg
from router.proxy.turn_tokens import check_prompt_ids, find_prompt_ids

# Seconds that a prefill engine may take to end a push leg after its KV was read.
PUSH_LEG_END_TIMEOUT_S = 5.0
# Seconds after a prefill engine's answer in which its blocks certainly wait without a renewal.
UNRENEWED_LEASE_S = 20.0
# Why a decode engine gets no prefill engine for a stream whose blocks a drained engine lends.
MIGRATED = "migrated"
# Recorded for a turn that needed no prefill engine.
DECODER_ALONE = TurnOffer("decoder_alone")


class DecodePhase(Enum):
    """The result of the decode part of a strategy."""

    ANSWERED = auto()
    RESUME = auto()
    """Another engine continues the part of the answer that exists, or begins a returned answer
    anew. The prompt is prefilled again, with the tokens that exist."""
    AFRESH = auto()
    """The KV may have been read or lost, so the prompt is prefilled again."""
    REJECTED = auto()
    """The decode engine has too little of the prompt in its cache."""
    SKIPPED = auto()
    """The decode engine may not support thresholds, so the leg was not sent."""
    SAME_ENGINE = auto()
    """The only decode engine left is the prefill engine, which has the KV already."""


ANSWERED = DecodePhase.ANSWERED

# Label values of the metric decode_first_total.
DECODE_FIRST_OUTCOMES = {
    DecodePhase.REJECTED: "rejected",
    DecodePhase.SKIPPED: "skipped",
    DecodePhase.AFRESH: "failed",
}


async def answer(run: Run) -> None:
    """Answer the request by its plan.

    Raises UpstreamError, EngineError, NoEngineError, or EngineRejectedError with an engine's 4xx.
    """
    plan, metrics = run.plan, run.gateway.metrics
    if run.request.record.trace is not None:
        run.request.record.trace.mode = plan.mode
    if plan.skips_threshold:
        metrics.decode_first.add(("skipped",))
    feedback = run.route.decode_feedback
    if feedback is not None and run.route.decoders and not plan.hedged_decoders:
        # The policy learns of the engine now: the next request with this prompt may be here
        # before the leg is sent.
        feedback.sent(place_of_leg(run, run.route.decoders[0], DECODE).name)
    try:
        if plan.threshold and await decode_first(run):
            return
        if plan.mode is DECODE_ONLY:
            await decode_only(run, plan.decode_only_reason)
        else:
            await _prefill_and_decode(run)
    finally:
        if run.holder is not None:
            run.stop_holding()
        if run.unread_turn is not None:
            run.release_unread_turn()


def _prefill_and_decode(run: Run) -> Awaitable[None]:
    """Run the strategy of two legs, and compare their first tokens if a canary wants that."""
    mode = run.plan.mode
    strategy = pull if mode is PULL else push if mode is PUSH else transfer
    canary = run.canary = choose_canary(run) if run.gateway.limits.kv_canary else None
    return strategy(run) if canary is None else _compare(run, canary, strategy)


async def _compare(run: Run, canary: Canary, strategy: Callable[[Run], Awaitable[None]]) -> None:
    """Run the strategy with a canary, and without it if an engine refuses the canary's fields."""
    try:
        return await strategy(run)
    except EngineRejectedError as error:
        if not canary.withdraw(run, error):
            raise
    await strategy(run)
    canary.note_refused()


async def pull(run: Run) -> None:
    """Prefill on one engine, then decode on another engine that loads the KV."""
    if not run.route.decoders:
        raise run.gateway.routes.lack_of(DECODE, run.request.model)
    while True:
        # Prefill, on one engine after another.
        if run.suspects:
            await require_engines_alive(run)
        run.prefiller = None
        if run.lender is not None:
            decoder = select_decoder(run)
            # It is not drained before its blocks are read, or another engine has computed them.
            run.hold(engine_of(run.lender))
            if decoder is run.holder or (decoder and may_borrow_stream(run, decoder)):
                return await decode_only(run, MIGRATED)
            run.lender = None
        prefiller = select_prefiller(run)
        if prefiller is None:
            if change_group(run):
                continue
            if run.resume.continued is None:
                require_short_prompt(run)
            return await decode_only(run, "no_prefiller")
        if protocol_of(prefiller) is not None:  # in another group
            return await transfer(run)
        hands_over = prefiller.capabilities.supports_hand_over and run.resume.hands_over(
            prefiller, select_decoder(run, prefiller)
        )
        if run.plan.reuse is not None:
            await find_prompt_ids(run, prefiller)
        last_turn = None if run.plan.reuse is None else run.offer_last_turn(prefiller)
        prefilled = await prefill_leg(run, prefiller, None, last_turn, hands_over)
        if not isinstance(prefilled, PrefillAnswer):
            if isinstance(prefilled, LegFailure):
                recover(run, prefilled)  # raises if nothing is left to try
            elif not run.resume.restart_answer() and not go_back(run):
                raise prefilled.error
            continue
        is_right = check_prompt_ids(run, prefiller, prefilled)
        run.note_prefilled(prefiller, prefilled.params)
        if not is_right:  # it has computed on with KV of other tokens
            run.stop_holding()
            run.release_unread(prefilled.params)
            run.bodies.prompt_ids = b""
            require_short_prompt(run)
            return await decode_only(run, "tokens_differ")
        run.prefiller = prefiller
        if not run.request.model and run.resume.continued is None:
            run.take_model(prefilled.model)
        if hands_over:
            run.gateway.metrics.handed_over.add((prefilled.prepare_hand_over(),))
            if prefilled.is_whole_answer:  # the one token of the prefill engine is the whole answer
                run.stop_holding()
                run.release_unread(prefilled.params)
                return await deliver_prefilled(run, prefilled)

        # Decode, on one engine after another, until the client has the answer.
        params = prefilled.params
        del prefilled  # it may be large
        try:
            decoded = await _decode(run, params)
        except BaseException as cause:
            run.release_unread(params, cause)
            raise
        if decoded is ANSWERED:
            return None

        # This KV is used up or abandoned. Prefill again, or do without.
        run.stop_holding()
        run.release_unread(params)
        if decoded is DecodePhase.SAME_ENGINE:
            run.prefiller = None
            return await decode_only(run, SAME_ENGINE)
        if lacks_pair(run):
            return await decode_only(run, "no_pair")


async def decode_only(run: Run, reason: str) -> None:
    """Let one decode engine compute the prompt and write the answer. `reason` is a metric label."""
    if reason != PASSED:
        require_lone_decoder(run)
    run.gateway.metrics.decode_only.labels(reason).inc()
    run.request.record.without_transfer = describe_reason(run, reason)
    if run.slot is not None and reason not in (ONE_TOKEN_ANSWER, MIGRATED):
        run.slot.compute_at_decoder()
    # Without a prefill engine and a threshold, an answer and RESUME are the only results.
    if await _decode(run, None) is DecodePhase.RESUME:
        return await pull(run)  # which prefills the part of the answer that is there, too
    reuse = run.plan.reuse
    if reuse is not None and reuse.entry is None:  # there is no last turn that it could have reused
        run.count_turn(TurnOffer(reuse.outcome, reuse.reason))
    run.count_turn(DECODER_ALONE)


async def decode_first(run: Run) -> bool:
    """Send the decode leg with a cache threshold, which allows the engine to reject the request.

    Return True if a decode engine has answered. Otherwise the plan's strategy follows.
    """
    threshold = run.plan.threshold
    engines = select_hedged_decoders(run)
    if engines:
        legs = HedgedLegs(run)
        for engine in engines:
            legs.add(engine, run.leg_params(None, engine, is_hedged=True))
        hedged = await legs.run(threshold)
        for failed in hedged.others:
            record_hedged_failure(run, failed)
        if hedged.failure is not None:
            what = await _recover(run, hedged.failure)
            decoded = DecodePhase.RESUME if what is Next.RESUME else DecodePhase.AFRESH
        else:
            decoded = DecodePhase.REJECTED if hedged.is_rejected else DecodePhase.ANSWERED
    else:
        decoded = await _decode(run, None, threshold)
    run.gateway.metrics.decode_first.add((DECODE_FIRST_OUTCOMES.get(decoded, "answered"),))
    if decoded is DecodePhase.ANSWERED:
        run.count_turn(DECODER_ALONE)
        return True
    return False


async def push(run: Run) -> None:
    """Send both legs at once, so that the prefill engine writes its KV to the decode engine.

    The strategy becomes pull where a push is impossible: engines that cannot push, an unknown
    address of the prefill engine, or an answer to be continued.
    """
    is_forced = run.gateway.limits.transfer_mode == PUSHES
    while True:
        if run.suspects:
            await require_engines_alive(run)
        if run.resume.continued is not None:
            return await pull(run)
        prefiller = select_prefiller(run)
        decoder = select_decoder(run, prefiller)
        if prefiller is None or decoder is None or decoder is prefiller:
            return await pull(run)
        place = place_of_leg(run, prefiller, PREFILL)
        params = make_push(run.request, place, decoder, is_forced)
        if params is None:
            return await pull(run)  # the answer of a prefill engine has its address
        failed = await legs_together(run, prefiller, decoder, params)
        if failed is None:
            return None
        if not isinstance(failed.error, PreemptedError | MigratedError):
            prefiller.capabilities.note_transfer_failed()
        await _recover(run, failed)
        if lacks_pair(run):
            return await decode_only(run, "no_pair")


async def transfer(run: Run) -> None:
    """Send both legs as a protocol other than the NixlConnector's wants it (`kv_protocols`).

    Each attempt is a new transfer: of KV that was given up, the router does not know whether it was
    read.
    """
    while True:
        if run.suspects:
            await require_engines_alive(run)
        prefiller = select_prefiller(run)
        decoder = select_decoder(run, prefiller)
        if prefiller is None or decoder is None or decoder is prefiller:
            if change_group(run):
                continue
            if run.resume.continued is None:
                require_short_prompt(run)
            return await decode_only(run, SAME_ENGINE if prefiller else "no_prefiller")
        protocol = protocol_of(prefiller)
        if protocol is None:  # in another group
            return await pull(run)
        pair = protocol.pair(run.request, place_of_leg(run, prefiller, PREFILL), decoder)
        if pair is None:  # an engine that is back, and whose pages were not read again
            prefiller.capabilities.note_transfer_failed()
            run.failed.append(prefiller)
            continue
        run.prefiller = None
        failed = await send_pair(run, prefiller, decoder, protocol, pair)
        if failed is None:
            return None
        prefiller.capabilities.note_transfer_failed()
        await _recover(run, failed)
        if lacks_pair(run):
            return await decode_only(run, "no_pair")


async def send_pair(
    run: Run, prefiller: Engine, decoder: Engine, protocol: TransferProtocol, pair: LegPair
) -> LegFailure | None:
    """Send both legs once. Return None if the client has its answer. Raises an engine's 4xx."""
    if protocol.runs_together:
        return await legs_together(run, prefiller, decoder, pair)
    prefilled = await prefill_leg(run, prefiller, pair)
    if isinstance(prefilled, LegRefusal):
        raise prefilled.error
    if isinstance(prefilled, LegFailure):
        return prefilled
    try:
        continued = protocol.continue_with(pair, prefilled)
    except BrokenAnswerError as error:
        return LegFailure(error, prefiller, PREFILL)
    if continued is None:
        await deliver_prefilled(run, prefilled)
        return None
    run.prefiller = prefiller
    run.hold(prefiller)
    decoded = await decode_leg(run, decoder, pair_params(run, decoder, continued), pair=pair)
    run.stop_holding(run.is_read)
    if isinstance(decoded, LegRefusal):
        raise decoded.error
    if not isinstance(decoded, LegFailure):
        return None
    if pair.release is not None and isinstance(decoded.error, UpstreamError) and not run.is_read:
        group = prefiller.group
        run.gateway.releaser.release_by_reading(run.request, group, pair.release, decoder)
    return decoded


def pair_params(run: Run, decoder: Engine, pair: LegPair) -> DecodeParams:
    """Return the part of a decode leg that the pair's protocol adds."""
    if pair.decode_fields is not None:
        return DecodeParams(fields=pair.decode_fields)
    return run.leg_params(pair.params, decoder)


async def legs_together(
    run: Run, prefiller: Engine, decoder: Engine, pair: LegPair
) -> LegFailure | None:
    """Run both legs at once; the failure of one ends the other. Return None if the client has its
    answer. Raises an engine's 4xx."""
    loop = run.request.exchange.loop
    params = pair_params(run, decoder, pair)
    prefilling = loop.create_task(_prefill(run, prefiller, pair))
    decoding = loop.create_task(decode_leg(run, decoder, params, pair=pair))
    prefilling.add_done_callback(_retrieve_error)
    del params
    try:
        await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
        is_relaying = run.request.record.stage == "stream"  # so the decode engine has the KV
        if not decoding.done() and (is_relaying or not _has_failed(prefilling)):
            await asyncio.wait((decoding,))
    finally:
        is_answered = decoding.done() and not _has_failed(decoding)
        if pair.abort is not None and not is_answered:
            for engine in (prefiller, decoder):
                run.gateway.tasks.spawn(abort_leg(run.request, engine, pair.abort))
        try:
            await _end(decoding)
        except asyncio.CancelledError:  # the client has disconnected in this very moment
            prefilling.cancel()
            raise
        if is_answered and not prefilling.done():  # its KV was read, so it is about to end
            run.gateway.tasks.spawn(_end(prefilling, PUSH_LEG_END_TIMEOUT_S))
        else:
            await _end(prefilling)
            if not is_answered and not prefilling.cancelled() and not _has_failed(prefilling):
                prefilled = prefilling.result()
                assert isinstance(prefilled, PrefillAnswer)
                run.release_unread(prefilled.params)
    if is_answered:
        return None
    failed_legs = [leg for leg in (prefilling, decoding) if _has_failed(leg)]
    for leg in failed_legs:
        outcome = None if leg.exception() is not None else leg.result()
        if isinstance(outcome, LegFailure):
            note_possible_crash(run, outcome)
    first = failed_legs[0].result()  # raises what is a fault of the router's own
    if isinstance(first, LegRefusal):
        raise first.error
    assert isinstance(first, LegFailure)
    return first


async def _prefill(run: Run, engine: Engine, pair: LegPair) -> PrefillOutcome:
    """Send a prefill leg beside its decode leg."""
    prefilled = await prefill_leg(run, engine, pair, run.offer_last_turn(engine))
    if isinstance(prefilled, PrefillAnswer):
        run.note_prefilled(engine, prefilled.params)
    return prefilled


async def _decode(run: Run, params: KvParams | None, threshold: float = 0.0) -> DecodePhase:
    """Send the decode leg to one engine after another until one answers, or the strategy has to do
    something else first. `params` are the KV transfer params of `run.prefiller`, if there is one.
    """
    prefiller, resume = run.prefiller, run.resume
    while True:
        if run.suspects:
            await require_engines_alive(run)
        decoder = select_decoder(run, prefiller)
        if decoder is None:
            if resume.restart_answer():
                return DecodePhase.RESUME
            if not change_group(run):
                raise _no_decoder_left(run)
            if prefiller is not None:
                return DecodePhase.AFRESH
            continue
        if decoder is prefiller:
            return DecodePhase.SAME_ENGINE
        if threshold and not may_reject(run.request, decoder):
            return DecodePhase.SKIPPED
        leg_params = run.leg_params(params, decoder)
        outcome = await decode_leg(run, decoder, leg_params, threshold)
        if outcome is LEG_ANSWERED:
            return ANSWERED
        if outcome is LEG_REJECTED:
            return DecodePhase.REJECTED
        if isinstance(outcome, LegRefusal):
            if resume.restart_answer() or go_back(run, decoder):
                return DecodePhase.RESUME
            sent = leg_params.params
            continues_tokens = sent is not None and sent.continues_tokens
            if not continues_tokens or not resume.stop_handing_over(decoder, outcome.error):
                raise outcome.error
            return DecodePhase.AFRESH
        what = await _recover(run, outcome)
        if what is Next.RESUME or isinstance(outcome.error, PreemptedError):
            return DecodePhase.RESUME
        is_afresh = prefiller is not None and (what is Next.AFRESH or not _is_leased(run))
        if is_afresh and another_decoder(run, prefiller) not in (None, prefiller):
            return DecodePhase.AFRESH


async def _recover(run: Run, failed: LegFailure) -> Next:
    """Do as `recover`. Where another engine continues the answer by ids, make its request."""
    what, buffer = recover(run, failed), run.resume.continued
    if what is Next.RESUME and isinstance(buffer, IdBuffer):
        body, engines = None, usable_decoders(run)
        while not engines and change_group(run):
            engines = usable_decoders(run)
        if await find_cut(run.request, engines, buffer):
            body = continuing_body(run.request.body, buffer)
        if body is None:
            raise _resume_given_up(run, failed.error)
        run.bodies = run.bodies.of(body)
        if "messages" in body:
            run.bodies.prompt_ids = buffer.continuing_ids()
    return what


def _is_leased(run: Run) -> bool:
    """Return True if the prefill engine's blocks certainly still wait."""
    done = run.request.record.prefill_done
    return done is not None and now() - done < UNRENEWED_LEASE_S


def _no_decoder_left(run: Run) -> Exception:
    if run.failure is None:
        return run.gateway.routes.lack_of(DECODE, run.request.model)
    return _resume_given_up(run, run.failure)


def _resume_given_up(run: Run, failure: LegError) -> LegError:
    if run.request.exchange.started:
        run.gateway.metrics.resumes.add((failure.kind, "given_up"))
    return failure


def _has_failed(leg: asyncio.Task[Any]) -> bool:
    if leg.cancelled():
        return False
    return leg.exception() is not None or isinstance(leg.result(), LegFailure | LegRefusal)


async def _end(leg: asyncio.Task[Any], timeout: float = 0.0) -> None:
    """Cancel a leg after `timeout` seconds, and wait until it has ended. Never raises."""
    if timeout and not leg.done():
        await asyncio.wait((leg,), timeout=timeout)
    leg.cancel()
    await asyncio.gather(leg, return_exceptions=True)


def _retrieve_error(leg: asyncio.Task[Any]) -> None:
    """Retrieve an error that no task awaits, which asyncio would log."""
    if not leg.cancelled():
        leg.exception()
