"""Decoders whose caches are too small for what they are asked: what one hands back, a prefiller
computes and another goes on with. The oracle is one engine that nobody disturbed."""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.integration.oracle import (
    Answer,
    all_decoded_together,
    complete,
    differences,
    streamed,
    text_of,
)
from tests.integration.processes import BOTH_WAYS, Launcher, Server, described, metric, wait_for

LONG = 150
PROMPTS = [text_of(length, 9000 + length) for length in (40, 64, 200, 333, 41, 90, 128, 250)]
FEW = ("--num-blocks", "24")
HANDED_BACK = 'disagg_engine_requests_finished_total{reason="cache_threshold"}'


PREFILLER = described("prefill", extra=BOTH_WAYS)


@pytest.fixture(scope="module")
def decoders(launcher: Launcher) -> Iterator[list[Server]]:
    with (
        launcher.engine("small", *FEW, extra=BOTH_WAYS) as one,
        launcher.engine("smaller", *FEW, extra=BOTH_WAYS) as other,
    ):
        yield [one, other]


@pytest.fixture(scope="module")
def right(alone: Server) -> list[Answer]:
    return [complete(alone, prompt, LONG) for prompt in PROMPTS]


def is_free(server: Server) -> bool:
    return metric(server, "disagg_engine_blocks") == metric(server, "disagg_engine_blocks_free")


def handed_back(servers: list[Server]) -> float:
    return sum(server.metrics().get(HANDED_BACK, 0) for server in servers)


def moved(router: Server) -> float:
    return metric(router, r"disagg_router_resumes_total\{.*preempted.*resumed.*\}")


def ask(server: Server, number: int) -> Answer:
    """Every other answer is streamed."""
    prompt = PROMPTS[number]
    return streamed(server, prompt, LONG) if number % 2 else complete(server, prompt, LONG)


@pytest.mark.parametrize("how_many", [1, 2])
def test_what_is_handed_back_goes_on(
    launcher: Launcher,
    prefiller: Server,
    decoders: list[Server],
    right: list[Answer],
    how_many: int,
) -> None:
    used = decoders[:how_many]
    before = handed_back(used)
    options = ("--decode-policy", "round_robin", "--health-timeout", "90")
    with launcher.router([prefiller], used, *options) as router:
        asks = [partial(ask, router, number) for number in range(len(PROMPTS))]
        assert differences(right, all_decoded_together(router, used, asks)) == []
        assert moved(router) == handed_back(used) - before > 0
        for server in (*used, prefiller):
            wait_for(lambda server=server: is_free(server), f"{server.name} is free")  # type: ignore[misc]
        assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 0
        assert metric(router, r'disagg_router_requests_total\{.*outcome="ok".*\}') == len(PROMPTS)
