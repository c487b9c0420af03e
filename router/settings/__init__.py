"""All settings of the router: flags, DISAGG_ROUTER_* variables and one YAML file, same names.

A flag takes precedence over a variable, a variable over the file, the file over the default.
`load(flags)` returns the `Settings` of one router, or raises `SettingsError` with one line for
each problem. `Settings` is one flat model that inherits from one `SettingsGroup` for each title
in `--help`; to add a setting, add a field to its group (engines, server, routing) and its help text
to the group's docstring. The secrets are pairs of settings, value or file.
"""

from router.settings.fields import (
    ADMIN_URL,
    GROUP_NAME,
    HOST_NAME,
    MAX_GROUP_WEIGHT,
    TLS_SCHEME,
    Address,
    BrokenFileError,
    SettingsError,
    canonical,
    flag_of,
    is_loopback,
    is_port,
    split_port,
    variable_of,
)
from router.settings.model import (
    RENAMED,
    SECRET_NAMES,
    Settings,
    as_yaml,
    deprecation_warnings,
    description_of,
    group_title,
    load,
    metavar_of,
    unit_of,
    unknown_variables,
    value_text,
)
from router.settings.routing import UNSAFE_REUSE
from router.settings.secret import read_secret

__all__ = [
    "ADMIN_URL",
    "GROUP_NAME",
    "HOST_NAME",
    "MAX_GROUP_WEIGHT",
    "RENAMED",
    "SECRET_NAMES",
    "TLS_SCHEME",
    "UNSAFE_REUSE",
    "Address",
    "BrokenFileError",
    "Settings",
    "SettingsError",
    "as_yaml",
    "canonical",
    "deprecation_warnings",
    "description_of",
    "flag_of",
    "group_title",
    "is_loopback",
    "is_port",
    "load",
    "metavar_of",
    "read_secret",
    "split_port",
    "unit_of",
    "unknown_variables",
    "value_text",
    "variable_of",
]
