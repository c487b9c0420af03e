"""Two prefill and two decode engines, of which one pair moves KV slowly: the router and doctor name
it, and it gets fewer requests. It takes minutes, and on a loaded machine another pair of the same
decode engine is slow beside its neighbours, too."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import find_free_ports
from tests.integration.oracle import complete_all, text_of
from tests.integration.processes import Launcher, Server

pytestmark = pytest.mark.nightly
REQUESTS = 32
SLOW = "disagg_router_pair_slowness{"


def reads(decoder: Server) -> dict[str, int]:
    """The READs of a decode engine, by the engine that they were from."""
    (rank,) = decoder.get("/disagg/leases").json()["ranks"]
    return {one["engine_id"]: one["transfers"] for one in rank["moved"]}


def failed_checks(url: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "router.commands.cli", "doctor", url, "--json"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    checks = json.loads(done.stdout)["checks"]
    return [check for check in checks if check["state"] == "FAIL"]


def test_a_throttled_pair_is_named_and_gets_fewer_requests(
    launcher: Launcher, tmp_path: Path
) -> None:
    (p_port, p_side), throttled = find_free_ports(2), tmp_path / "throttled"
    throttled.write_text(str(p_side))
    double = "tests.integration.throttled_engine"
    with (
        launcher.engine("p-a", ports=(p_port, p_side), engine_id="slow-p") as p_a,
        launcher.engine("p-b") as p_b,
        launcher.engine("d-a") as d_a,
        launcher.engine("d-b", "--throttled", str(throttled), module=double) as d_b,
        launcher.router([p_a, p_b], [d_a, d_b]) as router,
    ):
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
        check, *_ = failed_checks(router.url)
        assert check["name"] == "KV rate"
        assert check["text"].startswith(f"{source} -> {target} moves KV at ")
        share = of_pair(partial(load, 3 * REQUESTS))
        assert share < share_before / 2, (share, share_before)
