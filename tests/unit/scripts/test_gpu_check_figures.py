"""Figures of transfers may be believed, and are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.errors import BenchError
from scripts.transfer_bench import cli, copying
from scripts.transfer_bench.engine import EngineSpec, Granted, Loaded
from scripts.transfer_bench.memory import HostMemory, Shape
from scripts.transfer_bench.report import Aim, Report, Row


def test_a_copy_is_of_half_the_memory_at_most() -> None:
    memory = HostMemory(Shape(2, 8, 64))
    memory.stamp(5)
    memory.copy(2 * 8 * 64 // 2)
    assert (memory.marks(range(8))[1] == memory.marks(range(8))[0]).all()
    with pytest.raises(AssertionError):
        memory.copy(2 * 8 * 64 // 2 + 8)


class Acted:
    """An Actor in this process, without NIXL."""

    def __init__(self, make: object, spec: EngineSpec) -> None:
        self._memory = HostMemory(spec.shape)

    def __enter__(self) -> "Acted":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def call(self, method: Any, *arguments: Any) -> Any:
        if method is copying.Side.copy:
            return self._memory.copy(*arguments)
        answers = {
            copying.Side.prefill: Granted({}, 0.0, 0.0),
            copying.Side.load: Loaded(0.0, 0.0, 1.0),
            copying.Side.load_beside: (1.0, 1.0),
            copying.Side.spin: 1.0,
        }
        return answers.get(method)


def test_the_largest_transfer_is_copied_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "Actor", Acted)
    report = Report({}, {}, 1.0)
    copying.measure(report, Shape(2, 64, 4096), "cpu", (16, 64), 1)
    assert len(report.rows) == 2


@pytest.mark.parametrize(("only", "blocks"), [("copy", 300), ("throughput", 328), ("idle", 0)])
def test_the_memory_of_a_section_is_counted(only: str, blocks: int) -> None:
    given = cli._parser().parse_args(["--only", only, "--blocks", "16,100", "--layers", "2"])
    assert cli.needed_bytes(given) == blocks * 2 * 64 * 1024


def test_figures_are_kept_where_a_later_section_fails(tmp_path: Path) -> None:
    report, file = Report({}, {}, 1.0), tmp_path / "bench.json"
    kept: list[Any] = []

    def well() -> None:
        report.add(Row("a section", "a case", {"figure": 1.0}, 1, 0.0))

    def fail() -> None:
        kept.append(json.loads(file.read_text()))
        raise BenchError("the device has no more memory")

    cli.measure(report, {"first": well, "second": fail, "third": well}, file)
    assert [row["case"] for row in kept[0]["rows"]] == ["a case"]
    said = json.loads(file.read_text())
    assert said["failed"] == ["second"]
    assert len(said["rows"]) == 2


def test_rows_in_doubt_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({}, {}, 0.25)
    for spread in (0.1, 0.3, 0.4):
        report.add(Row("a section", "a case", {"ms": 3.0}, 9, spread, Aim("ms", spread * 10)))
    given = cli._parser().parse_args([])
    assert cli._conclude(report, given) == 0
    given.strict = True
    assert cli._conclude(report, given) == 3
    assert capsys.readouterr().err.endswith("of 3 rows 1 missed an aim, 2 are noisy\n")
    report.failed.append("idle")
    assert cli._conclude(report, given) == 1
