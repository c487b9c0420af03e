"""Writes what is made of the settings: README's table, between its markers, and the part of the
chart's values.schema.json that says which settings there are."""

from __future__ import annotations

from pathlib import Path

from router.settings import settings_table
from scripts.chart_schema import SCHEMA, with_settings

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- settings:begin -->", "<!-- settings:end -->"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{settings_table()}\n{END}{after}", encoding="utf-8")
    SCHEMA.write_text(with_settings(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
