"""All that gpu_check needs is there, and what went wrong is told."""

import ast
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_steps
from scripts.gpu_steps import Done, Step
from scripts.transfer_bench.reference import Setup, VllmEngine

ROOT = Path(__file__).resolve().parents[3]
CHECK = ROOT / "scripts" / "gpu_check.sh"
STARTED = (
    "scripts/gpu_steps.py",
    "scripts/bench_transfer.py",
    "scripts/transfer_bench/equality.py",
    "engine_ext/reference/cli.py",
)


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.exists()), None)


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached(starts: list[Path]) -> tuple[set[Path], set[str]]:
    """Files of ours, and the packages of others: of scripts all that they import, of engines what
    their modules cannot be imported without."""
    files: set[Path] = set()
    others: set[str] = set()
    while starts:
        file = starts.pop()
        if file in files:
            continue
        files.add(file)
        tree = ast.parse(file.read_text())
        found = {name: file_of(name) for name in imports(ast.walk(tree))}
        starts += filter(None, found.values())
        late = file.is_relative_to(ROOT / "scripts")
        others.update(name.partition(".")[0] for name in (found if late else imports(tree.body)))
    return files, others - sys.stdlib_module_names - {"scripts", "engine_ext"}


def test_all_that_the_steps_import_is_installed() -> None:
    said = re.search(r'MODULES="([^"]*)"', CHECK.read_text())
    assert said is not None
    files, others = reached([ROOT / name for name in STARTED])
    assert ROOT / "engine_ext/reference/server/app.py" in files
    assert ROOT / "scripts/transfer_bench/copying.py" in files
    assert others - {"nixl"} <= set(said[1].split())


def test_the_wheels_to_carry_are_those_that_are_tested() -> None:
    (nixl,) = re.findall(r"^nixl==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (vllm,) = re.findall(
        r"^vllm==(\S+)", (ROOT / "scripts/vllm_wheels.txt").read_text(), re.MULTILINE
    )
    said = CHECK.read_text()
    assert set(re.findall(r"nixl(?:-cu13)?==([\d.]+)", said)) == {nixl}
    assert re.findall(r"vllm==([\d.]+)", said) == [vllm]


STUB = """\
#!/bin/sh
case "$*" in
"-m pip list"*) echo torch==2.9.0 ;;
"-m pip install"*) echo "$*" >>"$CALLS"; case "$*" in *" vllm"*) exit "$VLLM_FAILS" ;; esac ;;
"- vllm") echo vllm ;;
"- "*) echo msgspec ;;
"-c import nixl._api") grep -q nixl "$CALLS" ;;
"-c import torch;"*) echo 13 ;;
*gpu_steps.py*) echo "$*" ;;
esac
"""


def checked(directory: Path, *options: str, fails: int = 0) -> tuple[list[str], str]:
    """What pip was told, and the steps, on a machine whose Python has torch alone."""
    for name, text in (("python", STUB), ("nvidia-smi", "#!/bin/sh\n")):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    environment = {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "PYTHON": str(directory / "python"),
        "OUT": str(directory),
        "CALLS": str(directory / "calls"),
        "VLLM_FAILS": str(fails),
    }
    done = subprocess.run(
        [CHECK, *options], env=environment, capture_output=True, text=True, check=True
    )
    return (directory / "calls").read_text().splitlines(), done.stdout + done.stderr


def test_what_is_installed_stays_as_it_is(tmp_path: Path) -> None:
    (told, nixl), _ = checked(tmp_path)
    assert f"-c {tmp_path}/installed.txt msgspec vllm>=" in told
    assert (tmp_path / "installed.txt").read_text() == "torch==2.9.0\n"
    assert re.search(r"--no-deps nixl==([\d.]+) nixl-cu13==\1$", nixl)


def test_without_vllm_it_is_not_installed(tmp_path: Path) -> None:
    told, _ = checked(tmp_path, "--without-vllm")
    assert not any(" vllm" in each for each in told)


def test_vllm_that_cannot_be_installed_keeps_nothing_else_from_it(tmp_path: Path) -> None:
    told, said = checked(tmp_path, fails=1)
    assert told[-2].endswith("installed.txt msgspec")
    assert "gpu_check: error: vLLM cannot be installed" in said
    assert "gpu_steps.py --device cuda" in said


def options(out: Path, **changed: Any) -> Namespace:
    chosen = vars(gpu_steps._parser().parse_args(["--out", str(out)]))
    return Namespace(**chosen | changed)


def test_vllm_is_tried_pulled_and_pushed_in_both_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_steps, "has_vllm", lambda: True)
    found = [step for step in gpu_steps.steps(options(tmp_path)) if "vllm" in step.arguments]
    words = [" ".join(step.arguments) for step in found]
    assert [re.findall(r"--(?:mode|dtype) (\w+)", each) for each in words] == [
        ["pull", "float32"],
        ["push", "float32"],
        ["pull", "bfloat16"],
        ["push", "bfloat16"],
    ]
    assert len({step.arguments[-1] for step in found}) == 4  # where logs are kept


def test_vllm_runs_as_the_readme_says(tmp_path: Path) -> None:
    (scheduler,) = set(re.findall(r"--scheduler-cls (\S+)", (ROOT / "README.md").read_text()))
    given = VllmEngine._options(Namespace(), Setup(8, "cuda"), {})  # type: ignore[arg-type]
    assert given["--scheduler-cls"] == scheduler


def test_vllm_that_is_not_there_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_steps, "has_vllm", lambda: False)
    monkeypatch.setattr(gpu_steps, "steps", lambda _: [])
    assert gpu_steps.main(["--out", str(tmp_path)]) == 1
    assert "gpu_check: failed: vLLM: it is not installed" in capsys.readouterr().err
    assert gpu_steps.main(["--out", str(tmp_path), "--without-vllm"]) == 0


def test_figures_in_doubt_are_told_and_fail_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('a table\\nof figures'); sys.exit(3)"
    bench = Step("bench", ("-c", code), 60, may_doubt=True)
    monkeypatch.setattr(gpu_steps, "steps", lambda _: [bench])
    arguments = ["--out", str(tmp_path), "--without-vllm"]
    assert gpu_steps.main(arguments) == 0
    said = capsys.readouterr()
    assert "bench\na table\nof figures\n" in said.out
    assert "gpu_check: doubtful: bench" in said.err
    assert gpu_steps.main([*arguments, "--strict"]) == 3


def test_what_is_done_is_written_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(step: Step) -> Done:
        if step.name == "second":
            raise KeyboardInterrupt
        return Done(step.name, "ok", 1.0, "said")

    named = [Step("first", (), 1), Step("second", (), 1)]
    monkeypatch.setattr(gpu_steps, "steps", lambda _: named)
    monkeypatch.setattr(gpu_steps, "run", run)
    with pytest.raises(KeyboardInterrupt):
        gpu_steps.main(["--out", str(tmp_path), "--without-vllm"])
    (told,) = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert told["name"] == "first"
