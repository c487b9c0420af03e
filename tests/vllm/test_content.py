"""What a request's KV depends on: the proof and vLLM's own prefix cache are of one opinion."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.legs import decode_body, prefill_body
from tests.integration.oracle import tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import FETCHED, nothing_left
from tests.vllm.servers import INSIDE_SECONDS, Fleet

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def judged(fleet: Fleet) -> dict[str, Any]:
    done = subprocess.run(
        [fleet.python, ROOT / "tests" / "vllm" / "content_of_requests.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=INSIDE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_proof_shares_exactly_what_vllms_own_prefix_cache_would(judged: dict[str, Any]) -> None:
    assert judged["proof"] == judged["vllm"]


def test_requests_that_differ_in_one_thing_never_share_all(judged: dict[str, Any]) -> None:
    for one, row in zip(judged["names"], judged["proof"], strict=True):
        whole = [other for other, tokens in zip(judged["names"], row, strict=True) if tokens == 32]
        assert whole == [one]


@pytest.mark.parametrize("what", ["embeddings", "a client's name", "counted media"])
def test_what_has_no_name_of_its_content_is_never_shared(judged: dict[str, Any], what: str) -> None:
    assert judged["nameless"][what] is None


@pytest.mark.parametrize(("salt", "fetched"), [("x", 200), ("y", 0), (None, 0)])
def test_a_decoder_loads_what_was_prefilled_under_its_own_salt_only(
    prefiller: Server, decoder: Server, salt: str | None, fetched: int
) -> None:
    prompt = tokens_of(200, 4711)
    with nothing_left(prefiller):
        leg = {**prefill_body(prompt), "cache_salt": "x"}
        params = prefiller.post("/v1/completions", leg).json()["kv_transfer_params"]
        before = metric(decoder, FETCHED)
        body = {**decode_body(prompt, params), **({} if salt is None else {"cache_salt": salt})}
        assert decoder.post("/v1/completions", body).status_code == 200
        assert metric(decoder, FETCHED) - before == fetched
