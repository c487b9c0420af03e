"""Writes what is made of the settings: their page in the documentation, and their part of the
chart's values.schema.json."""

from __future__ import annotations

from pathlib import Path

from router.settings import Settings, default_of, description_of, flag_of, variable_of
from scripts.chart_schema import SCHEMA, with_settings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
HEAD = """\
# Settings

Each one is a flag of `disagg-router`, a variable, or a line of the YAML file that `--config` names,
with the flag's name. A flag wins over a variable, a variable over the file. `--check` validates
them, `--print-config` prints those in force. SIGHUP and `POST /admin/reload` read those again that
may change at run time ([by hand](discovery.md#admin-api)).
"""


def main() -> None:
    PAGE.write_text(settings_page(), encoding="utf-8")
    SCHEMA.write_text(with_settings(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")


def settings_table() -> str:
    """Return a Markdown table of all settings: flag, variable, default, meaning."""
    rows = ["| Flag | Variable | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = f"`{value}`" if (value := default_of(field)) else ""
        flag, variable = f"`{flag_of(name)}`", f"`{variable_of(name)}`"
        rows.append(f"| {flag} | {variable} | {default} | {description_of(name)} |")
    return "\n".join(rows)


def settings_page() -> str:
    return f"{HEAD}\n{settings_table()}\n"


if __name__ == "__main__":
    main()
