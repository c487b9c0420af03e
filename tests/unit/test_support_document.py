"""docs/support.md says of nothing that it is tested unless it names the tests, and where they are
run; README.md says no more."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE, _, LIST = TEXT.partition("## The tests")
STATES = re.compile(
    r"tested(?: \([^)]*\))?: (?P<tested>\w)"
    r"|refused[^:|]*: (?P<refused>\w)"
    r"|\*untested\*"
    r"|no such (?:model|thing)|no ranks"
)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
NOT_IN_CI = "`make test-nightly`"
IN_NEXT = re.compile(r"tests/vllm/test_(?:next_\w+|releases|layouts)\.py|tests/unit/")
"""Tests of the newest release that CI runs."""


def rows(text: str) -> dict[str, list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: others for name, *others in cells}


def named() -> dict[str, list[tuple[str, str]]]:
    """The tests of each letter."""
    lines = LIST.strip().splitlines()
    found = {line[2]: NAMED.findall(line) for line in lines if line[:2] + line[3:5] == "* : "}
    assert len(found) == len(lines)
    return found


def letter_in(cell: str) -> str | None:
    match = STATES.fullmatch(cell)
    assert match, cell
    return match["tested"] or match["refused"]


def is_left_to_all(path: str, name: str) -> bool:
    """Marked `more`, by itself or with all of its file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in tree.body:
        of_file = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        if of_file and "mark.nightly" in ast.unparse(node):
            return True
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return "pytest.mark.nightly" in map(ast.unparse, node.decorator_list)
    return False


def test_each_cell_says_what_is_known() -> None:
    cells = [cell for others in rows(TABLE).values() for cell in others]
    assert len(cells) > 60
    assert {letter_in(cell) for cell in cells} - {None} == set(named())


def test_what_is_said_to_be_tested_names_tests_that_are_there() -> None:
    for letter, tests in named().items():
        assert tests, letter
        for path, name in tests:
            source = (ROOT / path).read_text(encoding="utf-8")
            # Where it is collected: defined there, or taken over from another file.
            there = rf"^(?:async )?def {name}\(|^    {name},$"
            assert re.search(there, source, re.MULTILINE), name


def test_a_cell_says_whether_ci_runs_its_tests() -> None:
    tests = named()
    for name, (_, build, newest) in rows(TABLE).items():
        for cell, is_newest in ((build, False), (newest, True)):
            its = tests.get(letter_in(cell) or "", [])
            is_left = any(is_left_to_all(*test) for test in its)
            is_left |= is_newest and not all(IN_NEXT.match(path) for path, _ in its)
            assert NOT_IN_CI in cell or not is_left, f"{name}: {cell}"


def test_the_readme_says_what_the_document_says() -> None:
    _, _, rest = README.partition("### What is supported\n")
    said = rows(rest.partition("\n## ")[0])
    assert len(said) > 15
    documented = rows(TABLE)
    for name, cells in said.items():
        for cell, full in zip(cells, documented[name], strict=True):
            assert re.split(r" \(|:", full)[0].strip("*") == cell, name
