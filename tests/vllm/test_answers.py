"""Our connector on both sides inside unmodified vLLM: right as one vLLM alone."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.legs import coordinates_in, decode, decode_body, prefill, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.integration.stranger import handshake
from tests.vllm.measures import (
    COMPUTED,
    FETCHED,
    counted,
    distributed,
    freed,
    prompts,
    share_of_a_core,
)
from tests.vllm.servers import Fleet


def test_twenty_prompts_through_the_router_are_those_of_one_vllm_alone(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server
) -> None:
    before = metric(decoder, FETCHED)
    with fleet.router([prefiller], [decoder]) as router, ThreadPoolExecutor(4) as pool:
        right = [complete(alone, prompt) for prompt in prompts()]
        got = list(pool.map(lambda prompt: complete(router, prompt), prompts()))
    assert differences(right, got) == []
    assert metric(decoder, FETCHED) - before > 5000
    wait_for(lambda: freed(prefiller), "P's blocks are freed after the reads")


def test_what_moved_is_counted_in_vllms_metrics(prefiller: Server, decoder: Server) -> None:
    wait_for(lambda: freed(prefiller) and counted(prefiller, "leases_active") == 0, "P is idle")
    received, blocks = counted(decoder, "bytes_received"), counted(decoder, "blocks_received")
    granted, released = counted(prefiller, "leases_granted"), counted(prefiller, "leases_released")
    # Other tests let pulls of this engine fail.
    failed = counted(decoder, "pulls_failed")
    failures = metric(decoder, r"vllm:nixl_num_failed_transfers_total\{.*")
    reads = distributed(decoder, "vllm:nixl_xfer_time_seconds").times
    carried = distributed(decoder, "vllm:nixl_bytes_transferred")
    ages = distributed(prefiller, "disagg_engine_kv_lease_age_at_read_seconds").times
    prompt = tokens_of(100, 5)
    params = prefill(prefiller, prompt)
    assert counted(prefiller, "leases_active") == 1
    decode(decoder, prompt, params)
    assert counted(decoder, "blocks_received") - blocks == 4
    # K and V of 4 layers, 4 heads of 32 floats: whole blocks move.
    assert counted(decoder, "bytes_received") - received == 4 * 32 * 4 * 4 * 2 * 32 * 4
    wait_for(lambda: counted(prefiller, "leases_active") == 0, "the lease has ended")
    assert counted(prefiller, "leases_granted") - granted == 1
    assert counted(prefiller, "leases_released") - released == 1
    assert counted(decoder, "pulls_failed") == failed
    assert distributed(decoder, "vllm:nixl_xfer_time_seconds").times - reads == 1
    times, total = distributed(decoder, "vllm:nixl_bytes_transferred")
    assert times - carried.times == 1
    assert total - carried.total == counted(decoder, "bytes_received") - received
    assert distributed(decoder, "disagg_engine_kv_handshake_seconds").times >= 1
    age = "disagg_engine_kv_lease_age_at_read_seconds"
    assert distributed(prefiller, age).times - ages == 1
    assert metric(decoder, r"vllm:nixl_num_failed_transfers_total\{.*") == failures
    line = r"request \S+: READ peer=\S+ blocks=4 bytes=\d+ ms=[\d.]+ proven_tokens=100\n"
    assert re.search(line, decoder.log.read_text())


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


def test_an_engine_that_waits_for_a_reader_uses_less_than_a_twentieth_of_a_core(
    prefiller: Server,
) -> None:
    # Of three windows: on a machine that stands still, a moment counts as its whole length.
    assert any(waits_at_rest(prefiller) for _ in range(3))


def waits_at_rest(server: Server) -> bool:
    release(server, prefill(server, tokens_of(300, 60)))
    wait_for(lambda: freed(server), "P has heard of an end")
    params = prefill(server, tokens_of(300, 60))
    share = share_of_a_core(server)
    num_leases = counted(server, "leases_active")
    print(f"{share:.3f} of a core, {num_leases:.0f} leases")
    release(server, params)
    return num_leases == 1 and share < 0.05


def test_an_engine_says_who_it_is_as_its_answers_do(prefiller: Server, alone: Server) -> None:
    said = prefiller.get("/disagg/identity").json()
    assert said["engine"] == "vllm"
    assert re.match(r"\d+\.\d+\.\d+", said["versions"]["vllm"])
    assert said["transfer_modes"] == ["pull"]
    assert [said[f"{kind}_size"] for kind in ("tp", "pp", "dp")] == [1, 1, 1]
    promised = {"cache_hit_threshold", "streamed_kv_transfer_params", "turns", "release"}
    assert promised <= set(said["capabilities"])
    (rank,) = said["ranks"]
    params = prefill(prefiller, tokens_of(8, 2))
    assert coordinates_in(rank) == coordinates_in(params)
    assert rank["max_step_tokens"] == 2048
    payload = handshake(params)
    assert rank["compatibility_hash"] == payload.compatibility_hash
    assert rank["compatibility_factors"]["transfer_mode"] == "pull"
    release(prefiller, params)
    without = alone.get("/disagg/identity").json()
    assert without["ranks"] == []
    assert "cache_hit_threshold" not in without["capabilities"]


def release(server: Server, params: dict[str, Any]) -> bool:
    answer = server.post("/disagg/release", {"kv_transfer_params": params})
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["released"])


def test_an_engine_shows_its_leases_and_peers_and_nobodys_name(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    wait_for(lambda: freed(prefiller), "P is idle")
    prompt = tokens_of(100, 92)
    params, other = prefill(prefiller, prompt), prefill(prefiller, prompt)

    def shows_both() -> bool:
        """The worker hears of a lease with the step after the answer."""
        return prefiller.get("/disagg/leases").text.count('"granted"') == 2

    wait_for(shows_both, "P shows both leases")
    said = prefiller.get("/disagg/leases")
    (rank,) = said.json()["ranks"]
    assert (rank["dp_rank"], rank["tp_rank"], rank["num_leases"]) == (0, 0, 2)
    assert [lease["state"] for lease in rank["leases"]] == ["granted"] * 2
    assert all(0 < lease["seconds_left"] <= 30 for lease in rank["leases"])
    assert rank["num_quarantined"] == 0
    name = params["remote_request_id"]
    assert name not in said.text
    (asked,) = prefiller.get(f"/disagg/leases?request_id={name}").json()["ranks"]
    (lease,) = asked["leases"]
    assert lease["request"] in [one["request"] for one in rank["leases"]]
    decode(decoder, prompt, params)
    release(prefiller, other)
    (rank,) = decoder.get("/disagg/leases").json()["ranks"]
    peers = {peer["engine_id"]: peer for peer in rank["peers"]}
    assert not peers[params["remote_engine_id"]]["in_use"]
    latest = rank["transfers"][-1]
    assert (latest["what"], latest["engine_id"]) == ("READ", params["remote_engine_id"])
    assert latest["blocks"] > 0
    assert params["remote_engine_id"] in [moved["engine_id"] for moved in rank["moved"]]
    assert alone.get("/disagg/leases").json() == {"ranks": []}


def test_kv_that_nobody_will_read_is_released_by_name_and_once(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    wait_for(lambda: freed(prefiller), "P is idle")
    prompt = tokens_of(300, 90)
    params, kept = prefill(prefiller, prompt), prefill(prefiller, prompt)
    assert not release(prefiller, {**params, "remote_engine_id": "another"})
    assert release(prefiller, params)
    wait_for(lambda: counted(prefiller, "leases_active") == 1, "one is released")
    assert not release(prefiller, params)
    turn = decode(decoder, prompt, kept)
    assert differences([complete(alone, prompt)], [turn.answer]) == []
    wait_for(lambda: freed(prefiller), "the other is read")
    assert prefiller.post("/disagg/release", {}).status_code == 400
    for body in (b"[" * 100_000, b"x", b'{"kv_transfer_params": "\xff"}'):
        answer = httpx.post(f"{prefiller.url}/disagg/release", content=body, timeout=30)
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("how", ["a model that nobody serves", "a prompt that shares nothing"])
def test_a_decoder_told_in_vain_releases_the_prefiller(
    prefiller: Server, decoder: Server, how: str
) -> None:
    """What the router does where it knows only vLLM's own API; told twice is told once."""
    wait_for(lambda: freed(prefiller), "P is idle")
    params = prefill(prefiller, tokens_of(300, 91))
    body: dict[str, Any] = {"prompt": [1], "max_tokens": 1, "kv_transfer_params": params}
    body["model"] = "nobody's" if "model" in how else "tiny"
    for _ in range(2):
        response = decoder.post("/v1/completions", body)
        assert response.status_code == (404 if "model" in how else 200), response.text
        wait_for(lambda: freed(prefiller), "P is told")
