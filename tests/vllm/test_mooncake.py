"""The router with vLLM's own MooncakeConnector, over TCP, without our extension: it moves KV, and
nobody holds any after a request that did not come to its end."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import find_free_ports
from tests.integration.oracle import complete, differences, streamed, tokens_of
from tests.integration.processes import Server, metric, pause, post_and_leave, wait_for
from tests.vllm.measures import COMPUTED, FETCHED, RUNNING, nothing_left
from tests.vllm.releases import RELEASES, python_of
from tests.vllm.servers import UNCACHED, Fleet, Kind

INSTALL = Path(__file__).parents[2] / "scripts" / "install_mooncake"
LENGTHS = (1, 31, 32, 33, 200, 1500)
"""Of prompts."""
TIMEOUT, SOON = 30, 20
"""Seconds after which engines give up a transfer by themselves, and a time before that."""
LONG = 120
"""Tokens of an answer that is under way for a while."""


def mooncake(name: str, role: str, bootstrap_port: int, *options: str) -> Kind:
    run = subprocess.run([str(INSTALL)], check=True, stdout=subprocess.PIPE, text=True)
    transfer: dict[str, Any] = {
        "kv_connector": "MooncakeConnector",
        "kv_connector_module_path": "tests.vllm.mooncake_on_cpu",
        "kv_role": role,
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    environment = {
        "DISAGG_MOONCAKE": run.stdout.splitlines()[-1],
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(TIMEOUT),
        "VLLM_HOST_IP": "127.0.0.1",
    }
    return Kind(name, transfer, (UNCACHED, *options), environment=environment)


@dataclass
class Mooncake:
    """A prefill engine, two decode engines and a router."""

    fleet: Fleet
    bootstrap_port: int
    p: Server
    ds: list[Server]
    router: Server = field(init=False)

    @property
    def prefiller(self) -> Kind:
        return mooncake("mooncake-p", "kv_producer", self.bootstrap_port)


def in_use(engines: Mooncake) -> float:
    """1 if the router holds the prefill engine for healthy."""
    name = rf'disagg_router_engine_healthy\{{.*127.0.0.1:{engines.p.port}".*\}}'
    return max(0.0, metric(engines.router, name))


@pytest.fixture(scope="module", params=RELEASES)
def engines(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Mooncake]:
    fleet = replace(fleet, python=python_of(fleet, request.param))
    ports = find_free_ports(3)
    decoders = [mooncake(f"mooncake-d{n}", "kv_consumer", port) for n, port in enumerate(ports[1:])]
    prefiller = mooncake("mooncake-p", "kv_producer", ports[0])
    with ExitStack() as stack:
        p, *ds = stack.enter_context(fleet.servers(prefiller, *decoders))
        found = Mooncake(fleet, ports[0], p, ds)
        options = ("--bootstrap-port", str(ports[0]))
        found.router = stack.enter_context(fleet.router([p], ds, *options))
        for number in range(4):  # each of the two decode engines meets the prefill engine
            complete(found.router, tokens_of(40, number))
        yield found


def test_answers_are_those_of_one_vllm_alone(engines: Mooncake, alone: Server) -> None:
    before = metric(engines.p, COMPUTED), sum(metric(d, FETCHED) for d in engines.ds)
    with nothing_left(engines.p, *engines.ds):
        for length in LENGTHS:
            prompt = tokens_of(length, 100 + length)
            right = complete(alone, prompt)
            got = [complete(engines.router, prompt), streamed(engines.router, prompt, 12)]
            assert differences([right, right], got) == []
    computed = metric(engines.p, COMPUTED) - before[0]
    assert computed == 2 * sum(LENGTHS)
    # A decode engine computes the last token of each prompt, which vLLM counts as fetched unless
    # it is the only one.
    assert sum(metric(d, FETCHED) for d in engines.ds) - before[1] == computed - 2


def test_prefill_engine_keeps_kv_of_an_answer_that_ends_with_its_first_token(
    engines: Mooncake, alone: Server
) -> None:
    prompt = tokens_of(300, 7)
    first = complete(alone, prompt, 1).tokens[0]
    before = sum(metric(d, FETCHED) for d in engines.ds)
    right, got = (
        complete(server, prompt, stop_token_ids=[first]) for server in (alone, engines.router)
    )
    assert differences([right], [got]) == []
    assert sum(metric(d, FETCHED) for d in engines.ds) - before == 300


def test_client_that_leaves_has_nothing_held_for_it(engines: Mooncake) -> None:
    body = {"model": "tiny", "ignore_eos": True, "max_tokens": LONG, "temperature": 0}
    with nothing_left(engines.p, *engines.ds, seconds=SOON):
        for number, moment in enumerate((0.0, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4)):
            prompt = tokens_of(1500, 400 + number)
            with post_and_leave(engines.router, {**body, "prompt": prompt}):
                pause(moment, "the request is somewhere on its way")


def test_decode_engine_that_is_killed_costs_no_answer_and_holds_nothing_at_the_other(
    engines: Mooncake, alone: Server
) -> None:
    prompts = [tokens_of(1500, 500 + number) for number in range(6)]
    fields = {"ignore_eos": True}
    right = [complete(alone, prompt, LONG, **fields) for prompt in prompts]
    gone = engines.ds.pop(0)
    # The other one asks for the KV in its place. What had been read it awaits in vain, in a block.
    with (
        nothing_left(*engines.ds, seconds=2 * TIMEOUT),
        nothing_left(engines.p, seconds=SOON),
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        got = [pool.submit(complete, engines.router, one, LONG, **fields) for one in prompts]
        wait_for(lambda: metric(gone, RUNNING), "an answer is under way")
        gone.kill()
        assert differences(right, [one.result() for one in got]) == []


def test_prefill_engine_that_restarts_is_used_again_under_its_new_id(
    engines: Mooncake, alone: Server
) -> None:
    port, router = engines.p.port, engines.router
    engines.p.kill()
    wait_for(lambda: not in_use(engines), "the router has noticed")
    prompt = tokens_of(700, 9)
    right = complete(alone, prompt)
    assert differences([right], [complete(router, prompt)]) == []  # the decode engine computes it
    kind = replace(engines.prefiller, port=port)
    with engines.fleet.server(kind) as engines.p:
        wait_for(lambda: in_use(engines), "it is in use again")
        before = metric(engines.ds[-1], FETCHED)
        assert differences([right], [complete(router, prompt)]) == []
        assert metric(engines.ds[-1], FETCHED) - before >= 700  # and that of a warm-up, perhaps


def test_kv_comes_from_the_rank_that_has_computed_it(fleet: Fleet, alone: Server) -> None:
    ports = find_free_ports(2)
    two = mooncake("mooncake-ranks", "kv_producer", ports[0], "--data-parallel-size", "2")
    one = mooncake("mooncake-of-ranks", "kv_consumer", ports[1])
    with (
        fleet.servers(two, one) as (p, d),
        fleet.router([p], [d], "--bootstrap-port", str(ports[0])) as router,
    ):
        for number in range(6):
            prompt = tokens_of(200, 600 + number)
            assert differences([complete(alone, prompt)], [complete(router, prompt)]) == []
        assert metric(d, FETCHED) == 6 * 200
        for rank in range(2):
            by_rank = COMPUTED.replace(".*", rf'.*engine="{rank}".*')
            assert metric(p, by_rank) > 0
