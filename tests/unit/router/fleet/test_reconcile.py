"""Steps from what is there to what is wanted, and several sources' lists as one."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.engine import EngineRole, EngineSpec, Intent
from router.fleet.registry import FleetChanges, find_changes, merge_listings
from router.settings import Address

ADDRESSES = [Address("h", port) for port in range(1, 6)]
LISTED = st.builds(
    EngineSpec,
    st.sampled_from(EngineRole),
    st.sampled_from(ADDRESSES),
    st.frozensets(st.sampled_from("ab")),
    st.sampled_from(["default", "blue", "green"]),
    st.sampled_from([0.0, 1.0, 2.5]),
    intent=st.sampled_from(Intent),
)
SETS = st.lists(LISTED, unique_by=lambda one: one.address)
FLEETS = SETS.map(lambda listed: {one.address: one for one in listed})


def applied(there: dict[Address, EngineSpec], changes: FleetChanges) -> dict[Address, EngineSpec]:
    after = {address: one for address, one in there.items() if address not in changes.leave}
    return after | {one.address: one for one in (*changes.join, *changes.change)}


@given(FLEETS, FLEETS)
def test_the_changes_lead_to_the_wanted_fleet_and_none_is_needless(
    there: dict[Address, EngineSpec], wanted: dict[Address, EngineSpec]
) -> None:
    changes = find_changes(there, wanted)
    assert applied(there, changes) == wanted
    assert {one.address for one in changes.join} == wanted.keys() - there.keys()
    assert set(changes.leave) == there.keys() - wanted.keys()
    assert all(there[one.address] != one for one in changes.change)
    touched = [one.address for one in (*changes.join, *changes.change)] + [*changes.leave]
    assert len(touched) == len(set(touched))
    assert not find_changes(applied(there, changes), wanted), "a second time there is nothing to do"


@given(st.lists(SETS, max_size=4))
def test_an_address_is_one_engine_with_every_role_that_is_listed(
    listings: list[list[EngineSpec]],
) -> None:
    engines, conflicts = merge_listings((f"s{number}", one) for number, one in enumerate(listings))
    everyone = [listed for listing in listings for listed in listing]
    assert engines.keys() == {listed.address for listed in everyone}
    for address, engine in engines.items():
        said = [listed for listed in everyone if listed.address == address]
        roles = {listed.role for listed in said}
        assert engine.role is (roles.pop() if len(roles) == 1 else EngineRole.BOTH)
        drains = any(listed.intent is Intent.DRAINING for listed in said)
        assert (engine.intent is Intent.DRAINING) == drains
        for what, default in (("group", "default"), ("models", frozenset()), ("weight", 1.0)):
            given = [v for one in said if (v := getattr(one, what)) != default]
            assert getattr(engine, what) == (given[0] if given else default)
            told = [line for line in conflicts if str(address) in line and what in line]
            assert bool(told) == (len(set(given)) > 1)


def test_a_more_explicit_source_is_no_conflict() -> None:
    at = ADDRESSES[0]
    plain, more = (
        EngineSpec(EngineRole.PREFILL, at),
        EngineSpec(EngineRole.PREFILL, at, group="blue"),
    )
    for listings in ([("a", [plain]), ("b", [more])],) * 2:
        assert merge_listings(listings) == ({at: more}, [])
    other = EngineSpec(EngineRole.PREFILL, at, group="green")
    engines, conflicts = merge_listings([("a", [more]), ("b", [other])])
    assert engines[at].group == "blue"
    assert conflicts == ["h:1: a and b disagree on its group: a wins"]
