"""The comparison with other routers, without them."""

import json
from pathlib import Path

import pytest

from router.routing.route import POLICIES
from scripts.benchmarks.field import main
from scripts.benchmarks.simulated_engine import PrefixCache


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Nine conversations of 32k tokens whose requests come one after another, three times."""
    lines = []
    for number in range(27):
        ids = [1000 * (number % 9) + block for block in range(64)]
        entry = {"timestamp": 9000 * number, "input_length": 32_768, "output_length": 20}
        lines.append(json.dumps(entry | {"hash_ids": ids}))
    path = tmp_path / "conversations.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_router_that_knows_the_caches_reuses_all_that_they_hold(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", str(trace), "--peers", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    rows = {row[2]: row[3:] for row in map(str.split, printed.out.splitlines()[1:])}
    assert [*rows] == [*POLICIES, "local", "exact"]
    assert rows["exact"][1] == rows["prefix"][1] == "0.667"
    assert float(rows["least_loaded"][1]) < 0.667
    assert "without Dynamo or vllm-router" in printed.err


def test_file_that_is_no_trace_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").write_text("no JSON\n")
    assert main(["--trace", str(tmp_path / "trace")]) == 2
    assert "bench field: error: " in capsys.readouterr().err


def test_cache_reports_added_and_evicted_chunks() -> None:
    changes: list[tuple[list[tuple[int, int | None]], list[int]]] = []
    cache = PrefixCache(3 * 256)
    cache.on_change = lambda added, evicted: changes.append(([*added], evicted))
    cache.add([1, 2])
    cache.add([1, 3, 4])
    cache.add([1])
    assert changes == [([(1, None), (2, 1)], []), ([(3, 1), (4, 3)], [2]), ([], [])]
