"""Base classes of a request's records: msgspec Structs, at a third of a dataclass's cost.

A frozen subclass repeats `frozen=True`, because mypy requires it.
"""

from __future__ import annotations

from msgspec import Struct


class FrozenStruct(Struct, frozen=True):
    """Immutable, and equal to another with the same fields."""


class IdentityStruct(Struct, eq=False):
    """Mutable, and equal only to itself."""
