"""The canary, between stock vLLM's engines: wrong KV is found at the first load that is wrong, and
the client gets the right answer. Healthy engines raise no alarm.

A decode engine of the tests has a prefix cache, which holds the wrong blocks afterwards.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load, save

from engine_ext.reference.tiny_model import write_tiny_model
from tests.integration.oracle import tokens_of
from tests.integration.processes import Server
from tests.vllm.releases import RELEASES, python_of
from tests.vllm.servers import CHUNKS, UNCACHED, Fleet, Kind

PLAIN: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
WRONG = PLAIN | {
    "kv_connector": "WrongKvConnector",
    "kv_connector_module_path": "tests.vllm.wrong_kv",
}
EACH = 50
"""Loads of which one is wrong."""
NO_FAULT = "zeroed 1000000"
FAULTS = ("others", "zeroed", "swapped", "early")
SMALL_CACHE = ("--num-gpu-blocks-override", "66")


def write_peaked_model(folder: Path) -> Path:
    """Write the tiny model with logits three times as far apart: its tokens are then about as
    likely as those of trained models."""
    path = write_tiny_model(folder) / "model.safetensors"
    weights = load(path.read_bytes())
    weights["model.norm.weight"] *= 3
    path.write_bytes(save(weights, {"format": "pt"}))
    return folder


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module", params=RELEASES)
def engines(fleet: Fleet, faults: Path, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """A prefill engine and a decode engine with faults, and a decode engine without."""
    fleet = replace(fleet, python=python_of(fleet, request.param))
    faults.write_text(NO_FAULT)
    environment = {"DISAGG_WRONG_KV": str(faults)}
    with fleet.servers(
        Kind("canary-p", WRONG, (UNCACHED, *CHUNKS, *SMALL_CACHE), write_peaked_model, environment),
        Kind("canary-wrong", WRONG, (), write_peaked_model, environment),
        Kind("canary-d", PLAIN, (), write_peaked_model),
    ) as servers:
        yield servers


def seeds_of(fault: str, count: int, first: int = 0) -> range:
    """Return the seeds of prompts of which no other test has a part in a cache."""
    first += 1000 * (1 + FAULTS.index(fault))
    return range(first, first + count)


def ask(server: Server, seed: int, **fields: Any) -> list[int]:
    """Return the tokens of a greedy answer to a prompt of its own."""
    prompt = tokens_of(64 + seed * 37 % 300, seed)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, **fields}
    body |= {"return_token_ids": True, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def compared(router: Server, outcome: str) -> int:
    return round(router.metrics().get(f'disagg_router_kv_canary_total{{outcome="{outcome}"}}', 0))


@pytest.mark.parametrize("fault", FAULTS)
def test_first_wrong_load_of_fifty_is_found_and_answer_is_right(
    fleet: Fleet, engines: list[Server], faults: Path, fault: str
) -> None:
    """The only decode engine computes the prompt again, in spite of its prefix cache."""
    prefiller, decoder, _ = engines
    faults.write_text(f"{fault} {EACH} {prefiller.url}")
    seeds = seeds_of(fault, EACH + 2)
    with fleet.router([prefiller], [decoder], "--kv-canary", "1") as router:
        # Swaps need two requests at once.
        with ThreadPoolExecutor(2 if fault == "swapped" else 1) as pool:
            answers = list(pool.map(lambda seed: ask(router, seed), seeds))
        assert compared(router, "disagreed") == (2 if fault == "swapped" else 1)
        assert compared(router, "engines_differ") == 0
    faults.write_text(NO_FAULT)
    assert answers == [ask(prefiller, seed) for seed in seeds]


@pytest.mark.parametrize("fault", ["others", "zeroed"])
def test_tokens_alone_show_wrong_loads_of_one_engine(
    fleet: Fleet, engines: list[Server], faults: Path, fault: str
) -> None:
    """Every load of the first decode engine is wrong. Its pair is avoided after the first one that
    is found, and the other decode engine answers."""
    prefiller, *decoders = engines
    faults.write_text(f"{fault} 1")
    seeds = seeds_of(fault, 12, 500)
    with fleet.router([prefiller], decoders, "--kv-canary", "0.000001") as router:
        answers, names = [], set[str]()
        for seed in seeds:  # a slow machine may reach the pause's end
            answers.append(ask(router, seed))
            names.update(router.metrics())
        assert 1 <= compared(router, "disagreed") <= 2
        assert any(name.startswith("disagg_router_pair_avoided") for name in names)
    faults.write_text(NO_FAULT)
    assert answers == [ask(prefiller, seed) for seed in seeds]


def assert_no_alarm(router: Server, clients: int, count: int) -> None:
    """Every second request is greedy."""
    with ThreadPoolExecutor(clients) as pool:
        fields = [{"temperature": number % 2} for number in range(count)]
        list(pool.map(lambda at: ask(router, 50_000 + at[0], **at[1]), enumerate(fields)))
    assert compared(router, "disagreed") == compared(router, "engines_differ") == 0
    assert compared(router, "agreed") >= count / 2


def test_healthy_engines_raise_no_alarm(fleet: Fleet, engines: list[Server]) -> None:
    prefiller, _, decoder = engines
    with fleet.router([prefiller], [decoder], "--kv-canary", "0.5") as router:
        assert_no_alarm(router, 4, 300)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "clients"), [(1, 16), (2, 4), (2, 32)])
def test_many_requests_of_unlike_engines_raise_no_alarm(
    fleet: Fleet, ranks: int, clients: int
) -> None:
    """10,000 in all, in bfloat16: batches of other sizes, and ranks that add in another order."""
    options = ("--dtype", "bfloat16")
    split = (*options, UNCACHED, *CHUNKS, "--tensor-parallel-size", str(ranks))
    with (
        fleet.servers(
            Kind("canary-split-p", PLAIN, split, write_peaked_model),
            Kind("canary-whole-d", PLAIN, options, write_peaked_model),
        ) as servers,
        fleet.router([servers[0]], [servers[1]], "--kv-canary", "0.5") as router,
    ):
        assert_no_alarm(router, clients, 3334)
