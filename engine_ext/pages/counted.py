"""The names under which `/metrics` tells a connector's counters, the same in every engine."""

from dataclasses import fields
from typing import NamedTuple

from engine_ext.base.types import ConnectorStats


class Counted(NamedTuple):
    field: str
    """Of ConnectorStats."""
    name: str
    """Of the metric; a counter's samples end in `_total`."""
    text: str
    is_gauge: bool


COUNTED = tuple(
    Counted(
        field.name,
        f"disagg_engine_kv_{field.name}",
        f"KV connector: {field.name.replace('_', ' ')}",
        "active" in field.name,
    )
    for field in fields(ConnectorStats)
)
