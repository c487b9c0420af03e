"""What several sources list, as one fleet; and how to come from what is there to what is wanted.

Pure: sets in, a set of steps out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from router.fleet.engine_spec import DEFAULT_GROUP, EngineRole, EngineSpec, Intent, ListedEngine
from router.settings import Address

T = TypeVar("T")


class MergedListing(NamedTuple):
    """`conflicts` has a line for each engine of which two sources say what cannot both be."""

    engines: Mapping[Address, ListedEngine]
    conflicts: Sequence[str]


class FleetChanges(NamedTuple):
    """What has to be done. An engine is in one of these at most."""

    join: Sequence[ListedEngine]
    leave: Sequence[Address]
    change: Sequence[ListedEngine]

    def __bool__(self) -> bool:
        return any(self)


def reconcile(
    there: Mapping[Address, ListedEngine], wanted: Mapping[Address, ListedEngine]
) -> FleetChanges:
    return FleetChanges(
        [listed for address, listed in wanted.items() if address not in there],
        [address for address in there if address not in wanted],
        [
            listed
            for address, listed in wanted.items()
            if address in there and there[address] != listed
        ],
    )


def merge_listings(listings: Iterable[tuple[str, Iterable[ListedEngine]]]) -> MergedListing:
    """`listings` are what sources list, by their names, those first that count more.

    An address is one engine, whoever lists it. It plays every role that is listed, and drains where
    anybody says so, who knows more than those that do not. Of the rest, what a source says counts
    before what is so by default, and then what the first one says.
    """
    engines: dict[Address, ListedEngine] = {}
    several: dict[Address, list[tuple[str, ListedEngine]]] = {}
    whose: dict[Address, str] = {}
    for name, listing in listings:
        for listed in listing:
            address = listed.address
            known = engines.setdefault(address, listed)
            if known is listed:
                whose[address] = name
            elif known != listed or address in several:
                several.setdefault(address, [(whose[address], known)]).append((name, listed))
    conflicts: list[str] = []
    for address, said in several.items():
        engines[address] = _one(address, said, conflicts)
    return MergedListing(engines, sorted(conflicts))


def _one(
    address: Address, said: Sequence[tuple[str, ListedEngine]], conflicts: list[str]
) -> ListedEngine:
    specs = [(name, listed.spec) for name, listed in said]
    roles = {spec.role for _, spec in specs}
    drains = any(listed.intent is Intent.DRAINING for _, listed in said)

    def settled(what: str, default: T) -> T:
        return _settled(address, what, default, specs, conflicts)

    spec = EngineSpec(
        roles.pop() if len(roles) == 1 else EngineRole.BOTH,
        address,
        settled("models", frozenset()),
        settled("group", DEFAULT_GROUP),
        settled("weight", 1.0),
        settled("tls", False),
    )
    return ListedEngine(spec, Intent.DRAINING if drains else Intent.SERVING)


def _settled(
    address: Address,
    what: str,
    default: T,
    specs: Sequence[tuple[str, EngineSpec]],
    conflicts: list[str],
) -> T:
    given: list[tuple[str, Any]] = [
        (name, value) for name, spec in specs if (value := getattr(spec, what)) != default
    ]
    if not given:
        return default
    name, first = given[0]
    if other := next((other for other, value in given if value != first), ""):
        conflicts.append(f"{address}: {name} and {other} list it with another {what}: {name} wins")
    chosen: T = first
    return chosen
