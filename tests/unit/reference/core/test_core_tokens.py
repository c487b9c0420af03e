"""The oracle: an answer does not depend on how its request was scheduled."""

import random

import pytest

from engine_ext.reference.messages import GenerateRequest, RequestOutput
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import BLOCK, greedy, prompt, request

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 70, 150]


def requests(max_tokens: int = 24) -> list[GenerateRequest]:
    sampling = greedy(max_tokens, logprobs=3, ignore_eos=True)
    return [request(f"r{n}", prompt(n, seed=n), sampling) for n in LENGTHS]


def alone(make_driver: MakeDriver) -> list[RequestOutput]:
    return [make_driver().run(one)[0] for one in requests()]


def assert_same_answers(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        ours = [logprob.logprob for logprob in one.logprobs]
        assert ours == pytest.approx([x.logprob for x in other.logprobs], abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 5}, id="chunks of 5"),
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 3}, id="three at a time"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
        pytest.param({"block_size": 32, "num_blocks": 60}, id="other block size"),
    ],
)
def test_tokens_and_logprobs_are_those_of_the_request_alone(
    make_driver: MakeDriver, changes: dict[str, int]
) -> None:
    driver = make_driver(**changes)
    assert_same_answers(driver.run(*requests()), alone(make_driver))
    driver.assert_empty()


def test_a_prefix_hit_changes_nothing_but_the_work(make_driver: MakeDriver) -> None:
    driver = make_driver()
    first = driver.run(request("cold", prompt(100)))[0]
    computed = driver.core.stats().prompt_tokens_computed
    second = driver.run(request("warm", prompt(100)))[0]
    assert_same_answers([second], [first])
    assert second.num_cached_tokens == 96
    assert driver.core.stats().prompt_tokens_computed - computed == 4


def test_a_fully_cached_prompt_still_computes_its_last_token(make_driver: MakeDriver) -> None:
    driver = make_driver()
    first = driver.run(request("cold", prompt(4 * BLOCK)))[0]
    second = driver.run(request("warm", prompt(4 * BLOCK)))[0]
    assert_same_answers([second], [first])
    assert second.num_cached_tokens == 3 * BLOCK


def test_preemption_changes_nothing(make_driver: MakeDriver) -> None:
    some = [
        request(f"r{i}", prompt(30, seed=i), greedy(40, ignore_eos=True, logprobs=0))
        for i in range(4)
    ]
    expected = [make_driver().run(one)[0] for one in some]
    driver = make_driver(num_blocks=16)
    assert_same_answers(driver.run(*some), expected)
    assert driver.core.stats().preemptions > 0
    driver.assert_empty()


def test_a_prompt_that_must_wait_for_blocks_is_computed_once(make_driver: MakeDriver) -> None:
    driver = make_driver(num_blocks=13, max_num_batched_tokens=16, enable_prefix_caching=False)
    driver.run(*(request(n, prompt(60, seed=i), greedy(4)) for i, n in enumerate("ab")))
    assert driver.core.stats().prompt_tokens_computed == 120


def test_one_changed_prompt_token_changes_the_answer(make_driver: MakeDriver) -> None:
    tokens = list(prompt(60))
    base = make_driver().run(request("base", tokens, greedy(32, ignore_eos=True)))[0]
    for at in (0, 25, 59):
        changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
        other = make_driver().run(request("other", changed, greedy(32, ignore_eos=True)))[0]
        assert other.token_ids != base.token_ids, f"position {at} does not matter"


def test_a_random_workload_keeps_the_books(make_driver: MakeDriver) -> None:
    rng = random.Random(7)
    driver = make_driver(num_blocks=24, max_num_seqs=5, max_num_batched_tokens=40)
    live: list[str] = []
    for turn in range(150):
        if rng.random() < 0.4:
            name = f"r{turn}"
            length = rng.choice([3, 20, 20, 64, 90])
            tokens = prompt(length, seed=rng.randrange(3))
            driver.add(request(name, tokens, greedy(rng.randrange(1, 60))))
            live.append(name)
        if live and rng.random() < 0.15:
            driver.abort(live[rng.randrange(len(live))])
        driver.step()
        live = [name for name in live if not driver.is_finished(name)]
    driver.finish(*live)
    assert driver.core.stats().preemptions > 0
    driver.assert_empty()
