"""What is made of the model of settings is up to date: README's table, the chart's schema."""

from __future__ import annotations

from pathlib import Path

from scripts.chart_schema import SCHEMA, settings_schema, with_settings
from scripts.write_settings_table import PAGE, settings_page, settings_table

README = Path(__file__).parents[3] / "README.md"


def test_the_readme_has_the_table_of_the_model() -> None:
    text = README.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- settings:begin -->")
    block, end, _ = rest.partition("<!-- settings:end -->")
    assert end, "README.md has lost the markers of the settings table"
    assert block.strip() == settings_table(), "run scripts/write_settings_table.py"


def test_the_documentation_has_it_as_a_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == settings_page(), "run scripts/write_settings_table.py"


def test_the_chart_knows_the_settings_of_the_model() -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    assert text == with_settings(text), "run scripts/write_settings_table.py"


def test_the_charts_settings_have_no_secret_and_nothing_that_the_chart_sets() -> None:
    known = settings_schema()["properties"]
    own = {"config", "port", "liveness-port", "shutdown-delay"}
    secret = {"conversation-store-password", "conversation-store-key"}
    assert not known.keys() & (own | secret | {f"{name}-file" for name in secret})
    assert known["workers"] == {"type": "integer", "minimum": 1, "maximum": 256}
    assert known["conversation-store"] == {"enum": ["memory", "off"]}  # a URL is redis.url's
