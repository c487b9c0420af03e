"""Groups, and what is said of one that lacks a role."""

import pytest

from router.common.deadlines import Deadlines
from router.fleet.consistency import INCOMPLETE_GRACE_S, ConsistencyLog, GroupCounts, count_groups
from router.fleet.engine import Engine, EngineRole, EngineSpec, Health, Intent
from router.fleet.fleet import Fleet
from router.http_client.pool import EnginePool, PoolLimits
from router.settings import Address
from tests.unit.router.fleet.test_partners import page


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


async def test_engines_that_cannot_exchange_kv_are_logged_once_with_the_cure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="disagg_router")
    time = 0.0
    fleet = fleet_of((EngineRole.PREFILL, "default"), (EngineRole.DECODE, "default"))
    log = ConsistencyLog(fleet, lambda: time)
    p, d = fleet.engines

    def check() -> int:
        nonlocal time
        for _ in range(3):
            log.check_findings()
            log.check_groups()
            time += INCOMPLETE_GRACE_S
        return caplog.text.count("cannot exchange KV, because they differ: num_layers 28 and 36")

    def report(engine: Engine, layers: str) -> None:
        engine.capabilities.note_identity(page({"num_layers": layers}, compatibility_hash=layers))
        fleet.note_identity(engine)
        fleet.note_probe_passed(engine)
        fleet.set_group_weights({})

    for engine, layers in ((p, "28"), (d, "36")):
        report(engine, layers)
    log.check_findings()
    assert "exchange KV" not in caplog.text, "it may be so for a moment, while engines start"
    assert check() == 1
    assert "To do: start both engines with the same model and options" in caplog.text
    assert "has no usable" not in caplog.text, "the finding says why"
    fleet.note_unreachable(d, "restarts")
    fleet.set_group_weights({})
    assert check() == 1
    report(d, "36")
    assert check() == 1, "it is as it was"
    fleet.note_unreachable(d, "restarts")
    report(d, "28")
    assert check() == 1
    assert not fleet.compare().reasons
    report(d, "36")
    assert check() == 2, "it was well in the meantime"
