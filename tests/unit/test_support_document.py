"""docs/support.md says of nothing that it is tested unless it names the test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
TABLE, _, LIST = TEXT.partition("## The tests")
STATES = re.compile(
    r"tested(?: \([^)]*\))?: (?P<tested>\w)"
    r"|refused[^:|]*: (?P<refused>\w)"
    r"|\*untested\*"
    r"|no such (?:model|thing)|no ranks"
)
NAMED = re.compile(r"^\* (\w): `(tests/[\w/]+\.py)::(test_\w+)`", re.MULTILINE)


def cells() -> list[str]:
    lines = [line for line in TABLE.splitlines() if line.startswith("|")][2:]
    return [cell.strip() for line in lines for cell in line.strip("|").split("|")[1:]]


def test_each_cell_says_what_is_known() -> None:
    assert len(cells()) > 60
    for cell in cells():
        assert STATES.fullmatch(cell), cell


def test_what_is_said_to_be_tested_names_its_test() -> None:
    found = [match for cell in cells() if (match := STATES.fullmatch(cell))]
    wanted = {match["tested"] or match["refused"] for match in found} - {None}
    named = {letter: (path, name) for letter, path, name in NAMED.findall(LIST)}
    assert wanted == set(named)
    assert len(named) == len(LIST.strip().splitlines())
    for path, name in named.values():
        source = (ROOT / path).read_text(encoding="utf-8")
        # Where it is collected: defined there, or taken over from another file.
        assert re.search(rf"^(?:async )?def {name}\(|^    {name},$", source, re.MULTILINE), name
