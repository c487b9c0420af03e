"""Loans of cached prefixes in the simulated world, which checks at every event that no block is
given back while a reader relies on it, and that no engine accepts wrong KV."""

from typing import Any

import pytest

from engine_ext.scheduler.loans import LOAN_SECONDS
from tests.unit.engine_ext.simulation.pair import Pair, tokens
from tests.unit.engine_ext.simulation.scenario import LOANS, Scenario
from tests.unit.engine_ext.simulation.world import SimRequest, Weather

SETTINGS: dict[str, Any] = {"bidirectional": True, "recompute_threshold": 4}


class Lending:
    """D answers a long request. P asks D for its prompt, which it will continue."""

    def __init__(self, **config: Any) -> None:
        self.pair = Pair("pull", **{**SETTINGS, **config})
        self.holder, self.reader = self.pair.decoder, self.pair.prefiller
        params = self.reader.finish(self.reader.prefill("p-1", tokens(1, 8)))
        running = SimRequest("d-1", tokens(1, 8), {**(params or {}), "retain": False})
        running.computes_for = 60.0
        self.holder.queue(running)
        assert self.holder.load(running)
        self.pair.world.pass_time(2.0)
        self.prompt = [*tokens(1, 8), *tokens(2, 4)]
        self.lent: list[dict[str, Any] | None] = []

    def ask(self) -> dict[str, Any] | None:
        self.reader.borrow(self.holder, self.prompt, self.lent.append)
        self.pair.world.until(lambda: self.lent)
        return self.lent.pop()

    def read(self, params: dict[str, Any], name: str = "p-2") -> SimRequest:
        leg = self.reader.queue(SimRequest(name, self.prompt, params))
        assert self.reader.load(leg)
        return leg

    @property
    def num_lent(self) -> int:
        return sum(request.is_loan for request in self.holder.held.values())


def test_a_prefill_reads_what_is_lent_and_the_loan_ends() -> None:
    lending = Lending()
    params = lending.ask()
    assert params is not None
    assert (params["remote_num_tokens"], lending.num_lent) == (8, 1)
    lending.read(params)
    lending.pair.world.pass_time(3.0)
    assert lending.reader.outcomes["p-2"]
    assert lending.num_lent == 0
    lending.pair.assert_all_ended()


def test_blocks_that_are_lent_outlive_their_request() -> None:
    lending = Lending(prefill_load_timeout=10.0)
    params = lending.ask()
    assert params is not None
    lending.pair.world.network.weather = Weather(transfer=3.0)
    lending.read(params)
    lending.holder.abort(lending.holder.running["d-1"])
    lending.pair.world.pass_time(5.0)
    assert lending.reader.outcomes["p-2"]
    lending.pair.assert_all_ended()


def test_a_loan_that_is_revoked_while_it_is_read_is_never_accepted_too_late() -> None:
    lending = Lending(prefill_load_timeout=60.0)
    params = lending.ask()
    assert params is not None
    lending.pair.world.network.weather = Weather(transfer=LOAN_SECONDS + 15.0)
    lending.read(params)
    lending.holder.abort(lending.holder.running["d-1"])
    lending.holder.scheduler.end_turns()
    lending.pair.world.pass_time(LOAN_SECONDS + 2.0)
    assert lending.num_lent == 0, "its blocks are the holder's again"
    lending.pair.world.pass_time(20.0)
    assert not lending.reader.outcomes["p-2"]
    lending.pair.assert_all_ended()


def test_a_loan_that_is_not_read_ends_after_its_seconds_and_what_is_gone_is_refused() -> None:
    lending = Lending()
    assert lending.ask() is not None
    lending.holder.abort(lending.holder.running["d-1"])
    assert lending.ask() is not None, "it is still there, for it is lent"
    lending.pair.world.pass_time(LOAN_SECONDS + 2.0)
    assert lending.num_lent == 0
    assert lending.ask() is None
    lending.pair.assert_all_ended()


@pytest.mark.parametrize("seeds", [range(40)])
def test_no_seed_with_loans_breaks_what_no_fault_may_break(seeds: range) -> None:
    num_lent = 0
    for seed in seeds:
        scenario = Scenario(seed, kind=LOANS, mixes_versions=False)
        scenario.run()
        num_lent += scenario.num_lent
    assert num_lent > 5, "there was something to break"
