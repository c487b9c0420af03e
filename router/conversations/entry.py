"""What one turn leaves for the next, as it is kept in a store.

What comes back from there is input: each field has its type and its bounds, or there is no entry.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import orjson
from msgspec import Meta, Struct
from msgspec.structs import asdict

from router.common.exact_json import dumps, loads
from router.openai.answers import Json

VERSION = 1
DIGEST_BYTES = 16
SCOPE_BYTES = 8
MAX_COUNT = 2**53
MOST_MARKS = 16
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Meta(max_length=512)]
Time = Annotated[float, Meta(ge=0, le=1e11)]
InexactReason = Literal["", "reasoning", "rendering"]
Digest = Annotated[str, Meta(max_length=2 * DIGEST_BYTES)]
ScopeDigest = Annotated[str, Meta(max_length=2 * SCOPE_BYTES)]


class PromptPrefix(Struct, frozen=True):
    """A beginning of a prompt: how long, which, and how many tokens it was, where known."""

    count: Count
    digest: Digest
    tokens: Count | None = None


class ReuseScope(Struct, frozen=True):
    """What must be the same in two turns besides their messages, as digests. `model` is what KV
    depends on although no token shows it."""

    model: ScopeDigest
    tools: ScopeDigest
    template: ScopeDigest


class Entry(Struct, frozen=True, tag_field="v", tag=VERSION, forbid_unknown_fields=True):
    """Times are Unix seconds. `prompts` are the beginnings that were whole prompts, oldest first;
    `whole` is the last of them with its answer. `inexact` says why a template may render that
    answer otherwise than it was generated, or is empty.
    """

    decoder: Text
    params: Json
    created_at: Time
    expires_at: Time
    kind: Text
    scope: ReuseScope
    prompts: Annotated[tuple[PromptPrefix, ...], Meta(max_length=MOST_MARKS)]
    whole: PromptPrefix | None
    inexact: InexactReason
    size: Count
    """Bytes of prompt and answer, roughly."""

    @property
    def engine_id(self) -> str | None:
        value = self.params.get("remote_engine_id")
        return value if isinstance(value, str) else None

    @property
    def is_proven(self) -> bool:
        """The decoder says by hashes which tokens it holds."""
        return isinstance(self.params.get("prefix_proof"), dict)

    @property
    def is_revocable(self) -> bool:
        """The decode engine may drop the KV at any time, which stock engines cannot detect."""
        return self.params.get("revocable") is True

    def to_bytes(self) -> bytes:
        """Raises orjson.JSONEncodeError for params that no engine could be told either."""
        return dumps({"v": VERSION, **asdict(self)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Entry | None:
        """Total: None for what this version did not write."""
        try:
            content = loads(raw)
            if not isinstance(content, dict) or "v" not in content:  # which msgspec does without
                return None
            return msgspec.convert(content, cls)
        except (orjson.JSONDecodeError, msgspec.ValidationError, RecursionError):
            return None
