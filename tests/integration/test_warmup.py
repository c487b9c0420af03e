"""Engines meet before a user's request needs them: the handshake is over when it comes."""

from collections.abc import Iterator

import pytest

from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import CONNECTORS, Launcher, Server, metric, wait_for

HANDSHAKES = "disagg_engine_kv_handshake_seconds_count"
WARMED = "disagg_router_warm_ups_total"


@pytest.fixture(params=["pull", "push"])
def pair(launcher: Launcher, request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    connector = CONNECTORS[request.param]
    with (
        launcher.engine("prefill", connector=connector) as p,
        launcher.engine("decode", connector=connector) as d,
    ):
        yield p, d


def test_the_first_request_of_a_pair_shakes_no_hands(
    launcher: Launcher, pair: tuple[Server, Server], alone: Server
) -> None:
    p, d = pair

    def handshakes() -> float:
        return metric(p, HANDSHAKES) + metric(d, HANDSHAKES)

    assert handshakes() == 0
    with launcher.router([p], [d], "--warm-up", "eager") as router:
        wait_for(lambda: router.metrics().get(f'{WARMED}{{outcome="done"}}') == 1, "no warm-up")
        before = handshakes()
        assert before >= 1
        prompt = text_of(300, 5)
        assert not differences([complete(alone, prompt)], [complete(router, prompt)])
        assert handshakes() == before
