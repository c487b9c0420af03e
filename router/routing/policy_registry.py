"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from router.routing.affinity import LoadBound
from router.routing.candidate import Policy
from router.routing.least_loaded import LeastLoaded
from router.routing.power_of_two import PowerOfTwo
from router.routing.prefix_cache import PrefixAffinity
from router.routing.round_robin import RoundRobin
from router.routing.session_affinity import SessionAffinity

POLICIES: dict[str, Callable[[LoadBound], Policy]] = {
    "round_robin": lambda bound: RoundRobin(),
    "least_loaded": lambda bound: LeastLoaded(),
    "power_of_two": lambda bound: PowerOfTwo(),
    "session": SessionAffinity,
    "prefix": PrefixAffinity,
}


class UnknownPolicyError(ValueError):
    """One line that names the known ones."""


def make_policy(name: str, bound: LoadBound) -> Policy:
    """Raises UnknownPolicyError. Dashes and underscores are the same."""
    known = name.replace("-", "_").lower()
    if known not in POLICIES:
        close = get_close_matches(known, POLICIES, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UnknownPolicyError(f"unknown policy {name!r}{hint}; known: {', '.join(POLICIES)}")
    return POLICIES[known](bound)
