"""Which conversation a request belongs to, and whose it is.

Names are looked up in a configured order, the first one that is set wins: a name that begins with
"x-" is a header, `prefix` recognises a chat by its messages, any other name is a field of the body.
The key of an entry is a hash over the caller's credential and the id, so that the id of another
caller is worth nothing, and a store shows neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter

from router.common.records import Value
from router.conversations.entry import PromptPrefix
from router.conversations.prompt import ChatPrompt, Prompt
from router.openai.answers import Json

Header = tuple[bytes, bytes]
PREFIX = "prefix"
NAME = itemgetter(0)
OPENING = 2  # messages that stay the same in all turns: system and first question


class Conversation(Value, frozen=True):
    """One request's place in its conversation.

    `take_key`: where the last turn left something. `session`: stable over all turns. `keep_key`:
    where this turn may leave something, None if only its answer will tell.
    """

    session: str
    take_key: str | None
    keep_key: str | None
    tenant: str

    def key_after(self, whole: PromptPrefix | None) -> str | None:
        """Where this turn leaves its entry, whose prompt and answer are `whole`."""
        if self.keep_key is not None:
            return self.keep_key
        return None if whole is None else _hash(self.tenant, PREFIX, whole.digest)


class ConversationResolver:
    """Reads ids out of requests. Costs one pass over the headers and some look-ups."""

    def __init__(self, names: Sequence[str], tenant_header: str) -> None:
        lowered = tuple(name.lower() for name in names)
        self.by_prefix = PREFIX in lowered
        self._names = tuple(name for name in lowered if name != PREFIX)
        self._fields = frozenset(n for n in self._names if not n.startswith("x-"))
        self._headers = {n.encode("latin-1"): n for n in self._names if n.startswith("x-")}
        self._header_names = frozenset(self._headers)
        self._tenant_header = tenant_header.lower().encode("latin-1")

    def id_of(self, headers: Sequence[Header], body: Json) -> tuple[str, str] | None:
        """The name that is set and its value, or None. PREFIX is left to `recognised`."""
        wanted = self._headers
        if self._header_names.isdisjoint(map(NAME, headers)) and self._fields.isdisjoint(body):
            return None
        given: dict[str, str] = {}
        for name, value in headers:
            if name in wanted and value:
                given.setdefault(wanted[name], value.decode("latin-1"))
        for known in self._names:
            text = given.get(known) or _text(body.get(known))
            if text:
                return known, text
        return None

    def named(self, headers: Sequence[Header], given: tuple[str, str]) -> Conversation:
        tenant = self.tenant(headers)
        key = _hash(tenant, "id", given[1])
        return Conversation(key, key, key, tenant)

    def recognised(self, headers: Sequence[Header], prompt: Prompt) -> Conversation | None:
        """The conversation whose last answer stands where the last turn's whole digest is."""
        if not isinstance(prompt, ChatPrompt):
            return None
        tenant = self.tenant(headers)
        opening = prompt.digest_at(min(OPENING, prompt.count)) or ""
        last = prompt.digest_at(prompt.last_answer) if prompt.last_answer else None
        take = None if last is None else _hash(tenant, PREFIX, last)
        return Conversation(_hash(tenant, "opening", opening), take, None, tenant)

    def tenant(self, headers: Sequence[Header]) -> str:
        """Who asks, as a hash; all who don't say are one."""
        return _tenant(*[value for name, value in headers if name == self._tenant_header])


@lru_cache(maxsize=1024)
def _tenant(*values: bytes) -> str:
    return _hash("tenant", *(value.decode("latin-1") for value in values))


def _text(value: object) -> str | None:
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int else None


def _hash(*parts: str) -> str:
    """Over the parts with their lengths, so that no two lists of parts are the same bytes."""
    raw = [part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join([b"%d:%b" % (len(part), part) for part in raw])
    return hashlib.blake2b(whole, digest_size=20).hexdigest()
