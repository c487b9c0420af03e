"""Which engines may read each other's KV.

A source may say so. Of the engines of which none does, those that name the same hash of what they
must have in common (GET /disagg/identity) are a group, called by that hash: so all routers call it
the same, whenever they came, and it keeps its name when another one comes or goes. Engines that
name none, as stock ones, belong to the only hash there is. Once there are two, as when a new
version is rolled out, nobody knows which of them could read the nameless: these are one of their
own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from router.fleet.engine import Engine
from router.fleet.engine_spec import DEFAULT_GROUP

# Of a hash: enough to tell groups apart, for people too; more where hashes begin alike.
SHOWN = 8


def assign_groups(engines: Iterable[Engine]) -> None:
    unassigned: list[Engine] = []
    hashes: set[str] = set()
    for engine in engines:
        if engine.spec.group != DEFAULT_GROUP:
            continue
        engine.compatibility = engine.capabilities.compatibility or engine.compatibility
        if engine.compatibility:
            hashes.add(engine.compatibility)
        unassigned.append(engine)
    names = _names(hashes)
    nameless = next(iter(names.values())) if len(names) == 1 else DEFAULT_GROUP
    for engine in unassigned:
        engine.group = names.get(engine.compatibility, nameless)


def _names(hashes: Set[str]) -> Mapping[str, str]:
    """One group, one name, whatever engines call a hash."""
    shown = {one: one[:SHOWN] for one in hashes}
    alike = Counter(shown.values())
    return {
        one: f"{DEFAULT_GROUP}-{start}{'' if alike[start] == 1 else '-' + _digest(one)}"
        for one, start in shown.items()
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
