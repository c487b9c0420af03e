"""All settings of the router: flags, DISAGG_ROUTER_* variables and one YAML file, same names.

A flag takes precedence over a variable, a variable over the file, the file over the default.
`load(flags)` returns the `Settings` of one router, or raises `SettingsError` with one line for
each problem. `Settings` is one flat model that inherits from one `SettingsGroup` for each title
in `--help`; to add a setting, add a field to its group (engines, server, routing, conversations,
access). A `Secret` is a pair of settings, value or file. Rendering is in `router.settings.render`.
"""

from router.settings.fields import (
    GROUP_NAME,
    HOST_NAME,
    MAX_GROUP_WEIGHT,
    TLS_SCHEME,
    Address,
    canonical,
    is_loopback,
    is_port,
)
from router.settings.model import (
    SECRET_NAMES,
    Settings,
    deprecation_warnings,
    load,
    unknown_variables,
)
from router.settings.names import (
    ADMIN_URL,
    RENAMED,
    BrokenFileError,
    SettingsError,
    flag_of,
    variable_of,
)
from router.settings.render import (
    default_of,
    description_of,
    group_title,
    metavar_of,
    settings_table,
)

__all__ = [
    "ADMIN_URL",
    "GROUP_NAME",
    "HOST_NAME",
    "MAX_GROUP_WEIGHT",
    "RENAMED",
    "SECRET_NAMES",
    "TLS_SCHEME",
    "Address",
    "BrokenFileError",
    "Settings",
    "SettingsError",
    "canonical",
    "default_of",
    "deprecation_warnings",
    "description_of",
    "flag_of",
    "group_title",
    "is_loopback",
    "is_port",
    "load",
    "metavar_of",
    "settings_table",
    "unknown_variables",
    "variable_of",
]
