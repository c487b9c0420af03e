"""Stock engines of the newest release beside ours in it, either way round: as test_stock does."""

from collections.abc import Iterator

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import tokens_of
from tests.integration.processes import Server
from tests.vllm.releases import of_next
from tests.vllm.servers import OURS, SCHEDULER, STOCK, TRUSTING, Fleet, Kind

# They ask for a prefiller, a decoder, a stock engine and one that answers alone: this file's.
from tests.vllm.test_stock import (  # noqa: F401
    either_way,
    test_a_request_that_the_decoder_rejects_frees_the_prefiller,
    test_prompts_are_those_of_one_vllm_alone,
    test_the_router_lets_nobody_pull_what_is_not_surely_the_same,
    test_two_turns_are_those_of_one_vllm_alone,
)

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def trio(fleet: Fleet) -> Iterator[list[Server]]:
    with of_next(fleet).servers(
        Kind("next-p", TRUSTING, (*SCHEDULER, "--no-enable-prefix-caching")),
        Kind("next-d", OURS, SCHEDULER),
        Kind("next-stock", STOCK, ("--no-enable-prefix-caching",)),
    ) as servers:
        # A stock decoder gives nothing back to a prefiller that it has never pulled from.
        prompt = tokens_of(40, 7400)
        decode(servers[2], prompt, prefill(servers[0], prompt))
        yield servers


@pytest.fixture(scope="module")
def prefiller(trio: list[Server]) -> Server:
    return trio[0]


@pytest.fixture(scope="module")
def decoder(trio: list[Server]) -> Server:
    return trio[1]


@pytest.fixture(scope="module")
def stock(trio: list[Server]) -> Server:
    return trio[2]


@pytest.fixture
def alone(pair: tuple[Server, Server], prefiller: Server, stock: Server) -> Server:
    """Without params, and without a prefix cache, either answers by itself: the one that does not
    prefill here, for that one's work is counted."""
    return stock if pair[0] is prefiller else prefiller
