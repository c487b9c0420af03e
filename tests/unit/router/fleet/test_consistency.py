"""Groups, and what is said of one that lacks a role."""

from __future__ import annotations

import pytest

from router.fleet.consistency import (
    INCOMPLETE_GRACE_S,
    GroupCounts,
    IncompleteGroupLog,
    count_groups,
)
from router.fleet.engine import EngineRole, EngineSpec, Health
from router.fleet.fleet import Fleet
from router.http_client.deadlines import Deadlines
from router.http_client.pool import EnginePool, PoolLimits
from router.settings import Address


def fleet_of(*engines: tuple[EngineRole, str]) -> Fleet:
    specs = [
        EngineSpec(role, Address("h", port), group=group)
        for port, (role, group) in enumerate(engines, 1)
    ]
    return Fleet(
        specs, lambda spec: EnginePool(*spec.address, PoolLimits(1, 1, 1, 1), Deadlines()), 1
    )


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
    fleet.drain(decoder)
    assert count_groups(fleet) == {"blue": GroupCounts(0.0, 0, 0)}
    fleet.resume(decoder)
    assert count_groups(fleet)["blue"].is_half
    assert not count_groups(fleet)["blue"].is_complete


async def test_an_incomplete_group_is_logged_once_and_only_if_it_stays_incomplete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="disagg_router")
    time = 0.0
    fleet = fleet_of((EngineRole.PREFILL, "blue"), (EngineRole.DECODE, "blue"))
    halves = IncompleteGroupLog(fleet, lambda: time)
    prefiller, decoder = fleet.engines
    halves.check()
    fleet.drain(decoder)
    halves.check()
    fleet.resume(decoder)
    time += INCOMPLETE_GRACE_S
    halves.check()
    assert not caplog.text, "it was so for a moment"
    fleet.drain(decoder)
    for _ in range(3):
        halves.check()
        time += INCOMPLETE_GRACE_S
    assert caplog.text.count("group blue has no usable decode engine") == 1
    fleet.note_probe_failed(prefiller, "dead")
    halves.check()
    assert "complete" not in caplog.text, "nobody is left"
    fleet.note_probe_passed(prefiller)
    fleet.resume(decoder)
    halves.check()
    fleet.drain(prefiller)
    for _ in range(3):
        halves.check()
        time += INCOMPLETE_GRACE_S
    assert caplog.text.count("group blue has no usable prefill engine") == 1
    fleet.resume(prefiller)
    assert prefiller.health is Health.HEALTHY
    halves.check()
    assert "group blue is complete" in caplog.text
