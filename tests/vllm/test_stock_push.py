"""Push beside stock engines (NixlPushConnector): ours writes to a stock decode engine. A stock
prefill engine promises no end of its WRITEs, so ours registers nothing with one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import COMPUTED, FETCHED, counted, nothing_left
from tests.vllm.releases import BUILD, RELEASES, of_next
from tests.vllm.servers import PUSH, SCHEDULER, STOCK, UNCACHED, Fleet, Kind
from tests.vllm.test_push import both_legs

STOCK_PUSH: dict[str, Any] = {
    **STOCK,
    "kv_connector": "NixlPushConnector",
    "kv_connector_extra_config": {},  # it has no part in turns
}
# What each leg is asked ends in the same X-Request-Id: stock 0.32 and 0.33 send no transfer_id.
BY_REQUEST: dict[str, Any] = {
    **PUSH,
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"trust_request_ids": True},
}
LENGTHS = (1, 31, 32, 33, 200, 700, 1500)


@pytest.fixture(scope="module", params=RELEASES)
def three(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    release = fleet if request.param == BUILD else of_next(fleet)
    with release.servers(
        Kind("beside-stock-p", BY_REQUEST, (*SCHEDULER, UNCACHED)),
        Kind("beside-stock-d", BY_REQUEST, (*SCHEDULER, UNCACHED)),
        Kind("stock-push", STOCK_PUSH, (UNCACHED,)),
    ) as servers:
        yield servers


def test_a_stock_decoder_is_written_what_one_vllm_alone_computes(three: list[Server]) -> None:
    prefiller, other, stock = three
    prompts = [tokens_of(length, 9700 + length) for length in LENGTHS]
    fetched, pushed = metric(stock, FETCHED), counted(prefiller, "pushes_ok")
    right = [complete(other, prompt) for prompt in prompts]
    with nothing_left(prefiller):
        turns = [both_legs(prefiller, stock, prompt) for prompt in prompts]
        assert differences(right, [turn.answer for turn in turns]) == []
        with ThreadPoolExecutor(3) as pool:
            turns = list(pool.map(partial(both_legs, prefiller, stock), prompts))
        assert differences(right, [turn.answer for turn in turns]) == []
    assert metric(stock, FETCHED) - fetched == 2 * (sum(LENGTHS) - 1)
    assert counted(prefiller, "pushes_ok") - pushed == 2 * len(LENGTHS)


def test_nothing_is_awaited_of_a_stock_prefiller(three: list[Server]) -> None:
    """The decode engine computes the prompt: what a stock engine may write, and until when, it
    does not say."""
    _, decoder, stock = three
    prompt = tokens_of(300, 9800)
    right = complete(stock, prompt)
    fetched, computed = metric(decoder, FETCHED), metric(decoder, COMPUTED)
    turn = decode(decoder, prompt, prefill(stock, prompt))
    assert differences([right], [turn.answer]) == []
    assert metric(decoder, FETCHED) == fetched
    assert metric(decoder, COMPUTED) - computed == len(prompt)
    assert "P gives no bound for its WRITEs (push_write_bound)" in decoder.log.read_text()
