"""Choose the role that each engine of both roles prefers, so that capacity follows the traffic.

An engine of both roles can compute prompts and answers alike, so a role is only a preference, and
a change needs no drain: from then on the engine gets other work, and ends what it has. One of two
forms holds in a group:

    free      every engine does both, and `free_placement` chooses by cost for each request. That is
              best where steps are limited in time (`target_itl_ms`) and mixing costs little: less
              than MAX_MIXING weight reads per step with prompts and answers
    boundary  the first engines, in the order of their names, compute prompts and the others
              decode, with conditional disaggregation by load (`local_prefill`). The boundary moves
              each INTERVAL_S, by the work that is offered: by one engine, or by an eighth of the
              way in a large group

In simulations of traffic that changes, the boundary is about as good as the best fixed division of
each phase, and free placement is better if mixing costs little (docs/performance.md).

The share of engines for prompts is need_prefill / (need_prefill + need_decode), both in engines.
Offered work is the signal, because a decode engine is busy at any load, and a queue shows bursts
instead of need. The queue of prompts, and the answers at decode engines, are guards. A move costs
the engine's queue, so an engine is taken from answers only if they have needed few for a while.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from time import monotonic as now
from typing import NamedTuple

from router.fleet.engine import BOTH, DECODE, PREFILL, Engine, EngineRole
from router.fleet.fleet import Fleet
from router.fleet.step_model import StepModel

logger = logging.getLogger("disagg_router.routing")

INTERVAL_S = 2.0
# Weight reads that a step with prompts and answers may cost beyond its parts, for free placement.
MAX_MIXING = 0.3
# Free placement ends only with so many more, because the penalties are measured.
MIXING_MARGIN = 0.1
WORK_WINDOW_S = 20.0
# The parts of the target that a decode engine's steps, of its cache that KV, and of its limit of
# running requests that answers should take.
STEP_SHARE = 0.5
CACHE_SHARE = 0.8
CACHE_MARGIN = 1.1
SEQS_SHARE = 0.75
# The boundary moves if it is so many engines off.
LEAST_CHANGE = 0.7
MOVED_SHARE = 1 / 8
# If the work needs no more than this part of all engines, and each role has twice the engines that
# it needs, the boundary stays where it is.
IDLE_SHARE = 0.2
# Seconds of queued prompts per prefill engine: with more than the first, no engine stops computing
# prompts; with more than the second, one more does.
BUSY_QUEUE_S = 0.5
LONG_QUEUE_S = 1.0
# The reasons for a form: a metric label, so none names an engine or has a figure.
CHEAP = "mixing prompts and answers costs little"
EXPENSIVE = "mixing prompts and answers costs too much"
UNMEASURED = "no engine has measured the mixing penalty yet"
ONE_ROLE = "an engine has only one role"
NO_STEP_BUDGET = "an engine has no step budget in time"


class EngineState(NamedTuple):
    """An engine of a group, at one moment. The contexts are the tokens of requests whose answers
    run there."""

    name: str
    role: EngineRole
    preferred_role: EngineRole
    model: StepModel | None
    has_step_limit: bool
    """Its steps with answers are limited in time, and its budget and cache are known."""
    cache_tokens: int
    """0 if unknown."""
    own_contexts: int
    """Those of this router's requests."""
    contexts: int
    """Those of all routers' requests."""
    legs: int
    """All routers' legs. At an engine that prefers answers, few of them are prompts."""
    offered_s: float
    """Seconds of work of all prompts that this router has sent there so far, by all its ranks."""
    queued_s: float
    """Seconds of work of all routers' prompts that it has to compute, by all its ranks."""
    num_ranks: int = 1
    """Data-parallel ranks, among which the contexts are divided."""
    max_num_seqs: int = 0
    """The most requests that each rank runs at once; 0 if unknown."""


class Need(NamedTuple):
    """The engines that the work of all routers needs."""

    prompts: float
    answers: float
    lasting_answers: float
    """In the mean of WORK_WINDOW_S."""
    crowd: float
    """Those that the answers at decode engines need. Other answers end where they are."""
    queue_s: float
    """Seconds of all queued prompts."""


class Balance(NamedTuple):
    """The preferred role of each engine of both roles, by name, and the reason in words."""

    is_free: bool
    roles: dict[str, EngineRole]
    form_reason: str
    """Why this form holds, one of a few texts."""
    reason: str
    """It explains the form and the boundary, with figures and the names of engines."""


class RoleBalancer:
    """Decides for one group. `target_itl` is in seconds; times are any monotonic clock's."""

    def __init__(self, target_itl: float) -> None:
        self._target_itl = target_itl
        self._prefillers: int | None = None
        """The number of engines that prefer prompts; None before the first division."""
        self._mixing: float | None = None
        """The last known mixing penalty."""
        self._is_free = False
        self._offered: dict[str, float] = {}
        self._means: Sequence[float] = ()
        """Averages over WORK_WINDOW_S: seconds of prompts per second, the contexts of this router's
        requests, and those of all routers'."""
        self._updated = -math.inf

    def update(self, engines: Sequence[EngineState], moment: float) -> Balance | None:
        """Return the preferences for the usable engines of the group. None if there is nothing to
        divide: no engine plays both roles, or only one engine is usable."""
        movable = sorted(one.name for one in engines if one.role is BOTH)
        if not movable or len(engines) < 2:
            return None
        self._measure_work(engines, moment)
        form_reason, detail = self._choose_form(engines)
        why = f"{form_reason}: {detail}" if detail else form_reason
        if self._is_free:
            return Balance(True, dict.fromkeys(movable, BOTH), form_reason, why)
        need = self._need(engines)
        fixed = sum(one.role is PREFILL for one in engines)
        least = 0 if fixed else 1
        most = len(movable) - (not any(one.role is DECODE for one in engines))
        if self._prefillers is None:
            self._prefillers = len(movable) // 2
        count = min(max(self._prefillers, least), most)
        moved = self._moved(count, fixed, len(engines), need)
        self._prefillers = count = min(max(moved, least), most)
        roles = {name: PREFILL if i < count else DECODE for i, name in enumerate(movable)}
        needs = f"prompts need {_number(need.prompts)} engines and answers {_number(need.answers)}"
        if need.queue_s >= 0.1:
            needs += f", {need.queue_s:.1f} s of prompts are queued"
        return Balance(False, roles, form_reason, f"{needs}; boundary, since {why}")

    def _moved(self, count: int, fixed: int, total: int, need: Need) -> int:
        """Return how many engines should prefer prompts, where `count` do."""
        prefillers = fixed + count
        decoders = total - prefillers
        prompts, answers = need.prompts, need.answers
        queue_s = need.queue_s / max(1, prefillers)
        # An engine that moves computes prompts slowly until its answers have ended, and if it moves
        # back, its prompts wait beside answers. So there has to be room for a while.
        may_take = max(answers, need.lasting_answers, need.crowd) <= decoders - 1
        if queue_s > LONG_QUEUE_S and may_take:
            return count + 1
        busy = max(answers, need.crowd)
        is_idle = (
            prompts + busy <= IDLE_SHARE * total
            and 2 * prompts <= prefillers
            and 2 * busy <= decoders
        )
        if is_idle or not prompts + answers:
            return count  # the ratio of small needs shows little, and a move costs cached prefixes
        change = total * prompts / (prompts + answers) - prefillers
        if change > LEAST_CHANGE and may_take:
            return count + max(1, int(min(change * MOVED_SHARE, decoders - answers)))
        is_spare = -change > LEAST_CHANGE and queue_s <= BUSY_QUEUE_S
        if is_spare or need.crowd > decoders:  # without room for answers, prompts wait as well
            return count - max(1, int(-change * MOVED_SHARE))
        return count

    def _measure_work(self, engines: Sequence[EngineState], moment: float) -> None:
        elapsed = moment - self._updated
        if elapsed <= 0:
            return
        self._updated = moment
        before, self._offered = self._offered, {one.name: one.offered_s for one in engines}
        if math.isinf(elapsed):
            return
        new = sum(max(0.0, one.offered_s - before.get(one.name, one.offered_s)) for one in engines)
        own, contexts = sum(e.own_contexts for e in engines), sum(e.contexts for e in engines)
        values, weight = (new / elapsed, own, contexts), -math.expm1(-elapsed / WORK_WINDOW_S)
        means = zip(self._means or values, values, strict=True)
        self._means = [mean + weight * (value - mean) for mean, value in means]

    def _need(self, engines: Sequence[EngineState]) -> Need:
        """Return what all routers' work needs. This router's share of the offered work is its share
        of the contexts."""
        work, own, mean = self._means or (0.0, 0.0, 0.0)
        prompts = work * mean / own if own else work
        per_token = self._engines_per_token(engines)
        decoders = [one for one in engines if one.preferred_role is not PREFILL]
        crowd = per_token * sum(one.contexts for one in decoders)
        if limits := [one.max_num_seqs for one in engines if one.max_num_seqs]:
            crowd = max(crowd, sum(one.legs for one in decoders) / (SEQS_SHARE * median(limits)))
        answers = per_token * sum(one.contexts for one in engines)
        queue_s = sum(one.queued_s for one in engines)
        return Need(prompts, answers, per_token * mean, crowd, queue_s)

    def _engines_per_token(self, engines: Sequence[EngineState]) -> float:
        """Return how many engines a token of contexts needs for short steps, and for its KV. The
        medians of the engines count, so that a single one with a wrong cache or step model moves no
        boundary."""
        room = steps = 0.0
        if caches := [one.cache_tokens for one in engines if one.cache_tokens]:
            room = CACHE_MARGIN / (CACHE_SHARE * median(caches))
        least = 0.1 * self._target_itl
        if costs := [
            one.model.context
            / max(STEP_SHARE * self._target_itl - one.model.base, least)
            / one.num_ranks
            for one in engines
            if one.model is not None
        ]:
            steps = median(costs)
        return max(room, steps)

    def _choose_form(self, engines: Sequence[EngineState]) -> tuple[str, str]:
        """Set `_is_free`, and return the reason with its figure or its engine. The median of the
        engines' mixing penalties counts, or the last one while no engine knows its own: one that
        prefers prompts has no steps that show it."""
        was_free, self._is_free = self._is_free, False
        for one in engines:
            if one.role is not BOTH:
                return ONE_ROLE, one.name
            if not one.has_step_limit:
                return NO_STEP_BUDGET, one.name
        models = [one.model for one in engines if one.model is not None]
        known = [model.mixing for model in models if model.mixing is not None]
        self._mixing = median(known) if known else self._mixing
        if self._mixing is None:
            return UNMEASURED, ""
        self._is_free = self._mixing < MAX_MIXING + (MIXING_MARGIN if was_free else 0.0)
        figure = f"{self._mixing:.2f} weight reads per step"
        return CHEAP if self._is_free else EXPENSIVE, figure


def _number(engines: float) -> str:
    return f"{engines:.1f}" if engines >= 0.95 else f"{engines:.2f}"


class RoleKeeper:
    """Gives the engines of a fleet their preferred roles, each INTERVAL_S. Without engines of both
    roles it does nothing."""

    def __init__(self, fleet: Fleet, target_itl: float) -> None:
        self._fleet, self._target_itl = fleet, target_itl
        self._balancers: dict[str, RoleBalancer] = {}

    async def run(self) -> None:
        """Update until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self.update(now())
            except Exception:  # the preferences stay as they are
                logger.exception("roles cannot be balanced")

    def update(self, moment: float) -> None:
        """Balance each group that has engines of both roles. `moment` is in seconds of a monotonic
        clock."""
        groups: defaultdict[str, list[Engine]] = defaultdict(list)
        for engine in self._fleet.engines:
            if engine.is_available:
                groups[engine.group].append(engine)
        roles: dict[str, tuple[EngineRole, str]] = {}
        free: set[str] = set()
        forms: dict[str, str] = {}
        balancers, self._balancers = self._balancers, {}
        for group, engines in groups.items():
            if not any(engine.role is BOTH for engine in engines):
                continue
            balancer = balancers.get(group) or RoleBalancer(self._target_itl)
            self._balancers[group] = balancer
            found = balancer.update([state_of(engine) for engine in engines], moment)
            if found is None:
                roles |= {e.name: (BOTH, "") for e in engines}
                continue
            roles |= {name: (role, found.reason) for name, role in found.roles.items()}
            forms[group] = found.form_reason
            if found.is_free:
                free.add(group)
        self._fleet.prefer_roles(roles, free)
        self._fleet.form_reasons = forms


def state_of(engine: Engine) -> EngineState:
    """Return the state of an engine as this router knows it."""
    known, num_ranks = engine.capabilities, len(engine.ranks or ()) or 1
    own, contexts = engine.tokens_in_flight, engine.total_tokens
    offered_s, queued_s = engine.offered_prefill_s, engine.total_local_prefill[0]
    if engine.role is PREFILL:  # its tokens are those of prompts
        rates = [place.prefill_rate for place in engine.ranks or (engine,)]
        offered_s = sum(rate.busy_s for rate in rates)
        queued_s = contexts * max(rate.token_seconds for rate in rates)
        own = contexts = 0
    is_limited = not math.isinf(known.step_limit) and known.max_step_tokens > 0
    return EngineState(
        engine.name,
        engine.role,
        engine.preferred_role,
        known.step_model,
        is_limited and engine.cache_tokens > 0,
        engine.cache_tokens,
        own,
        contexts,
        engine.total_legs // num_ranks,
        offered_s / num_ranks,
        queued_s / num_ranks,
        num_ranks,
        known.max_num_seqs,
    )
