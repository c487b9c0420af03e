"""Another vLLM than those that were tested: what it names as they do is on."""

import ast
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from engine_ext.vllm import optional
from engine_ext.vllm.compat.probe import ANY, Feature, Symbol, problem
from engine_ext.vllm.compat.vllm_symbols import PROMISED, REQUIRED
from engine_ext.vllm.optional.answers import PREEMPTION_RETURN, RESUME, THRESHOLD
from engine_ext.vllm.optional.load_failures import LOAD_FAILURES
from engine_ext.vllm.optional.streams import STREAMS

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


def run(program: str, beside: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(beside), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
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
    say = "from engine_ext.vllm.compat import support; support.log_what_is_off()"
    program = f"import subprocess, sys; {say}; subprocess.run([sys.executable, '-c', {say!r}])"
    unknown, *lines = run(program, other_vllm).stderr.splitlines()
    known = r"(\d\.\d+ and )+\d\.\d+"
    assert re.fullmatch(rf"vLLM 0\.31\.1 is untested \(tested: {known}\): .*", unknown)
    assert len(lines) == len(OPTIONAL)
    for feature, line in zip(OPTIONAL, lines, strict=True):
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


AT = f"{__name__}:Example"


@pytest.mark.parametrize(
    "name",
    [
        Symbol(AT, has="shared kept call"),
        Symbol(f"{AT}.call", takes="self one two"),
        Symbol(f"{AT}.call", takes=f"self one {ANY}"),
        Symbol(f"{AT}.call", uses="abs kept"),
        Symbol(f"{__name__}:fill", has="kept"),
        Symbol(f"{__name__}:Asking", abstract="call told"),
        Symbol(f"{AT}.shared", values=(0, 1)),
    ],
)
def test_a_name_that_is_as_we_know_it_is_no_problem(name: Symbol) -> None:
    assert problem(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (Symbol("vllm_of_nobody:A"), "vllm_of_nobody:A: No module named 'vllm_of_nobody'"),
        (Symbol(f"{AT}.gone"), "Example.gone: type object 'Example' has no attribute 'gone'"),
        (Symbol(AT, has="shared gone lost"), "Example has no gone, lost"),
        (Symbol(AT, has="kept merely_read"), "Example has no merely_read"),
        (
            Symbol(f"{AT}.call", takes="self two"),
            "Example.call takes (self, one, two, three), not (self, two)",
        ),
        (
            Symbol(f"{AT}.call", takes="self one"),
            "Example.call takes (self, one, two, three), not (self, one)",
        ),
        (Symbol(f"{AT}.call", uses="abs"), "Example.call uses abs, kept, not abs"),
        (Symbol(f"{__name__}:fill", has="kept gone"), "fill has no gone"),
        (Symbol(f"{__name__}:Asking", abstract="told"), "Asking also requires call"),
        (Symbol(f"{AT}.shared", values=(2, 3)), "Example.shared is 1, not 2 or 3"),
    ],
)
def test_a_name_that_is_another_is_named_with_what_it_is(name: Symbol, words: str) -> None:
    assert str(problem(name)).endswith(words)


OURS = "engine_ext.vllm"
OPTIONAL = PROMISED + optional.TIER_2
ALL = REQUIRED + OPTIONAL


@pytest.mark.parametrize("feature", OPTIONAL, ids=[each.name for each in OPTIONAL])
def test_a_module_that_only_a_feature_uses_imports_no_module_of_another(feature: Feature) -> None:
    """Else a name that the one lacks turns the other off."""
    own = {f"{OURS}.{module}" for each in _with_required(feature) for module in each.modules}
    others = {f"{OURS}.{module}" for each in OPTIONAL for module in each.modules} - own
    # These import nothing of vLLM.
    others -= {f"{OURS}.prompt_progress", f"{OURS}.optional.steps.step_times"}
    for module in feature.modules:
        assert _imported(f"{OURS}.{module}") & others == set(), module


@pytest.mark.parametrize("sender", [THRESHOLD, RESUME, PREEMPTION_RETURN, LOAD_FAILURES])
def test_what_is_sent_in_streams_is_off_with_them(sender: Feature) -> None:
    """Else a refusal would be a stream without an end, and what a client has be sent again."""
    assert STREAMS in sender.requires


def test_every_module_that_imports_vllm_is_a_features_or_everybodys() -> None:
    """So that an import that fails turns a feature off, and names what is missing."""
    modules = {f"{OURS}.{module}" for each in ALL for module in each.modules}
    always = {*_imported(f"{OURS}.connector"), f"{OURS}.compat.patch_weights"}
    for path in (ROOT / "engine_ext/vllm").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if _names(path)[0]:
            assert module in modules | always


def test_every_patch_is_installed_by_the_plugin_or_by_the_connector() -> None:
    by_plugin = {f"{OURS}.{patch}" for each in ALL for patch in each.patches}
    by_connector = {
        f"{OURS}.compat.patch_weights",
        f"{OURS}.optional.engine_loop.patch_engine_loop",
    }
    found = set()
    for path in (ROOT / "engine_ext/vllm").rglob("*.py"):
        if "\ndef install() -> None:" in path.read_text(encoding="utf-8"):
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert found == by_plugin | by_connector


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("resume", "resume"),
        ("cache_hit_threshold", "cache_hit_threshold"),
        ("begun", "resume"),
        ("rest", "idle_rest"),
        ("hand_back", "preemption_return"),
        ("leaving", "early_exit"),
    ],
)
def test_the_operator_can_turn_a_feature_off(other_vllm: Path, written: str, name: str) -> None:
    program = (
        "from engine_ext.vllm.compat import support; support.log_what_is_off();"
        f"print(support.missing()[{name!r}])"
    )
    result = run(program, other_vllm, DISAGG_VLLM_DISABLE=f"metrics, {written},resum")
    assert result.stdout == "DISAGG_VLLM_DISABLE turns it off\n"
    assert "DISAGG_VLLM_DISABLE: no feature resum; did you mean resume?" in result.stderr
    deprecation = f"DISAGG_VLLM_DISABLE: {written} is now {name}; the old name is deprecated"
    assert (deprecation in result.stderr) == (written != name)


def test_the_documents_table_names_every_feature_that_can_be_off() -> None:
    text = (ROOT / "docs" / "engine-configuration.md").read_text(encoding="utf-8")
    section = text.partition("## Versions of vLLM")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert named == [each.name for each in OPTIONAL]


def test_each_name_says_what_it_is_for_and_what_breaks_without_it() -> None:
    for symbol in (symbol for feature in ALL for symbol in feature.symbols):
        assert all(symbol.why.partition(". ")), symbol.at


@pytest.mark.parametrize("words", [r"vLLM", r"\b[Ww]e\b", r"\nIf "])
def test_each_patch_begins_with_what_vllm_does_what_we_change_and_what_breaks(words: str) -> None:
    for path in (ROOT / "engine_ext/vllm").rglob("patch_*.py"):
        head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert re.search(words, head), path


def _with_required(feature: Feature) -> set[Feature]:
    return {feature}.union(*map(_with_required, feature.requires))


def _imported(module: str) -> set[str]:
    """Return the modules of our adapter that are imported with `module`."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        if (each := todo.pop()) in seen:
            continue
        path = ROOT / each.replace(".", "/")
        path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if path.exists():
            seen.add(each)
            todo += _names(path, deep=False)[1]
    return seen


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
