"""Changes of operators take precedence over the listings of sources."""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.engine import EngineRole, EngineSpec, Intent
from router.fleet.registry import OperatorOverrides, apply_overrides, merge_listings
from router.settings import Address
from tests.unit.router.fleet.test_reconcile import ADDRESSES, LISTED, SETS

LISTINGS = st.lists(SETS, max_size=3).map(
    lambda listings: [(f"s{number}", one) for number, one in enumerate(listings)]
)
ADDED = st.lists(
    LISTED.map(lambda one: replace(one, intent=Intent.SERVING)), unique_by=lambda spec: spec.address
)
DRAINING = st.frozensets(st.sampled_from(ADDRESSES))
OVERLAYS = st.builds(
    OperatorOverrides,
    ADDED.map(tuple),
    DRAINING,
    st.dictionaries(st.sampled_from(["blue", "green"]), st.sampled_from([0.0, 1.0])),
)
Listings = list[tuple[str, list[EngineSpec]]]
ONE = EngineSpec(EngineRole.DECODE, Address("h", 9))


@given(LISTINGS, OVERLAYS)
def test_engines_of_sources_and_of_operators_are_in_the_fleet(
    listings: Listings, overrides: OperatorOverrides
) -> None:
    engines, _ = apply_overrides(listings, overrides)
    listed = {one.address for _, listing in listings for one in listing}
    assert engines.keys() == listed | {spec.address for spec in overrides.added}


@given(LISTINGS, OVERLAYS)
def test_a_drain_changes_only_the_intent(listings: Listings, overrides: OperatorOverrides) -> None:
    engines, conflicts = apply_overrides(listings, overrides)
    others, same = apply_overrides(listings, replace(overrides, draining=frozenset()))
    assert conflicts == same
    for address, engine in engines.items():
        assert replace(engine, intent=others[address].intent) == others[address]
        if address in overrides.draining:
            assert engine.intent is Intent.DRAINING
        else:
            assert engine == others[address]


@given(st.lists(LISTINGS, max_size=5), st.sampled_from(ADDRESSES))
def test_a_drain_outlives_later_listings(history: list[Listings], address: Address) -> None:
    overrides = OperatorOverrides().with_drain(address)
    for listings in history:
        engines, _ = apply_overrides(listings, overrides)
        assert address not in engines or engines[address].intent is Intent.DRAINING


@given(LISTINGS)
def test_without_overrides_the_fleet_is_what_sources_list(listings: Listings) -> None:
    assert apply_overrides(listings, OperatorOverrides()) == merge_listings(listings)


@given(OVERLAYS, st.sampled_from(ADDRESSES))
def test_each_override_can_be_removed(overrides: OperatorOverrides, address: Address) -> None:
    assert overrides.with_drain(address).without_drain(address) == overrides.without_drain(address)
    added = overrides.with_engine(ONE)
    assert (added.adds(ONE.address), added.without_engine(ONE.address)) == (True, overrides)
    assert overrides.with_weight("red", 2.0).without_weight("red") == overrides


@given(OVERLAYS, DRAINING)
def test_only_drains_of_unlisted_engines_are_pruned(
    overrides: OperatorOverrides, listed: frozenset[Address]
) -> None:
    pruned = overrides.pruned(listed)
    assert pruned.draining == overrides.draining & listed
    assert replace(pruned, draining=overrides.draining) == overrides


STEPS = st.one_of(
    st.sampled_from(ADDRESSES).map(lambda a: lambda overrides: overrides.with_drain(a)),
    st.sampled_from(ADDRESSES).map(lambda a: lambda overrides: overrides.without_drain(a)),
    st.sampled_from(ADDRESSES).map(lambda a: lambda overrides: overrides.without_engine(a)),
    st.sampled_from(["blue", "green"]).map(
        lambda g: lambda overrides: overrides.with_weight(g, 1.0)
    ),
)


@given(OVERLAYS, st.lists(STEPS, max_size=8))
def test_overrides_stay_consistent(
    overrides: OperatorOverrides, steps: list[Callable[[OperatorOverrides], OperatorOverrides]]
) -> None:
    after = reduce(lambda one, step: step(one), steps, overrides)
    assert len({spec.address for spec in after.added}) == len(after.added)
    assert after.draining <= set(ADDRESSES)
    assert set(after.weights) <= {"blue", "green"}
