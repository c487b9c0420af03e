"""Which group, and in it which prefillers and decoders, in order of preference: one pure call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.fleet.engine import Engine
from router.fleet.snapshot import Pool
from router.policies.affinity import first
from router.policies.candidate import Ask, Policy
from router.policies.chance import mix


class Route(NamedTuple):
    """Either sequence may be empty: nobody of that role may be asked."""

    group: str
    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]


NOWHERE = Route("", (), ())


def route(
    pools: Sequence[Pool],
    prefill: Policy,
    decode: Policy,
    ask: tuple[Ask, Ask],
    home: Engine | None = None,
) -> Route:
    """`ask` is what either policy may look at. `home` is a decoder that comes before the others,
    and whose group it then is."""
    pool = _pool(pools, ask[1], home)
    if pool is None:
        return NOWHERE
    prefillers = prefill.order(pool.prefillers, ask[0]) if pool.prefillers else ()
    decoders: Sequence[Engine] = decode.order(pool.decoders, ask[1]) if pool.decoders else ()
    if home is not None and home.is_wanted and home.spec.group == pool.group:
        decoders = first(decoders, home)
    return Route(pool.group, prefillers, decoders)


def _pool(pools: Sequence[Pool], ask: Ask, home: Engine | None) -> Pool | None:
    """A complete one before one with a role missing, by weight among those that are alike."""
    if len(pools) == 1:
        return pools[0]
    if home is not None:
        pools = [pool for pool in pools if pool.group == home.spec.group] or pools
    pools = [pool for pool in pools if pool.prefillers and pool.decoders] or pools
    pools = [pool for pool in pools if pool.decoders] or pools
    at = mix(ask.turn) / 2**64 * sum(pool.weight for pool in pools)
    for pool in pools:
        at -= pool.weight
        if at < 0:
            return pool
    return pools[-1] if pools else None
