"""The turns of conversations, and the entries that turns leave for the next ones.

Which conversation a request belongs to is found by configured names. They are tried in order, and
the first one that is set wins. A name that begins with "x-" is a header, `prefix` recognizes a chat
by its messages, and any other name is a field of the body. The key of an entry is a hash over the
tenant's credential and the id. So an id is useless to another tenant, and a store shows neither
credential nor id.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from operator import itemgetter

import orjson
from msgspec import Struct

from router.common.exact_json import number
from router.conversations.entry import MAX_UNIX_TIME_S, Entry, Prompt, prompt_of
from router.conversations.store import Store, StoreError, UnverifiedError
from router.openai.answers import AnswerChoice, Json

Header = tuple[bytes, bytes]
PREFIX = "prefix"
NAME = itemgetter(0)
NUM_OPENING_MESSAGES = 2  # the same in all turns: the system prompt and the first question
# A store keeps an entry for longer than the entry is valid, so that the router can distinguish an
# expired entry from one that never existed.
EXPIRED_ENTRY_RETENTION_S = 300.0
# An entry expires this share of the lease before the decode engine releases the KV.
LEASE_MARGIN_SHARE = 1 / 16


class RecallOutcome(StrEnum):
    """The result of looking for the last turn's entry."""

    ENTRY = "entry"
    NEW = "new"
    EXPIRED = "expired"
    UNVERIFIED = "unverified"
    UNREADABLE = "unreadable"
    STORE_FAILED = "store_failed"


class Turn(Struct, eq=False):
    """One request of a conversation.

    `session` identifies the conversation in all of its turns. `take_key` is the store key of the
    last turn's entry, None for a first turn. `keep_key` is the key for this turn's entry, None if
    the key depends on the answer. `tenant` is a hash of the credential. `recall` sets `recalled`,
    and `entry` to what the last turn left for this one.
    """

    session: str
    take_key: str | None
    keep_key: str | None
    tenant: str
    prompt: Prompt
    recalled: RecallOutcome = RecallOutcome.NEW
    entry: Entry | None = None


class KeepOutcome(Struct, frozen=True):
    """The result of keeping an entry.

    `unreachable` are the entries that no later turn can take: older ones that the store evicted,
    or the new one. The caller releases the KV that they describe.
    """

    is_kept: bool
    unreachable: Sequence[Entry]


class Conversations:
    """The turns of all conversations, with their entries in one store.

    `names` tell how requests name their conversation (see above). `ttl` is how long an entry is
    valid, in seconds. It must be less than the time for which decode engines retain KV; where an
    engine reports that time, the earlier of the two counts. `clock` returns Unix time in seconds.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        tenant_header: str,
        ttl: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        lowered = tuple(name.lower() for name in names)
        self._uses_prefix = PREFIX in lowered
        self._names = tuple(name for name in lowered if name != PREFIX)
        self._fields = frozenset(n for n in self._names if not n.startswith("x-"))
        self._headers = {n.encode("latin-1"): n for n in self._names if n.startswith("x-")}
        self._header_names = frozenset(self._headers)
        self._tenant_header = tenant_header.lower().encode("latin-1")
        self._ttl = ttl
        self._clock = clock

    def turn_of(self, headers: Sequence[Header], body: Json) -> Turn | None:
        """Return the turn that a request is, without its entry.

        Returns None for a request that belongs to no conversation, and for one whose prompt cannot
        be compared with another prompt.
        """
        given = self._id_of(headers, body)
        if given is None and not self._uses_prefix:
            return None
        try:
            prompt = prompt_of(body)
        except orjson.JSONEncodeError:  # nested too deep; the router does not forward it either
            return None
        if prompt is None or (given is None and prompt.kind != "chat"):
            return None
        tenant = tenant_of(headers, self._tenant_header)
        if given is not None:
            key = _hash(tenant, "id", given)
            return Turn(key, key, key, tenant, prompt)
        # The chat is known by its messages up to the last answer.
        opening = prompt.digest_at(min(NUM_OPENING_MESSAGES, prompt.count)) or ""
        last = prompt.digest_at(prompt.last_answer) if prompt.last_answer else None
        take_key = None if last is None else _hash(tenant, PREFIX, last)
        return Turn(_hash(tenant, "opening", opening), take_key, None, tenant, prompt)

    def _id_of(self, headers: Sequence[Header], body: Json) -> str | None:
        """Return the value of the first name that is set, other than PREFIX."""
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
                return text
        return None

    async def recall(self, turn: Turn) -> None:
        """Take the last turn's entry out of the store, if there is one, and put it into `turn`."""
        if turn.take_key is None:
            return
        try:
            raw = await self.store.take(turn.take_key)
        except StoreError as error:
            foreign = isinstance(error, UnverifiedError)
            turn.recalled = RecallOutcome.UNVERIFIED if foreign else RecallOutcome.STORE_FAILED
            return
        if raw is None:
            return
        entry = Entry.from_bytes(raw)
        if entry is None:  # written by another version of the router
            turn.recalled = RecallOutcome.UNREADABLE
        elif entry.expires_at <= self._clock():
            turn.recalled = RecallOutcome.EXPIRED
        else:
            turn.recalled, turn.entry = RecallOutcome.ENTRY, entry

    async def keep(
        self,
        turn: Turn,
        decoder: str,
        params: Json,
        answer: AnswerChoice | None,
        prompt_tokens: int | None,
    ) -> KeepOutcome:
        """Store an entry for the next turn.

        `decoder` is the name of the decode engine that retains the KV, and `params` its
        `kv_transfer_params`. `answer` is what the client got, None where the router cannot know it.
        """
        now, prompt = self._clock(), turn.prompt
        older = () if turn.entry is None else turn.entry.prompts
        entry = Entry(
            decoder=decoder,
            params=params,
            created_at=now,
            expires_at=self._valid_until(params, now),
            size=prompt.size + _answer_size(answer),
            kind=prompt.kind,
            scope=prompt.scope,
            prompts=prompt.reusable_prefixes(older, prompt_tokens),
            whole=prompt.with_answer(answer),
            inexact=prompt.why_inexact(answer),
        )
        key = turn.keep_key
        if key is None and entry.whole is not None:
            key = _hash(turn.tenant, PREFIX, entry.whole.digest)
        if key is None or entry.expires_at <= now:
            return KeepOutcome(False, [entry])
        try:
            raw = entry.to_bytes()
        except orjson.JSONEncodeError:  # nested too deep to be sent to an engine
            return KeepOutcome(False, [])
        try:
            seconds = entry.expires_at - now + EXPIRED_ENTRY_RETENTION_S
            dropped = await self.store.put(key, raw, seconds)
        except StoreError:
            return KeepOutcome(False, [entry])
        unreachable = [one for one in map(Entry.from_bytes, dropped) if one is not None]
        return KeepOutcome(raw not in dropped, unreachable)

    async def close(self) -> None:
        await self.store.close()

    def _valid_until(self, params: Json, now: float) -> float:
        retained = params.get("retained_until")
        if retained is None:
            return now + self._ttl
        retained = number(retained)
        if isinstance(retained, int | float) and not isinstance(retained, bool):
            # An integer may be too large for a float.
            retained = min(max(retained, 0), MAX_UNIX_TIME_S)
            return min(now + self._ttl, retained - (retained - now) * LEASE_MARGIN_SHARE)
        return now + self._ttl


def _answer_size(answer: AnswerChoice | None) -> int:
    if answer is None:
        return 0
    text = answer.text if answer.message is None else answer.message.get("content")
    return len(str(text or ""))


def tenant_of(headers: Sequence[Header], tenant_header: bytes) -> str:
    """Return a hash of the tenant's credential; requests without one share a tenant."""
    return _tenant(*[value for name, value in headers if name == tenant_header])


@lru_cache(maxsize=1024)
def _tenant(*values: bytes) -> str:
    return _hash("tenant", *(value.decode("latin-1") for value in values))


def _hash(*parts: str) -> str:
    """Hash the parts with their lengths, so that no two lists of parts are the same bytes."""
    raw = [part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join([b"%d:%b" % (len(part), part) for part in raw])
    return hashlib.blake2b(whole, digest_size=20).hexdigest()
