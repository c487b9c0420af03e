"""YAML files that consist of one list, with or without its name: engines, API keys."""

from __future__ import annotations

import textwrap

import yaml

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML without libyaml is slower
    from yaml import SafeLoader  # type: ignore[assignment]

# The depth of a list in an entry of the list.
MAX_DEPTH = 4


def parse_yaml_list(content: bytes, name: str) -> list[object]:
    """Return the entries under `name`, or those of a file that is itself a list.

    Raises yaml.YAMLError, ValueError, RecursionError or OverflowError.
    """
    _check_shape(content, name)
    found = yaml.load(content, SafeLoader)
    nothing = ValueError(
        f"has no list of {name}: write the line '{name}:', and a line '- {{...}}' for each"
    )
    if isinstance(found, list) and found:
        return found
    if not isinstance(found, dict) or name not in found:
        raise nothing
    entries = found.pop(name)
    if found:
        other = textwrap.shorten(repr(next(iter(found))), 300)
        raise ValueError(f"unknown key {other}: the only key is {name}")
    if not isinstance(entries, list):
        raise nothing
    return entries


def _check_shape(content: bytes, name: str) -> None:
    """Refuse aliases and deep nesting: a few lines of YAML can expand to billions of values.

    Raises ValueError, yaml.YAMLError.
    """
    depth = 0
    for event in yaml.parse(content, SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError("anchors and aliases are not supported")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested too deep for a list of {name}")
