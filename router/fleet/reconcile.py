"""From the lists of several sources and the overrides of operators to one fleet. Pure.

`merge_listings` combines the lists, `apply_overrides` puts the operators' wishes on top, and
`reconcile` returns the changes from the present fleet to the wanted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from router.fleet.engine import EngineRole, EngineSpec, Intent
from router.settings import Address

# The name of the source of engines that operators add.
OVERRIDES_SOURCE = "admin"


class MergedListing(NamedTuple):
    """`conflicts` has a line for each engine that two sources describe in contradictory ways."""

    engines: Mapping[Address, EngineSpec]
    conflicts: Sequence[str]


class FleetChanges(NamedTuple):
    """The changes to make. An engine is in at most one of the three."""

    join: Sequence[EngineSpec]
    leave: Sequence[Address]
    change: Sequence[EngineSpec]

    def __bool__(self) -> bool:
        return any(self)


@dataclass(frozen=True, slots=True)
class OperatorOverrides:
    """The changes of operators at run time: engines that they added, engines that they drain, and
    the weights of groups. No address is added twice."""

    added: tuple[EngineSpec, ...] = ()
    draining: frozenset[Address] = frozenset()
    weights: Mapping[str, float] = field(default_factory=dict)

    def adds(self, address: Address) -> bool:
        return any(spec.address == address for spec in self.added)

    def with_engine(self, spec: EngineSpec) -> OperatorOverrides:
        """Its address must not be added yet."""
        assert not self.adds(spec.address)
        return replace(self, added=(*self.added, spec))

    def without_engine(self, address: Address) -> OperatorOverrides:
        return replace(self, added=tuple(s for s in self.added if s.address != address))

    def with_drain(self, address: Address) -> OperatorOverrides:
        return replace(self, draining=self.draining | {address})

    def without_drain(self, address: Address) -> OperatorOverrides:
        return replace(self, draining=self.draining - {address})

    def with_weight(self, group: str, weight: float) -> OperatorOverrides:
        return replace(self, weights={**self.weights, group: weight})

    def without_weight(self, group: str) -> OperatorOverrides:
        left = {name: weight for name, weight in self.weights.items() if name != group}
        return replace(self, weights=left)

    def pruned(self, listed: Set[Address]) -> OperatorOverrides:
        """Return the overrides without drains of engines that no source lists: another engine may
        appear at such an address."""
        return replace(self, draining=self.draining & listed)


def reconcile(
    present: Mapping[Address, EngineSpec], wanted: Mapping[Address, EngineSpec]
) -> FleetChanges:
    return FleetChanges(
        [listed for address, listed in wanted.items() if address not in present],
        [address for address in present if address not in wanted],
        [
            listed
            for address, listed in wanted.items()
            if address in present and present[address] != listed
        ],
    )


def apply_overrides(
    listings: Iterable[tuple[str, Iterable[EngineSpec]]], overrides: OperatorOverrides
) -> MergedListing:
    """Merge the listings, before them the engines that operators added, and drain the engines that
    operators drain, whatever the sources list."""
    added = (OVERRIDES_SOURCE, overrides.added)
    engines, conflicts = merge_listings([added, *listings])
    drained = {
        address: replace(engines[address], intent=Intent.DRAINING)
        for address in overrides.draining
        if address in engines
    }
    return MergedListing({**engines, **drained}, conflicts)


def merge_listings(listings: Iterable[tuple[str, Iterable[EngineSpec]]]) -> MergedListing:
    """Merge the lists of sources, given with the sources' names in the order of precedence.

    An address is one engine, whichever sources list it. It plays all listed roles, and it drains if
    any source does. For each other property explicit values take precedence over defaults, and
    then earlier sources over later ones.
    """
    engines: dict[Address, EngineSpec] = {}
    several: dict[Address, list[tuple[str, EngineSpec]]] = {}
    first_source: dict[Address, str] = {}
    for source, listing in listings:
        for listed in listing:
            address = listed.address
            known = engines.setdefault(address, listed)
            if known is listed:
                first_source[address] = source
            elif known != listed or address in several:
                descriptions = several.setdefault(address, [(first_source[address], known)])
                descriptions.append((source, listed))
    conflicts: list[str] = []
    for address, descriptions in several.items():
        engines[address] = _merge_descriptions(address, descriptions, conflicts)
    return MergedListing(engines, sorted(conflicts))


def _merge_descriptions(
    address: Address, descriptions: Sequence[tuple[str, EngineSpec]], conflicts: list[str]
) -> EngineSpec:
    roles = {listed.role for _, listed in descriptions}
    drains = any(listed.intent is Intent.DRAINING for _, listed in descriptions)
    intent = Intent.DRAINING if drains else Intent.SERVING
    role = roles.pop() if len(roles) == 1 else EngineRole.BOTH
    spec = EngineSpec(role, address, intent=intent)
    explicit: dict[str, Any] = {}
    for name in ("models", "group", "weight", "tls"):
        given = [(source, getattr(listed, name)) for source, listed in descriptions]
        given = [one for one in given if one[1] != getattr(spec, name)]
        if given:
            source, explicit[name] = given[0]
            if other := next((other for other, value in given if value != explicit[name]), ""):
                conflicts.append(
                    f"{address}: {source} and {other} disagree on its {name}: {source} wins"
                )
    return replace(spec, **explicit)
