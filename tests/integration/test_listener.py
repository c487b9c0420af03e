"""The side channel of a peer that never answers. What a listener takes: unit/engine_ext/wire."""

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.integration.legs import decode_body, prefill
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import Launcher, Server, metric, wait_for


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port where connections are taken and nothing is ever said."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        yield silent.getsockname()[1]


def test_a_peer_that_never_answers_delays_no_other_peers_requests(
    launcher: Launcher, alone: Server
) -> None:
    prompt = text_of(90, 1)
    with (
        black_hole() as port,
        launcher.engine("prefill") as prefiller,
        launcher.engine("decode") as decoder,
        ThreadPoolExecutor(12) as pool,
    ):
        params = prefill(prefiller, prompt)
        # Without proof of other tokens, so that each of them is worth loading.
        unproven = {key: value for key, value in params.items() if key != "prefix_proof"}
        dead = [
            {**unproven, "remote_port": port, "remote_engine_id": f"dead-{number}"}
            for number in range(12)
        ]
        started = time.monotonic()
        hopeless = [
            pool.submit(decoder.post, "/v1/completions", decode_body(text_of(90, 10 + i), one))
            for i, one in enumerate(dead)
        ]
        waiting = "disagg_engine_requests_waiting_for_remote_kv"
        wait_for(lambda: metric(decoder, waiting) == 12, "all of them shake hands")
        response = decoder.post("/v1/completions", decode_body(prompt, params))
        assert not any(one.done() for one in hopeless)
        assert response.status_code == 200
        tokens = tuple(response.json()["choices"][0]["token_ids"])
        right = complete(alone, prompt)
        assert tokens == right.tokens
        assert [one.result(timeout=60).status_code for one in hopeless] == [500] * 12
        assert time.monotonic() - started < 60, "one after the other, it would take minutes"
        assert differences([right], [complete(decoder, prompt)]) == []
