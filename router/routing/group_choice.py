"""Which group of engines a request goes to: KV moves only within one, so this is chosen first.

By weight, and for a conversation always the same while weights stay: of all groups the one whose
`-ln(u) / weight` is the least, with `u` in (0, 1] from the group's name and the conversation's
(weighted rendezvous hashing). A group has its weight's share of all, and what a change of weights
moves is no more than the shares that change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import inf, log

from router.fleet.engine import Engine
from router.fleet.snapshot import GroupPool
from router.routing.candidate import RoutingQuery


def group_of(
    pools: Sequence[GroupPool], ask: RoutingQuery, home: Engine | None = None
) -> GroupPool | None:
    """The group of the decoder `home` if that is whole, whatever its weight, for a conversation
    stays where its KV is; else by weight."""
    where = None if home is None else home.group
    for pool in pools:
        if pool.group == where and _is_whole(pool):
            return pool
    complete = preferred(pools)
    if len(complete) < 2:
        return complete[0] if complete else None
    key = ask.session or str(ask.turn)
    return min(complete, key=lambda pool: _distance(pool, key))


def preferred(pools: Sequence[GroupPool]) -> Sequence[GroupPool]:
    """Those with a weight before those without, and complete ones before those that lack a role:
    nobody is sent to half a group as long as there is a whole one. Of these, groups where a role is
    played by nobody but the cold, the overloaded and the failing come last."""
    for able in (_is_whole, _can_decode):
        found = [pool for pool in pools if able(pool)]
        if found:
            found = [pool for pool in found if pool.weight > 0] or found
            return [pool for pool in found if _is_sound(pool)] or found
    return pools


def _is_whole(pool: GroupPool) -> bool:
    return bool(pool.prefillers and pool.decoders)


def _can_decode(pool: GroupPool) -> bool:
    return bool(pool.decoders)


def _is_sound(pool: GroupPool) -> bool:
    roles = (pool.prefillers, pool.decoders)
    return all(not role or any(engine.is_available for engine in role) for role in roles)


def _distance(pool: GroupPool, key: str) -> float:
    if pool.weight <= 0:
        return inf
    text = f"{pool.group}\0{key}".encode("utf-8", "surrogatepass")
    chance = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return -log((chance + 1) / 2**56) / pool.weight
