"""What operators want of every process of a router, as one value.

It is told whole, to each process, every time: who missed a change has it with the next one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from pydantic import TypeAdapter

from router.fleet.overrides import OperatorOverrides
from router.settings import Settings

KEYS = ("conversation_store_key", "conversation_store_key_file")
TOKEN = ("admin_token", "admin_token_file")


@dataclass(frozen=True, slots=True)
class Tunables:
    """The settings that processes take over while they run, as they are in Settings."""

    group_weights: tuple[str, ...]
    log_level: str
    max_body_size: int
    max_connections: int
    max_engine_prefill_tokens: int
    max_engine_requests: int
    max_held_answers: int
    max_held_bodies: int
    queue_priorities: bool
    queue_size: int
    queue_timeout: float

    @classmethod
    def of(cls, settings: Settings) -> Tunables:
        return cls(**{name: getattr(settings, name) for name in TUNABLE})

    def over(self, settings: Settings) -> Settings:
        return settings.model_copy(update=asdict(self))


TUNABLE = tuple(one.name for one in fields(Tunables))
RELOADABLE = frozenset((*TUNABLE, *KEYS, *TOKEN))


@dataclass(frozen=True, slots=True)
class DesiredState:
    """`store_keys` None: those that the process has had from the start. `reloads`: how often files
    were to be looked at again, at once."""

    tunables: Tunables
    overrides: OperatorOverrides = field(default_factory=OperatorOverrides)
    store_keys: tuple[str, ...] | None = None
    reloads: int = 0


_ADAPTER = TypeAdapter(DesiredState)


def encoded(state: DesiredState) -> bytes:
    return _ADAPTER.dump_json(state)


def decoded(raw: bytes) -> DesiredState:
    """Raises ValueError."""
    return _ADAPTER.validate_json(raw)


def changed(before: Settings, after: Settings) -> list[str]:
    """The names of settings that differ."""
    return [n for n in Settings.model_fields if getattr(before, n) != getattr(after, n)]
