"""Push mode where neither engine has room for all that it is asked for: everything moves on."""

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.legs import Turn, coordinates_in, decode, prefill
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import Launcher, Server, metric, wait_for

PUSH = "DisaggPushConnector"
SMALL = ("--num-blocks", "48", "--no-enable-prefix-caching")
"""47 of 32 tokens: one prompt of 900 tokens fits, and no second one beside."""
WAITING = "disagg_engine_requests_waiting"
FOR_KV = "disagg_engine_requests_waiting_for_remote_kv"
GIVEN_BACK = "disagg_engine_kv_pushes_given_back_total"


@pytest.fixture
def pair(launcher: Launcher) -> Iterator[tuple[Server, Server]]:
    with (
        launcher.engine("small-p", *SMALL, connector=PUSH) as prefiller,
        launcher.engine("small-d", *SMALL, connector=PUSH) as decoder,
    ):
        yield prefiller, decoder


class Legs:
    """Requests whose legs come when the test says so."""

    def __init__(self, pool: ThreadPoolExecutor, prefiller: Server, decoder: Server) -> None:
        self.pool, self.prefiller, self.decoder = pool, prefiller, decoder
        self.where = coordinates_in(prefiller.get("/disagg/identity").json()["ranks"][0])

    def decode(self, prompt: str, name: str) -> Future[Turn]:
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": name,
            **self.where,
        }
        return self.pool.submit(decode, self.decoder, prompt, params, request_id=name)

    def prefill(self, prompt: str, name: str) -> Future[dict[str, Any]]:
        return self.pool.submit(prefill, self.prefiller, prompt, request_id=name)


def test_two_prompts_in_opposite_order_are_both_answered_where_one_fits(
    pair: tuple[Server, Server], alone: Server
) -> None:
    prefiller, decoder = pair
    first, second = text_of(900, 5100), text_of(900, 5101)
    right = [complete(alone, first), complete(alone, second)]
    with ThreadPoolExecutor(4) as pool:
        legs = Legs(pool, prefiller, decoder)
        a, b = str(uuid.uuid4()), str(uuid.uuid4())
        decoded_b = legs.decode(second, b)
        wait_for(lambda: metric(decoder, FOR_KV) == 1, "D has registered the second one")
        decoded_a = legs.decode(first, a)
        wait_for(lambda: metric(decoder, WAITING) == 1, "the first one has no room at D")
        legs.prefill(first, a).result(timeout=30)
        legs.prefill(second, b)
        got = [decoded_a.result(timeout=20).answer, decoded_b.result(timeout=20).answer]
    assert differences(right, got) == []
    assert metric(decoder, GIVEN_BACK) == 1


def test_clients_that_ask_for_more_than_fits_are_all_answered(
    launcher: Launcher, pair: tuple[Server, Server], alone: Server
) -> None:
    """Both legs at once, as a router sends them, of prompts of many lengths."""
    prefiller, decoder = pair
    prompts = [text_of(80 + 97 * number % 1200, 5200 + number) for number in range(36)]
    right = [complete(alone, prompt) for prompt in prompts]
    with ThreadPoolExecutor(72) as pool:
        legs = Legs(pool, prefiller, decoder)
        names = [str(uuid.uuid4()) for _ in prompts]
        asked = list(zip(prompts, names, strict=True))
        for prompt, name in reversed(asked):
            legs.prefill(prompt, name)
        decoded = [legs.decode(prompt, name) for prompt, name in asked]
        got = [leg.result(timeout=60).answer for leg in decoded]
    assert differences(right, got) == []
