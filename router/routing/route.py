"""Which group, and in it which prefillers and decoders, in order of preference: one pure call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from router.common.records import Value
from router.fleet.engine import Engine
from router.fleet.snapshot import GroupPool
from router.routing.affinity import first
from router.routing.candidate import Policy, RoutingQuery
from router.routing.group_choice import group_of
from router.routing.policy_feedback import PolicyFeedback


class Route(Value, frozen=True):
    """Either sequence may be empty: nobody of that role may be asked. Notes are for a policy that
    remembers.

    A Struct, as other values that each request makes: one is made at a third of a frozen
    dataclass's price, and read at a tenth of a named tuple's."""

    group: str
    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]
    prefill_feedback: PolicyFeedback | None = None
    decode_feedback: PolicyFeedback | None = None
    has_feedback: bool = False
    """There are some."""
    all_decoders: Sequence[Engine] = ()
    """Of the group, in no order: the policy names those that it would rather have."""

    def end_feedback(self) -> None:
        for notes in (self.prefill_feedback, self.decode_feedback):
            if notes is not None:
                notes.end()


NOWHERE = Route("", (), ())


def route(
    pools: Sequence[GroupPool],
    prefill: Mapping[str, Policy],
    decode: Mapping[str, Policy],
    ask: tuple[RoutingQuery | None, RoutingQuery],
    home: Engine | None = None,
) -> Route:
    """The policies are by group. `ask` is what either may look at, None for no prefiller. `home` is
    a decoder that comes before the others, and whose group it then is."""
    pool = pools[0] if len(pools) == 1 else group_of(pools, ask[1], home)
    if pool is None:
        return NOWHERE
    group = pool.group
    prefillers, prefill_notes = _ordered(prefill, group, pool.prefillers, ask[0])
    decoders, decode_notes = _ordered(decode, group, pool.decoders, ask[1])
    if home is not None and home.is_usable and home.group == group:
        decoders = first(decoders, home)
    is_noted = prefill_notes is not None or decode_notes is not None
    return Route(group, prefillers, decoders, prefill_notes, decode_notes, is_noted, pool.decoders)


def _ordered(
    policies: Mapping[str, Policy], group: str, engines: Sequence[Engine], ask: RoutingQuery | None
) -> tuple[Sequence[Engine], PolicyFeedback | None]:
    if ask is None or (len(engines) < 2 and not ask.chunks):
        return engines, None
    policy = policies[group]
    notes = PolicyFeedback(policy, ask) if ask.chunks and policy.uses_feedback else None
    order = policy.order(engines, ask)
    if order and order[0].failed_recently:  # it has little to do since it fails
        order = sorted(order, key=attrgetter("failed_recently"))
    return order, notes
