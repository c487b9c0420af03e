"""`cache_hit_threshold`: too little KV at hand is an answer of its own, and costs no block."""

import pytest

from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import BLOCK, Driver, FakeConnector, greedy, prompt, request

TOKENS = prompt(10 * BLOCK)
REASON = "cache_threshold"


def warmed(driver: Driver, num_blocks: int) -> Driver:
    """The prefix cache holds the first blocks of TOKENS, and no more of it."""
    driver.run(request("warm", TOKENS[: num_blocks * BLOCK], greedy(1)))
    return driver


@pytest.mark.parametrize(
    ("threshold", "reason"), [(0.0, "length"), (0.3, "length"), (0.3000001, REASON), (1.0, REASON)]
)
def test_the_threshold_itself_is_enough(
    make_driver: MakeDriver, threshold: float, reason: str
) -> None:
    driver = warmed(make_driver(), 3)
    (got,) = driver.run(request("a", TOKENS, greedy(2), threshold=threshold))
    assert got.finish_reason == reason
    assert len(got.token_ids) == (2 if reason == "length" else 0)
    driver.assert_empty()


@pytest.mark.parametrize(
    ("default", "own", "reason"),
    [(0.5, None, REASON), (0.5, 0.0, "length"), (0.0, 0.5, REASON), (0.0, None, "length")],
)
def test_a_request_decides_over_the_engine(
    make_driver: MakeDriver, default: float, own: float | None, reason: str
) -> None:
    driver = make_driver(global_cache_hit_threshold=default)
    (got,) = driver.run(request("a", TOKENS, greedy(1), threshold=own))
    assert got.finish_reason == reason


def test_a_rejection_takes_no_block_and_tells_the_connector(make_driver: MakeDriver) -> None:
    connector = FakeConnector()
    driver = make_driver(connector)
    driver.run(request("a", TOKENS, threshold=0.5))
    assert driver.core.stats().prompt_tokens_computed == 0
    about_it = [call for call in connector.calls if " a" in call]
    assert about_it == [
        "on_new_request a",
        "get_num_new_matched_tokens a 0",
        "request_finished a aborted",
    ]
    driver.assert_empty()


def test_a_request_that_finds_no_room_is_rejected_all_the_same(make_driver: MakeDriver) -> None:
    driver = make_driver(num_blocks=12)
    driver.add(request("long", prompt(10 * BLOCK, 1), greedy(4)))
    driver.step()
    driver.add(request("a", TOKENS, threshold=0.5))
    driver.step()
    assert driver.result("a").finish_reason == REASON
    driver.finish("long")
    driver.assert_empty()


@pytest.mark.parametrize(("announced", "is_taken"), [(80, True), (40, True), (39, False)])
def test_what_a_remote_announces_is_at_hand(
    make_driver: MakeDriver, announced: int, is_taken: bool
) -> None:
    connector = FakeConnector()
    connector.scheduler.external["a"] = announced
    driver = make_driver(connector)
    driver.add(request("a", TOKENS, greedy(1), threshold=0.5))
    driver.step()
    assert driver.core.stats().num_waiting_for_remote_kv == is_taken
    assert driver.is_finished("a") is not is_taken


def test_nothing_is_judged_before_the_connector_knows(make_driver: MakeDriver) -> None:
    connector = FakeConnector()
    connector.scheduler.external["a"] = None
    driver = make_driver(connector)
    driver.add(request("a", TOKENS, greedy(1), threshold=0.5))
    driver.step()
    assert not driver.is_finished("a")
    connector.scheduler.external["a"] = 0
    driver.step()
    assert driver.result("a").finish_reason == REASON


def test_a_prefill_leg_is_never_rejected(make_driver: MakeDriver) -> None:
    driver = make_driver(global_cache_hit_threshold=1.0)
    (got,) = driver.run(request("a", TOKENS, greedy(1), {"do_remote_decode": True}, threshold=1.0))
    assert got.finish_reason == "length"


@pytest.mark.parametrize(("threshold", "reason"), [(0.0, "length"), (0.5, REASON)])
def test_a_request_that_lost_its_blocks_is_judged_again(
    make_driver: MakeDriver, threshold: float, reason: str
) -> None:
    """Two that fit until they have grown: the second, whose KV a remote gave, makes room."""
    connector = FakeConnector()
    driver = make_driver(connector, num_blocks=9, enable_prefix_caching=False)
    connector.scheduler.external["b"] = 3 * BLOCK
    driver.add(request("a", prompt(3 * BLOCK, 1), greedy(20)))
    driver.add(request("b", prompt(3 * BLOCK, 2), greedy(20), threshold=threshold))
    driver.step()
    connector.worker.report(received=["b"])
    driver.finish("a", "b")
    assert driver.core.stats().preemptions == 1
    got = driver.result("b")
    assert got.finish_reason == reason
    assert 0 < len(got.token_ids) <= 20, "what it said remains said"
    assert (len(got.token_ids) == 20) is (reason == "length")
    driver.assert_empty()
