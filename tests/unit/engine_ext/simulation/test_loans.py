"""Loans of cached prefixes in the simulated world, which checks at every event that no block is
given back while a reader relies on it, and that no engine accepts wrong KV."""

from typing import Any

import pytest

from engine_ext.scheduler.loans import LATE_SECONDS, LOAN_SECONDS, OFFER_SECONDS
from engine_ext.scheduler.report_deadlines import REPORT_SECONDS
from engine_ext.worker.loan_asks import SILENT_SECONDS
from tests.unit.engine_ext.simulation.pair import Pair, tokens
from tests.unit.engine_ext.simulation.scenario import LOANS, Scenario
from tests.unit.engine_ext.simulation.world import SimRequest, Weather

SETTINGS: dict[str, Any] = {"bidirectional": True, "recompute_threshold": 4}


class Lending:
    """D answers a long request. P continues its prompt, and is to borrow the beginning from D."""

    def __init__(self, **config: Any) -> None:
        self.pair = Pair("pull", **{**SETTINGS, **config})
        self.holder, self.reader = self.pair.decoder, self.pair.prefiller
        self._answer("1")
        self.prompt = [*tokens(1, 8), *tokens(2, 4)]

    def _answer(self, number: str) -> None:
        params = self.reader.finish(self.reader.prefill(f"p-{number}", tokens(1, 8)))
        running = SimRequest(f"d-{number}", tokens(1, 8), {**(params or {}), "retain": False})
        running.computes_for = 60.0
        self.holder.queue(running)
        assert self.holder.load(running)
        self.pair.world.pass_time(2.0)

    def restart_holder(self) -> None:
        """Another process at the same address under the same id answers the request again."""
        self.holder.die()
        self.holder = self.pair.world.engine("d", port=2, **SETTINGS)
        self._answer("again")

    def ask(self, name: str = "p-2") -> SimRequest:
        """A leg arrives that names D, and asks it."""
        params = {"do_remote_decode": True, "holders": [self.holder.as_holder(8)]}
        leg = self.reader.queue(SimRequest(name, self.prompt, params))
        assert not self.reader.load(leg)
        assert name in self.reader.awaiting
        return leg

    def is_lent(self, leg: SimRequest) -> bool:
        """Pass time until the leg waits no longer. Return whether it loads."""
        self.pair.world.until(lambda: self.reader.load(leg) or leg.awaits_since is None)
        return leg.request_id in self.reader.loading

    @property
    def num_lent(self) -> int:
        return sum(request.is_loan for request in self.holder.held.values())


def borrowed(leg: SimRequest) -> int:
    params = leg.decision.kv_transfer_params if leg.decision is not None else None
    return int((params or {}).get("borrowed_tokens", 0))


def test_a_prefill_borrows_what_the_holder_has_and_the_loan_ends() -> None:
    lending = Lending()
    leg = lending.ask()
    assert lending.is_lent(leg)
    lending.pair.world.pass_time(3.0)
    assert lending.reader.outcomes["p-2"]
    assert borrowed(leg) == 8
    assert lending.num_lent == 0
    lending.pair.assert_all_ended()


def test_blocks_that_are_lent_outlive_their_request() -> None:
    lending = Lending(prefill_load_timeout=10.0)
    lending.pair.world.network.weather = Weather(transfer=3.0)
    assert lending.is_lent(lending.ask())
    lending.holder.abort(lending.holder.running["d-1"])
    lending.pair.world.pass_time(5.0)
    assert lending.reader.outcomes["p-2"]
    lending.pair.assert_all_ended()


def test_a_loan_is_renewed_while_it_is_read() -> None:
    lending = Lending(prefill_load_timeout=60.0)
    lending.pair.world.network.weather = Weather(transfer=2 * LOAN_SECONDS)
    leg = lending.ask()
    assert lending.is_lent(leg)
    lending.holder.abort(lending.holder.running["d-1"])
    lending.pair.world.pass_time(2 * LOAN_SECONDS + 2.0)
    assert lending.reader.outcomes["p-2"]
    assert borrowed(leg) == 8
    lending.pair.assert_all_ended()


def test_a_loan_that_is_revoked_while_it_is_read_is_never_accepted_too_late() -> None:
    lending = Lending(prefill_load_timeout=60.0)
    lending.pair.world.network.weather = Weather(transfer=LOAN_SECONDS + 15.0)
    leg = lending.ask()
    assert lending.is_lent(leg)
    lending.holder.abort(lending.holder.running["d-1"])
    lending.holder.scheduler.end_turns()
    lending.pair.world.pass_time(LOAN_SECONDS + 2.0)
    assert lending.num_lent == 0, "its blocks are the holder's again"
    lending.pair.world.pass_time(20.0)
    assert not lending.reader.outcomes["p-2"]
    assert borrowed(leg) == 0
    lending.pair.assert_all_ended()


@pytest.mark.parametrize("delay", [0.0, 2.0])
def test_a_reader_relies_on_a_loan_no_longer_than_its_holder_keeps_it(delay: float) -> None:
    """No message arrives after the grant, so the holder frees the blocks in the middle of the READ.
    The world fails if the reader relies on them then."""
    lending = Lending(prefill_load_timeout=60.0, loan_timeout=10.0, confirm_timeout=5.0)
    lending.pair.world.network.weather = Weather(delay=delay)
    leg = lending.ask()
    lending.pair.world.until(lambda: lending.reader.stats.loans_received, within=20.0)
    lending.pair.world.network.weather = Weather(transfer=2 * LOAN_SECONDS, lose=1.0)
    assert lending.is_lent(leg)
    lending.holder.abort(lending.holder.running["d-1"])
    lending.pair.world.pass_time(LOAN_SECONDS + 2.0)
    assert lending.num_lent == 0, "its blocks are the holder's again"
    lending.pair.world.pass_time(30.0)
    assert not lending.reader.outcomes["p-2"]
    assert borrowed(leg) == 0


def test_a_loan_that_finds_no_blocks_goes_back_and_what_is_gone_is_refused() -> None:
    lending = Lending()
    lending.ask()
    lending.pair.world.until(lambda: lending.num_lent)
    lending.pair.world.pass_time(OFFER_SECONDS + 5.0)
    assert lending.num_lent == 0
    lending.holder.abort(lending.holder.running["d-1"])
    assert not lending.is_lent(lending.ask("p-3"))


@pytest.mark.parametrize("moment", ["asked", "granted"])
def test_a_client_that_leaves_gives_the_loan_back(moment: str) -> None:
    lending = Lending()
    leg = lending.ask()
    if moment == "granted":
        lending.pair.world.until(lambda: lending.num_lent)
    lending.reader.abort(leg)
    lending.pair.world.pass_time(2.0)
    assert lending.num_lent == 0
    lending.pair.assert_all_ended()


def test_a_frozen_holder_costs_the_time_limit() -> None:
    lending = Lending(loan_timeout=0.25)
    leg = lending.ask()
    lending.holder.freeze(60.0)
    before = lending.pair.world.now
    assert not lending.is_lent(leg)
    assert lending.pair.world.now - before < 1.0


def test_a_holder_that_restarts_under_its_name_lends_again() -> None:
    lending = Lending()
    assert lending.is_lent(lending.ask())
    lending.pair.world.pass_time(3.0)
    lending.restart_holder()
    assert not lending.is_lent(lending.ask("p-3")), "the process that was asked is gone"
    lending.pair.world.pass_time(SILENT_SECONDS)
    assert lending.is_lent(lending.ask("p-4"))


@pytest.mark.parametrize("seeds", [range(40)])
def test_no_seed_with_loans_breaks_what_no_fault_may_break(seeds: range) -> None:
    num_borrowed = 0
    for seed in seeds:
        scenario = Scenario(seed, kind=LOANS, mixes_versions=False)
        scenario.run()
        num_borrowed += scenario.num_borrowed
    assert num_borrowed > 5, "there was something to break"


def test_a_reader_frozen_as_one_of_two_readings_of_a_lease_ends_breaks_nothing() -> None:
    Scenario(17089, kind=LOANS).run()


def test_no_loan_waits_for_its_end_in_good_weather() -> None:
    """Each one is read, given back or refused: none expires."""
    num_borrowed = 0
    for seed in range(60):
        scenario = Scenario(seed, kind=LOANS, mixes_versions=False)
        for number in range(15):
            scenario.network.timeline.at(scenario.network.now + number, scenario.request)
        scenario.network.timeline.run_until(scenario.network.now + 15.0)
        scenario.finish()
        num_borrowed += scenario.num_borrowed
        for engine in scenario.all_engines:
            assert engine.longest_loan < LOAN_SECONDS - 1.0, (seed, engine.longest_loan)
    assert num_borrowed > 20


@pytest.mark.parametrize(
    "spoilt",
    [
        {"prefix_proof": {}},
        {"retained_until": 1.0},
        {"remote_num_tokens": 1},
        {"remote_engine_id": "p"},
    ],
    ids=["malformed proof", "expired", "too short", "the reader's own id"],
)
def test_a_leg_whose_last_turn_is_declined_borrows_from_a_holder(spoilt: dict[str, Any]) -> None:
    lending = Lending()
    reader, holder = lending.reader, lending.holder
    params = reader.finish(reader.prefill("p-turn", tokens(3, 8)))
    retained = SimRequest("d-turn", tokens(3, 8), {**(params or {}), "retain": True})
    holder.queue(retained)
    assert holder.load(retained)
    lending.pair.world.until(lambda: retained.decision is not None)
    assert retained.decision is not None
    turn = retained.decision.kv_transfer_params or {}
    holders = [holder.as_holder(8)]
    both = {"do_remote_decode": True, **turn, **spoilt, "holders": holders}
    leg = reader.queue(SimRequest("p-2", lending.prompt, both))
    reader.load(leg)
    assert lending.is_lent(leg)
    lending.pair.world.until(lambda: reader.outcomes.get("p-2"))
    assert borrowed(leg) == 8


def test_a_lost_report_about_a_loan_costs_its_deadline() -> None:
    lending = Lending(loan_timeout=0.25)
    lending.pair.world.network.weather = Weather(forget=1.0)
    leg = lending.ask()
    before = lending.pair.world.now
    lending.pair.world.until(lambda: lending.reader.load(leg) or leg.awaits_since is None, 20.0)
    assert lending.pair.world.now - before < LATE_SECONDS + 2.0
    lending.pair.world.network.weather = Weather()
    lending.pair.world.pass_time(LOAN_SECONDS)
    assert lending.num_lent == 0, "nothing waits for the loan"


def test_a_lost_report_about_a_load_fails_the_load_when_nothing_is_open() -> None:
    lending = Lending()
    leg = lending.ask()
    assert lending.is_lent(leg)
    lending.pair.world.network.weather = Weather(forget=1.0)
    lending.pair.world.until(lambda: lending.reader.stats.pulls_ok == 1)
    lending.pair.world.network.weather = Weather()
    lending.pair.world.pass_time(2 * REPORT_SECONDS)
    assert lending.reader.outcomes["p-2"] is False
    lending.pair.assert_all_ended()
