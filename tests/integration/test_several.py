"""Several answers to one prompt (`n`): one prefill, one read, and nothing is left."""

import json
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.integration.oracle import body_of, text_of
from tests.integration.processes import (
    BOTH_WAYS,
    CONNECTORS,
    Launcher,
    Server,
    is_settled,
    metric,
    post_and_leave,
    wait_for,
)

COMPUTED = "disagg_engine_prompt_tokens_computed_total"
FETCHED = "disagg_engine_prompt_tokens_fetched_total"
EXPIRED = "disagg_engine_kv_leases_expired_total"
LEASES = "disagg_engine_kv_leases_active"
LENGTH = 500
SAMPLED: dict[str, Any] = {"n": 3, "temperature": 0.8, "seed": 5, "logprobs": 2}


@pytest.fixture(scope="module", params=["pull", "push"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prefiller(launcher: Launcher, mode: str) -> Iterator[Server]:
    connector = CONNECTORS[mode]
    with launcher.engine("prefill", extra=BOTH_WAYS, connector=connector) as server:
        yield server


@pytest.fixture(scope="module")
def decoder(launcher: Launcher, mode: str) -> Iterator[Server]:
    connector = CONNECTORS[mode]
    with launcher.engine("decode", extra=BOTH_WAYS, connector=connector) as server:
        yield server


@pytest.fixture(scope="module")
def router(launcher: Launcher, prefiller: Server, decoder: Server) -> Iterator[Server]:
    with launcher.router([prefiller], [decoder]) as server:
        wait_for(lambda: _is_shared(server, prefiller), "its engines are known", 30)
        yield server


def _is_shared(router: Server, prefiller: Server) -> bool:
    """Until a decoder has said that it can, it answers alone."""
    before = metric(prefiller, COMPUTED)
    choices_of(router, text_of(64, 1), n=2, max_tokens=1)
    return metric(prefiller, COMPUTED) > before


def choices_of(server: Server, prompt: str, **fields: Any) -> list[tuple[object, ...]]:
    response = server.post("/v1/completions", body_of(prompt, SAMPLED | fields))
    assert response.status_code == 200, response.text
    choices = sorted(response.json()["choices"], key=lambda choice: int(choice["index"]))
    return [(choice["token_ids"], choice["text"], choice["finish_reason"]) for choice in choices]


def all_is_back(*servers: Server) -> None:
    for server in servers:
        wait_for(partial(_is_back, server), f"{server.name} has its blocks back", 30)


def _is_back(server: Server) -> bool:
    return is_settled(server.metrics()) and not metric(server, LEASES)


@pytest.mark.parametrize("number", [2, 3, 8])
def test_they_are_those_of_one_engine_alone_and_are_read_once(
    router: Server, prefiller: Server, decoder: Server, alone: Server, number: int
) -> None:
    prompt = text_of(LENGTH, 100 + number)
    servers, expired = (prefiller, decoder), metric(prefiller, EXPIRED)
    before = [metric(server, COMPUTED) for server in servers], metric(decoder, FETCHED)
    assert choices_of(router, prompt, n=number) == choices_of(alone, prompt, n=number)
    at_p, at_d = (
        metric(server, COMPUTED) - old for server, old in zip(servers, before[0], strict=True)
    )
    assert at_p == LENGTH
    assert metric(decoder, FETCHED) - before[1] == LENGTH
    assert at_d <= 64 * number, "each computes the end of the prompt, which is no whole block"
    all_is_back(*servers)
    assert metric(prefiller, EXPIRED) == expired


def test_a_stream_of_several_is_theirs(router: Server, alone: Server) -> None:
    prompt = text_of(LENGTH, 120)
    bodies = [
        server.post("/v1/completions", body_of(prompt, SAMPLED | {"stream": True})).text
        for server in (router, alone)
    ]
    assert all(body.endswith("data: [DONE]\n\n") for body in bodies)
    assert _said(bodies[0]) == _said(bodies[1])


def _said(stream: str) -> dict[int, str]:
    said: dict[int, str] = {}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    return said


def test_a_client_that_leaves_leaves_no_block_behind(
    router: Server, prefiller: Server, decoder: Server
) -> None:
    body = body_of(text_of(LENGTH, 130), SAMPLED | {"stream": True, "max_tokens": 400})
    running = "disagg_engine_requests_running"
    with post_and_leave(router, body, "several"):
        wait_for(lambda: metric(decoder, running) == 3, "all three run", 20)
    all_is_back(prefiller, decoder)


def test_who_leaves_before_they_are_read_leaves_none_either(
    router: Server, prefiller: Server, decoder: Server
) -> None:
    body = body_of(text_of(1500, 131), SAMPLED | {"stream": True})
    granted = "disagg_engine_kv_leases_granted_total"
    before = metric(prefiller, granted)
    with decoder.frozen(), post_and_leave(router, body, "several-early"):
        wait_for(lambda: metric(prefiller, granted) > before, "P has its lease", 20)
    all_is_back(prefiller, decoder)


def test_a_decoder_that_is_killed_costs_p_its_lease_and_no_more(
    launcher: Launcher, prefiller: Server, mode: str
) -> None:
    extra = {**BOTH_WAYS, "kv_lease_duration": 3}
    with (
        launcher.engine("mortal", extra=extra, connector=CONNECTORS[mode]) as mortal,
        launcher.router([prefiller], [mortal]) as router,
    ):
        wait_for(lambda: _is_shared(router, prefiller), "its engines are known", 30)
        body = body_of(text_of(LENGTH, 132), SAMPLED | {"stream": True, "max_tokens": 400})
        running = "disagg_engine_requests_running"
        with post_and_leave(router, body, "killed"):
            wait_for(lambda: metric(mortal, running) == 3, "all three run", 20)
            mortal.process.send_signal(signal.SIGKILL)
            mortal.process.wait(10)
    all_is_back(prefiller)
