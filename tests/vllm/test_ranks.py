"""An engine of two data-parallel ranks. As a decode engine, each rank pulls and keeps turns by
itself, and a turn goes to the rank that has the last one in its cache. As a prefill engine, a
prompt goes to the rank that has its beginning in its cache."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from router.fleet.kv_facts import ranks_of_metrics, ranks_of_page
from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
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
    # The engine chooses the rank of a first turn.
    options = ("--decode-first-turns", "0", "--decode-policy", "power_of_two")
    with fleet.router([prefiller], [decoder], *options) as server:
        asked = 'GET /disagg/identity HTTP/1.1" 200'
        wait_for(lambda: asked in decoder.log.read_text(), "the router has heard of both ranks")
        yield server


def answered(decoder: Server) -> list[float]:
    """How many requests each rank has."""
    name = r'vllm:request_success_total\{{.*engine="{}".*finished_reason="length".*\}}'
    return [metric(decoder, name.format(rank)) for rank in RANKS]


def asked_for(decoder: Server, ask: Callable[[], Answer]) -> tuple[Answer, int]:
    """The answer, and the rank that gave it."""
    before = answered(decoder)
    answer = ask()
    wait_for(lambda: sum(answered(decoder)) == sum(before) + 1, "it is counted")
    after = answered(decoder)
    return answer, [now - then for now, then in zip(after, before, strict=True)].index(1)


def test_turns_are_those_of_one_vllm_and_stay_at_their_rank(
    router: Server, prefiller: Server, decoder: Server, alone: Server
) -> None:
    homes = set()
    with nothing_left(prefiller):
        for number in range(6):
            prompt = tokens_of(LENGTH, 9500 + number)
            ask = partial(complete, router, conversation_id=f"rank-{number}")
            first, home = asked_for(decoder, partial(ask, prompt))
            longer = [*prompt, *first.tokens, *tokens_of(40, 9600 + number)]
            fetched = metric(decoder, FETCHED)
            second, rank = asked_for(decoder, partial(ask, longer))
            assert differences([complete(alone, prompt)], [first]) == []
            assert differences([complete(alone, longer)], [second]) == []
            assert rank == home
            assert metric(decoder, FETCHED) - fetched < LENGTH, "the rest was in its cache"
            homes.add(home)
    assert homes == set(RANKS), "or they were all of one, for another reason"


def test_metrics_show_the_ranks_and_caches_of_the_identity_page(decoder: Server) -> None:
    page = ranks_of_page(decoder.get("/disagg/identity").json())
    assert [rank.number for rank in page] == list(RANKS)
    assert ranks_of_metrics(decoder.get("/metrics").text) == page


def test_prompts_go_to_the_rank_that_has_their_beginning(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server
) -> None:
    hits = r'vllm:prefix_cache_hits_total\{{.*engine="{}".*\}}'
    homes = set()
    with fleet.router([decoder], [prefiller], "--prefill-policy", "prefix") as router:
        for number in range(4):
            prompt = tokens_of(2 * LENGTH, 9700 + number)
            longer = [*prompt, *tokens_of(40, 9800 + number)]
            _, home = asked_for(decoder, partial(complete, router, prompt))
            before = metric(decoder, hits.format(home))
            for _ in range(2):
                answer, rank = asked_for(decoder, partial(complete, router, longer))
                assert rank == home
            assert metric(decoder, hits.format(home)) - before >= 2 * LENGTH
            assert differences([complete(alone, longer)], [answer]) == []
            homes.add(home)
    assert homes == set(RANKS)
