"""Push mode inside vLLM: the prefill engine writes."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.legs import coordinates_in, decode, decode_body, prefill, prefill_body
from tests.integration.oracle import Answer, Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, wait_for
from tests.vllm.measures import counted, prompts
from tests.vllm.servers import PUSH, SCHEDULER, Fleet, Kind


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> Iterator[list[Server]]:
    kinds = (Kind(name, PUSH, SCHEDULER) for name in ("push-p", "push-d"))
    with fleet.servers(*kinds) as servers:
        yield servers


def where(prefiller: Server) -> dict[str, Any]:
    """P's coordinates, as P tells them to a router."""
    said = prefiller.get("/disagg/identity").json()
    assert said["transfer_modes"] == ["push"]
    (rank,) = said["ranks"]
    return coordinates_in(rank)


def test_pushed_prompts_are_those_of_one_vllm_alone(pair: list[Server], alone: Server) -> None:
    prefiller, decoder = pair
    at = where(prefiller)

    def ask(prompt: Prompt) -> Answer:
        request_id = str(uuid.uuid4())
        params = {"do_remote_prefill": True, "remote_request_id": request_id, **at}
        with ThreadPoolExecutor(2) as legs:
            p_leg = legs.submit(prefiller.post, "/v1/completions", prefill_body(prompt), request_id)
            d_leg = legs.submit(decode, decoder, prompt, params, 12, request_id)
            assert p_leg.result(timeout=60).status_code == 200
            return d_leg.result(timeout=60).answer

    pushed = counted(prefiller, "pushes_ok")
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(ask, prompts()))
    wait_for(lambda: counted(prefiller, "pushes_ok") - pushed == len(got), "all of it was pushed")
    assert differences([complete(alone, prompt) for prompt in prompts()], got) == []


@pytest.mark.parametrize("missing", ["everything", "remote_request_id", "remote_host", "tp_size"])
def test_r2_r3_params_with_a_key_missing_end_no_engine(
    pair: list[Server], alone: Server, missing: str
) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(100, 7)
    params = {"do_remote_prefill": True}
    if missing != "everything":
        params |= {**prefill(prefiller, prompt)}
        del params[missing]
    response = decoder.post("/v1/completions", decode_body(prompt, params))
    assert response.status_code == 200, response.text
    tokens = tuple(response.json()["choices"][0]["token_ids"])
    assert tokens == complete(alone, prompt).tokens


def test_an_engine_that_pushes_and_one_that_pulls_part_in_words(
    pair: list[Server], decoder: Server
) -> None:
    prompt = tokens_of(100, 8)
    params = prefill(pair[0], prompt)
    response = decoder.post("/v1/completions", decode_body(prompt, params))
    assert response.status_code == 500
    assert "transfer_mode (pull here, push there)" in decoder.log.read_text()
