"""Two reference engines, real NIXL: a proof that is spoilt on its way never gives another prompt's
KV to a request."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.legs import decode, decode_body, prefill
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import Server, described, metric, wait_for

HELD = text_of(300, 7)

FETCHED = "disagg_engine_prompt_tokens_fetched_total"
UNREADABLE = "disagg_engine_kv_proofs_unreadable_total"
LEASES = "disagg_engine_kv_leases_active"

SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda proof: {},
    "of another version": lambda proof: {**proof, "v": proof["v"] + 1},
    "cut by a character": lambda proof: {**proof, "h": proof["h"][:-1]},
    "without hashes": lambda proof: {**proof, "h": ""},
}


def other_than_held(seed: int) -> str:
    return HELD[:150] + text_of(150, seed)


PREFILLER, DECODER = described("proof-p"), described("proof-d")


@pytest.mark.parametrize(("seed", "how"), list(enumerate(SPOILT)))
def test_a_spoilt_proof_leaves_the_whole_prompt_to_compute(
    prefiller: Server, decoder: Server, alone: Server, seed: int, how: str
) -> None:
    other = other_than_held(seed)
    fetched, unreadable = metric(decoder, FETCHED), metric(decoder, UNREADABLE)
    params = prefill(prefiller, HELD)
    spoilt = SPOILT[how](params["prefix_proof"])
    turn = decode(decoder, other, {**params, "prefix_proof": spoilt})
    assert differences([complete(alone, other)], [turn.answer]) == []
    assert metric(decoder, FETCHED) == fetched
    assert metric(decoder, UNREADABLE) == unreadable + 1
    wait_for(lambda: metric(prefiller, LEASES) == 0, "the prefill engine has its blocks back")


def test_a_proof_that_got_lost_is_an_error_and_no_byte_moves(
    prefiller: Server, decoder: Server
) -> None:
    params = prefill(prefiller, HELD)
    del params["prefix_proof"]
    response = decoder.post("/v1/completions", decode_body(other_than_held(99), params))
    assert response.status_code == 500
    assert metric(decoder, "disagg_engine_kv_pulls_refused_total") == 1
    assert metric(decoder, "disagg_engine_kv_bytes_received_total") == 0
    wait_for(lambda: metric(prefiller, LEASES) == 0, "the prefill engine has its blocks back")


MISPLACED: dict[str, Callable[[list[int], list[int]], Any]] = {
    "of another request": lambda ours, others: others,
    "in another order": lambda ours, others: ours[::-1],
    "one of them twice": lambda ours, others: [ours[0], *ours[:-1]],
    "flattened and cut": lambda ours, others: ours[: len(ours) // 2],
}


@pytest.mark.parametrize("how", MISPLACED)
def test_a_whole_proof_of_other_blocks_proves_nothing(
    prefiller: Server, decoder: Server, alone: Server, how: str
) -> None:
    """A proxy that merges, sorts or thins out what it passes on."""
    prompt = text_of(300, 50 + list(MISPLACED).index(how))
    fetched = metric(decoder, FETCHED)
    params, others = prefill(prefiller, prompt), prefill(prefiller, text_of(300, 49))
    ids = MISPLACED[how](*(one["remote_block_ids"][0] for one in (params, others)))
    named = ids if "flattened" in how else [ids]
    turn = decode(decoder, prompt, {**params, "remote_block_ids": named})
    prefiller.post("/disagg/release", {"kv_transfer_params": others})
    assert differences([complete(alone, prompt)], [turn.answer]) == []
    assert metric(decoder, FETCHED) == fetched
    wait_for(lambda: metric(prefiller, LEASES) == 0, "the prefill engine has its blocks back")
