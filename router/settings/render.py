"""How settings are shown: in `--help`, in the documentation's table, in the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo

from router.settings.fields import Metavar
from router.settings.model import GROUPS, Settings
from router.settings.names import flag_of, variable_of

METAVARS: dict[Any, str] = {int: "N", Path: "FILE", ByteSize: "SIZE", SecretStr: "SECRET"}


def group_title(name: str) -> str:
    """Return the title of the group to which the setting `name` belongs."""
    return next(group.title for group in GROUPS if name in group.model_fields)


def description_of(field: FieldInfo) -> str:
    return " ".join(str(field.description).split())


def metavar_of(name: str) -> str:
    """Return what stands for the value of the setting `name` in `--help`."""
    return _metavar(get_type_hints(Settings, include_extras=True)[name])


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        plain, *metadata = get_args(annotation)
        return next((one.text for one in metadata if isinstance(one, Metavar)), _metavar(plain))
    if get_origin(annotation) is Literal:
        return f"{{{','.join(get_args(annotation))}}}"
    if annotation in METAVARS:
        return METAVARS[annotation]
    return next(filter(None, map(_metavar, get_args(annotation))), "")


def default_of(field: FieldInfo) -> str:
    """Return the default as a person would write it."""
    default = field.default
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, tuple):
        return " ".join(default)
    return "" if default is None else str(default)


def settings_table() -> str:
    """Return a Markdown table of all settings: flag, variable, default, meaning."""
    rows = ["| Flag | Variable | Default | Meaning |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = f"`{value}`" if (value := default_of(field)) else ""
        flag, variable = f"`{flag_of(name)}`", f"`{variable_of(name)}`"
        rows.append(f"| {flag} | {variable} | {default} | {description_of(field)} |")
    return "\n".join(rows)
