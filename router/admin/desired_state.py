"""The state that operators want in every process of a router, as one value.

It is always sent whole, so a process that missed a change has it with the next one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from pydantic import TypeAdapter

from router.fleet.reconcile import OperatorOverrides
from router.settings import Settings

STORE_KEY_SETTINGS = ("conversation_store_key", "conversation_store_key_file")
TOKEN_SETTINGS = ("admin_token", "admin_token_file")


@dataclass(frozen=True, slots=True)
class Tunables:
    """The settings that processes take over at run time, with their names in Settings."""

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
        """Return settings with these values in place of their own."""
        return settings.model_copy(update=asdict(self))


TUNABLE = tuple(one.name for one in fields(Tunables))
RELOADABLE = frozenset((*TUNABLE, *STORE_KEY_SETTINGS, *TOKEN_SETTINGS))


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The state that every process applies.

    `store_keys` sign entries in a shared conversation store; None for the keys that the process
    started with. `reloads` counts reloads: a process that sees it rise reads its watched files
    again at once.
    """

    tunables: Tunables
    overrides: OperatorOverrides = field(default_factory=OperatorOverrides)
    store_keys: tuple[str, ...] | None = None
    reloads: int = 0

    def to_json(self) -> bytes:
        """Return one line of JSON, without its end."""
        return _ADAPTER.dump_json(self)

    @staticmethod
    def from_json(raw: bytes) -> DesiredState:
        """Raises ValueError."""
        return _ADAPTER.validate_json(raw)


_ADAPTER = TypeAdapter(DesiredState)


def changed_settings(before: Settings, after: Settings) -> list[str]:
    """Return the names of settings that differ."""
    return [n for n in Settings.model_fields if getattr(before, n) != getattr(after, n)]
