"""The description of an engine by a source, without the engine's state."""

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
    """The desired state of an engine."""

    SERVING = "serving"
    DRAINING = "draining"


PREFILL, DECODE, BOTH = EngineRole
# The roles of the legs that a request may have.
LEGS = (PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as a source describes it.

    `models` is empty if the engine itself reports its models. KV moves only within a `group`, which
    gets requests in proportion to the `weight` of its engines. `tls`: connect over TLS.
    """

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
    """An engine in the list of a source."""

    spec: EngineSpec
    intent: Intent = Intent.SERVING

    @property
    def address(self) -> Address:
        return self.spec.address
