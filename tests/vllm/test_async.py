"""Engines that schedule ahead of the model, as vLLM does on GPUs, with `DisaggAsyncScheduler`; the
prefill engine has two data-parallel ranks."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine_ext.common.resume_payload import ResumePayload
from tests.integration.legs import Turn, decode, prefill_body
from tests.integration.oracle import Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm import forced_async
from tests.vllm.measures import FETCHED, nothing_left, prompts
from tests.vllm.resumed_answers import ask, begin, body_of, differ, hand_over, pairs, taken_over
from tests.vllm.servers import OURS, Kind

ASYNC = ("--scheduler-cls", "engine_ext.vllm.scheduler.DisaggAsyncScheduler", "--async-scheduling")
RANKS = (0, 1)


AHEAD: dict[str, Any] = {"environment": {"VLLM_LOGGING_LEVEL": "DEBUG"}, "plugins": (forced_async,)}
PAIR = (
    Kind("async-p", OURS, (*ASYNC, "--data-parallel-size", "2"), **AHEAD),
    Kind("async-d", OURS, ASYNC, **AHEAD),
)


def prefill_at(server: Server, rank: int, prompt: Prompt, previous: Any = None) -> Any:
    body = prefill_body(prompt, previous)
    said = server.post("/v1/completions", body, headers={"X-data-parallel-rank": str(rank)})
    assert said.status_code == 200, said.text
    return said.json()["kv_transfer_params"]


def test_both_really_schedule_ahead(pair: list[Server]) -> None:
    for server in pair:
        assert "Batch queue is enabled with size 2" in server.log.read_text()


def test_prompts_of_both_ranks_are_those_of_one_vllm_alone(
    pair: list[Server], alone: Server
) -> None:
    first, second = pair
    before = metric(second, FETCHED)
    with nothing_left(first, second), ThreadPoolExecutor(3) as pool:

        def ask(number: int) -> Turn:
            params = prefill_at(first, RANKS[number % 2], prompts()[number])
            assert params["remote_engine_id"].endswith(f"_dp{number % 2}")
            return decode(second, prompts()[number], params)

        turns = list(pool.map(ask, range(len(prompts()))))
    right = [complete(alone, prompt) for prompt in prompts()]
    assert differences(right, [turn.answer for turn in turns]) == []
    # Of a prompt of one token, there is nothing to fetch.
    assert metric(second, FETCHED) - before == sum(len(prompt) for prompt in prompts()) - 1


@pytest.mark.parametrize("rank", RANKS)
def test_a_turn_is_pulled_by_either_rank(pair: list[Server], alone: Server, rank: int) -> None:
    first, second = pair
    prompt = tokens_of(300, 8000 + rank)
    given = prefill_at(first, rank, prompt)
    turn = decode(second, prompt, {**given, "retain": True})
    longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 8010 + rank)]
    before = metric(first, FETCHED)
    params = prefill_at(first, 1 - rank, longer, turn.params)
    again = decode(second, longer, params)
    assert differences([complete(alone, longer)], [again.answer]) == []
    assert metric(first, FETCHED) > before


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5}, {"presence_penalty": 1.9}])
def test_an_answer_that_begins_in_the_middle_is_that_of_one_vllm_alone(
    pair: list[Server], alone: Server, fields: dict[str, Any]
) -> None:
    first, second = pair
    body = body_of("completion", tokens_of(200, 8030), **fields)
    right = ask(alone, "completion", body)
    params, said = hand_over(first, "completion", body)
    given = {**body, "kv_transfer_params": taken_over(params, said)}
    assert differ(right, ask(second, "completion", given)) == []
    six = ask(alone, "completion", {**body, "max_tokens": 6})
    scores = tuple(map(pairs, six.scores))
    begun = ResumePayload(tuple(body["prompt"]), six.tokens, logprobs=scores)
    assert differ(right, ask(second, "completion", begin(body, begun))) == []


def test_a_prompt_below_the_threshold_is_refused(pair: list[Server]) -> None:
    body = {"model": "tiny", "prompt": tokens_of(200, 8020), "max_tokens": 4, "ignore_eos": True}
    refused = pair[1].post("/v1/completions", {**body, "cache_hit_threshold": 0.5})
    assert refused.json()["choices"][0]["finish_reason"] == "cache_threshold"
    served = pair[1].post("/v1/completions", body)
    assert served.json()["choices"][0]["finish_reason"] == "length"
