"""Finds the engines that may serve a request, in order of preference.

The policies are pure (router.routing). This module gives them what they look at: the snapshot of
the fleet, the request's prompt, and counters for round robin.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from msgspec import structs

from router.fleet.engine import Engine
from router.fleet.engine_spec import EngineRole
from router.fleet.fleet import Fleet
from router.fleet.snapshot import GroupPool, Snapshot
from router.openai.errors import NoEngineError, UnknownModelError
from router.proxy.request import Request
from router.routing.load_policies import LoadBound
from router.routing.policy import RoutingQuery
from router.routing.prompt_chunks import TOKENS_PER_CHUNK, hash_chunks
from router.routing.route import GroupPolicies, Route, route
from router.settings import Settings

# A prefill engine works on one prompt at a time, so a second request there has to wait already.
PREFILL_LOAD_FLOOR = 2


class RouteFinder:
    """The routing policies of both roles, and the fleet that they choose from.

    `load_bound` decides when an engine that affinity prefers is too busy.
    """

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self.load_bound = LoadBound(settings.affinity_load_factor, settings.affinity_load_floor)
        floor = min(PREFILL_LOAD_FLOOR, self.load_bound.floor)
        prefill_bound = LoadBound(self.load_bound.factor, floor)
        self._fleet = fleet
        # With one decode engine, its cache still decides whether a prompt needs a prefill engine.
        self._least_decoders = 1 if settings.min_remote_prefill_tokens else 2
        self._prefill = GroupPolicies(settings.prefill_policy, prefill_bound)
        self._decode = GroupPolicies(settings.decode_policy, self.load_bound)
        self._prefill_turn = self._decode_turn = 0
        self._looked_at: Snapshot | None = None
        self._needs_chunks = False
        fleet.on_lost = self._forget_engine
        fleet.on_new_groups = self._forget_old_groups

    def find(self, request: Request, home: Engine | None = None, but: Container[str] = ()) -> Route:
        """Return the engines that may serve the request, best first.

        The decode engine `home` comes before others. Groups in `but` are left out. Raises
        UnknownModelError, NoEngineError.
        """
        pools = self.pools(request.body.get("model"))
        if but:
            pools = [pool for pool in pools if pool.group not in but]
        session = "" if request.turn is None else request.turn.conversation.session
        tokens = request.tokens
        is_long = tokens >= TOKENS_PER_CHUNK
        chunks = hash_chunks(request.body) if is_long and self._chunks_matter() else ()
        turn = self._decode_turn
        self._decode_turn = turn + 1
        decoder = RoutingQuery(turn, tokens, session, chunks)
        prefiller = None
        if not request.alone:
            same = turn == self._prefill_turn  # as long as no request needed a decode engine alone
            prefiller = decoder if same else structs.replace(decoder, turn=self._prefill_turn)
            self._prefill_turn += 1
        return route(pools, self._prefill, self._decode, (prefiller, decoder), home)

    def others(self, request: Request, planned: Route, role: EngineRole) -> Iterable[Engine]:
        """Yield the engines of the planned group as they are now."""
        for pool in self._fleet.snapshot.pools(request.model):
            if pool.group == planned.group:
                yield from pool.by_role(role)

    def pools(self, model: object) -> Sequence[GroupPool]:
        """Return the groups that serve a model. Raises UnknownModelError, NoEngineError."""
        pools = self._fleet.snapshot.pools(model)
        if pools:
            return pools
        if self._fleet.may_serve(model):
            raise NoEngineError("no decode engine is healthy")
        raise UnknownModelError(model)

    def shares_kv_loads(self, model: object) -> bool:
        """Return True if each decode engine of a model loads KV once for several answers."""
        pools = self._fleet.snapshot.pools(model)
        return all(one.capabilities.shares_kv_loads for pool in pools for one in pool.decoders)

    def _chunks_matter(self) -> bool:
        """Return True if a policy remembers prompts and has a choice. Computed once a snapshot."""
        snapshot = self._fleet.snapshot
        if snapshot is not self._looked_at:
            prefill, decode = self._prefill.uses_feedback, self._decode.uses_feedback
            self._looked_at, self._needs_chunks = (
                snapshot,
                any(
                    (prefill and len(pool.prefillers) > 1)
                    or (decode and len(pool.decoders) >= self._least_decoders)
                    for pool in snapshot.any_model
                ),
            )
        return self._needs_chunks

    def _forget_engine(self, engine: Engine) -> None:
        self._fleet.unreachable_pairs.forget(engine.name)
        for policies in (self._prefill, self._decode):
            policies.forget(engine.name, engine.group)

    def _forget_old_groups(self) -> None:
        for policies in (self._prefill, self._decode):
            policies.keep_only(self._fleet.groups)
