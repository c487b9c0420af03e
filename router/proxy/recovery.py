"""Carries out what follows from a failed leg: blame, counts, the access log, and retry or end.

`retry.decide` returns what follows. This is the only place that carries it out.

Some requests crash the engine process: a body that trips an assertion, or a prompt that exhausts
the engine's memory. Retried on one engine after another, such a request would crash the whole
fleet. So after two legs have failed in a way that may be a crash, the router probes both engines.
If both are down, the request ends with an error whose header asks clients not to retry. A failed
leg alone is not a crash: engines also return 5xx, restart, and lose connections.
"""

from __future__ import annotations

import asyncio
import time
from time import monotonic as now

from router.fleet.engine import PREFILL, Engine, Health, Intent
from router.http_client.errors import (
    ConnectRefusedError,
    ConnectTimeoutError,
    DisconnectedError,
    UpstreamError,
)
from router.openai.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    LoadFailedError,
    PreemptedError,
    RejectedMidStreamError,
    RepeatedCrashError,
)
from router.proxy.legs import LegFailure
from router.proxy.retry import RULES, Mark, Next, Situation, decide
from router.proxy.run import Run

# Engines that may die during one request.
MAX_DEATHS = 2
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
    else:
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
    if decision.gives_up or not (decision.is_free or gateway.budget.take(moment)):
        if request.exchange.started:
            gateway.metrics.resumes.add((error.kind, resume.reason_not_resumed()))
        _log(run, failed, Next.GIVE_UP)
        raise error
    if what is Next.RESUME or isinstance(error, PreemptedError):
        resume.note_move(error)
    _log(run, failed, what)
    request.record.retries += 1
    gateway.metrics.retries.labels(role, error.kind).inc()
    return what


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
    """Raise RepeatedCrashError if several engines have died while they worked on this request."""
    if len(run.suspects) < MAX_DEATHS:
        return
    checks = [_has_died(engine, at) for engine, at in run.suspects.items()]
    num_died = sum(await asyncio.gather(*checks))
    if num_died >= MAX_DEATHS:
        raise RepeatedCrashError(
            f"{num_died} engines died while they worked on this request, so the router does "
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
    # An engine that reports a shutdown has not crashed.
    is_shutdown = isinstance(failed.error, EngineUnavailableError)
    if failed.error.kind in CRASH_KINDS and not is_shutdown:
        run.suspects.setdefault(failed.engine, time.time())


def _blame(run: Run, failed: LegFailure, blames_engine: bool) -> None:
    """Report the failure to the fleet as evidence about the engine."""
    error, engine, fleet = failed.error, failed.engine, run.gateway.fleet
    if isinstance(error, ConnectRefusedError):
        fleet.note_unreachable(engine, str(error))
    elif isinstance(error, EngineOverloadedError):
        fleet.cool_down(engine, error.retry_after or 1)
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
        told = await engine.get("/health", now() + CRASH_PROBE_TIMEOUT_S, MAX_PROBE_ANSWER_BYTES)
    except (ConnectRefusedError, ConnectTimeoutError, DisconnectedError):
        return True
    except UpstreamError:
        return False  # busy, perhaps
    return told.status >= 500
