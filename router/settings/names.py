"""Names of settings as flags and variables, deprecated names, and the errors that name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "DISAGG_ROUTER_"
# The command `drain` reads this variable; the router itself does not.
ADMIN_URL = "DISAGG_ROUTER_ADMIN_URL"
# Deprecated names of settings and the current ones. A deprecated name works as flag, as variable
# and in the YAML file for one release.
RENAMED = {"scatter": "hedged_decoders"}


class SettingsError(Exception):
    """Settings that cannot be used; `problems` has one line for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class BrokenFileError(SettingsError):
    """A file that the router watches while it runs cannot be used at present."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with deprecated names replaced. A value under the current name wins."""
    renamed = {RENAMED[name]: value for name, value in values.items() if name in RENAMED}
    return renamed | {name: value for name, value in values.items() if name not in RENAMED}


def names_of(name: str) -> list[str]:
    """Return the setting's current name and its deprecated ones."""
    return [name, *(old for old, current in RENAMED.items() if current == name)]
