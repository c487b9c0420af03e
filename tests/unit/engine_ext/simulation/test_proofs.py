"""A proof that is lost or spoilt on its way, between engines that give one and stock engines.

The simulation fails by itself where wrong KV is accepted.
"""

from typing import Any

import pytest

from tests.unit.engine_ext.simulation.world import SimEngine, World

HELD = list(range(100, 110))
OTHER = [*range(100, 105), *range(905, 910)]


def answer_of(prefiller: SimEngine, **changes: Any) -> dict[str, Any]:
    params = prefiller.finish(prefiller.prefill("p-1", HELD))
    assert params is not None
    return {**params, **changes}


def test_an_unproven_read_from_an_engine_that_proves_is_refused_and_frees_it() -> None:
    world = World()
    prefiller, decoder = world.engine("p", port=1), world.engine("d", port=2)
    decoder.decode("d-1", OTHER, answer_of(prefiller, prefix_proof=None))
    world.until(lambda: "d-1" in decoder.outcomes)
    assert not decoder.outcomes["d-1"]
    assert decoder.stats.pulls_refused == 1
    assert decoder.stats.bytes_received == 0
    world.until(lambda: not prefiller.held)
    world.pass_time(1.0)
    prefiller.assert_empty()
    decoder.assert_empty()


def test_an_unproven_read_from_a_stock_engine_is_taken_at_its_word() -> None:
    world = World()
    prefiller, decoder = world.engine("p", version=None), world.engine("d", port=2)
    decoder.decode("d-1", HELD, answer_of(prefiller, prefix_proof=None))
    world.until(lambda: "d-1" in decoder.outcomes)
    assert decoder.outcomes["d-1"]
    assert decoder.stats.pulls_refused == 0


@pytest.mark.parametrize("spoil", [lambda h: h[:-1], lambda h: "", lambda h: None])
def test_a_spoilt_proof_loads_nothing_and_frees_the_prefiller_at_once(spoil: Any) -> None:
    world = World()
    prefiller, decoder = world.engine("p", port=1), world.engine("d", port=2)
    params = answer_of(prefiller)
    proof = {**params["prefix_proof"], "h": spoil(params["prefix_proof"]["h"])}
    assert decoder.decode("d-1", OTHER, {**params, "prefix_proof": proof}) is None
    assert decoder.scheduler.proofs_unreadable == 1
    world.until(lambda: not prefiller.held, within=2.0)
