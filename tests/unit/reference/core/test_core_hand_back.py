"""Where blocks run out, a request that asks for it is handed back, and another engine goes on."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine_ext.common.resume_payload import MAX_LOGPROBS, ResumePayload
from engine_ext.reference.answer import resume_answer
from engine_ext.reference.engine import merge
from engine_ext.reference.messages import GenerateRequest, RequestOutput, SamplingParams
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import Driver, FakeConnector, greedy, prompt, request
from tests.unit.reference.core.test_core_resumed_answers import RULES, tokenizer

__all__ = ["tokenizer"]
ASKED = {"hand_back": True}
SMALL: dict[str, Any] = {"num_blocks": 16}


def some(sampling: SamplingParams, params: dict[str, Any] | None) -> list[GenerateRequest]:
    return [request(f"r{i}", prompt(30, seed=i), sampling, params) for i in range(4)]


def go_on(
    driver: Driver, one: GenerateRequest, said: RequestOutput, tokenizer: Tokenizer
) -> RequestOutput:
    """Behind what was said, as a router asks for it: nothing is handed back any more."""
    logprobs = tuple(((each.token_id, each.logprob), *each.top) for each in said.logprobs)
    given = ResumePayload(one.prompt_token_ids, said.token_ids, 0, logprobs)
    later = request(f"{one.request_id}-again", one.prompt_token_ids, one.sampling)
    driver.go_on(later, resume_answer(given, one.sampling, tokenizer, RULES))
    driver.finish(later.request_id)
    return driver.result(later.request_id)


@pytest.mark.parametrize("sampling", [greedy(40), greedy(40, temperature=1.0, seed=4)])
@pytest.mark.parametrize("globally", [False, True])
def test_handed_back_and_gone_on_with_it_is_the_same_answer(
    make_driver: MakeDriver, tokenizer: Tokenizer, sampling: SamplingParams, globally: bool
) -> None:
    sampling = greedy(40, ignore_eos=True, logprobs=2, temperature=sampling.temperature, seed=4)
    asked = some(sampling, None if globally else ASKED)
    expected = [make_driver().run(one)[0] for one in asked]
    driver = make_driver(**SMALL, hand_back=globally)
    got = driver.run(*asked)
    driver.assert_empty()
    back = [one.finish_reason == "cache_threshold" for one in got]
    assert set(back) == {True, False}, "whoever came first had room"
    assert driver.core.stats().preemptions == sum(back)
    for one, said, whole in zip(asked, got, expected, strict=True):
        if said.finish_reason == "cache_threshold":
            assert said.stop_reason == "preempted"
            assert said.token_ids == whole.token_ids[: len(said.token_ids)]
            assert len(said.token_ids) > 0
            said = go_on(driver, one, said, tokenizer)
        assert said.token_ids == whole.token_ids
        assert said.text == whole.text
        for ours, theirs in zip(said.logprobs, whole.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    driver.assert_empty()


def ended(driver: Driver, asked: Sequence[GenerateRequest]) -> set[str | None]:
    got = driver.run(*asked)
    driver.assert_empty()
    assert driver.core.stats().preemptions > 0
    return {one.finish_reason for one in got}


def test_only_who_asks_is_handed_back(make_driver: MakeDriver) -> None:
    sampling = greedy(40, ignore_eos=True)
    assert ended(make_driver(**SMALL), some(sampling, None)) == {"length"}
    assert ended(make_driver(**SMALL, hand_back=True), some(sampling, {"hand_back": False})) == {
        "length"
    }


def test_a_prefill_is_never_handed_back(make_driver: MakeDriver) -> None:
    params = {"do_remote_decode": True, **ASKED}
    asked = some(greedy(40, ignore_eos=True), params)
    assert ended(make_driver(**SMALL, hand_back=True), asked) == {"length"}


def test_what_begun_cannot_tell_is_not_handed_back(make_driver: MakeDriver) -> None:
    """More log-probabilities than another engine would take."""
    many = greedy(40, ignore_eos=True, logprobs=MAX_LOGPROBS)
    assert ended(make_driver(**SMALL), some(many, ASKED)) == {"length"}


def test_whoever_keeps_blocks_hears_of_it_and_nothing_is_kept(make_driver: MakeDriver) -> None:
    connector = FakeConnector()
    asked = some(greedy(40, ignore_eos=True), ASKED)
    connector.scheduler.held = {one.request_id for one in asked}
    driver = make_driver(connector, **SMALL)
    driver.add(*asked)
    driver.step_until(lambda: driver.core.stats().preemptions > 0)
    back = [one for one in driver.outputs if driver.is_finished(one)]
    assert back
    assert all(f"request_finished {one} aborted" in connector.calls for one in back)
    assert driver.core.stats().num_blocks_delayed == 0


def test_one_that_has_said_nothing_is_handed_back_too(make_driver: MakeDriver) -> None:
    """Its prompt is not computed again here."""
    driver = make_driver(num_blocks=14, max_num_batched_tokens=6, enable_prefix_caching=False)
    driver.add(request("first", prompt(30), greedy(40, ignore_eos=True)))
    driver.step_until(lambda: bool(driver.outputs["first"]))
    driver.add(request("second", prompt(64, seed=1), greedy(4), ASKED))
    driver.finish("second")
    got = merge(driver.outputs["second"])
    assert (got.finish_reason, got.stop_reason, got.token_ids) == (
        "cache_threshold",
        "preempted",
        (),
    )
    driver.finish("first")
    driver.assert_empty()
