"""A turn's KV on a prefill engine that runs out of blocks, or whose load does not come."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.prefix_hashes import PrefixHashes
from engine_ext.reference.model import Decoder
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import (
    BLOCK,
    Driver,
    FakeWorker,
    LoadlessConnector,
    greedy,
    make_core,
    prompt,
    request,
)

TURNS = ConnectorConfig(engine_id="p", bidirectional=True, recompute_threshold=8)
HELD = 64
"""Tokens of the prompt that the decode engine holds."""


def last_turn(tokens: Sequence[int]) -> dict[str, Any]:
    """What the decode engine answered, for a prefill leg."""
    where = {
        "do_remote_decode": True,
        "remote_engine_id": "d",
        "remote_request_id": "d-1",
        "remote_host": "10.0.0.1",
        "remote_port": 1,
        "remote_block_ids": [list(range(HELD // BLOCK))],
        "remote_num_tokens": HELD,
    }
    return {**where, "prefix_proof": PrefixHashes.of(tokens[:HELD]).to_wire(where)}


@pytest.fixture
def driver(model_dir: Path, decoder: Decoder) -> Driver:
    """Seventeen blocks; steps of eight tokens; no prefix cache, so that what counts is the load."""
    return Driver(
        make_core(
            model_dir,
            connect=lambda _, geometry: LoadlessConnector(TURNS, geometry),
            model=decoder,
            num_blocks=18,
            max_num_batched_tokens=8,
            enable_prefix_caching=False,
        )
    )


def park_turn(driver: Driver) -> FakeWorker:
    tokens = prompt(120)
    driver.add(request("turn", tokens, greedy(1), last_turn(tokens)))
    driver.step_until(lambda: driver.core.stats().num_waiting_for_remote_kv == 1)
    half: Any = driver.core.connector
    assert isinstance(half, LoadlessConnector)
    return half.worker


def test_a_turn_that_is_preempted_after_its_load_is_computed(
    driver: Driver, make_driver: MakeDriver
) -> None:
    """Its blocks are gone, and the decode engine's too: asked again, the connector has nothing."""
    driver.add(request("occupant", prompt(10, seed=3), greedy(60, ignore_eos=True)))
    driver.step()
    driver.step()
    worker = park_turn(driver)
    worker.report(received=["turn"])
    driver.step_until(lambda: driver.core.stats().preemptions > 0)
    driver.finish("occupant", "turn")
    expected = make_driver().run(request("x", prompt(120), greedy(1)))[0]
    assert driver.result("turn").token_ids == expected.token_ids
    assert driver.core.stats().num_waiting_for_remote_kv == 0
    answer = driver.result("turn").kv_transfer_params
    assert answer is not None
    assert answer["remote_num_tokens"] == 120
    worker.report(sent=["turn"])
    driver.step()
    driver.assert_empty()


def test_a_turn_whose_load_fails_is_computed_whatever_the_policy(
    driver: Driver, make_driver: MakeDriver
) -> None:
    worker = park_turn(driver)
    worker.report(failed=["turn"])
    driver.finish("turn")
    expected = make_driver().run(request("x", prompt(120), greedy(1)))[0]
    assert driver.result("turn").token_ids == expected.token_ids
    worker.report(sent=["turn"])
    driver.step()
    driver.assert_empty()
