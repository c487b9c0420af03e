"""A router makes one prefill engine borrow from the other, which is busy: real engines over NIXL.

Each test keeps the holder busy with one long prompt, so the router sends the next one elsewhere.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration import stopping_engine
from tests.integration.nixl_puppet import TCP
from tests.integration.oracle import Answer, body_of, complete, differences, tokens_of
from tests.integration.processes import (
    UNCACHED,
    Launcher,
    Server,
    described,
    metric,
    wait_for,
    wait_until_stopped,
)

SHARED, OWN, LONG = 1280, 50, 4500
"""Tokens that prompts have in common, of each prompt alone, and of the one that keeps the holder
busy: a third of them is more than SHARED."""
SMALL = ("--num-blocks", "384", "--max-num-batched-tokens", "512")
"""An eighth of these blocks may be lent."""
OPTIONS = ("--log-format", "json", "--target-itl", "0")
REQUESTED = "disagg_engine_kv_loans_requested_total"
MAX_SECONDS = 20.0
"""For one answer, on a machine that is busy. A frozen engine never answers."""
LIMITS = {"loan_timeout": 5.0, "prefill_load_timeout": 3.0}
"""Seconds: several times what a loan and its READ take, and less than a slow READ takes."""


def name_of(engine: Server) -> str:
    return f"127.0.0.1:{engine.port}"


@dataclass
class Fleet:
    ps: list[Server]
    router: Server
    pool: ThreadPoolExecutor

    def send(self, name: str, prompt: list[int]) -> tuple[Answer, dict[str, Any]]:
        """Return the answer of a request, and its line in the access log."""
        response = self.router.post("/v1/completions", body_of(prompt, {}), request_id=name)
        assert response.status_code == 200, response.text
        line = wait_for(lambda: self.line_of(name), f"{name} is in the access log")
        return Answer.in_body(response.json()), line

    def line_of(self, name: str) -> dict[str, Any]:
        lines = (line for line in self.router.log.read_text().splitlines() if name in line)
        found = (json.loads(line) for line in lines if '"outcome"' in line)
        return next((line for line in found if line["request_id"] == name), {})

    def warm(self, seed: int, holder: Server | None = None) -> tuple[list[int], Server, Server]:
        """Return a prefix, the engine that has computed it (any one, or `holder`), and the other
        one. Between idle engines, the router chooses at random."""
        for turn in range(100):
            shared = tokens_of(SHARED, seed + turn * 1000)
            name = f"warm-{seed}-{turn}"
            prefiller = self.send(name, [*shared, *tokens_of(OWN, seed + 1)])[1]["prefiller"]
            first, second = sorted(self.ps, key=lambda p: name_of(p) != prefiller)
            if holder in (None, first):
                return shared, first, second
        raise AssertionError("the router chooses one engine only")

    def keep_busy(
        self, holder: Server, shared: list[int], seed: int
    ) -> "Future[tuple[Answer, dict[str, Any]]]":
        """Send the holder a long prompt, and return its answer to be."""
        long = self.pool.submit(self.send, f"long-{seed}", [*shared, *tokens_of(LONG, seed + 2)])
        legs = rf'disagg_router_engine_requests_in_flight\{{.*"{name_of(holder)}".*\}}'
        wait_for(lambda: metric(self.router, legs) == 1, "the holder is busy")
        return long

    def loans(self, outcome: str) -> float:
        name = f'disagg_router_prefix_loans_total{{outcome="{outcome}"}}'
        return self.router.metrics().get(name, 0)


@contextmanager
def running(launcher: Launcher, decoder: Server, **second: Any) -> Iterator[Fleet]:
    """Two prefill engines, and a router before them. `second` are options of the second one."""
    with ExitStack() as stack:
        enter = stack.enter_context
        ps = [
            enter(launcher.engine("p-1", *SMALL, extra=LIMITS)),
            enter(launcher.engine("p-2", *SMALL, extra=LIMITS, **second)),
        ]
        router = enter(launcher.router(ps, [decoder], *OPTIONS, "--health-interval", "60"))
        yield Fleet(ps, router, enter(ThreadPoolExecutor(4)))


# It lends nothing, so only one engine can.
DECODER = described("decode", UNCACHED)


@pytest.fixture
def fleet(launcher: Launcher, decoder: Server) -> Iterator[Fleet]:
    with running(launcher, decoder) as fleet:
        yield fleet


def test_a_prompt_that_goes_elsewhere_borrows_what_a_busy_engine_holds(
    fleet: Fleet, alone: Server
) -> None:
    shared, holder, borrower = fleet.warm(1)
    prompt = [*shared, *tokens_of(OWN, 4)]
    long = fleet.keep_busy(holder, shared, 1)
    answer, line = fleet.send("borrows", prompt)
    assert line["prefiller"] == name_of(borrower)
    assert (line["borrowed_from"], line["borrowed_tokens"]) == (name_of(holder), SHARED)
    assert line["cached_tokens"] == SHARED
    assert differences([complete(alone, prompt)], [answer]) == []
    assert fleet.loans("granted") == 1
    assert metric(fleet.router, "disagg_router_prefix_loan_tokens_total") == SHARED
    assert metric(borrower, "disagg_engine_prompt_tokens_fetched_total") == SHARED
    (rank,) = borrower.get("/disagg/leases").json()["ranks"]
    assert [one["what"] for one in rank["moved"]] == ["LOAN"]
    assert long.result(timeout=120)[1]["prefiller"] == name_of(holder)


def test_what_the_holder_has_evicted_is_computed(fleet: Fleet, alone: Server) -> None:
    shared, holder, borrower = fleet.warm(10)
    other, *_ = fleet.warm(12, holder)
    prompt = [*shared, *tokens_of(OWN, 14)]
    for seed in range(15, 19):
        complete(holder, tokens_of(4000, seed), 1)
    long = fleet.keep_busy(holder, other, 10)
    answer, line = fleet.send("evicted", prompt)
    assert line["prefiller"] == name_of(borrower)
    assert "borrowed_tokens" not in line
    assert differences([complete(alone, prompt)], [answer]) == []
    assert (fleet.loans("granted"), fleet.loans("refused")) == (0, 1)
    long.result(timeout=120)


@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_a_holder_that_does_not_answer_costs_little(
    fleet: Fleet, alone: Server, fault: str
) -> None:
    shared, holder, borrower = fleet.warm(20)
    prompt = [*shared, *tokens_of(OWN, 24)]
    with holder.frozen():
        long = fleet.keep_busy(holder, shared, 20)
        began = time.monotonic()
        short = fleet.pool.submit(fleet.send, fault, prompt)
        if fault == "killed":
            wait_for(lambda: metric(borrower, REQUESTED) == 1, "the holder is asked", poll=0.02)
            holder.kill()
        answer, line = short.result(timeout=60)
        assert time.monotonic() - began < MAX_SECONDS
        assert line["prefiller"] == name_of(borrower)
        assert "borrowed_tokens" not in line
    assert differences([complete(alone, prompt)], [answer]) == []
    outcomes = [fleet.loans(one) for one in ("granted", "refused", "cached", "failed")]
    # The long prompt of a killed holder is sent to the borrower, which may compute it first.
    assert outcomes in ([0, 0, 0, 1], [0, 0, 1, 0])[: 1 + (fault == "killed")]
    whole = [*shared, *tokens_of(LONG, 22)]
    assert differences([complete(alone, whole)], [long.result(timeout=120)[0]]) == []


def test_a_holder_that_is_killed_in_the_middle_of_a_read_costs_little(
    launcher: Launcher,
    decoder: Server,
    alone: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in {**TCP, stopping_engine.HOLDER: str(tmp_path / "holder")}.items():
        monkeypatch.setenv(name, value)
    with running(launcher, decoder, module=stopping_engine.__name__) as fleet:
        shared, holder, borrower = fleet.warm(60, fleet.ps[0])
        prompt = [*shared, *tokens_of(OWN, 64)]
        long = fleet.keep_busy(holder, shared, 60)
        stopping_engine.stop_at_next_read(holder, tmp_path / "holder")
        short = fleet.pool.submit(fleet.send, "mid-read", prompt)
        wait_until_stopped(holder.process.pid)
        holder.kill()
        killed = time.monotonic()
        answer, line = short.result(timeout=60)
        assert time.monotonic() - killed < MAX_SECONDS
        assert line["prefiller"] == name_of(borrower)
        assert "borrowed_tokens" not in line
        assert metric(borrower, "disagg_engine_kv_loans_received_total") == 1
        assert metric(borrower, "disagg_engine_kv_pulls_failed_total") == 1
        assert differences([complete(alone, prompt)], [answer]) == []
        whole = [*shared, *tokens_of(LONG, 62)]
        assert differences([complete(alone, whole)], [long.result(timeout=120)[0]]) == []


def test_a_leg_whose_loan_may_still_arrive_is_retried_without_holders(
    launcher: Launcher, decoder: Server, alone: Server
) -> None:
    module = "tests.integration.slow_reads_engine"
    with running(launcher, decoder, module=module) as fleet:
        shared, holder, borrower = fleet.warm(30, fleet.ps[0])
        prompt = [*shared, *tokens_of(OWN, 34)]
        long = fleet.keep_busy(holder, shared, 30)
        answer, line = fleet.send("retried", prompt)
        assert (line["retries"], fleet.loans("failed"), fleet.loans("granted")) == (1, 1, 0)
        assert metric(borrower, "disagg_engine_kv_pulls_failed_total") == 1
        assert sum(metric(p, REQUESTED) for p in fleet.ps) == 1
        avoided = rf'disagg_router_pair_avoided\{{.*"{name_of(borrower)}".*"{name_of(holder)}".*\}}'
        assert metric(fleet.router, avoided) == 1
        assert "borrowed_tokens" not in line
        assert differences([complete(alone, prompt)], [answer]) == []
        long.result(timeout=120)


def test_an_engine_that_has_restarted_borrows_from_the_decode_engine(
    launcher: Launcher, alone: Server
) -> None:
    shared, ports = tokens_of(SHARED, 50), launcher.free_ports(2)
    place = (ports[0], ports[1])
    with (
        ExitStack() as stack,
        launcher.engine("decode", *SMALL) as lender,
        ThreadPoolExecutor(1) as pool,
    ):
        with ExitStack() as life:
            p = life.enter_context(launcher.engine("p", *SMALL, extra=LIMITS, ports=place))
            router = stack.enter_context(launcher.router([p], [lender], *OPTIONS))
            fleet = Fleet([p], router, pool)
            fleet.send("before", [*shared, *tokens_of(OWN, 51)])
        wait_for(lambda: router.get("/ready").json()["status"] == "degraded", "it is missed")
        with launcher.engine("p", *SMALL, extra=LIMITS, ports=place):
            wait_for(lambda: router.get("/ready").json()["status"] == "ready", "it is back")
            prompt = [*shared, *tokens_of(OWN, 52)]
            answer, line = fleet.send("after", prompt)
            assert (line["borrowed_from"], line["borrowed_tokens"]) == (name_of(lender), SHARED)
            assert differences([complete(alone, prompt)], [answer]) == []
