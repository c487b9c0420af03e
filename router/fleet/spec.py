"""What an engine is, as a source of engines says it: nothing of how it fares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.settings import Address, Settings

DEFAULT_GROUP = "default"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def plays(self, role: Role) -> bool:
        return self in (role, Role.BOTH)


PREFILL, DECODE, BOTH = Role
# The legs that a request may have.
LEGS = (PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`models` empty: those that the engine names itself. KV moves only within a `group`, and a
    group gets requests by its engines' `weight`."""

    role: Role
    address: Address
    models: frozenset[str] = frozenset()
    group: str = DEFAULT_GROUP
    weight: float = 1.0

    @property
    def name(self) -> str:
        return str(self.address)


def specs_of(settings: Settings) -> list[EngineSpec]:
    """The engines of the flags; one that is named for both roles is one engine."""
    prefillers, decoders = settings.prefillers, settings.decoders
    both = set(prefillers) & set(decoders)
    known = [(Role.PREFILL, address) for address in prefillers]
    known += [(Role.DECODE, address) for address in decoders if address not in both]
    return [EngineSpec(Role.BOTH if at in both else role, at) for role, at in known]
