"""docs/support.toml calls nothing tested unless it names the tests, and docs/support.md follows it.

`python -m tests.unit.test_support_document` writes the tables. README.md may repeat rows of them.
"""

import ast
import re
import tomllib
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
README = ROOT / "README.md"
DATA = tomllib.loads((ROOT / "docs" / "support.toml").read_text(encoding="utf-8"))
FEATURES: list[dict[str, Any]] = DATA["feature"]
FAMILIES: list[dict[str, Any]] = DATA["family"]
PROOFS = {"answers", "bytes"}
COLUMNS = {"reference": "reference engine", "vllm-0.32": "vLLM 0.32", "vllm-0.33": "vLLM 0.33"}
NEWEST, BUILD = "vllm-0.33", "vllm-0.32"
BEGIN = "<!-- Written by python -m tests.unit.test_support_document from support.toml. -->\n"
END = "<!-- End of what is written. -->\n"
IN_NEXT = re.compile(r"tests/vllm/test_(?:next_\w+|releases|layouts)\.py|tests/unit/")
"""Tests of the newest release that CI runs."""


def cell_of(feature: dict[str, Any], column: str) -> dict[str, Any]:
    """Return the entry of a column, with the tests of the build before where it says "same"."""
    entry = feature.get(column, {})
    if entry == "same":
        assert column == NEWEST
        return {key: each for key, each in feature[BUILD].items() if key in ("refused", "tests")}
    return {"untested": True} if entry == "untested" else entry


def state_of(feature: dict[str, Any], column: str) -> str:
    """Return tested, nightly, untested, n/a, or how the engine refuses the feature."""
    cell = cell_of(feature, column)
    if not cell:
        return "n/a"
    if "untested" in cell:
        return "untested"
    tests = [tuple(each.split("::")) for each in cell["tests"]]
    nightly = cell.get("nightly", False) or any(is_nightly(path, name) for path, name in tests)
    nightly |= column == NEWEST and not all(IN_NEXT.match(path) for path, _ in tests)
    if "refused" in cell:
        return f"refused {cell['refused']}{' (nightly)' if nightly else ''}"
    return "nightly" if nightly else "tested"


def is_nightly(path: str, name: str) -> bool:
    """Return whether CI leaves the test out: it, or all of its file, has the mark `nightly`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in tree.body:
        of_file = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        if of_file and "mark.nightly" in ast.unparse(node):
            return True
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return "pytest.mark.nightly" in map(ast.unparse, node.decorator_list)
    return False


def tables() -> str:
    parts: list[str] = []
    for group in dict.fromkeys(each["group"] for each in FEATURES):
        features = [each for each in FEATURES if each["group"] == group]
        columns = [column for column in COLUMNS if any(column in each for each in features)]
        head = "".join(f" {COLUMNS[column]} |" for column in columns)
        parts += [f"\n### {group}\n", f"| |{head}", f"|---|{'---|' * len(columns)}"]
        for feature in features:
            cells = (text_of(feature, column) for column in columns)
            parts.append(f"| {feature['name']} | {' | '.join(cells)} |")
    parts += ["\n### Models by name\n", "| models | caches | vLLM 0.32 and 0.33 |", "|---|---|---|"]
    for (caches, proof), families in groupby(FAMILIES, itemgetter("caches", "proof")):
        models = "; ".join(family["models"] for family in families)
        parts.append(f"| {models} | {caches} | {proof} |")
    parts.append("\n### Messages of refusals\n")
    for feature in FEATURES:
        found = [m for column in COLUMNS for m in cell_of(feature, column).get("messages", ())]
        shown = ", ".join(f"`{m.partition(' yet. Start')[0]}`" for m in found)
        parts += [f"* {feature['name']}: {shown}"] if found else []
    return "\n".join(parts) + "\n\n"


def text_of(feature: dict[str, Any], column: str) -> str:
    note = cell_of(feature, column).get("note")
    return state_of(feature, column) + (f" ({note})" if note else "")


def with_tables(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}"


def test_the_page_is_written_from_the_data() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == with_tables(text), "run python -m tests.unit.test_support_document"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: each["name"])
def test_each_cell_is_a_known_state_and_names_tests_that_exist(feature: dict[str, Any]) -> None:
    assert feature.keys() <= {"group", "name", *COLUMNS}
    assert any(column in feature for column in COLUMNS)
    for column in COLUMNS:
        cell = cell_of(feature, column)
        assert cell.keys() <= {"refused", "messages", "nightly", "note", "tests", "untested"}
        assert bool(cell.get("tests")) != ("untested" in cell or not cell)
        for path, name in (each.split("::") for each in cell.get("tests", ())):
            source = (ROOT / path).read_text(encoding="utf-8")
            # A test is collected from the file that defines it, or that imports it.
            there = rf"^(?:async )?def {name}\(|^    {name},$"
            assert re.search(there, source, re.MULTILINE), name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each["models"])
def test_each_family_is_proven_by_tests_that_exist(family: dict[str, Any]) -> None:
    """tests/vllm/test_families.py compares the proofs with what our code does."""
    assert family["proof"] in PROOFS
    assert ("tests" in family) == (family["proof"] == "answers")
    for path, name in (each.split("::") for each in family.get("tests", ())):
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_no_feature_is_listed_twice() -> None:
    assert len(FEATURES) > 50
    assert len({each["name"] for each in FEATURES}) == len(FEATURES)


def test_the_readme_repeats_the_states_of_the_data() -> None:
    table = README.read_text(encoding="utf-8").partition("| reference engine | vLLM 0.32 |")[2]
    lines = table.partition("\n\n")[0].splitlines()[2:]
    assert len(lines) > 4
    by_name = {each["name"]: each for each in FEATURES}
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for cell, column in zip(cells, COLUMNS, strict=True):
            assert cell == text_of(by_name[name], column), name


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
