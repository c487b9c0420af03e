"""What operators want at run time, over what sources list: pure.

Engines that were added are one more listing. A drain stands over everything that any source says of
the engine, until it is taken back or no source lists the engine any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from router.fleet.engine_spec import EngineSpec, Intent, ListedEngine
from router.fleet.reconcile import MergedListing, merge_listings
from router.settings import Address

OVERRIDES_SOURCE = "admin"


@dataclass(frozen=True, slots=True)
class OperatorOverrides:
    """`weights` are of groups, by name. No address is added twice."""

    added: tuple[EngineSpec, ...] = ()
    draining: frozenset[Address] = frozenset()
    weights: Mapping[str, float] = field(default_factory=dict)

    def adds(self, address: Address) -> bool:
        return any(spec.address == address for spec in self.added)

    def with_engine(self, spec: EngineSpec) -> OperatorOverrides:
        """It must not be added yet."""
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
        """Without the drains of engines that nobody lists: another one may come at the address."""
        return replace(self, draining=self.draining & listed)


def apply_overrides(
    listings: Iterable[tuple[str, Iterable[ListedEngine]]], overrides: OperatorOverrides
) -> MergedListing:
    """`listings` as for `merged`. What an operator has added counts before any of them."""
    engines, conflicts = merge_listings(
        [(OVERRIDES_SOURCE, map(ListedEngine, overrides.added)), *listings]
    )
    drained = {
        address: replace(engines[address], intent=Intent.DRAINING)
        for address in overrides.draining
        if address in engines
    }
    return MergedListing({**engines, **drained}, conflicts)
