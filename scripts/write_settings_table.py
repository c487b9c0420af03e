"""Writes what is made of the settings: their page in the documentation, and their part of the
chart's values.schema.json."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from router.admin.processes import RELOADABLE
from router.settings import (
    RENAMED,
    Settings,
    description_of,
    flag_of,
    group_title,
    metavar_of,
    value_text,
)
from scripts.chart_schema import SCHEMA, with_settings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
BEGIN = "<!-- Written by scripts/write_settings_table.py. -->\n"


def main() -> None:
    PAGE.write_text(settings_page(), encoding="utf-8")
    SCHEMA.write_text(with_settings(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")


def settings_page() -> str:
    """Return the page: its head, which is written by hand, and tables of all settings."""
    parts = [PAGE.read_text(encoding="utf-8").partition(BEGIN)[0] + BEGIN]
    for title, names in groupby(Settings.model_fields, group_title):
        rows = ["| setting | default | | meaning |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {title}\n", *rows, *map(_row, names)]) + "\n")
    renamed = (f"`{flag_of(old)}` is now `{flag_of(new)}`." for old, new in RENAMED.items())
    return "\n".join([*parts, "## Deprecated names\n", *renamed]) + "\n"


def _row(name: str) -> str:
    field = Settings.model_fields[name]
    is_list = isinstance(field.default, tuple)
    value = metavar_of(name).replace("|", "\\|") + (" ..." if is_list else "")
    setting = f'<a id="{flag_of(name)[2:]}"></a>`{f"{flag_of(name)} {value}".strip()}`'
    shown = value_text(field.default)
    default = f"`{shown}`" if shown else ""
    reload = "reload" if name in RELOADABLE else ""
    return f"| {setting} | {default} | {reload} | {description_of(name)} |"


if __name__ == "__main__":
    main()
