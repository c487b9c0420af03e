"""The page and the chart's schema that are generated from the settings are up to date."""

from scripts.chart_schema import SCHEMA, settings_schema, with_settings
from scripts.write_settings_table import PAGE, settings_page


def test_the_documentations_page_is_up_to_date() -> None:
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
