"""Which engines may read each other's KV.

A source may say so. Of the engines of which none does, those that name the same hash of what they
must have in common (GET /disagg/identity) are a group. While only one such hash is known, all of
them are one group, with those that name none, as stock engines do. Once there are two, as when a
new version is rolled out, nobody knows which of them could read the nameless: these are one of
their own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from router.fleet.engine import Engine
from router.fleet.spec import DEFAULT_GROUP

# Of a hash: enough to tell groups apart, for people too; more where hashes begin alike.
SHOWN = 8


def assign_groups(engines: Iterable[Engine]) -> None:
    unassigned: list[Engine] = []
    hashes: set[str] = set()
    for engine in engines:
        if engine.spec.group != DEFAULT_GROUP:
            continue
        engine.compatibility = engine.learned.compatibility or engine.compatibility
        if engine.compatibility:
            hashes.add(engine.compatibility)
        unassigned.append(engine)
    names = _names(hashes)
    for engine in unassigned:
        is_told = len(hashes) > 1 and engine.compatibility
        engine.group = names[engine.compatibility] if is_told else DEFAULT_GROUP


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
