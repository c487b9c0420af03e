"""API keys as a file lists them: their digests, never themselves.

    keys:
    - {name: team-a, sha256: 9f86d081..., tenant: a, requests_per_minute: 600}
    - {name: team-b, sha256: 60303ae2..., tokens_per_minute: 100000, concurrency: 8, models: [m]}

A digest needs no salt, and no slow hash: those are against guesses and tables, and nobody guesses
256 random bits. So a key is found by one SHA-256 and one look-up, which takes the same time however
much of a guess is right: what is compared are digests, and nobody chooses those.
"""

from __future__ import annotations

import hashlib
import secrets
import textwrap
from collections.abc import Mapping
from typing import Annotated

import msgspec
import yaml

from router.common.yaml_list import entries_of

# About ten thousand keys.
MOST_BYTES = 2 * 1024 * 1024
# Tools know a key by how it begins, among them those that look for keys in places where none
# should be.
PREFIX = "sk-disagg-"
RANDOM_BYTES = 32

Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tenant` empty: its own. `models` empty: all. A limit of None is none."""

    name: Name
    sha256: Digest
    tenant: Name | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrency: Limit | None = None
    models: tuple[Text, ...] = ()

    @property
    def owner(self) -> str:
        return self.tenant or self.name

    @property
    def has_limits(self) -> bool:
        limits = self.requests_per_minute, self.tokens_per_minute, self.concurrency
        return any(limit is not None for limit in limits)

    def may_ask(self, model: object) -> bool:
        return not self.models or model in self.models


Keys = Mapping[bytes, Key]


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def line_for(name: str, tenant: str | None, key: str) -> str:
    """What stands for the key in the file. Raises ValueError."""
    entry = {"name": name, "sha256": digest_of(key.encode()).hex()}
    if tenant is not None:
        entry["tenant"] = tenant
    _entry(entry)
    return "- {" + ", ".join(f"{field}: {_quoted(text)}" for field, text in entry.items()) + "}"


def parse(content: bytes) -> Keys:
    """By digest. Raises ValueError, in one line that has no digest in it."""
    keys: dict[bytes, Key] = {}
    names: set[str] = set()
    for number, entry in enumerate(_entries(content), 1):
        try:
            key = _entry(entry)
        except ValueError as error:
            raise ValueError(f"key {number}: {error}") from None
        digest = bytes.fromhex(key.sha256)
        if digest in keys:
            raise ValueError(f"key {number}: {keys[digest].name} has the same sha256")
        if key.name in names:
            raise ValueError(f"key {number}: another one is called {key.name}, too")
        keys[digest] = key
        names.add(key.name)
    return keys


def _entry(entry: object) -> Key:
    """Raises ValueError."""
    try:
        return msgspec.convert(entry, Key)
    except msgspec.ValidationError as error:
        raise ValueError(_line(error)) from None


def _entries(content: bytes) -> list[object]:
    """Raises ValueError."""
    try:
        return entries_of(content, "keys")
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        raise ValueError(_where(error)) from None


def _where(error: Exception) -> str:
    """Without the text around it: what somebody pasted there may be a key."""
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f" in line {mark.line + 1}"
    return f"is not YAML: {_line(getattr(error, 'problem', None) or type(error).__name__)}{line}"


def _quoted(text: str) -> str:
    """A name like `no`, and one of digits alone, would be something else in YAML."""
    return text if yaml.safe_load(text) == text else f'"{text}"'


def _line(what: object) -> str:
    return textwrap.shorten(" ".join(str(what).split()), 300)
