"""docs/test-inventory.md names files that exist."""

import re

from tests.docs.markdown import ROOT

TEXT = (ROOT / "docs" / "test-inventory.md").read_text(encoding="utf-8")
FOLDERS = dict(re.findall(r"`([A-Z])` is `([\w/]+)`", TEXT))


def test_every_named_file_exists() -> None:
    assert len(FOLDERS) >= 7
    tables = [line for line in TEXT.splitlines() if line.startswith("|")]
    named = [name for line in tables for name in re.findall(r"`([\w/*]+(?:/|\.py))`", line)]
    assert len(named) > 70
    for name in named:
        folder, _, path = name.partition("/")
        pattern = f"tests/{FOLDERS[folder]}/{path}" if folder in FOLDERS else f"tests/{name}"
        assert list(ROOT.glob(pattern)), name
