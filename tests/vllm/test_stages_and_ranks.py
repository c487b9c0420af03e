"""Two pipeline stages of two tensor-parallel ranks each, beside engines of two stages or of one."""

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.legs import decode, decode_body, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, post_and_leave, wait_for
from tests.vllm import mended_pipeline
from tests.vllm.measures import RUNNING, WAITING, nothing_left
from tests.vllm.servers import OURS, PUSH, SCHEDULER, Kind
from tests.vllm.test_pipeline import STAGES, Servers, a_turn_is_right, prompts_are_right
from tests.vllm.test_push import both_legs
from tests.vllm.test_state import pulled

pytestmark = pytest.mark.nightly

RANKS = ("--tensor-parallel-size", "2")
PAIRS = ("both one", "one both", "both staged", "staged both")


def with_ranks(transfer: Mapping[str, Any]) -> dict[str, Kind]:
    mended: dict[str, Any] = {"plugins": (mended_pipeline,)}
    return {
        "both": Kind("tp-pp", transfer, (*SCHEDULER, *STAGES, *RANKS), **mended),
        "staged": Kind("pp-beside", transfer, (*SCHEDULER, *STAGES), **mended),
        "one": Kind("one-beside", transfer, SCHEDULER),
    }


pulling = pytest.mark.parametrize("servers", [with_ranks(OURS)], indirect=True, ids=["pull"])
pushing = pytest.mark.parametrize("servers", [with_ranks(PUSH)], indirect=True, ids=["push"])


@pulling
@pytest.mark.parametrize("pair", PAIRS)
def test_prompts_are_those_of_one_engine_alone(servers: Servers, pair: str) -> None:
    prefiller, decoder = (servers[name] for name in pair.split())
    with nothing_left(prefiller, decoder):
        seed = 50_000 + 10_000 * PAIRS.index(pair)
        prompts_are_right(prefiller, decoder, servers["one"], pulled, seed)


@pulling
@pytest.mark.parametrize("pair", PAIRS)
def test_a_turn_prefills_only_what_is_new(servers: Servers, pair: str) -> None:
    prefiller, decoder = (servers[name] for name in pair.split())
    a_turn_is_right(prefiller, decoder, servers["one"], 90_000 + PAIRS.index(pair))


@pulling
def test_clients_that_leave_leave_nothing_behind(servers: Servers) -> None:
    """At any moment of a load, some before it has begun."""
    prefiller, decoder = servers["staged"], servers["both"]
    moments = random.Random(5)

    def ask(number: int) -> None:
        prompt = tokens_of(moments.choice([300, 700, 1500]), 800 + number)
        body = decode_body(prompt, prefill(prefiller, prompt))
        with post_and_leave(decoder, body, f"leaving-{number}"):
            if number % 2:
                decode(decoder, prompt[:40], {})

    with nothing_left(prefiller, decoder, seconds=40):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(40)))
        wait_for(lambda: not _has_work(decoder), "the decode engine heard that all have left")
    prompt = tokens_of(900, 999)
    answer = pulled(prefiller, decoder, prompt).answer
    assert differences([complete(servers["one"], prompt)], [answer]) == []


def _has_work(server: Server) -> bool:
    return metric(server, RUNNING) + metric(server, WAITING) > 0


@pushing
@pytest.mark.parametrize("pair", PAIRS)
def test_pushed_prompts_are_those_of_one_engine_alone(servers: Servers, pair: str) -> None:
    prefiller, decoder = (servers[name] for name in pair.split())
    with nothing_left(prefiller):  # D keeps the turns.
        seed = 150_000 + 10_000 * PAIRS.index(pair)
        prompts_are_right(prefiller, decoder, servers["one"], both_legs, seed)
