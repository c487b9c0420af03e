"""The entry that one turn leaves for the next, as a store keeps it.

A store's content is untrusted input: every field has its type and its bounds, or there is no entry.
Field names are the wire format that routers of several versions share.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta, Struct
from msgspec.structs import asdict

from router.common.exact_json import dumps, loads
from router.openai.answers import Json

VERSION = 1
DIGEST_BYTES = 16
SCOPE_DIGEST_BYTES = 8
MAX_COUNT = 2**53
MAX_PREFIXES = 16
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Meta(max_length=512)]
UnixTime = Annotated[float, Meta(ge=0, le=1e11)]
InexactReason = Literal["", "reasoning", "rendering"]
Digest = Annotated[str, Meta(max_length=2 * DIGEST_BYTES)]
ScopeDigest = Annotated[str, Meta(max_length=2 * SCOPE_DIGEST_BYTES)]
S = TypeVar("S", bound=Struct)


class PromptPrefix(Struct, frozen=True):
    """The first `count` units of a prompt (see `prompt.Prompt`), and how many tokens they are."""

    count: Count
    digest: Digest
    tokens: Count | None = None


class ReuseScope(Struct, frozen=True):
    """Digests of what must be equal in two turns besides their messages.

    `model` covers what KV depends on although no token shows it.
    """

    model: ScopeDigest
    tools: ScopeDigest
    template: ScopeDigest


class Entry(Struct, frozen=True, tag_field="v", tag=VERSION, forbid_unknown_fields=True):
    """The KV that a decode engine retains after a turn, and the prompt and answer it belongs to.

    Times are Unix seconds, and `params` are the `kv_transfer_params` that read the KV. `prompts`
    are the prefixes that were whole prompts of the conversation, oldest first. `whole` is the last
    prompt with its answer. `inexact` is why a chat template may render that answer differently from
    the generated tokens, or empty. `size` is the approximate length of prompt and answer in bytes.
    """

    decoder: Text
    params: Json
    created_at: UnixTime
    expires_at: UnixTime
    kind: Text
    scope: ReuseScope
    prompts: Annotated[tuple[PromptPrefix, ...], Meta(max_length=MAX_PREFIXES)]
    whole: PromptPrefix | None
    inexact: InexactReason
    size: Count

    @property
    def engine_id(self) -> str | None:
        value = self.params.get("remote_engine_id")
        return value if isinstance(value, str) else None

    @property
    def has_prefix_hashes(self) -> bool:
        """The decode engine reports by hashes which tokens its KV covers."""
        return isinstance(self.params.get("prefix_proof"), dict)

    @property
    def is_revocable(self) -> bool:
        """The decode engine may drop the KV at any time, which stock engines cannot detect."""
        return self.params.get("revocable") is True

    def to_bytes(self) -> bytes:
        """Raises orjson.JSONEncodeError for params that are nested too deep."""
        return dumps({"v": VERSION, **asdict(self)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Entry | None:
        """Return None for anything that this version did not write; never raises."""
        return decode_versioned(raw, cls)


def decode_versioned(raw: bytes, kind: type[S]) -> S | None:
    """Decode a tagged struct from a store; return None for anything else."""
    try:
        content = loads(raw)
        if not isinstance(content, dict) or "v" not in content:  # msgspec does not require the tag
            return None
        return msgspec.convert(content, kind)
    except (orjson.JSONDecodeError, msgspec.ValidationError, RecursionError):
        return None
