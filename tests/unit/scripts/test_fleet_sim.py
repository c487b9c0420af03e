"""The simulated fleet: it replays, it loses nobody, and its command line says what is wrong."""

from __future__ import annotations

import pytest

from router.policies.registry import POLICIES
from scripts.fleet_sim.cli import main
from scripts.fleet_sim.engines import PrefixCache
from scripts.fleet_sim.report import figures_of
from scripts.fleet_sim.simulation import Outcome, Setup, Simulation
from scripts.fleet_sim.traces import SHAPES

REQUESTS = 250


def _run(shape: str, policy: str, **more: int) -> tuple[Setup, Outcome]:
    setup = Setup(
        shape,
        3,
        3,
        REQUESTS,
        policy,
        policy,
        bursty=True,
        cache_tokens=60_000,
        **more,  # type: ignore[arg-type]
    )
    return setup, Simulation(setup).run()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_replays_and_ends_with_every_engine_idle(shape: str, policy: str) -> None:
    _, outcome = _run(shape, policy, min_remote_prefill_tokens=300)
    _, again = _run(shape, policy, min_remote_prefill_tokens=300)
    assert figures_of(outcome) == figures_of(again)
    assert len(outcome.first_tokens) == REQUESTS * 4 // 5
    assert min(outcome.first_tokens) > 0
    for engine in (*outcome.prefillers, *outcome.decoders):
        assert engine.in_flight == engine.tokens_in_flight == 0


def test_another_seed_is_another_run() -> None:
    assert figures_of(_run("chat", "prefix")[1]) != figures_of(_run("chat", "prefix", seed=1)[1])


def test_where_prompts_share_much_prefix_finds_more_than_chance() -> None:
    found = {
        policy: figures_of(Simulation(Setup("chat", 8, 8, 1500, policy, "session")).run())
        for policy in ("power_of_two", "prefix")
    }
    assert found["prefix"].prefill_hits > found["power_of_two"].prefill_hits + 0.1


def test_what_a_decoder_holds_is_not_prefilled_elsewhere() -> None:
    assert figures_of(_run("chat", "prefix")[1]).alone == 0
    assert figures_of(_run("chat", "prefix", min_remote_prefill_tokens=1000)[1]).alone > 0.5


def test_a_cache_keeps_what_was_used_last_and_beginnings_longest() -> None:
    cache = PrefixCache(4 * 256)
    cache.add([1, 2, 3])
    cache.add([7, 8])
    assert cache.held([1, 2, 3]) == 2 * 256
    assert cache.held([7, 8, 9]) == 2 * 256


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--prefillers", "2", "--decoders", "2", "--requests", "50", "--shape", "uniform"]
    assert main([*small, "--prefill-policy", "prefix"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert printed.err == "", "no progress where nobody watches"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--prefillers", "0"],
        ["--prefillers", "1001"],
        ["--requests", "9" * 5000],
        ["--requests", "²"],
        ["--load", "nan"],
        ["--shape", "round"],
        ["--prefill-policy", "best"],
        ["--nonsense"],
    ],
)
def test_bad_input_is_told_in_a_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
