"""An engine that may hold something of ours, as long as it is not overloaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """An engine, as far as affinity goes: `in_flight` are the legs that run on it."""

    name: str
    in_flight: int


E = TypeVar("E", bound=Loaded)


@dataclass(frozen=True, slots=True)
class LoadBound:
    """An engine is overloaded with more than `floor` legs and more than `factor` times the mean."""

    factor: float
    floor: int

    def exceeded(self, engine: Loaded, candidates: Sequence[Loaded]) -> bool:
        mean = sum(candidate.in_flight for candidate in candidates) / max(1, len(candidates))
        return engine.in_flight >= self.floor and engine.in_flight > self.factor * mean


def by_session(candidates: Sequence[E], session: str, bound: LoadBound) -> list[E]:
    """All candidates, in an order that is the session's own; overloaded ones at the end.

    Rendezvous hashing: an engine that comes or goes moves only the sessions that are its own.
    """
    return sorted(
        candidates, key=lambda engine: (bound.exceeded(engine, candidates), _rank(session, engine))
    )


def first(candidates: Sequence[E], preferred: E) -> list[E]:
    """All candidates, `preferred` before the others."""
    return [preferred, *(engine for engine in candidates if engine is not preferred)]


def _rank(session: str, engine: Loaded) -> bytes:
    return hashlib.blake2b(f"{session} {engine.name}".encode(), digest_size=8).digest()
