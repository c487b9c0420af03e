"""Expert parallel: a mixture of experts whose experts are divided among the tensor-parallel ranks
of one engine and the data-parallel ranks of another. On a CPU vLLM 0.32 needs help with that: see
tests/vllm/mended_experts.py. The engine that answers alone has neither expert parallel nor help."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.legs import Turn, decode_body, prefill_body
from tests.integration.oracle import Answer, Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm import mended_experts
from tests.vllm.experts_model import EXPERTS, write_experts_model
from tests.vllm.measures import FETCHED, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Kind

LENGTHS = (1, 32, 33, 100, 257, 700, 1500)
TENSOR = (*SCHEDULER, UNCACHED, "--enable-expert-parallel", "--tensor-parallel-size", "2")
DATA = (*SCHEDULER, "--enable-expert-parallel", "--data-parallel-size", "2")
DATA_RANKS = {"alone": 1, "tensor": 1, "data": 2}

Servers = dict[str, Server]

pytestmark = pytest.mark.nightly


SERVERS = {
    "alone": Kind("experts-alone", None, (), write_experts_model),
    "tensor": Kind("experts-tensor", OURS, TENSOR, write_experts_model, plugins=(mended_experts,)),
    "data": Kind("experts-data", OURS, DATA, write_experts_model, plugins=(mended_experts,)),
}


def asked(server: Server, rank: int, body: dict[str, Any]) -> dict[str, Any]:
    """`rank`: of data parallel size."""
    said = server.post("/v1/completions", body, headers={"X-data-parallel-rank": str(rank)})
    assert said.status_code == 200, said.text
    answer: dict[str, Any] = said.json()
    return answer


def prefill_at(server: Server, rank: int, prompt: Prompt, previous: Any = None) -> dict[str, Any]:
    params: dict[str, Any] = asked(server, rank, prefill_body(prompt, previous))[
        "kv_transfer_params"
    ]
    return params


def decode_at(server: Server, rank: int, prompt: Prompt, params: dict[str, Any]) -> Turn:
    said = asked(server, rank, decode_body(prompt, params))
    return Turn(Answer.in_body(said), said.get("kv_transfer_params"))


def test_experts_are_really_divided(servers: Servers) -> None:
    for name, ranks in (("tensor", r"Worker_TP\d_EP(\d)"), ("data", r"Worker_DP\d_EP(\d)")):
        log = servers[name].log.read_text()
        assert "Expert parallelism is enabled" in log
        assert f"Local/global number of experts: {EXPERTS // 2}/{EXPERTS}" in log
        assert set(re.findall(ranks, log)) == {"0", "1"}
    assert "Expert parallelism is enabled" not in servers["alone"].log.read_text()


def test_an_answer_depends_on_one_token_of_a_prompt(servers: Servers) -> None:
    """Else equal answers would prove nothing."""
    plain = tokens_of(700, 700)
    changed = [*plain[:350], plain[350] ^ 1, *plain[351:]]
    right, wrong = (complete(servers["alone"], prompt) for prompt in (plain, changed))
    assert differences([right], [wrong]) != []


@pytest.mark.parametrize(("first", "second"), [("tensor", "data"), ("data", "tensor")])
def test_prompts_are_those_of_one_vllm_alone(servers: Servers, first: str, second: str) -> None:
    """Several at once: ranks of data parallel size compute unlike numbers of tokens in a step."""
    prefiller, decoder = servers[first], servers[second]
    asked_for = [tokens_of(length, 60_000 + length) for length in LENGTHS]
    before = metric(decoder, FETCHED)

    def answer(number: int) -> Answer:
        prompt = asked_for[number]
        rank = number % DATA_RANKS[first]
        params = prefill_at(prefiller, rank, prompt)
        assert params["remote_engine_id"].endswith(f"_dp{rank}") == (first == "data")
        return decode_at(decoder, number % DATA_RANKS[second], prompt, params).answer

    with nothing_left(prefiller), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(answer, range(len(LENGTHS))))
    assert differences([complete(servers["alone"], each) for each in asked_for], answers) == []
    # Of a prompt of one token, there is nothing to fetch.
    assert metric(decoder, FETCHED) - before == sum(LENGTHS) - 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_turn_is_that_of_one_vllm_alone(servers: Servers, rank: int) -> None:
    """The prefill engine keeps nothing: the last turn comes from the rank that answered it."""
    prefiller, decoder = servers["tensor"], servers["data"]
    prompt = tokens_of(300, 61_000 + rank)
    params = prefill_at(prefiller, 0, prompt)
    turn = decode_at(decoder, rank, prompt, {**params, "retain": True})
    assert turn.params is not None
    assert turn.params["remote_engine_id"].endswith(f"_dp{rank}")
    longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 61_010 + rank)]
    before = metric(prefiller, FETCHED)
    again = decode_at(decoder, rank, longer, prefill_at(prefiller, 0, longer, turn.params))
    assert metric(prefiller, FETCHED) - before == turn.params["remote_num_tokens"]
    right = [complete(servers["alone"], each) for each in (prompt, longer)]
    assert differences(right, [turn.answer, again.answer]) == []
