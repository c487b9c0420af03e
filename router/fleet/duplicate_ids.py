"""Finds engines that share an `engine_id`, by their identity pages (GET /disagg/identity).

Engines identify each other by that id. Two engines with the same id transfer no KV to each other,
and a stock engine confuses them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from router.fleet.engine import Engine
from router.fleet.fleet import Fleet

logger = logging.getLogger("disagg_router.fleet")


def find_duplicate_ids(engines: Iterable[Engine]) -> Mapping[str, tuple[str, str]]:
    """Map each engine that shares its engine_id to one other engine with that id, and the id. An
    engine that is listed under two addresses has one side channel and is not its own namesake."""
    by_id: dict[str, list[tuple[tuple[str, int], str]]] = {}
    for engine in engines:
        for at in engine.capabilities.rank_endpoints.values():
            place = at.remote_host, at.remote_port
            by_id.setdefault(at.remote_engine_id, []).append((place, engine.name))
    found: dict[str, tuple[str, str]] = {}
    for engine_id, holders in by_id.items():
        first, *_ = holders
        other = next((one for one in holders if one[0] != first[0] and one[1] != first[1]), None)
        if other is None:
            continue
        for place, name in holders:
            found[name] = (other[1] if place == first[0] else first[1]), engine_id
    return found


class DuplicateIdDetector:
    """Logs each pair of engines that share an engine_id, once for as long as they do."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._said: set[tuple[str, ...]] = set()

    def look(self) -> None:
        found: dict[tuple[str, ...], str] = {}
        for name, (other, engine_id) in find_duplicate_ids(self._fleet.engines).items():
            found[tuple(sorted((name, other)))] = engine_id
        for pair, engine_id in found.items():
            if pair not in self._said:
                logger.warning(
                    "engines %s and %s have one engine_id, %s: no KV moves between them, and a "
                    "stock engine takes one for the other. Give each an engine_id of its own.",
                    *pair,
                    engine_id,
                )
        self._said = set(found)
