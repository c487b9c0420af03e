"""Base classes of a request's records: msgspec Structs, at a third of a dataclass's cost.

Options stand here and are inherited, for a compiled class has none of its own
(scripts/compile_router.py); mypy wants `frozen` said again.
"""

from __future__ import annotations

from msgspec import Struct


class FrozenStruct(Struct, frozen=True):
    """Immutable, and equal to another with the same fields."""


class IdentityStruct(Struct, eq=False):
    """Mutable, and equal only to itself."""
