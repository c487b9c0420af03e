"""Engines meet before a user's request needs them: the handshake is over when it comes."""

import pytest

from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import CONNECTORS, Launcher, Server, described, metric, wait_for

HANDSHAKES = "disagg_engine_kv_handshake_seconds_count"
WARMED = "disagg_router_warm_ups_total"


@pytest.mark.parametrize(
    ("prefiller", "decoder"),
    [
        (described("prefill", connector=connector), described("decode", connector=connector))
        for connector in CONNECTORS.values()
    ],
    ids=CONNECTORS,
    indirect=True,
)
def test_the_first_request_of_a_pair_shakes_no_hands(
    launcher: Launcher, prefiller: Server, decoder: Server, alone: Server
) -> None:

    def handshakes() -> float:
        return metric(prefiller, HANDSHAKES) + metric(decoder, HANDSHAKES)

    assert handshakes() == 0
    with launcher.router([prefiller], [decoder], "--warm-up", "eager") as router:
        wait_for(lambda: router.metrics().get(f'{WARMED}{{outcome="done"}}') == 1, "no warm-up")
        before = handshakes()
        assert before >= 1
        prompt = text_of(300, 5)
        assert not differences([complete(alone, prompt)], [complete(router, prompt)])
        assert handshakes() == before
