"""Carries out what follows from a failed leg: blame, counts, the access log, and retry or end.

`retry.decide` returns what follows. This is the only place that carries it out.

Some requests crash the engine process: a body that trips an assertion, or a prompt that exhausts
the engine's memory. Retried on one engine after another, such a request would crash the whole
fleet. So after two legs have failed in a way that may be a crash, the router probes both engines.
If both are down, `require_engines_alive` may end the request with an error whose header asks
clients not to retry. A failed leg alone is not a crash: engines also return 5xx, restart, and lose
connections.
"""

from __future__ import annotations

import asyncio
import random
import time
from time import monotonic as now

from router.fleet.engine import PREFILL, Engine, Health, Intent
from router.fleet.engine_probe import HEALTH_PATH
from router.http_client.errors import (
    ConnectRefusedError,
    ConnectTimeoutError,
    DisconnectedError,
    MigratedError,
    UpstreamError,
)
from router.openai.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    LoadFailedError,
    PreemptedError,
    RejectedMidStreamError,
    RepeatedCrashError,
    UnservedModelError,
)
from router.proxy.legs import LegFailure
from router.proxy.resume_buffer import RETURNED
from router.proxy.retry import RULES, Mark, Next, Situation, decide
from router.proxy.run import Run, Suspicion

# Engines that may die during one request that nothing else explains.
MAX_DEATHS = 2
# Seconds between the first and the last engine that one outage kills. Longer than the default
# interval of the probes, which find dead engines without requests.
OUTAGE_S = 1.5
# Timeout of the probe, in seconds, the connection included.
CRASH_PROBE_TIMEOUT_S = 1.0
MAX_PROBE_ANSWER_BYTES = 64 * 1024
# Kinds of failures that may be a crash of the engine.
CRASH_KINDS = frozenset(("stale", "disconnected", "engine_lost", "broken_answer", "status_5xx"))
# For the access log.
CONSEQUENCES = {
    Next.AGAIN: "retried on a new connection",
    Next.ELSEWHERE: "retried on another engine",
    Next.AFRESH: "prefilled again",
    Next.GIVE_UP: "gave up",
    Next.RESUME: "resumed on another engine",
    Next.END: "gave up",
}


def recover(run: Run, failed: LegFailure) -> Next:
    """Act on a failed leg and return what the strategy does next.

    Raises the failure if there is nothing left to try.
    """
    error, engine, role = failed
    gateway, request, resume = run.gateway, run.request, run.resume
    moment = now()
    if isinstance(error, PreemptedError):
        resume.take_back(error, engine)
    elif not isinstance(error, MigratedError):
        gateway.note_failure(engine, role, error)
    situation = Situation(
        has_started=request.exchange.started,
        can_resume=resume.can_resume(role, error),
        is_late=moment >= request.latest,
        num_failed=len(run.failed) - run.num_hedged_failures + len(run.cannot_load),
        offered_turn=role is PREFILL and run.offer.params is not None,
        returns_left=resume.returns_left,
    )
    is_of_pair = isinstance(error, LoadFailedError) and error.is_of_pair
    decision = decide(error.kind, role, situation, is_of_pair)
    if not situation.is_late:
        _blame(run, failed, decision.blames_engine)
    run.failure = error
    note_possible_crash(run, failed)
    _remember(run, engine, decision.mark)
    run.is_turn_spent = run.is_turn_spent or decision.spends_turn
    run.is_fresh = run.is_fresh or error.kind == "stale"
    what = decision.next
    if not situation.is_late and go_back(run, engine, is_stale=error.kind == "stale"):
        what = Next.RESUME
    elif decision.gives_up or not (decision.is_free or gateway.budget.take(moment)):
        if request.exchange.started:
            gateway.metrics.resumes.add((error.kind, resume.reason_not_resumed()))
        _log(run, failed, Next.GIVE_UP)
        raise error
    elif what is Next.RESUME or isinstance(error, PreemptedError):
        resume.note_move(error)
    _log(run, failed, what)
    request.record.retries += 1
    gateway.metrics.retries.labels(role, error.kind).inc()
    return what


def go_back(run: Run, failed: Engine | None = None, is_stale: bool = False) -> bool:
    """Let a drained engine continue a stream that has just left it, because no other engine has.
    With `is_stale` the move is tried again instead, since the other engine never got the stream.

    Return False if there is no such engine. No limit of retries applies: without the move, the
    client would see no error. The blocks are still in the engine's cache.
    """
    buffer = run.resume.continued
    if buffer is None or buffer.resume_cause != MigratedError.kind:
        return False
    left = buffer.left
    if left is None or left is failed or not (left.is_draining or left.is_usable):
        return False
    if not is_stale:
        buffer.note_resume(RETURNED, is_free=True)
    run.lender = left
    return True


def record_hedged_failure(run: Run, failed: LegFailure) -> None:
    """Act on a failed leg of a hedged request that the answer does not depend on."""
    error, engine, role = failed
    run.gateway.note_failure(engine, role, error)
    if now() < run.request.latest:
        _blame(run, failed, RULES[error.kind].blames_engine)
    note_possible_crash(run, failed)
    if error.kind != "stale":
        run.failed.append(engine)
        run.num_hedged_failures += 1


async def require_engines_alive(run: Run) -> None:
    """Raise RepeatedCrashError if the request probably crashes engines.

    A request on which one engine dies is retried at once. Two dead engines mean that the request
    kills them, unless something else explains their deaths: either of them had other requests, too,
    or an engine that never had this one was lost at that time. A rack that fails and an operator
    who stops several engines look like that, but so does a crashing request in company. So a
    request with such an excuse gets one more engine, and at the next death the router refuses it:
    a crashing request kills two engines if it is alone, and three in company.

    Before the router decides, it waits for as long as an outage lasts. Then it knows the other
    engines that were lost, and does not send the request to an engine that is about to die. The
    wait has a random part, so that a crashing request and those that were on both engines with it
    seldom meet on the third. A request whose deadline comes sooner is refused at once.
    """
    if len(run.suspects) < MAX_DEATHS:
        return
    checks = [_has_died(engine, one.at) for engine, one in run.suspects.items()]
    results = await asyncio.gather(*checks)
    died = [one for one, has_died in zip(run.suspects.values(), results, strict=True) if has_died]
    if len(died) < MAX_DEATHS or len(died) <= run.excused_deaths:
        return
    wait = OUTAGE_S * random.uniform(1, 2)
    if not run.excused_deaths and now() + wait < run.request.latest:
        await asyncio.sleep(wait)
        since = min(one.at for one in died) - OUTAGE_S
        if any(one.has_company for one in died) or _were_others_lost(run, since):
            run.excused_deaths = len(died)
            return
    raise RepeatedCrashError(
        f"{len(died)} engines died while they worked on this request, so the router does "
        "not retry it. Sending it again may crash more engines"
    )


def _remember(run: Run, engine: Engine, mark: Mark) -> None:
    if mark is Mark.FAILED:
        run.failed.append(engine)
    elif mark is Mark.CANNOT_LOAD:
        run.cannot_load.append(engine)
    elif mark is Mark.PREEMPTED:
        run.resume.returns_left -= 1
        run.resume.preempted.append(engine)


def note_possible_crash(run: Run, failed: LegFailure) -> None:
    """Remember the engine if the failure of its leg may be a crash."""
    engine, moment = failed.engine, time.time()
    # An engine that reports a shutdown has not crashed.
    is_shutdown = isinstance(failed.error, EngineUnavailableError)
    if failed.error.kind not in CRASH_KINDS or is_shutdown or engine in run.suspects:
        return
    # The other legs there have failed just now, or are about to fail.
    has_company = engine.total_legs > 0 or moment - engine.leg_lost_at < OUTAGE_S
    run.suspects[engine] = Suspicion(moment, has_company)
    engine.leg_lost_at = moment


def _blame(run: Run, failed: LegFailure, blames_engine: bool) -> None:
    """Report the failure to the fleet as evidence about the engine."""
    error, engine, fleet = failed.error, failed.engine, run.gateway.fleet
    if isinstance(error, ConnectRefusedError):
        fleet.note_unreachable(engine, str(error))
    elif isinstance(error, EngineOverloadedError):
        fleet.cool_down(engine, error.retry_after or 1)
    elif isinstance(error, UnservedModelError):
        fleet.note_model_rejected(engine, str(run.request.model))
    elif blames_engine and not isinstance(error, RejectedMidStreamError):
        fleet.note_leg_failed(engine, str(error))


def _log(run: Run, failed: LegFailure, what: Next) -> None:
    line = f"{failed.role} at {failed.engine.name}: {failed.error.kind}; {CONSEQUENCES[what]}"
    run.request.record.failures += (line,)


async def _has_died(engine: Engine, suspected_at: float) -> bool:
    """Return True if the engine is down. `suspected_at`: when its leg failed, in Unix time."""
    if engine.intent is not Intent.SERVING:
        return False  # it was to leave
    if engine.health is Health.UNHEALTHY or engine.lost_at >= suspected_at:
        return True
    try:
        told = await engine.get(HEALTH_PATH, now() + CRASH_PROBE_TIMEOUT_S, MAX_PROBE_ANSWER_BYTES)
    except (ConnectRefusedError, ConnectTimeoutError, DisconnectedError):
        return True
    except UpstreamError:
        return False  # busy, perhaps
    return told.status >= 500


def _were_others_lost(run: Run, since: float) -> bool:
    """Return True if engines were lost that never failed this request. `since` is a Unix time."""
    return any(
        engine.lost_at >= since and engine.intent is Intent.SERVING and engine not in run.suspects
        for engine in run.gateway.fleet.engines
    )
