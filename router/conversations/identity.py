"""Which conversation a request belongs to, and which tenant sent it.

The configured names are tried in order, and the first one that is set wins. A name that begins with
"x-" is a header, `prefix` recognizes a chat by its messages, and any other name is a field of the
body. The key of an entry is a hash over the tenant's credential and the id. So an id is useless to
another tenant, and a store shows neither credential nor id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter

from router.common.structs import FrozenStruct
from router.conversations.entry import PromptPrefix
from router.conversations.prompt import Prompt
from router.openai.answers import Json

Header = tuple[bytes, bytes]
PREFIX = "prefix"
NAME = itemgetter(0)
NUM_OPENING_MESSAGES = 2  # the same in all turns: the system prompt and the first question


class Conversation(FrozenStruct, frozen=True):
    """One request's place in its conversation.

    `session` identifies the conversation in all of its turns. `take_key` is the store key of the
    last turn's entry, None for a first turn. `keep_key` is the key for this turn's entry, None if
    the key depends on the answer. `tenant` is a hash of the credential.
    """

    session: str
    take_key: str | None
    keep_key: str | None
    tenant: str

    def key_after(self, whole: PromptPrefix | None) -> str | None:
        """Return the key for this turn's entry. `whole` is its prompt with the answer."""
        if self.keep_key is not None:
            return self.keep_key
        return None if whole is None else _hash(self.tenant, PREFIX, whole.digest)


class ConversationResolver:
    """Reads conversation ids and tenants out of requests, in one pass over the headers."""

    def __init__(self, names: Sequence[str], tenant_header: str) -> None:
        lowered = tuple(name.lower() for name in names)
        self.uses_prefix = PREFIX in lowered
        self._names = tuple(name for name in lowered if name != PREFIX)
        self._fields = frozenset(n for n in self._names if not n.startswith("x-"))
        self._headers = {n.encode("latin-1"): n for n in self._names if n.startswith("x-")}
        self._header_names = frozenset(self._headers)
        self._tenant_header = tenant_header.lower().encode("latin-1")

    def id_of(self, headers: Sequence[Header], body: Json) -> tuple[str, str] | None:
        """Return the first name that is set, with its value. PREFIX is left to `by_messages`."""
        wanted = self._headers
        if self._header_names.isdisjoint(map(NAME, headers)) and self._fields.isdisjoint(body):
            return None
        given: dict[str, str] = {}
        for name, value in headers:
            if name in wanted and value:
                given.setdefault(wanted[name], value.decode("latin-1"))
        for known in self._names:
            text = given.get(known)
            if not text:
                field = body.get(known)
                text = field if isinstance(field, str) else str(field) if type(field) is int else ""
            if text:
                return known, text
        return None

    def by_id(self, headers: Sequence[Header], given: tuple[str, str]) -> Conversation:
        """Return the conversation of a name and value that `id_of` returned."""
        tenant = self.tenant_of(headers)
        key = _hash(tenant, "id", given[1])
        return Conversation(key, key, key, tenant)

    def by_messages(self, headers: Sequence[Header], prompt: Prompt) -> Conversation | None:
        """Return a chat's conversation, known by its messages up to the last answer."""
        if prompt.kind != "chat":
            return None
        tenant = self.tenant_of(headers)
        opening = prompt.digest_at(min(NUM_OPENING_MESSAGES, prompt.count)) or ""
        last = prompt.digest_at(prompt.last_answer) if prompt.last_answer else None
        take = None if last is None else _hash(tenant, PREFIX, last)
        return Conversation(_hash(tenant, "opening", opening), take, None, tenant)

    def tenant_of(self, headers: Sequence[Header]) -> str:
        """Return a hash of the tenant's credential; requests without one share a tenant."""
        return _tenant(*[value for name, value in headers if name == self._tenant_header])


@lru_cache(maxsize=1024)
def _tenant(*values: bytes) -> str:
    return _hash("tenant", *(value.decode("latin-1") for value in values))


def _hash(*parts: str) -> str:
    """Hash the parts with their lengths, so that no two lists of parts are the same bytes."""
    raw = [part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join([b"%d:%b" % (len(part), part) for part in raw])
    return hashlib.blake2b(whole, digest_size=20).hexdigest()
