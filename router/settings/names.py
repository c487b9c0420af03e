"""Names of settings as flags and variables, and the errors that name them."""

from __future__ import annotations

PREFIX = "DISAGG_ROUTER_"
# The command `drain` reads this variable; the router itself does not.
ADMIN_URL = "DISAGG_ROUTER_ADMIN_URL"


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
