"""The route of a request: a group of engines and, in it, engines in order of preference.

KV moves only within a group, so the group is chosen first, by weight. A conversation always goes to
the same group while the weights stay: to the one with the least `-ln(u) / weight`, where `u` in
(0, 1] is a hash of the group's name and the conversation's (weighted rendezvous hashing). So each
group gets its share, and a change of weights moves only the shares that change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from math import inf, log
from operator import attrgetter

from msgspec import Struct

from router.fleet.engine import PREFILL, Engine, EngineRank, EngineRole, Place, engine_of
from router.fleet.fleet import GroupPool
from router.fleet.step_model import StepModel
from router.routing.chunk_index import ChunkIndex
from router.routing.costs import PairSlowness, PlaceLoad
from router.routing.free_placement import Choice, place_freely
from router.routing.pair_choice import choose_pair
from router.routing.policy import (
    MAX_ORDERED,
    LeastLoaded,
    LoadBound,
    Policy,
    PolicyFeedback,
    PowerOfTwo,
    RoundRobin,
    RoutingQuery,
    load,
    prefill_load,
    some_of,
)
from router.routing.prefix_cache import PrefillCost, PrefixAffinity
from router.routing.session_affinity import SessionAffinity

PolicyMaker = Callable[[LoadBound, ChunkIndex], Policy]
POLICIES: dict[str, PolicyMaker] = {
    "round_robin": lambda bound, index: RoundRobin(),
    "least_loaded": lambda bound, index: LeastLoaded(),
    "power_of_two": lambda bound, index: PowerOfTwo(),
    "session": lambda bound, index: SessionAffinity(bound),
    "prefix": PrefixAffinity,
}
# With more engines, free placement compares a sample, and those that the policies name.
MAX_FREE_CHOICES = 16
# The load of a prefill engine is work that is queued there, so both count in one cost.
PREFILL_POLICIES = POLICIES | {
    "least_loaded": lambda bound, index: LeastLoaded(prefill_load),
    "prefix": PrefillCost,
}


class GroupPolicies(dict[str, Policy]):
    """The policies of one role by group, made when a group is first used. Groups share no KV, so
    their policies share only the memory for `index`."""

    def __init__(self, make_policy: PolicyMaker, bound: LoadBound, index: ChunkIndex) -> None:
        super().__init__()
        self._make_policy = partial(make_policy, bound, index)
        self.uses_feedback = self._make_policy().uses_feedback

    def __missing__(self, group: str) -> Policy:
        policy = self[group] = self._make_policy()
        return policy

    def forget(self, engine: str, group: str) -> None:
        """The engine was removed or has restarted."""
        if group in self:
            self[group].forget(engine)

    def keep_only(self, groups: Container[str]) -> None:
        """All other groups were removed."""
        for group in [group for group in self if group not in groups]:
            del self[group]


NO_RANKS: dict[Engine, EngineRank] = {}


class Route(Struct, frozen=True):
    """The engines for one request, best first. `prefillers` or `decoders` are empty if no engine of
    that role is usable. Feedback objects exist only for policies that use feedback.

    A Struct, like all values that each request makes: it is made at a third of the cost of a frozen
    dataclass and read at a tenth of the cost of a named tuple."""

    group: str
    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]
    prefill_feedback: PolicyFeedback | None = None
    decode_feedback: PolicyFeedback | None = None
    all_decoders: Sequence[Engine] = ()
    """All decode engines of the group, in no order; `decoders` are those that the policy named."""
    is_free: bool = False
    """The engines were chosen by cost for both legs together; the first ones may be the same."""
    slowness: float = 1.0
    """A transfer between the first two engines takes this many times as long as between others."""
    usual_model: StepModel | None = None
    """If they were: the step model of one of them, for an engine that has not measured its own."""
    prefill_ranks: Mapping[Engine, EngineRank] = {}
    decode_ranks: Mapping[Engine, EngineRank] = {}
    """The best data-parallel ranks of engines that the policy named, if it chooses ranks."""

    def place(self, engine: Engine, role: EngineRole) -> Place:
        """Return the data-parallel rank for a leg at this engine, or the engine if it has no ranks
        or should choose one itself."""
        chosen, ranks = self.decode_ranks, engine.ranks
        if role is PREFILL:
            chosen = self.prefill_ranks
        if not chosen or not ranks:
            return engine
        rank = chosen.get(engine)
        return min(ranks, key=load) if rank is None or rank not in ranks else rank

    def end_feedback(self) -> None:
        for feedback in (self.prefill_feedback, self.decode_feedback):
            if feedback is not None:
                feedback.end()


NOWHERE = Route("", (), ())


def route(
    pools: Sequence[GroupPool],
    prefill: Mapping[str, Policy],
    decode: Mapping[str, Policy],
    queries: tuple[RoutingQuery | None, RoutingQuery],
    preferred: Engine | None = None,
    chance: Callable[[], float] | None = None,
    slowness: PairSlowness | None = None,
) -> Route:
    """Choose a group and order its engines.

    `prefill` and `decode` are the policies by group. `queries` are for the prefill engine, None if
    the request needs none, and for the decode engine. The decode engine `preferred` comes before
    all others unless it prefers prompts, and its group is chosen if it is complete. `chance`
    returns numbers in [0, 1), which keep several routers from the same choice. `slowness` is given
    if KV moves slowly between some engines. Returns NOWHERE without pools.
    """
    prefill_query, decode_query = queries
    pool = pools[0] if len(pools) == 1 else choose_group(pools, decode_query, preferred)
    if pool is None:
        return NOWHERE
    group = pool.group
    if pool.is_free and pool.decoders and prefill_query is not None:
        policies = prefill[group], decode[group]
        both = prefill_query, decode_query
        return _route_freely(pool, policies, both, preferred, chance, slowness)
    prefillers, p_ranks, prefill_feedback = _order(
        prefill, group, pool.prefillers, pool.prefill_places, prefill_query
    )
    decoders, d_ranks, decode_feedback = _order(
        decode, group, pool.decoders, pool.decode_places, decode_query
    )
    if (
        preferred is not None
        and preferred.is_usable
        and preferred.group == group
        # Else it prefers prompts by now, and computes this one, or its KV is read.
        and (preferred.preferred_role is not PREFILL or preferred in pool.decoders)
    ):
        decoders = [preferred, *(engine for engine in decoders if engine is not preferred)]
    else:
        preferred = None
    slow = 1.0
    if slowness is not None and prefillers and decoders:
        held = _expected(prefill_feedback), _expected(decode_feedback)
        among = decoders if preferred is None else decoders[:1]
        prefillers, chosen = choose_pair(
            (prefillers, among), decode_query.tokens, decode_query.turn, slowness, held
        )
        decoders = chosen if preferred is None else decoders
        slow = slowness(prefillers[0].name, decoders[0].name)
    return Route(
        group,
        prefillers,
        decoders,
        prefill_feedback,
        decode_feedback,
        pool.decoders,
        slowness=slow,
        prefill_ranks=p_ranks,
        decode_ranks=d_ranks,
    )


def _route_freely(
    pool: GroupPool,
    policies: tuple[Policy, Policy],
    queries: tuple[RoutingQuery, RoutingQuery],
    preferred: Engine | None,
    chance: Callable[[], float] | None,
    slowness: PairSlowness | None,
) -> Route:
    """Choose the engines for both legs by cost, among all engines of a group that do both."""
    query = queries[0]
    feedback = _feedback_of(policies[0], query), _feedback_of(policies[1], queries[1])
    # The policies know which engines hold the prompt, and have to know the names of all engines.
    orders = [policy.order(pool.decoders, query) for policy in policies]
    if preferred is None and query.session and isinstance(policies[1], SessionAffinity):
        preferred = orders[1][0]
    compared = some_of(pool.decoders, query.turn, MAX_FREE_CHOICES)
    engines = list(dict.fromkeys([*compared, *orders[0], *orders[1]]))
    engines = [one for one in engines if not one.failed_recently] or engines  # they look idle
    if preferred is not None and preferred in pool.decoders and preferred not in engines:
        engines.append(preferred)
    models = (engine.capabilities.step_model for engine in pool.decoders)
    usual = next((model for model in models if model is not None), None)
    choices = []
    for engine in engines:
        load = PlaceLoad.of(engine, engine, usual)
        if load is not None:
            held = min(0 if one is None else one.expected_tokens(engine.name) for one in feedback)
            uncached, legs = max(1, query.tokens - held), engine.total_legs
            waiting = (engine.kv_leases, engine.kv_lease_tokens)
            choices.append(Choice(engine, load, uncached, legs, *waiting))
    prefillers = decoders = engines[:MAX_ORDERED]
    if choices:
        has_others = any(engine.total_legs > engine.in_flight for engine in engines)
        drawn = chance if has_others else None
        prefillers, decoders = place_freely(
            choices,
            query.tokens,
            preferred,
            drawn,
            lambda source, target: 1.0 if slowness is None else slowness(source.name, target.name),
        )
    return Route(
        pool.group,
        prefillers,
        decoders,
        *feedback,
        pool.decoders,
        is_free=True,
        usual_model=usual,
    )


def _order(
    policies: Mapping[str, Policy],
    group: str,
    engines: Sequence[Engine],
    places: Sequence[Place],
    query: RoutingQuery | None,
) -> tuple[Sequence[Engine], Mapping[Engine, EngineRank], PolicyFeedback | None]:
    """Return the engines in order, the best rank of each, and the feedback. `places` has the
    engines' data-parallel ranks, if any engine has some."""
    if query is None or (len(places or engines) < 2 and not query.chunks):
        return engines, NO_RANKS, None
    policy = policies[group]
    feedback = _feedback_of(policy, query)
    if places and policy.chooses_ranks:
        ordered = policy.order(places, query)
        order: Sequence[Engine] = list(dict.fromkeys(map(engine_of, ordered)))
        ranks = {one.engine: one for one in reversed(ordered) if isinstance(one, EngineRank)}
    else:
        order, ranks = policy.order(engines, query), NO_RANKS
    if order and order[0].failed_recently:  # a failing engine looks idle
        order = sorted(order, key=attrgetter("failed_recently"))
    return order, ranks, feedback


def _expected(feedback: PolicyFeedback | None) -> Callable[[str], int]:
    return (lambda name: 0) if feedback is None else feedback.expected_tokens


def _feedback_of(policy: Policy, query: RoutingQuery) -> PolicyFeedback | None:
    return PolicyFeedback(policy, query) if query.chunks and policy.uses_feedback else None


def choose_group(
    pools: Sequence[GroupPool], query: RoutingQuery, preferred: Engine | None = None
) -> GroupPool | None:
    """Return the group of the decode engine `preferred` if it is complete, whatever its weight,
    because the conversation's KV is there; else a group by weight. None without pools."""
    where = None if preferred is None else preferred.group
    for pool in pools:
        if pool.group == where and pool.prefillers and pool.decoders:
            return pool
    candidates = preferred_groups(pools)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    key = query.session or str(query.turn)
    return min(candidates, key=lambda pool: _distance(pool, key))


def preferred_groups(pools: Sequence[GroupPool]) -> Sequence[GroupPool]:
    """Return the groups to choose from. Complete groups come before groups that lack a role; among
    these, groups with a weight before those without, and then groups whose roles each have an
    available engine before groups with only cold, overloaded or failing ones."""
    able = [pool for pool in pools if pool.decoders]
    if not able:
        return pools
    able = [pool for pool in able if pool.prefillers] or able
    able = [pool for pool in able if pool.weight > 0] or able
    return [pool for pool in able if _is_available(pool)] or able


def _is_available(pool: GroupPool) -> bool:
    roles = (pool.prefillers, pool.decoders)
    return all(not role or any(engine.is_available for engine in role) for role in roles)


def _distance(pool: GroupPool, key: str) -> float:
    if pool.weight <= 0:
        return inf
    text = f"{pool.group}\0{key}".encode("utf-8", "surrogatepass")
    chance = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return -log((chance + 1) / 2**56) / pool.weight
