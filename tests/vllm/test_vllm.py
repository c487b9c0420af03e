"""The connector inside unmodified vLLM: right as one vLLM alone, and what stock cannot do."""

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.legs import PREFILL, decode, decode_body, prefill, prefill_body, take_turn
from tests.integration.oracle import Answer, Prompt, complete, differences, tokens_of
from tests.integration.processes import Launcher, Server, metric, post_and_leave, wait_for
from tests.vllm.servers import OURS, PUSH, SCHEDULER, STOCK, Fleet

COMPUTED = r'vllm:prompt_tokens_by_source_total\{.*source="local_compute"\}'
FETCHED = r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer"\}'
RUNNING = r"vllm:num_requests_running\{.*"
USED = r"vllm:kv_cache_usage_perc\{.*"

LENGTHS = (
    1,
    2,
    31,
    32,
    33,
    63,
    64,
    65,
    100,
    200,
    255,
    256,
    257,
    300,
    500,
    700,
    900,
    1200,
    1500,
    90,
)


def prompts() -> list[Prompt]:
    return [tokens_of(length, 1000 + length) for length in LENGTHS]


def freed(server: Server) -> bool:
    return metric(server, USED) == 0


def test_twenty_prompts_through_the_router_are_those_of_one_vllm_alone(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server
) -> None:
    launcher = Launcher(fleet.logs, fleet.model, fleet.free_ports)
    before = metric(decoder, FETCHED)
    with launcher.router([prefiller], [decoder]) as router, ThreadPoolExecutor(4) as pool:
        right = [complete(alone, prompt) for prompt in prompts()]
        got = list(pool.map(lambda prompt: complete(router, prompt), prompts()))
    assert differences(right, got) == []
    assert metric(decoder, FETCHED) - before > 5000
    wait_for(lambda: freed(prefiller), "P's blocks are freed after the reads")


def test_three_streamed_turns_compute_only_what_is_new(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt, params = tokens_of(700, 1), None
    for number in range(3):
        before = metric(prefiller, COMPUTED)
        held = params["remote_num_tokens"] if params else 0
        tokens, params = streamed_turn(prefiller, decoder, prompt, params)
        assert tokens == complete(alone, prompt).tokens
        # P computes the last token of what it pulled, if nothing else.
        assert metric(prefiller, COMPUTED) - before <= len(prompt) - held + 1
        prompt += [*tokens, *tokens_of(50, 10 + number)]


def streamed_turn(
    prefiller: Server, decoder: Server, prompt: list[int], previous: dict[str, Any] | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    params = prefill(prefiller, prompt, previous)
    body = {**decode_body(prompt, {**params, "retain": True}), "stream": True}
    with httpx.stream("POST", f"{decoder.url}/v1/completions", json=body, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    tokens = [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in choice.get("token_ids") or ()
    ]
    return tuple(tokens), chunks[-1]["kv_transfer_params"]


@pytest.mark.parametrize("change", ["shortened", "edited", "unrelated"])
def test_another_history_than_the_one_held_is_answered_right(
    prefiller: Server, decoder: Server, alone: Server, change: str
) -> None:
    prompt = tokens_of(300, 20)
    turn = take_turn(prefiller, decoder, prompt)
    whole = [*prompt, *turn.answer.tokens]
    changed = {
        "shortened": whole[:200],
        "edited": [*whole[:150], whole[150] ^ 1, *whole[151:], *tokens_of(40, 21)],
        "unrelated": tokens_of(400, 23),
    }[change]
    again = take_turn(prefiller, decoder, changed, turn.params)
    assert differences([complete(alone, changed)], [again.answer]) == []


def test_a_lost_turn_is_computed_although_the_policy_is_fail(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(300, 30)
    params = take_turn(prefiller, decoder, prompt).params
    assert params is not None
    longer = [*prompt, *tokens_of(40, 31)]
    gone = {**params, "remote_port": fleet.free_ports(1)[0]}
    again = take_turn(prefiller, decoder, longer, gone)
    assert differences([complete(alone, longer)], [again.answer]) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_prompt_below_the_threshold_is_refused_and_at_it_is_not(
    decoder: Server, endpoint: str, stream: bool
) -> None:
    text = str(uuid.uuid4()) * 6
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "stream": stream, "ignore_eos": True}
    if endpoint == "completions":
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    path = f"/v1/{endpoint}"
    assert finish_reason(decoder, path, {**body, "cache_hit_threshold": 0.5}) == "cache_threshold"
    assert finish_reason(decoder, path, body) == "length"
    assert finish_reason(decoder, path, {**body, "cache_hit_threshold": 0.5}) == "length"
    assert finish_reason(decoder, path, {**body, "cache_hit_threshold": 1}) == "cache_threshold"
    wrong = decoder.post(path, {**body, "cache_hit_threshold": 1.5})
    assert wrong.status_code == 400
    assert "cache_hit_threshold" in wrong.text


def finish_reason(server: Server, path: str, body: dict[str, Any]) -> str:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return str(response.json()["choices"][0]["finish_reason"])
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    reasons = [c["finish_reason"] for line in lines for c in json.loads(line)["choices"]]
    return str([reason for reason in reasons if reason][-1])


PULL = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "tp_size": 1}
REACHABLE = {"remote_host": "127.0.0.1", "remote_port": 1}


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"do_remote_prefill": True}, 200),
        ({**PULL, "remote_block_ids": [[1]]}, 200),
        ({**PULL, **REACHABLE, "remote_block_ids": ["a"]}, 200),
        ({**PULL, **REACHABLE, "remote_port": "x", "remote_block_ids": [[1]]}, 200),
        ({**PULL, **REACHABLE, "remote_block_ids": [0, 1, 2, 3]}, 500),
        ({**PULL, **REACHABLE, "remote_block_ids": [[0]]}, 500),
        ({"foo": 1}, 200),
    ],
)
def test_params_that_kill_stock_leave_the_engine_serving(
    decoder: Server, alone: Server, params: dict[str, Any], status: int
) -> None:
    prompt = tokens_of(100, len(str(params)))
    response = decoder.post("/v1/completions", decode_body(prompt, params))
    assert response.status_code == status, response.text
    assert complete(decoder, prompt).tokens == complete(alone, prompt).tokens


def test_blocks_that_do_not_exist_fail_the_request_alone(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(100, 40)
    params = prefill(prefiller, prompt)
    broken = {**params, "remote_block_ids": [[2**30, 5, 6, 7]]}
    assert decoder.post("/v1/completions", decode_body(prompt, broken)).status_code == 500
    again = decode(decoder, prompt, prefill(prefiller, prompt))
    assert differences([complete(alone, prompt)], [again.answer]) == []


def test_a_decode_that_is_aborted_while_queued_frees_the_prefiller_in_a_second(
    fleet: Fleet, prefiller: Server
) -> None:
    with fleet.server("queue", OURS, *SCHEDULER, "--max-num-seqs", "1") as decoder:
        wait_for(lambda: freed(prefiller), "P is idle")
        busy = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True}
        prompt = tokens_of(300, 50)
        with post_and_leave(decoder, busy):
            wait_for(lambda: metric(decoder, RUNNING) == 1, "D is busy")
            params = prefill(prefiller, prompt)
            with post_and_leave(decoder, decode_body(prompt, params)):
                waiting = r"vllm:num_requests_waiting\{.*"
                wait_for(lambda: metric(decoder, waiting) == 1, "the D leg queues")
                assert not freed(prefiller)
            wait_for(lambda: freed(prefiller), "P's blocks are freed", 2)


def test_an_engine_that_waits_for_readers_rests(prefiller: Server) -> None:
    wait_for(lambda: freed(prefiller), "P is idle")
    prefill(prefiller, tokens_of(300, 60))
    processes = family(prefiller.process.pid)
    # vLLM's own workers spin for a second after a step.
    settled = time.monotonic() + 2
    wait_for(lambda: time.monotonic() > settled, "the last step's spinning is over")
    before, started = cpu_seconds(processes), time.monotonic()
    wait_for(lambda: time.monotonic() - started > 6, "six seconds of leases")
    assert not freed(prefiller)
    assert (cpu_seconds(processes) - before) / (time.monotonic() - started) < 0.05


def family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def cpu_seconds(processes: list[int]) -> float:
    ticks = 0
    for pid in processes:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


@pytest.mark.parametrize("ours", ["prefill", "decode"])
def test_a_fleet_may_mix_stock_and_ours(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server, ours: str
) -> None:
    with fleet.server("stock", STOCK) as stock:
        first, second = (prefiller, stock) if ours == "prefill" else (stock, decoder)
        before = metric(second, FETCHED)
        for length in (1, 33, 200, 1500):
            prompt = tokens_of(length, 70 + length)
            turn = decode(second, prompt, prefill(first, prompt))
            assert differences([complete(alone, prompt)], [turn.answer]) == []
        assert metric(second, FETCHED) - before == 1 + 33 + 200 + 1500 - 1
        wait_for(lambda: freed(first), "P's blocks are freed")


def test_pushed_prompts_are_those_of_one_vllm_alone(fleet: Fleet, alone: Server) -> None:
    with fleet.server("push-p", PUSH) as prefiller, fleet.server("push-d", PUSH) as decoder:
        known = prefill(prefiller, "hello")
        keys = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
        where = {key: known[key] for key in keys}

        def ask(prompt: Prompt) -> Answer:
            request_id = str(uuid.uuid4())
            params = {"do_remote_prefill": True, "remote_request_id": request_id, **where}
            with ThreadPoolExecutor(2) as legs:
                p_leg = legs.submit(
                    prefiller.post, "/v1/completions", prefill_body(prompt), request_id
                )
                d_leg = legs.submit(decode, decoder, prompt, params, 12, request_id)
                assert p_leg.result(timeout=60).status_code == 200
                return d_leg.result(timeout=60).answer

        with ThreadPoolExecutor(3) as pool:
            got = list(pool.map(ask, prompts()))
        assert differences([complete(alone, prompt) for prompt in prompts()], got) == []


def test_prefill_legs_are_not_measured_by_the_threshold(decoder: Server) -> None:
    body = {**prefill_body(tokens_of(100, 80)), "cache_hit_threshold": 1}
    response = decoder.post("/v1/completions", body)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert PREFILL["do_remote_decode"]
