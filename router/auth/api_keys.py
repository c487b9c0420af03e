"""API keys: in the headers of requests, and in the watched file that lists their digests.

A client sends its key as Authorization: Bearer, or as Anthropic's x-api-key.

    keys:
    - {name: team-a, sha256: 9f86d081..., tenant: a, requests_per_minute: 600}
    - {name: team-b, sha256: 60303ae2..., tokens_per_minute: 100000, concurrency: 8, models: [m]}

A key is found by one SHA-256 and one look-up in a dictionary of digests. A salt or a slow hash
would protect against guesses and tables, but an attacker cannot guess 256 random bits. The look-up
compares digests, which an attacker cannot choose, so its time reveals nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from router.common.watched_file import WatchedFiles, read_regular_file
from router.common.yaml_list import parse_yaml_list
from router.settings import is_loopback, split_port

logger = logging.getLogger("disagg_router.auth")
# About ten thousand keys.
MAX_KEYS_BYTES = 2 * 1024 * 1024
# Secret scanners recognise a key by its prefix.
PREFIX = "sk-disagg-"
RANDOM_BYTES = 32

Header = tuple[bytes, bytes]
Headers = Iterable[Header]
AUTHORIZATION, X_API_KEY = b"authorization", b"x-api-key"
CREDENTIALS = frozenset((AUTHORIZATION, X_API_KEY))
# Longer keys are never valid and need not be hashed.
MAX_KEY_BYTES = 512

NAME_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


def read_key(headers: Sequence[Header]) -> bytes | None:
    """Return the API key, None if there is none, or b"" for a credential that is never valid.

    Two credentials of the same kind are invalid, because a gateway in front of the router may have
    checked either of them.
    """
    found = [header for header in headers if header[0] in CREDENTIALS]
    if not found:
        return None
    if len(found) == 2 and found[0][0] != found[1][0]:
        found = [header for header in found if header[0] == AUTHORIZATION]
    if len(found) > 1:
        return b""
    name, value = found[0]
    if name == AUTHORIZATION:
        scheme, _, value = value.partition(b" ")
        if scheme.lower() != b"bearer":
            return b""
    key = value.strip()
    return key if len(key) <= MAX_KEY_BYTES else b""


def without_credentials(headers: Sequence[Header]) -> list[Header]:
    return [header for header in headers if header[0] not in CREDENTIALS]


def has_bearer_token(headers: Headers, token: str) -> bool:
    """Return True for exactly one Authorization header with `token`. Compares in constant time."""
    values = [value for name, value in headers if name == AUTHORIZATION]
    scheme, _, rest = (values[0] if len(values) == 1 else b"").partition(b" ")
    is_right = hmac.compare_digest(rest.strip(), token.encode())
    return is_right and scheme.lower() == b"bearer"


def has_local_host(headers: Headers) -> bool:
    """Return True if no Host header names another machine than this one.

    A web page whose DNS name was rebound to a loopback address is of the same origin for its
    browser, so the browser lets it read answers. Only Host then shows where the page is from.
    """
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    return all(is_loopback(split_port(host)[0].strip("[]")) for host in hosts)


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the file. Without `models` the key may use all; None is no limit."""

    name: Name
    sha256: Digest
    tenant: Name | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrency: Limit | None = None
    models: tuple[Text, ...] = ()

    @property
    def owner(self) -> str:
        """The tenant, or the key's name without one."""
        return self.tenant or self.name

    @property
    def has_limits(self) -> bool:
        limits = self.requests_per_minute, self.tokens_per_minute, self.concurrency
        return any(limit is not None for limit in limits)

    def allows_model(self, model: object) -> bool:
        return not self.models or model in self.models


KeysByDigest = Mapping[bytes, ApiKey]


class Keyring:
    """The keys of a watched file. Unusable content leaves the keys in force unchanged."""

    def __init__(
        self,
        path: Path,
        check: Callable[[KeysByDigest], None] = lambda keys: None,
    ) -> None:
        """`check` raises ValueError for keys that this router cannot serve.

        Raises ValueError for a file that cannot be used.
        """
        self.path = path
        self.keys: KeysByDigest = {}
        self.on_change: Callable[[], None] = lambda: None
        self._check = check
        self.file = WatchedFiles((path,), MAX_KEYS_BYTES, self._replace_keys, self._log)

    @staticmethod
    def check_file(path: Path) -> None:
        """Raise ValueError if the file cannot be used now."""
        parse_keys(read_regular_file(path, MAX_KEYS_BYTES))

    def find(self, key: bytes) -> ApiKey | None:
        return self.keys.get(digest_of(key))

    def _replace_keys(self, content: tuple[bytes, ...]) -> None:
        """Raises ValueError."""
        keys = parse_keys(content[0])
        self._check(keys)
        is_first, self.keys = not self.keys, keys
        if not is_first:
            logger.info("%s: %d API keys are in force", self.path, len(keys))
        self.on_change()

    def _log(self, trouble: str) -> None:
        if trouble:
            logger.error("API keys stay as they are: %s: %s", self.path, trouble)
        else:
            logger.info("%s can be used again", self.path)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def file_entry(name: str, tenant: str | None, key: str) -> str:
    """Return the line of the file for `key`. Raises ValueError for an invalid name or tenant."""
    entry = {"name": name, "sha256": digest_of(key.encode()).hex()}
    if tenant is not None:
        entry["tenant"] = tenant
    _parse_entry(entry)
    return "- {" + ", ".join(f"{field}: {_quoted(text)}" for field, text in entry.items()) + "}"


def parse_keys(content: bytes) -> KeysByDigest:
    """Parse the file's content. Raises ValueError, in one line that contains no digest."""
    try:
        entries = parse_yaml_list(content, "keys")
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        # Only the position: the text around it may be a pasted key.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or type(error).__name__
        raise ValueError(f"is not YAML: {textwrap.shorten(str(problem), 300)}{where}") from None
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        try:
            key = _parse_entry(entry)
        except ValueError as error:
            raise ValueError(f"key {number}: {error}") from None
        digest = bytes.fromhex(key.sha256)
        if digest in keys:
            raise ValueError(f"key {number}: {keys[digest].name} has the same sha256")
        if key.name in names:
            raise ValueError(f"key {number}: another key has the name {key.name}")
        keys[digest] = key
        names.add(key.name)
    return keys


def _parse_entry(entry: object) -> ApiKey:
    """Raises ValueError."""
    try:
        return msgspec.convert(entry, ApiKey)
    except msgspec.ValidationError as error:
        text = textwrap.shorten(str(error), 300)
        if repr(NAME_PATTERN) in text:  # describe the pattern in words
            field = "tenant" if "$.tenant" in text else "name"
            text = f"{field}: begin with a letter or digit, then up to 63 of these, '.', '_' or '-'"
        raise ValueError(text) from None


def _quoted(text: str) -> str:
    """Quote names such as `no` or `123`, which YAML would not read as text."""
    return text if yaml.safe_load(text) == text else f'"{text}"'
