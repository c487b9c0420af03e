"""Another vLLM than those that were tested: what it names as they do is on."""

import ast
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from engine_ext.vllm.compat import features
from engine_ext.vllm.compat.names import ANY, Name, problem

ROOT = Path(__file__).parents[4]
REFUSAL = (
    r"engine_ext does not fit vLLM 0\.31\.1: connector: vllm\.\S+: No module named 'vllm\.\w+'; "
    r"cache: .*; content: .*"
)


@pytest.fixture
def other_vllm(tmp_path: Path) -> Path:
    """Nothing but a version."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.31.1"\n')
    return tmp_path


def run(program: str, beside: Path) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(beside), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", ["DisaggConnector", "DisaggPushConnector"])
def test_the_connector_refuses_in_one_line_that_names_what_kv_depends_on(
    other_vllm: Path, name: str
) -> None:
    result = run(f"from engine_ext.vllm import {name}", other_vllm)
    assert result.returncode == 1
    assert re.fullmatch(f"RuntimeError: {REFUSAL}", result.stderr.splitlines()[-1])


def test_the_plugin_changes_nothing_and_says_so(other_vllm: Path) -> None:
    program = "from engine_ext.vllm import plugin; plugin.register()"
    result = run(program, other_vllm)
    assert (result.returncode, result.stdout) == (0, "")
    (line,) = result.stderr.splitlines()
    assert re.match(REFUSAL, line)


def test_what_is_off_is_said_once_in_a_family_of_processes(other_vllm: Path) -> None:
    say = "from engine_ext.vllm.compat import support; support.say()"
    program = f"import subprocess, sys; {say}; subprocess.run([sys.executable, '-c', {say!r}])"
    unknown, *lines = run(program, other_vllm).stderr.splitlines()
    known = r"(\d\.\d+ and )+\d\.\d+"
    untested = rf"vLLM 0\.31\.1 was not tested, {known} were: what it names as they do is on"
    assert re.fullmatch(untested, unknown)
    assert len(lines) == len(features.OPTIONAL)
    for feature, line in zip(features.OPTIONAL, lines, strict=True):
        assert line.startswith(f"{feature.name} is off with vLLM 0.31.1 ({feature.lost}): vllm.")


class Example:
    shared = 1
    merely_read: int

    def __init__(self) -> None:
        self.kept = 2 if self.shared else self.merely_read

    def call(self, one: int, two: int, three: int = 3) -> int:
        return abs(self.kept)


class Asking(ABC):
    @abstractmethod
    def call(self) -> int: ...


def fill(example: Example) -> None:
    example.kept = 3


BEGUN = ("worker", "hand_over", "prompt", "answer")
AT = f"{__name__}:Example"


@pytest.mark.parametrize(
    "name",
    [
        Name(AT, has=("shared", "kept", "call")),
        Name(f"{AT}.call", ("self", "one", "two")),
        Name(f"{AT}.call", ("self", "one", ANY)),
        Name(f"{AT}.call", uses=("abs", "kept")),
        Name(f"{__name__}:fill", has=("kept",)),
        Name(f"{__name__}:Asking", asks=("call", "told")),
        Name(f"{AT}.shared", values=(0, 1)),
    ],
)
def test_a_name_that_is_as_we_know_it_is_no_problem(name: Name) -> None:
    assert problem(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (Name("vllm_of_nobody:A"), "vllm_of_nobody:A: No module named 'vllm_of_nobody'"),
        (Name(f"{AT}.gone"), "Example.gone: type object 'Example' has no attribute 'gone'"),
        (Name(AT, has=("shared", "gone", "lost")), "Example has no gone, lost"),
        (Name(AT, has=("kept", "merely_read")), "Example has no merely_read"),
        (
            Name(f"{AT}.call", ("self", "two")),
            "Example.call takes (self, one, two, three), not (self, two)",
        ),
        (
            Name(f"{AT}.call", ("self", "one")),
            "Example.call takes (self, one, two, three), not (self, one)",
        ),
        (Name(f"{AT}.call", uses=("abs",)), "Example.call uses abs, kept, not abs"),
        (Name(f"{__name__}:fill", has=("kept", "gone")), "fill has no gone"),
        (Name(f"{__name__}:Asking", asks=("told",)), "Asking asks for call, too"),
        (Name(f"{AT}.shared", values=(2, 3)), "Example.shared is 1, not 2 or 3"),
    ],
)
def test_a_name_that_is_another_is_named_with_what_it_is(name: Name, words: str) -> None:
    assert str(problem(name)).endswith(words)


OURS = "engine_ext.vllm"


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        ("connector", []),
        ("stats", [features.METRICS]),
        ("compat.engine_loop", [features.LEAVING]),
        ("compat.by_name", [features.SEVERAL]),
        ("pages", [features.PAGES]),
        ("compat.streams", [features.STREAMS]),
        ("compat.load_failures", [features.LOAD_FAILURES]),
        ("problems", [features.LOAD_FAILURES]),
        ("scheduler", [features.SCHEDULER]),
        ("compat.finish_reason", [features.SCHEDULER]),
        ("compat.finish_reason", [features.THRESHOLD]),
        ("compat.request_field", [features.THRESHOLD]),
        ("compat.request_field", [features.BEGUN]),
        *((f"compat.begun_{name}", [features.BEGUN]) for name in BEGUN),
    ],
)
def test_a_feature_can_be_imported_where_its_names_are(
    module: str, wanted: list[features.Feature]
) -> None:
    """And those that KV depends on: of nothing else is anything imported."""
    probed = _probed(features.REQUIRED + tuple(wanted))
    assert {one for one in _imported(f"{OURS}.{module}") if one not in probed} == set()


@pytest.mark.parametrize("speaks", [features.THRESHOLD, features.BEGUN, features.LOAD_FAILURES])
def test_what_speaks_in_streams_is_off_with_them(speaks: features.Feature) -> None:
    """Else a refusal would be a stream without an end, and what a client has be said again."""
    assert set(features.STREAMS.needs) <= set(speaks.needs)


def test_every_name_of_vllms_that_we_import_has_a_probe() -> None:
    found = {one for path in (ROOT / "engine_ext/vllm").rglob("*.py") for one in _names(path)[0]}
    assert len(found) > 40
    assert found - _probed(ALL) == set()


def test_the_documents_table_names_every_feature_that_can_be_off() -> None:
    text = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    section = text.partition("## Versions of vLLM")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert named == [each.name for each in features.OPTIONAL]


ALL = features.REQUIRED + features.OPTIONAL
PUBLIC = {"vllm.__version__"}


def _probed(wanted: tuple[features.Feature, ...]) -> set[str]:
    """Dotted, with the classes and modules that they are in."""
    found = set(PUBLIC)
    for each in (name for feature in wanted for name in feature.needs):
        module, _, path = each.at.partition(":")
        parts = [module, *path.split(".")] if path else [module]
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        found |= {".".join([*parts, name]) for name in each.has}
    return found


def _imported(module: str) -> set[str]:
    """Of vLLM, while `module` and what of ours it needs are imported."""
    found: set[str] = set()
    seen, todo = set(), [module]
    while todo:
        if (each := todo.pop()) in seen:
            continue
        seen.add(each)
        path = ROOT / each.replace(".", "/")
        path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if path.exists():
            theirs, ours = _names(path, deep=False)
            found |= theirs
            todo += ours
    return found


def _names(path: Path, deep: bool = True) -> tuple[set[str], set[str]]:
    """Of vLLM and of our adapter, imported by a file: everywhere in it, or when it is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if deep else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{one.name}" for one in node.names}
            found |= {node.module} if node.module.startswith(OURS) else set()
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    theirs = {one for one in found if one.partition(".")[0] == "vllm"}
    return theirs, {one for one in found if one.startswith(OURS)}
