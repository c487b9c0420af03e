"""Engines of different tensor parallel size: each reads from the other."""

from collections.abc import Iterator

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import FETCHED, counted, distributed, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind

LENGTHS = (1, 32, 33, 100, 257, 700, 1500)


@pytest.fixture(scope="module")
def two_ranks(fleet: Fleet) -> Iterator[Server]:
    options = (*SCHEDULER, "--tensor-parallel-size", "2")
    with fleet.server(Kind("two-ranks", OURS, options)) as server:
        yield server


@pytest.mark.parametrize("order", ["2 to 1", "1 to 2"])
def test_prompts_are_those_of_one_vllm_alone(
    prefiller: Server, decoder: Server, two_ranks: Server, alone: Server, order: str
) -> None:
    first, second = (two_ranks, decoder) if order == "2 to 1" else (prefiller, two_ranks)
    before = metric(second, FETCHED)
    reads = distributed(second, "vllm:nixl_bytes_transferred")
    received = counted(second, "bytes_received")
    with nothing_left(first):
        for length in LENGTHS:
            prompt = tokens_of(length, 50_000 + length + 2000 * (order == "2 to 1"))
            params = prefill(first, prompt)
            assert params["tp_size"] == (2 if first is two_ranks else 1)
            turn = decode(second, prompt, params)
            assert differences([complete(alone, prompt)], [turn.answer]) == [], length
    assert metric(second, FETCHED) - before == sum(LENGTHS) - 1
    # One READ from each rank, or by each rank.
    times, total = distributed(second, "vllm:nixl_bytes_transferred")
    assert times - reads.times == 2 * len(LENGTHS)
    assert total - reads.total == counted(second, "bytes_received") - received
