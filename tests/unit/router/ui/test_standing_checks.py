"""The checks that the dashboard shows: what is well, what is not, and what to do about it."""

from collections.abc import Mapping
from time import monotonic as now

import pytest

from router.fleet.engine import Health
from router.ui.standing_checks import CheckResult, CheckState, merge_results, run_checks
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router, eventually


def results_of(router: Router) -> Mapping[str, CheckResult]:
    state = router.state
    found = run_checks(
        router.gateway.fleet, state.registry, state.watched_files, state.certificates
    )
    return {one.name: one for one in found}


def identity(layers: int) -> dict[str, object]:
    factors = {"num_layers": layers}
    rank = {"compatibility_hash": f"hash-{layers}", "compatibility_factors": factors}
    return {"transfer_modes": ["pull"], "ranks": [rank]}


async def test_a_healthy_fleet_passes_all_checks(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity = d.identity = identity(28)
    router = await start_router()
    await eventually(lambda: results_of(router)["KV transfer"].state is CheckState.OK)
    found = results_of(router)
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(
        ("discovery: flags", "prefill engines", "decode engines", "KV transfer"), CheckState.OK
    )
    assert found["KV transfer"].text == (
        "2 engines compared: each one has a partner to exchange KV with"
    )


async def test_engines_that_differ_fail_with_the_first_difference_and_its_cure(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.identity = identity(28), identity(36)
    router = await start_router()
    await eventually(lambda: results_of(router)["KV transfer"].state is CheckState.FAILED)
    found = results_of(router)["KV transfer"]
    assert "num_layers 28 and 36" in found.text
    assert found.cure


async def test_engines_without_an_identity_page_are_not_compared(router: Router) -> None:
    found = results_of(router)["KV transfer"]
    assert (found.state, found.text[:14]) == (CheckState.SKIPPED, "0 of 2 engines")


async def test_a_pair_with_wrong_kv_is_named_with_its_cure(router: Router) -> None:
    p, d = (engine.name for engine in router.gateway.fleet.engines)
    pairs = router.gateway.fleet.unreachable_pairs
    pairs.record_failure(p, d, now())
    assert results_of(router)["KV pair"].text.startswith("no KV was loaded")
    pairs.record_failure(p, d, now(), is_silent=True)
    found = results_of(router)["KV pair"]
    assert found.text.startswith(f"wrong KV was loaded from {p} to {d}")
    assert "restart the decode engine" in found.cure


async def test_an_unhealthy_engine_fails_the_check_of_its_role(
    router: Router, d: MockEngine
) -> None:
    await d.stop()
    fleet = router.gateway.fleet
    await eventually(lambda: any(one.health is Health.UNHEALTHY for one in fleet.engines))
    found = results_of(router)
    assert found["decode engines"].state is CheckState.FAILED
    assert found["decode engines"].text == "0 of 1 healthy"
    assert found["KV transfer"].state is CheckState.SKIPPED


def result(name: str, state: CheckState, text: str) -> CheckResult:
    return CheckResult(name=name, state=state, text=text)


OK = result("KV transfer", CheckState.OK, "2 engines compared")
SOURCE = result("discovery: file", CheckState.OK, "2 engines listed")
BAD = result("KV transfer", CheckState.FAILED, "they differ")
WORSE = result("KV transfer", CheckState.FAILED, "they differ, too")


@pytest.mark.parametrize(
    ("processes", "merged"),
    [
        ([[OK, SOURCE], [OK, SOURCE]], [OK, SOURCE]),
        ([[OK, SOURCE], [BAD, SOURCE]], [SOURCE, BAD]),
        ([[BAD, WORSE], [BAD], [OK]], [BAD, WORSE]),
        ([], []),
    ],
)
def test_of_several_processes_the_worst_result_counts(
    processes: list[list[CheckResult]], merged: list[CheckResult]
) -> None:
    assert merge_results(processes) == merged
