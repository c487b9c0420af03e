"""What an engine is, as a source of engines says it: nothing of how it fares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.settings import Address

DEFAULT_GROUP = "default"


class EngineRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def plays(self, role: EngineRole) -> bool:
        return self in (role, EngineRole.BOTH)


class Intent(StrEnum):
    """What is wanted of an engine."""

    SERVING = "serving"
    DRAINING = "draining"


PREFILL, DECODE, BOTH = EngineRole
# The legs that a request may have.
LEGS = (PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`models` empty: those that the engine names itself. KV moves only within a `group`, and a
    group gets requests by its engines' `weight`. `tls`: it is spoken to over that."""

    role: EngineRole
    address: Address
    models: frozenset[str] = frozenset()
    group: str = DEFAULT_GROUP
    weight: float = 1.0
    tls: bool = False

    @property
    def name(self) -> str:
        return str(self.address)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"


@dataclass(frozen=True, slots=True)
class ListedEngine:
    """An engine as a source lists it."""

    spec: EngineSpec
    intent: Intent = Intent.SERVING

    @property
    def address(self) -> Address:
        return self.spec.address
