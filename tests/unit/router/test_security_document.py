"""docs/security.md names a test for each promise: they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests/unit/router"
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/security.md").read_text("utf-8"))


def test_some_are_named() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_each_promise_has_its_test(file: str, name: str) -> None:
    text = (TESTS / file).read_text("utf-8")
    assert re.search(rf"^(async )?def {name}\(", text, re.M)
