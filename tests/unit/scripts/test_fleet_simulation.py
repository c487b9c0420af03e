"""The simulated fleet replays from its seed, reads published traces, and its engines make the gaps
that chunked prefill makes."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from scripts.benchmarks.fleet import main
from scripts.benchmarks.fleet_simulation import Outcome, Setup, Simulation
from scripts.benchmarks.simulated_engine import SPEEDS
from scripts.benchmarks.traces import Arrival, Job, at_load, changing, published

QWEN = SPEEDS["qwen3-32b-h200"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """60 requests in ticks of three seconds; every second one repeats an earlier prompt."""
    lines = []
    for number in range(60):
        first = 1000 * (number // 2)
        entry = {"timestamp": 3000 * (number // 6), "input_length": 2100, "output_length": 20}
        lines.append(json.dumps(entry | {"hash_ids": [first, first + 1, first + 2, first + 3]}))
    path = tmp_path / "published.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The lines without the measured times of a choice."""
    assert main(arguments) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


def test_trace_is_replayed_at_its_own_times(trace: Path) -> None:
    arrivals = published(trace, spread=False)
    assert [at for at, _ in arrivals] == [3.0 * (number // 6) for number in range(60)]
    assert len(arrivals[0][1].chunks) == 2100 // 256
    assert arrivals[0][1].chunks == arrivals[1][1].chunks != arrivals[2][1].chunks
    spread = [at for at, _ in published(trace, spread=True)]
    assert spread[:7] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert spread == sorted(spread)


@pytest.mark.parametrize("closed", [True, False])
def test_session_waits_for_its_answers_and_pauses_in_a_closed_loop(
    tmp_path: Path, closed: bool
) -> None:
    path, jobs = tmp_path / "sessions.jsonl", list[Job]()
    for number in range(6):
        entry = {"timestamp": 100 * number, "input_length": 2100, "output_length": 500}
        entry |= {"session": number % 2, "pause": 1000 * (number // 2)}
        with path.open("a") as file:
            print(json.dumps(entry | {"hash_ids": [1, 2, 3, 4]}), file=file)
    setup = Setup("uniform", 1, 1, 0, "prefix", "prefix", closed_loop=closed,
        arrivals=at_load(published(path, spread=False), 2))  # fmt: skip
    answers = Simulation(setup, jobs).run().answers
    assert len(jobs) == len(answers) == 6
    ends = {one.arrived: one.arrived + one.ttft + 499 * one.tpot for one in answers}
    for session in ("0", "1"):
        own = [job for job in jobs if job.session == session]
        assert [job.pause for job in own] == [0, 0.5, 1]
        waits = [b.arrived - ends[a.arrived] for a, b in pairwise(own)]
        assert (waits == pytest.approx([0.5, 1])) is closed
    assert [job.arrived for job in jobs[:2]] == [0, 0.05]


def test_policy_that_knows_prefixes_finds_them_in_the_trace(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--trace", str(trace), "--fleet", "3+1")
    found = rows(capsys, *arguments, "--prefill-policy", "round_robin", "prefix")
    assert [row[3] for row in found] == ["round_robin", "prefix"]
    hits = [int(row[12].rstrip("%")) for row in found]
    assert hits[0] == 0
    assert hits[1] > 0
    assert found == rows(capsys, *arguments, "--prefill-policy", "round_robin", "prefix")


def test_goals_that_nothing_meets_have_no_goodput(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--trace", str(trace), "--prefill-policy", "prefix", "--fleet", "2+16")
    assert rows(capsys, *arguments)[0][6] == "1.000"
    for goal in ("--tpot-goal", "--ttft-goal", "--gap-goal"):
        assert rows(capsys, *arguments, goal, "0.001")[0][6] == "0.000"


def test_several_routers_find_more_if_they_share_or_get_whole_conversations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ("--shape", "chat", "--requests", "1200", "--prefill-policy", "prefix")
    fleet = ("--fleet", "4+2")
    one, four = rows(capsys, *shape, *fleet, "--routers", "1", "4")
    (sharing,) = rows(capsys, *shape, *fleet, "--routers", "4", "--share-interval", "0.2")
    (hashed,) = rows(capsys, *shape, *fleet, "--routers", "4", "--by-conversation")
    hits = [int(row[12].rstrip("%")) for row in (one, four, sharing, hashed)]
    assert min(hits[2:]) - 5 < hits[1] <= hits[3]
    assert hits[1] < hits[2]
    assert hits[2] >= hits[0] - 3


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"timestamp": "soon", "input_length": 1}', "\x00"]
)
def test_file_that_is_no_trace_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{line}\n")
    assert main(["--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}, line 1: not a request of a trace" in error
    assert error.count("\n") == 1
    assert main(["--trace", str(tmp_path / "none")]) == 2


def job(tokens: int, output: int, first_chunk: int = 0) -> Job:
    chunks = tuple(range(first_chunk, first_chunk + tokens // 256))
    return Job(tokens, output, chunks, chunks)


def replay(*arrivals: Arrival, **changes: object) -> Outcome:
    """One prefill and one decode engine with the speed of Qwen3-32B."""
    setup = Setup("uniform", 1, 1, 0, "prefix", "prefix", speed=QWEN, arrivals=arrivals)
    return Simulation(replace(setup, **changes)).run()  # type: ignore[arg-type]


def test_steps_without_prompts_take_the_sum_of_their_times() -> None:
    (answer,) = replay((0.0, job(10_000, 500))).answers
    steps = [QWEN.step(0, 0, 1, 10_000 + step) for step in range(499)]
    assert answer.tpot == pytest.approx(sum(steps) / 499)
    # Arrivals end the steps early, but no step is lost or made twice.
    others = [(2 + at / 7, job(256, 2, 1000 * at)) for at in range(1, 20)]
    first = max(replay((0.0, job(10_000, 500)), *others).answers, key=lambda one: one.ttft)
    assert first.tpot == pytest.approx(sum(steps) / 499, rel=0.01)


@pytest.mark.parametrize(("budget", "gap"), [(256, 17), (2048, 110)])
def test_prompt_on_a_decoder_delays_its_answers_by_a_chunk(budget: int, gap: int) -> None:
    arrivals = [(0.0, job(2560, 200)), (1.0, job(2560, 200, 1000))]
    split, alone = (
        replay(*arrivals, step_tokens=budget, min_remote_prefill_tokens=least)
        for least in (0, 10_000)
    )
    assert (split.alone, alone.alone) == (0, 2)
    assert 1000 * max(one.worst for one in split.answers) < 12
    assert 1000 * max(one.worst for one in alone.answers) == pytest.approx(gap, rel=0.1)


def test_decoder_computes_prompts_by_load_only_within_the_target() -> None:
    arrivals = [(0.15 * number, job(4096, 400, 1000 * number)) for number in range(40)]
    no, yes, tight = (
        replay(*arrivals, target_itl=target, step_tokens=256) for target in (0.0, 0.05, 0.012)
    )
    assert (no.alone, tight.alone) == (0, 0)
    assert 5 < yes.alone < 40
    assert max(one.worst for one in yes.answers) < 0.05
    assert mean(one.ttft for one in yes.answers) < mean(one.ttft for one in no.answers)


def test_step_with_a_time_limit_holds_it_in_deep_contexts() -> None:
    arrivals = [(0.0, job(2560, 2000)), (1.0, job(100_000, 20, 1000))]
    for limit, worst in ((0.0, 0.08), (0.04, 0.0401)):
        outcome = replay(*arrivals, step_tokens=512, step_s=limit, min_remote_prefill_tokens=10**6)
        assert worst / 1.5 < max(one.worst for one in outcome.answers) <= worst * 1.5
    assert max(one.worst for one in outcome.answers) <= worst


def test_prompts_wait_for_room_at_the_decoder_and_for_its_network() -> None:
    arrivals = [(0.0, job(40_000, 1000, 1000 * number)) for number in range(3)]
    roomy, full, slow = (
        sorted(one.ttft for one in replay(*arrivals, speed=speed).answers)
        for speed in (
            QWEN,
            replace(QWEN, kv_tokens=90_000),
            replace(QWEN, nic_tokens_per_s=8_000.0),
        )
    )
    assert full[1] == pytest.approx(roomy[1], abs=0.1)  # two fit
    assert full[2] > roomy[2] + 5  # the third waits for the end of an answer
    assert [later - sooner for sooner, later in pairwise(slow)] == pytest.approx([5, 5], rel=0.01)


@pytest.mark.parametrize(("lend_s", "borrowed"), [(50, 0), (150, 8191)])
def test_replaced_engine_gets_no_more_prompts_and_lends_for_a_while(
    lend_s: float, borrowed: int
) -> None:
    """It alone has the first prompt when that comes again: other caches have room for one."""
    arrivals = [(100.0 * at, job(8192, 10, 100 * (at % 2))) for at in range(3)]
    setting = {"loans": True, "restarts": 1, "cache_tokens": 8192}
    old, new = replay(*arrivals, lend_s=lend_s, **setting).prefillers
    assert (old.asked, new.asked, new.borrowed) == (8192, 2 * 8192, borrowed)


def test_changing_traffic_turns_from_documents_to_answers_and_back() -> None:
    arrivals, _ = changing(0)
    parts = [[one for at, one in arrivals if start <= at < start + 300] for start in (0, 450, 800)]
    prompts = [sum(one.tokens for one in part) / len(part) for part in parts]
    answers = [sum(one.output for one in part) / len(part) for part in parts]
    assert min(prompts[0], prompts[2]) > 8 * prompts[1]
    assert answers[1] > 6 * max(answers[0], answers[2])


@pytest.mark.parametrize("text", ["0+2", "2+", "1+1+1+1", "two", "-1"])
def test_fleet_without_an_engine_for_a_role_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--fleet", text])
    assert "is not P+D, N or P+D+N" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["free", "boundary"])
def test_engines_of_both_roles_serve_what_a_bad_division_cannot(form: str) -> None:
    jobs = [(at / 1.2, one) for at, one in changing(1, phases=[1, 2])[0] if 370 < at < 500]
    split = Setup("uniform", 7, 1, 0, "prefix", "prefix", speed=QWEN, step_s=0.045)
    goods = []
    for setup in (split, replace(split, prefillers=0, decoders=0, both=8, form=form)):
        arrivals = [(at, replace(one)) for at, one in jobs]
        outcome = Simulation(replace(setup, target_itl=0.05, arrivals=arrivals)).run()
        assert len(outcome.answers) == len(jobs)
        goods.append(mean(one.ttft <= 2 and one.gap <= 0.05 for one in outcome.answers))
    assert goods[0] < 0.8
    assert goods[1] > 0.95
