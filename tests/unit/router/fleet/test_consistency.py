"""Groups, and what is said of one that lacks a role."""

from __future__ import annotations

import pytest

from router.fleet.consistency import (
    INCOMPLETE_GRACE_S,
    ConsistencyLog,
    GroupCounts,
    count_groups,
)
from router.fleet.engine import EngineRole, EngineSpec, Health, Intent
from router.fleet.fleet import Fleet
from router.http_client.answer_limits import Deadlines
from router.http_client.pool import EnginePool, PoolLimits
from router.settings import Address


def fleet_of(*engines: tuple[EngineRole, str]) -> Fleet:
    fleet = Fleet(lambda spec: EnginePool(*spec.address, PoolLimits(1, 1, 1, 1), Deadlines()), 1)
    for port, (role, group) in enumerate(engines, 1):
        fleet.add(EngineSpec(role, Address("h", port), group=group))
    return fleet


def test_every_group_is_counted_even_one_without_engines() -> None:
    fleet = fleet_of(
        (EngineRole.PREFILL, "blue"),
        (EngineRole.DECODE, "blue"),
        (EngineRole.DECODE, "blue"),
        (EngineRole.BOTH, "green"),
    )
    fleet.set_group_weights({"green": 0.25, "red": 3.0})
    assert count_groups(fleet) == {
        "green": GroupCounts(0.25, 1, 1),
        "red": GroupCounts(3.0, 0, 0),
        "blue": GroupCounts(2.0, 1, 2),
    }


async def test_unusable_engines_are_not_counted() -> None:
    fleet = fleet_of((EngineRole.PREFILL, "blue"), (EngineRole.DECODE, "blue"))
    prefiller, decoder = fleet.engines
    fleet.note_probe_failed(prefiller, "dead")
    fleet.set_intent(decoder, Intent.DRAINING)
    assert count_groups(fleet) == {"blue": GroupCounts(0.0, 0, 0)}
    fleet.set_intent(decoder, Intent.SERVING)
    assert count_groups(fleet)["blue"].is_half
    assert not count_groups(fleet)["blue"].is_complete


async def test_an_incomplete_group_is_logged_once_and_only_if_it_stays_incomplete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="disagg_router")
    time = 0.0
    fleet = fleet_of((EngineRole.PREFILL, "blue"), (EngineRole.DECODE, "blue"))
    halves = ConsistencyLog(fleet, lambda: time)
    prefiller, decoder = fleet.engines
    halves.check_groups()
    fleet.set_intent(decoder, Intent.DRAINING)
    halves.check_groups()
    fleet.set_intent(decoder, Intent.SERVING)
    time += INCOMPLETE_GRACE_S
    halves.check_groups()
    assert not caplog.text, "it was so for a moment"
    fleet.set_intent(decoder, Intent.DRAINING)
    for _ in range(3):
        halves.check_groups()
        time += INCOMPLETE_GRACE_S
    assert caplog.text.count("group blue has no usable decode engine") == 1
    fleet.note_probe_failed(prefiller, "dead")
    halves.check_groups()
    assert "complete" not in caplog.text, "nobody is left"
    fleet.note_probe_passed(prefiller)
    fleet.set_intent(decoder, Intent.SERVING)
    halves.check_groups()
    fleet.set_intent(prefiller, Intent.DRAINING)
    for _ in range(3):
        halves.check_groups()
        time += INCOMPLETE_GRACE_S
    assert caplog.text.count("group blue has no usable prefill engine") == 1
    fleet.set_intent(prefiller, Intent.SERVING)
    assert prefiller.health is Health.HEALTHY
    halves.check_groups()
    assert "group blue is complete" in caplog.text
