"""Blocks that arrive other than they were sent, with `kv_checksum` and without.

The simulation fails by itself where wrong KV is accepted.
"""

from typing import Any

import pytest

from tests.unit.engine_ext.simulation.engine import has_landed
from tests.unit.engine_ext.simulation.pair import Pair, tokens
from tests.unit.engine_ext.simulation.world import Violation, Weather, World

FAULTS = [Weather(flip=1.0), Weather(swap=1.0)]
LONG = list(range(100, 120))
OLDER = 1


def read_once(world: World, **params: Any) -> bool:
    """One pull of five blocks from the engine p to the engine d; True: it was used."""
    prefiller, decoder = world.engines["p"], world.engines["d"]
    answer = prefiller.finish(prefiller.prefill("p-1", LONG))
    assert answer is not None
    decoder.decode("d-1", LONG, {**answer, **params})
    world.until(lambda: "d-1" in decoder.outcomes)
    return decoder.outcomes["d-1"]


def world_of(weather: Weather, **settings: Any) -> World:
    world = World()
    world.engine("p", port=1, **{"checksums": True, **settings})
    world.engine("d", port=2, **{"checksums": True, **settings})
    world.network.weather = weather
    return world


def assert_all_ended(world: World) -> None:
    world.pass_time(60.0)
    for engine in world.engines.values():
        engine.assert_empty()
    world.check()


@pytest.mark.parametrize("weather", FAULTS)
def test_a_changed_bit_and_two_swapped_blocks_fail_the_load(weather: Weather) -> None:
    world = world_of(weather)
    assert not read_once(world)
    stats = world.engines["d"].stats
    assert (stats.loads_corrupted, stats.loads_verified, stats.pulls_failed) == (1, 0, 1)
    assert_all_ended(world)


@pytest.mark.parametrize("weather", FAULTS)
def test_without_checksums_the_simulation_sees_the_wrong_kv(weather: Weather) -> None:
    """The faults are real: this is what the checksums are for."""
    world = world_of(weather, checksums=False)
    for engine in world.engines.values():
        engine.agent.compares_checksums = True  # Though nothing compares them.
    with pytest.raises(Violation, match="accepted wrong KV"):
        read_once(world)


def test_blocks_that_change_at_the_holder_between_lease_and_read_fail_the_load() -> None:
    world = world_of(Weather())
    prefiller, decoder = world.engines["p"], world.engines["d"]
    leg = prefiller.prefill("p-1", LONG)
    params = prefiller.finish(leg)
    world.pass_time(0.1)
    prefiller.memory.contents[leg.blocks[3]] = (0,)
    decoder.decode("d-1", LONG, params)
    world.until(lambda: "d-1" in decoder.outcomes)
    assert not decoder.outcomes["d-1"]
    assert decoder.stats.loads_corrupted == 1


def test_a_corrupted_load_is_computed_where_the_policy_says_so() -> None:
    world = world_of(Weather(flip=1.0), load_failure_policy="recompute")
    read_once(world)
    world.pass_time(5.0)
    decoder = world.engines["d"]
    assert decoder.stats.loads_corrupted == 1
    assert not decoder.running
    assert_all_ended(world)


@pytest.mark.parametrize("change", [{"checksums": False}, {"version": None}], ids=str)
def test_a_holder_without_checksums_is_read_unverified(change: dict[str, Any]) -> None:
    world = World()
    prefiller = world.engine("p", port=1, **{"checksums": True, **change})
    decoder = world.engine("d", port=2, checksums=True)
    stock = {"prefix_proof": None} if prefiller.version is None else {}
    assert read_once(world, **stock)
    stats = decoder.stats
    assert (stats.loads_unverified, stats.loads_verified, stats.loads_corrupted) == (1, 0, 0)
    assert_all_ended(world)


def test_a_reader_without_checksums_asks_for_none() -> None:
    world = World()
    world.engine("p", port=1, checksums=True)
    decoder = world.engine("d", port=2)
    assert read_once(world)
    assert (decoder.stats.loads_verified, decoder.stats.loads_unverified) == (0, 0)
    assert_all_ended(world)


def test_a_read_that_comes_before_the_lease_waits_for_its_checksums() -> None:
    """The router may answer D before P's worker has heard of the grant."""
    world = world_of(Weather())
    prefiller, decoder = world.engines["p"], world.engines["d"]
    leg = prefiller.prefill("p-1", LONG)
    world.pass_time(0.5)
    prefiller.longest_step = 0.05
    prefiller.agent.is_frozen = True
    params = prefiller.finish(leg)
    decoder.decode("d-1", LONG, params)
    world.pass_time(0.5)
    assert "d-1" not in decoder.outcomes
    prefiller.agent.thaw()
    world.until(lambda: "d-1" in decoder.outcomes)
    assert decoder.outcomes["d-1"]
    assert decoder.stats.loads_verified == 1
    assert_all_ended(world)


@pytest.mark.parametrize("weather", [Weather(), *FAULTS])
def test_a_turn_that_the_decode_engine_sends_is_verified(weather: Weather) -> None:
    world = World()
    both: dict[str, Any] = {"checksums": True, "bidirectional": True, "recompute_threshold": 4}
    prefiller = world.engine("p", port=1, **both)
    decoder = world.engine("d", port=2, **both)
    turn: list[Any] = []
    answer = prefiller.finish(prefiller.prefill("p-1", LONG))
    leg = decoder.decode("d-1", LONG, {**(answer or {}), "retain": True})
    assert leg is not None
    leg.then = turn.append
    world.until(lambda: turn)
    world.network.weather = weather
    again = prefiller.prefill("p-2", [*leg.token_ids, 7, 8, 9], **turn[0])
    assert prefiller.load(again)
    world.until(lambda: "p-2" in prefiller.outcomes)
    is_well = weather == Weather()
    assert prefiller.outcomes["p-2"] is is_well
    assert prefiller.stats.loads_verified == is_well
    assert prefiller.stats.loads_corrupted == (not is_well)


def test_a_request_that_ends_while_it_waits_for_checksums_leaves_nothing() -> None:
    world = world_of(Weather(delay=1.0))
    prefiller, decoder = world.engines["p"], world.engines["d"]
    leg = decoder.decode("d-1", LONG, prefiller.finish(prefiller.prefill("p-1", LONG)))
    assert leg is not None
    world.pass_time(1.5)  # The READ has ended, and its answer is on its way.
    assert leg.reads
    decoder.abort(leg)
    assert_all_ended(world)
    assert (decoder.stats.loads_verified, decoder.stats.loads_corrupted) == (0, 0)


def test_a_holder_that_falls_silent_after_the_read_fails_the_load() -> None:
    """Its heartbeat's answer proves that the blocks were the request's, and nothing of their
    bytes."""
    world = world_of(Weather(delay=1.0))
    prefiller, decoder = world.engines["p"], world.engines["d"]
    params = prefiller.finish(prefiller.prefill("p-1", LONG))
    leg = decoder.decode("d-1", LONG, params)
    world.pass_time(0.5)  # The READ has ended, and what D said of it is on its way.
    assert leg is not None
    assert has_landed(leg)
    prefiller.freeze(20.0)
    world.until(lambda: "d-1" in decoder.outcomes, within=10.0)
    assert not decoder.outcomes["d-1"]
    assert (decoder.stats.loads_verified, decoder.stats.loads_corrupted) == (0, 0)
    assert_all_ended(world)


def test_several_requests_with_checksums_are_all_served() -> None:
    pair = Pair("pull", checksums=True)
    assert all(pair.is_served() for _ in range(5))
    assert pair.decoder.stats.loads_verified == 5
    assert len(tokens(1)) % 4  # The last block of each is not full.
    pair.assert_all_ended()
