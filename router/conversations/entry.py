"""What one turn leaves for the next, as it is kept in a store."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from router.conversations.prompt import Mark
from router.conversations.said import Json
from router.conversations.scope import Scope

VERSION = 1
MOST_MARKS = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """Times are Unix seconds. `prompts` are the beginnings that were whole prompts, oldest first;
    `whole` is the last of them with its answer. `inexact` says why a template may render that
    answer otherwise than it was generated, or is empty.
    """

    decoder: str
    params: Json
    created_at: float
    expires_at: float
    kind: str
    scope: Scope
    prompts: tuple[Mark, ...]
    whole: Mark | None
    inexact: str
    size: int
    """Bytes of prompt and answer, roughly."""

    @property
    def engine_id(self) -> str | None:
        value = self.params.get("remote_engine_id")
        return value if isinstance(value, str) else None

    @property
    def is_proven(self) -> bool:
        """The decoder says by hashes which tokens it holds."""
        return isinstance(self.params.get("prefix_proof"), dict)

    def to_bytes(self) -> bytes:
        return orjson.dumps({"v": VERSION} | {name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Entry | None:
        """Total: None for what this version did not write."""
        try:
            content = orjson.loads(raw)
            if content.pop("v") != VERSION:
                return None
            whole = content.pop("whole")
            return cls(
                scope=Scope(**content.pop("scope")),
                prompts=tuple(Mark(**mark) for mark in content.pop("prompts")),
                whole=None if whole is None else Mark(**whole),
                **content,
            )
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
            return None
