"""The README's table of settings is the model's."""

from __future__ import annotations

from pathlib import Path

from router.settings import settings_table

README = Path(__file__).parents[3] / "README.md"


def test_the_readme_has_the_table_of_the_model() -> None:
    text = README.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- settings:begin -->")
    block, end, _ = rest.partition("<!-- settings:end -->")
    assert end, "README.md has lost the markers of the settings table"
    assert block.strip() == settings_table(), "run scripts/write_settings_table.py"
