"""Describes settings that cannot be used: one line for each problem, with its origin."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from router.common.did_you_mean import did_you_mean
from router.settings.fields import flag_of, variable_of

# In a URL, perhaps a user and a password.
BEFORE_HOST = re.compile(r".*@", re.DOTALL)
# By pydantic's type of error, https://docs.pydantic.dev/latest/errors/validation_errors/. Fields in
# braces are the error's context. An error of another type keeps pydantic's message.
MESSAGES = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "byte_size": "must be a number of bytes, as in 1048576, 64MiB or 1GB",
    "byte_size_unit": "{unit} is no unit of size: use KiB, MiB, GiB, KB, MB or GB",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt:.12g}",
    "greater_than_equal": "must be at least {ge:.12g}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt:.12g}",
    "less_than_equal": "must be at most {le:.12g}",
    "literal_error": "must be {expected}",
    "path_type": "must be the path of a file",
    "string_type": "must be text",
}


# Of a value with a unit, these are followed by the unit.
BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
NUMBERS = ("finite_number", "float_parsing", "float_type", "int_from_float", "int_parsing")
UNIT_WORDS = {"s": "seconds"}


def describe(
    error: ValidationError,
    flags: Mapping[str, Any],
    units: Mapping[str, str],
    renamed: Mapping[str, str],
    secret_names: Collection[str],
) -> list[str]:
    """Return the lines, without the values of secrets.

    `units` has the unit of each setting, empty for none, and `renamed` maps deprecated names to
    current ones.
    """
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        message = _message(problem)
        if problem["loc"]:
            unit = units.get(str(problem["loc"][0]), "")
            if unit and problem["type"] in BOUNDS:
                message += f" {unit}"
            elif unit and problem["type"] in NUMBERS:
                message += f" of {UNIT_WORDS.get(unit, unit)}"
            name = str(problem["loc"][0])
            if problem["type"] == "extra_forbidden":
                known = [each.replace("_", "-") for each in units]
                message = f"not a setting{did_you_mean(name.replace('_', '-'), known)}"
            elif name not in secret_names:
                given = BEFORE_HOST.sub("***@", repr(problem["input"]))
                message += f" (got {textwrap.shorten(given, 80)})"
            message = f"{_origin(name, flags, units, renamed)}: {message}"
        lines += message.split("\n")
    return list(dict.fromkeys(lines))


def _message(problem: ErrorDetails) -> str:
    context = problem.get("ctx", {})
    if problem["type"] not in MESSAGES:
        return problem["msg"].removeprefix("Value error, ")
    message = MESSAGES[problem["type"]].format(**context)
    if problem["type"] == "literal_error":
        allowed = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        message += did_you_mean(str(problem["input"]), allowed)
    return message.replace("'", "")


def _origin(
    name: str, flags: Mapping[str, Any], names: Collection[str], renamed: Mapping[str, str]
) -> str:
    spellings = [name, *(old for old, current in renamed.items() if current == name)]
    for given in spellings:
        if given in flags:
            return flag_of(given)
    for given in spellings:
        if name in names and variable_of(given) in os.environ:
            return variable_of(given)
    return f"{name.replace('_', '-')} (in the configuration file)"
