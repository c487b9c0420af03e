"""What the connector sees, and what its answers do to requests and blocks."""

import logging

import pytest

from engine_ext.common.types import LoadProblem, PeerAddress
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import (
    BLOCK,
    Driver,
    FakeConnector,
    copy_blocks,
    greedy,
    prompt,
    request,
)

STEP = ["build_connector_meta", "start_load_kv", "get_transfer_results", "update_connector_output"]


@pytest.fixture
def connector() -> FakeConnector:
    return FakeConnector()


def park(driver: Driver, connector: FakeConnector, name: str = "d", length: int = 50) -> None:
    connector.scheduler.external[name] = length
    driver.add(request(name, prompt(length)))
    driver.step()
    assert driver.core.stats().num_waiting_for_remote_kv == 1


def free_blocks(driver: Driver) -> int:
    return driver.core.stats().num_blocks_free


def test_a_local_request_calls_the_hooks_in_vllms_order(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    make_driver(connector).run(request("a", prompt(20), greedy(2)))
    assert connector.calls == [
        "on_new_request a",
        "get_num_new_matched_tokens a 0",
        "update_state_after_alloc a 0",
        *STEP,
        *STEP[:3],
        "request_finished a length_capped",
        STEP[3],
    ]


def test_a_loaded_request_calls_the_hooks_in_vllms_order(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    connector.scheduler.external["d"] = 20
    driver.add(request("d", prompt(20), greedy(1)))
    driver.step()
    connector.worker.report(received=["d"])
    driver.step()
    driver.step()
    assert connector.calls == [
        "on_new_request d",
        "get_num_new_matched_tokens d 0",
        "update_state_after_alloc d 20",
        *STEP,
        *STEP,
        "update_state_after_alloc d 0",
        *STEP[:3],
        "request_finished d length_capped",
        STEP[3],
    ]


def test_a_preempted_request_is_asked_about_again(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector, num_blocks=11)
    driver.run(*(request(n, prompt(30, seed=i), greedy(30)) for i, n in enumerate("ab")))
    asked = [call for call in connector.calls if call.startswith("get_num_new_matched_tokens b")]
    assert driver.core.stats().preemptions > 0
    assert len(asked) > 1


@pytest.mark.parametrize("length", [5, BLOCK, 4 * BLOCK, 50])
def test_fetched_blocks_give_the_tokens_of_a_local_prefill(
    make_driver: MakeDriver, length: int
) -> None:
    p_side, d_side = FakeConnector(), FakeConnector()
    prefiller, decoder = make_driver(p_side), make_driver(d_side)
    expected = make_driver().run(request("x", prompt(length)))[0]

    p_side.scheduler.held.add("p")
    prefiller.run(request("p", prompt(length), greedy(1)))
    # D's ids are not P's: the copy goes by position.
    decoder.run(request("other", prompt(30, seed=9), greedy(2)))
    park(decoder, d_side, length=length)
    before = decoder.core.stats().prompt_tokens_computed
    copy_blocks(
        prefiller.core,
        p_side.scheduler.blocks["p"],
        decoder.core,
        d_side.scheduler.blocks["d"],
    )
    d_side.worker.report(received=["d"])
    decoder.finish("d")

    result = decoder.result("d")
    assert result.token_ids == expected.token_ids
    assert result.num_cached_tokens == length
    assert decoder.core.stats().prompt_tokens_fetched == length
    assert decoder.core.stats().prompt_tokens_computed - before == 1
    decoder.assert_empty()


def test_a_turn_that_a_prefiller_pulled_counts_for_its_decoder(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    connector.scheduler.external["p"] = 40
    connector.scheduler.held.add("p")
    connector.scheduler.answers["p"] = {"do_remote_prefill": True}
    driver.add(request("p", prompt(50), greedy(1), params={"do_remote_decode": True}))
    driver.step()
    connector.worker.report(received=["p"])
    driver.finish("p")
    params = driver.result("p").kv_transfer_params
    assert params is not None
    assert params["remote_prefill_cached_tokens"] == 40


@pytest.mark.parametrize("budget", [2048, 10])
def test_what_the_remote_lacks_is_computed_here(make_driver: MakeDriver, budget: int) -> None:
    p_side, d_side = FakeConnector(), FakeConnector()
    prefiller = make_driver(p_side)
    decoder = make_driver(d_side, max_num_batched_tokens=budget)
    p_side.scheduler.held.add("p")
    prefiller.run(request("p", prompt(50)[:20], greedy(1)))
    d_side.scheduler.external["d"] = 20
    decoder.add(request("d", prompt(50)))
    decoder.step()
    for layer in decoder.core.cache.layers:
        layer[list(d_side.scheduler.blocks["d"][0])] = float("nan")  # whatever was there before
    source = p_side.scheduler.blocks["p"]
    copy_blocks(prefiller.core, source, decoder.core, d_side.scheduler.blocks["d"])
    d_side.worker.report(received=["d"])
    decoder.finish("d")
    expected = make_driver().run(request("x", prompt(50)))[0]
    assert decoder.result("d").token_ids == expected.token_ids
    assert decoder.core.stats().prompt_tokens_computed == 30


def test_broken_kv_from_a_remote_harms_its_own_request_only(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector, num_blocks=9)
    park(driver, connector)
    for layer in driver.core.cache.layers:
        layer[list(connector.scheduler.blocks["d"][0])] = float("nan")
    connector.worker.report(received=["d"])
    driver.finish("d")
    assert driver.result("d").finish_reason == "error"
    # The same prompt finds none of it, and computes into the very blocks that held it.
    again = driver.run(request("again", prompt(50), greedy(8)))[0]
    expected = make_driver().run(request("x", prompt(50), greedy(8)))[0]
    assert again.token_ids == expected.token_ids
    assert again.num_cached_tokens == 0


def test_only_what_the_prefix_cache_lacks_is_asked_for(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    driver.run(request("first", prompt(50), greedy(1)))
    park(driver, connector)
    assert "get_num_new_matched_tokens d 48" in connector.calls
    assert "update_state_after_alloc d 2" in connector.calls


def test_blocks_that_wait_for_kv_are_no_prefix_hits(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    park(driver, connector)
    twin = driver.run(request("twin", prompt(50)))[0]
    assert twin.num_cached_tokens == 0
    assert twin.token_ids == make_driver().run(request("x", prompt(50)))[0].token_ids


def test_loaded_blocks_are_prefix_hits(make_driver: MakeDriver, connector: FakeConnector) -> None:
    driver = make_driver(connector)
    park(driver, connector)
    connector.worker.report(received=["d"])
    driver.finish("d")
    assert driver.run(request("twin", prompt(50)))[0].num_cached_tokens == 48


def test_a_failed_load_under_policy_fail_ends_the_request(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    park(driver, connector)
    connector.worker.report(failed=["d"])
    driver.finish("d")
    result = driver.result("d")
    assert result.finish_reason == "error"
    assert result.error is not None
    assert "request_finished d error" in connector.calls
    driver.assert_empty()


def test_a_failed_load_under_policy_recompute_is_computed_here(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    connector.scheduler.policy = "recompute"
    park(driver, connector)
    connector.worker.report(failed=["d"])
    remote = PeerAddress("p-1", "10.0.0.1", 5600)
    connector.scheduler.load_failures.note("d", remote, LoadProblem("no way", is_of_pair=True))
    driver.finish("d")
    assert driver.result("d").token_ids == make_driver().run(request("x", prompt(50)))[0].token_ids
    assert driver.core.stats().prompt_tokens_fetched == 0
    failure = driver.result("d").load_failure
    assert failure is not None
    assert (failure["remote_engine_id"], failure["reason"]) == ("p-1", "no way")
    assert not connector.scheduler.load_failures.by_request
    driver.assert_empty()


def test_blocks_of_an_aborted_load_stay_until_the_load_has_ended(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    park(driver, connector)
    driver.abort("d")
    assert driver.result("d").finish_reason == "abort"
    driver.step()
    assert free_blocks(driver) == driver.core.stats().num_blocks_total - 7
    assert driver.core.has_work
    connector.worker.report(received=["d"])
    driver.step()
    driver.assert_empty()


@pytest.mark.parametrize("state", ["waiting", "loaded", "running"])
def test_an_abort_frees_the_blocks_at_once(
    make_driver: MakeDriver, connector: FakeConnector, state: str
) -> None:
    driver = make_driver(connector, max_num_seqs=1)
    if state == "loaded":
        park(driver, connector, "a")
    driver.add(request("busy", prompt(20, seed=5), greedy(50, ignore_eos=True)))
    driver.step()
    if state == "running":
        driver.abort("busy")
        driver.assert_empty()
        return
    if state == "loaded":
        connector.worker.report(received=["a"])
        driver.step()
    else:
        driver.add(request("a", prompt(50)))
    assert driver.core.stats().num_waiting == 1
    driver.abort("a")
    assert driver.result("a").finish_reason == "abort"
    assert "request_finished a aborted" in connector.calls
    driver.finish("busy")
    driver.assert_empty()


def test_a_block_that_two_requests_hold_counts_once_and_until_both_are_read(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector, num_blocks=17)
    connector.scheduler.held.update(("a", "b"))
    for name in "ab":
        driver.run(request(name, prompt(60), greedy(1)))
    blocks = [set(connector.scheduler.blocks[name][0]) for name in "ab"]
    assert blocks[0] & blocks[1]
    assert driver.core.stats().num_blocks_delayed == len(blocks[0] | blocks[1])
    for name, left in (("a", blocks[1]), ("b", set())):
        connector.worker.report(sent=[name])
        driver.step()
        driver.core.scheduler.check_integrity()
        assert driver.core.stats().num_blocks_delayed == len(left)
    driver.assert_empty()


def test_held_blocks_are_not_reused_before_the_remote_has_read_them(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector, num_blocks=17)
    connector.scheduler.held.add("p")
    driver.run(request("p", prompt(60), greedy(1)))
    held = set(connector.scheduler.blocks["p"][0])
    assert driver.core.stats().num_blocks_delayed == len(held) == 8
    before = [layer[sorted(held)].clone() for layer in driver.core.cache.layers]

    driver.run(*(request(f"r{i}", prompt(40, seed=i + 1), greedy(20)) for i in range(4)))
    after = [layer[sorted(held)] for layer in driver.core.cache.layers]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))

    connector.worker.report(sent=["p"])
    driver.step()
    driver.assert_empty()


def test_a_prefill_answer_tells_how_much_was_cached(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    driver.run(request("first", prompt(50), greedy(1)))
    connector.scheduler.held.add("p")
    connector.scheduler.answers["p"] = {"do_remote_prefill": True, "unknown": [1]}
    result = driver.run(request("p", prompt(50), greedy(1)))[0]
    assert result.kv_transfer_params == {
        "do_remote_prefill": True,
        "unknown": [1],
        "remote_prefill_cached_tokens": 48,
    }


@pytest.mark.parametrize(
    "hook", ["on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"]
)
def test_an_exception_from_a_hook_ends_that_request_only(
    make_driver: MakeDriver, connector: FakeConnector, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_driver(connector)
    driver.add(request("fine", prompt(20), greedy(30, ignore_eos=True)))
    driver.step()
    connector.scheduler.raising.add(hook)
    with caplog.at_level(logging.ERROR):
        driver.add(request("bad", prompt(20, seed=1)))
        driver.finish("bad")
    assert driver.result("bad").finish_reason == "error"
    assert "planted" in caplog.text
    connector.scheduler.raising.clear()
    driver.finish("fine")
    assert driver.result("fine").finish_reason == "length"
    driver.assert_empty()


@pytest.mark.parametrize(
    "hook", ["request_finished", "build_connector_meta", "update_connector_output"]
)
def test_an_exception_from_a_step_hook_harms_no_local_request(
    make_driver: MakeDriver, connector: FakeConnector, hook: str
) -> None:
    driver = make_driver(connector)
    connector.scheduler.raising.add(hook)
    assert driver.run(request("a", prompt(20)))[0].finish_reason in ("stop", "length")
    driver.assert_empty()


@pytest.mark.parametrize("hook", ["start_load_kv", "get_transfer_results"])
def test_an_exception_from_the_worker_half_harms_no_local_request(
    make_driver: MakeDriver, connector: FakeConnector, hook: str
) -> None:
    driver = make_driver(connector)
    connector.worker.raising.add(hook)
    assert driver.run(request("a", prompt(20)))[0].finish_reason in ("stop", "length")
    driver.assert_empty()


def test_a_load_that_was_not_ordered_keeps_its_blocks_until_it_is_reported(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    connector.scheduler.external["d"] = 50
    connector.scheduler.raising.add("update_state_after_alloc")
    driver.add(request("d", prompt(50)))
    driver.step()
    assert "fail_load d" in connector.calls
    assert not driver.is_finished("d")
    assert free_blocks(driver) == driver.core.stats().num_blocks_total - 7
    connector.worker.report(failed=["d"])
    driver.step()
    assert driver.result("d").finish_reason == "error"
    driver.assert_empty()


def test_reports_about_nobody_are_ignored(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector)
    connector.worker.report(sent=["ghost"], received=["phantom"])
    driver.step()
    driver.assert_empty()


def test_loaded_requests_that_fill_the_cache_do_not_block_each_other(
    make_driver: MakeDriver, connector: FakeConnector
) -> None:
    driver = make_driver(connector, num_blocks=9)
    for i, name in enumerate("ab"):
        connector.scheduler.external[name] = 4 * BLOCK
        driver.add(request(name, prompt(4 * BLOCK, seed=i), greedy(20, ignore_eos=True)))
    driver.step()
    assert free_blocks(driver) == 0
    connector.worker.report(received=["a", "b"])
    driver.finish("a", "b")
    driver.assert_empty()
