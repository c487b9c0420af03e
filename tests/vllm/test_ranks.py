"""A decode engine of two data-parallel ranks: each pulls and keeps turns by itself, and a turn goes
to the rank that has the last one in its cache."""

from collections.abc import Iterator

import pytest

from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Launcher, Server, metric, wait_for
from tests.vllm.measures import FETCHED, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind

RANKS = (0, 1)
LENGTH = 300


@pytest.fixture(scope="module")
def decoder(fleet: Fleet) -> Iterator[Server]:
    kind = Kind("ranks-d", OURS, (*SCHEDULER, "--data-parallel-size", "2"))
    with fleet.server(kind) as server:
        yield server


@pytest.fixture(scope="module")
def router(fleet: Fleet, prefiller: Server, decoder: Server) -> Iterator[Server]:
    launcher = Launcher(fleet.logs, fleet.model, fleet.free_ports)
    with launcher.router([prefiller], [decoder], "--decode-first-turns", "0") as server:
        asked = 'GET /disagg/identity HTTP/1.1" 200'
        wait_for(lambda: asked in decoder.log.read_text(), "the router has heard of both ranks")
        yield server


def answered(decoder: Server) -> list[float]:
    """How many requests each rank has."""
    name = r'vllm:request_success_total\{{.*engine="{}".*finished_reason="length".*\}}'
    return [metric(decoder, name.format(rank)) for rank in RANKS]


def test_turns_are_those_of_one_vllm_and_stay_at_their_rank(
    router: Server, prefiller: Server, decoder: Server, alone: Server
) -> None:
    homes = set()
    with nothing_left(prefiller):
        for number in range(6):
            prompt, name = tokens_of(LENGTH, 9500 + number), f"rank-{number}"
            before = answered(decoder)
            first = complete(router, prompt, conversation_id=name)
            between = answered(decoder)
            longer = [*prompt, *first.tokens, *tokens_of(40, 9600 + number)]
            fetched = metric(decoder, FETCHED)
            second = complete(router, longer, conversation_id=name)
            assert differences([complete(alone, prompt)], [first]) == []
            assert differences([complete(alone, longer)], [second]) == []
            assert metric(decoder, FETCHED) - fetched < LENGTH, "the rest was in its cache"
            home = [after - earlier for after, earlier in zip(between, before, strict=True)]
            wait_for(lambda: sum(answered(decoder)) == sum(between) + 1, "it is counted")  # noqa: B023
            after = answered(decoder)
            assert [now - then for now, then in zip(after, between, strict=True)] == home
            homes.add(home.index(1))
    assert homes == set(RANKS)
