"""Two prefill and two decode engines, of which one pair moves KV slowly: the router and doctor name
it, and it gets fewer requests. It takes minutes."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import pytest

from tests.conftest import find_free_ports
from tests.integration.oracle import complete_all, text_of
from tests.integration.processes import Launcher, Server
from tests.smoke.test_doctor import doctor, failed, texts

pytestmark = pytest.mark.nightly
REQUESTS = 32
SLOW = "disagg_router_pair_slowness{"


def reads(decoder: Server) -> dict[str, int]:
    """The READs of a decode engine, by the engine that they were from."""
    (rank,) = decoder.get("/disagg/leases").json()["ranks"]
    return {one["engine_id"]: one["transfers"] for one in rank["moved"]}


class Fleet(NamedTuple):
    """`p_a` -> `d_b` is the throttled pair."""

    p_a: Server
    p_b: Server
    d_a: Server
    d_b: Server

    @property
    def slow_pair(self) -> str:
        return f"127.0.0.1:{self.p_a.port} -> 127.0.0.1:{self.d_b.port}"


@pytest.fixture(scope="module")
def fleet(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    (p_port, p_side) = find_free_ports(2)
    throttled = tmp_path_factory.mktemp("pairs") / "throttled"
    throttled.write_text(str(p_side))
    double = "tests.integration.throttled_engine"
    with ExitStack() as stack:
        engines = (
            launcher.engine("p-a", ports=(p_port, p_side), engine_id="slow-p"),
            launcher.engine("p-b"),
            launcher.engine("d-a"),
            launcher.engine("d-b", "--throttled", str(throttled), module=double),
        )
        yield Fleet(*map(stack.enter_context, engines))


def test_doctor_moves_a_prompt_over_each_pair_and_names_the_slow_one(fleet: Fleet) -> None:
    urls = [engine.url for engine in fleet]
    _, checks = doctor("--prefill", *urls[:2], "--decode", *urls[2:])
    (check,) = failed(checks)
    assert check["name"] == "KV rate"
    assert check["text"].startswith(f"{fleet.slow_pair} moves KV at ")
    text = "both engines have the same first token, 4 of 4 pairs compared"
    assert texts(checks, "KV content") == [text]


def test_a_throttled_pair_is_named_and_gets_fewer_requests(
    launcher: Launcher, fleet: Fleet
) -> None:
    p_a, p_b, d_a, d_b = fleet
    with launcher.router([p_a, p_b], [d_a, d_b]) as router:
        sent = 0

        def load(requests: int = REQUESTS) -> None:
            nonlocal sent
            prompts = [text_of(90, 1000 + sent + number) for number in range(requests)]
            sent += requests
            complete_all(router, prompts, at_once=4, max_tokens=2)

        def of_pair(run: Callable[[], None]) -> float:
            """The share of the pair in all READs meanwhile."""
            before, all_before = reads(d_b).get("slow-p", 0), total()
            run()
            return (reads(d_b).get("slow-p", 0) - before) / (total() - all_before)

        def total() -> int:
            return sum(sum(reads(one).values()) for one in (d_a, d_b))

        began = time.monotonic()
        named: list[str] = []
        share_before = of_pair(load)
        while not (named := [name for name in router.metrics() if name.startswith(SLOW)]):
            assert time.monotonic() < began + 180, router.metrics()
            load()
        source, target = f"127.0.0.1:{p_a.port}", f"127.0.0.1:{d_b.port}"
        assert f'{SLOW}source="{source}",target="{target}"}}' in named
        check, *_ = failed(doctor(router.url)[1])
        assert check["name"] == "KV rate"
        assert check["text"].startswith(f"{fleet.slow_pair} moves KV at ")
        share = of_pair(partial(load, 3 * REQUESTS))
        assert share < share_before / 2, (share, share_before)
