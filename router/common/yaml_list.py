"""A YAML file that is one list under one name, as those are that operators write."""

from __future__ import annotations

import textwrap

import yaml

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML without libyaml: the same, slower
    from yaml import SafeLoader  # type: ignore[assignment]

# As deep as a list in an entry of the list.
DEEPEST = 4


class NoListError(ValueError):
    """It is YAML, and lists nothing. The text is one line."""


def entries_of(content: bytes, name: str) -> list[object]:
    """What stands under `name`. Raises NoListError, and for what is not to be read at all
    yaml.YAMLError, ValueError, RecursionError or OverflowError."""
    _check_shape(content, name)
    found = yaml.load(content, SafeLoader)
    nothing = NoListError(f"has no list of {name}: begin it with a line of '{name}:'")
    if not isinstance(found, dict) or name not in found:
        raise nothing
    entries = found.pop(name)
    if found:
        other = textwrap.shorten(" ".join(repr(next(iter(found))).split()), 300)
        raise NoListError(f"{other} is not known beside {name}")
    if not isinstance(entries, list):
        raise nothing
    return entries


def _check_shape(content: bytes, name: str) -> None:
    """A few lines of YAML can mean billions of values, or be nested without end; none of that is
    needed here. Raises ValueError, yaml.YAMLError."""
    depth = 0
    for event in yaml.parse(content, SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError("anchors and aliases are not taken")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"is nested too deep for a list of {name}")
