"""What a decode engine's answer says of a load that failed: which engine it was to load from, why,
and whether the next request of the same two engines has to expect that."""

from typing import Any

import pytest

from tests.unit.engine_ext.simulation.pair import LONGEST, Pair, connected, tokens
from tests.unit.engine_ext.simulation.world import Weather

MODES = ("pull", "push")


def failure(pair: Pair, asked: str) -> dict[str, Any]:
    """Of a request whose load fails, once it has."""
    pair.world.until(lambda: asked in pair.decoder.outcomes, LONGEST)
    assert pair.decoder.outcomes[asked] is False
    found = pair.decoder.scheduler.load_failures.take(asked)
    assert found is not None
    assert pair.decoder.scheduler.load_failures.take(asked) is None, "it is taken once"
    assert found.pop("remote_engine_id") == pair.prefiller.name
    assert (found.pop("remote_host"), found.pop("remote_port")) == ("sim", 1)
    return found


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", ["before they meet", "once connected"])
def test_an_engine_that_cannot_be_reached_is_a_failure_of_the_pair(
    mode: str, policy: str, moment: str
) -> None:
    pair = Pair(mode, load_failure_policy=policy)
    if moment == "once connected":
        assert pair.is_served()
        pair.decoder.agent.failing = {"start_read", "notify"}
    else:
        pair.world.network.listeners.pop(("sim", 1))
    found = failure(pair, pair.ask(hurry=True))
    assert found["scope"] == "pair"
    assert found["reason"]


def test_a_read_that_hangs_is_a_failure_of_the_pair() -> None:
    pair = connected("pull")
    pair.world.network.weather = Weather(transfer=10_000.0)
    assert failure(pair, pair.ask()) == {"scope": "pair", "reason": "READ: it took too long"}
    assert failure(pair, pair.ask())["reason"] == "an earlier READ from this engine has not ended"


def test_a_lease_that_has_ended_is_a_failure_of_the_request() -> None:
    pair = connected("pull")
    leg = pair.prefiller.prefill("cmpl-y-0-0000000a", tokens(9))
    params = pair.prefiller.finish(leg)
    pair.prefiller.scheduler.release(pair.prefiller.name, leg.request_id)
    pair.world.pass_time(LONGEST)
    asked = "cmpl-y-0-0000000d"
    assert pair.decoder.decode(asked, tokens(9), params) is not None
    assert failure(pair, asked) == {"scope": "request", "reason": "its lease ended meanwhile"}


def test_a_prefill_that_ends_is_a_failure_of_the_request() -> None:
    pair = connected("push")
    leg = pair.prefiller.prefill("cmpl-y-0-0000000a", tokens(9))
    asked = "cmpl-y-0-0000000d"
    assert pair.decoder.decode(asked, tokens(9), pair.where("y")) is not None
    pair.world.pass_time(1)
    pair.prefiller.abort(leg)
    found = failure(pair, asked)
    assert found == {"scope": "request", "reason": "P will not write: P gave this request up"}


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_ends_first_has_no_failure(mode: str) -> None:
    pair = connected(mode)
    pair.world.network.weather = Weather(transfer=5.0)
    asked = pair.ask()
    pair.world.until(lambda: pair.world.network.transfers)
    pair.decoder.abort(pair.decoder.loading[asked])
    pair.world.pass_time(30)
    assert pair.decoder.outcomes[asked] is False
    assert pair.decoder.scheduler.load_failures.take(asked) is None
