"""What a request's records are made of: msgspec's Structs, at a third of a dataclass's price.

Options stand here and are inherited, for a compiled class has none of its own
(scripts/compile_router.py); mypy wants `frozen` said again.
"""

from __future__ import annotations

from msgspec import Struct


class Value(Struct, frozen=True):
    """Never changed, and equal to another that holds the same."""


class Thing(Struct, eq=False):
    """Equal to itself alone."""
