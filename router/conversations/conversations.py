"""The turns of conversations, and the entries that turns leave for the next ones.

Which conversation a request belongs to is found by configured names. They are tried in order, and
the first one that is set wins. A name with a hyphen is a header, and any other name is a field of
the body. Without an id, `prefix` recognizes a chat by its messages; `verified-prefix` does so where
engines verify what they reuse.

Several chats may share one id: a title is asked for beside the chat, an agent has sub-agents. So a
chat's entry is stored under a hash over the tenant's credential, the id, and the messages that the
answer follows. The next turn repeats these messages before the answer, so it finds the entry
whatever the client made of the answer, and no other chat replaces it. Without an id, many chats may
begin with the same question, so the answer is hashed, too. The key of a text or of token ids is the
hash over the credential and the id. An id is useless to another tenant, and a store shows neither
credential nor id nor messages.

    first turn   system, user                       kept under (system, user)
    next turn    system, user, assistant, user      takes (system, user), kept under all four

If the client edited the messages, no entry has that key. Then `RecentSessions` may know which turn
of the id the request changes. `ReturnTracker` finds out which ids and tenants never continue a
conversation; engines need not retain anything for these.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from operator import itemgetter
from random import getrandbits
from typing import NamedTuple

import orjson
from msgspec import Struct

from router.common.exact_json import number
from router.conversations.entry import (
    ASSISTANT,
    MAX_UNIX_TIME_S,
    SYSTEM_ROLES,
    Entry,
    Prompt,
    PromptPrefix,
    ReuseDecision,
    decide_reuse,
    digest_answer,
    digest_reasoning,
    find_answer_change,
    prompt_of,
)
from router.conversations.store import Store, StoreError, UnverifiedError
from router.conversations.token_prefix import TokenPrefix
from router.fleet.fleet import Fleet
from router.openai.answers import AnswerChoice, Json

Header = tuple[bytes, bytes]
PREFIX, VERIFIED_PREFIX = "prefix", "verified-prefix"
# Before a name that would be a field of the body without it.
HEADER_MARK = "header:"
NAME = itemgetter(0)
# So many conversations in a row may be left before the next ones are expected to be left as well.
MAX_LEFT_SESSIONS, MAX_LEFT_CHATS = 64, 32
# The same limit for ids in headers. Load generators and gateways make such an id anew for each
# request, under any of the names that clients use for conversations.
MAX_LEFT_HEADER_IDS = 4
# A client sends this one only if it wants turns.
OWN_HEADER = b"x-conversation-id"
# Single questions with one system prompt, as of a batch, are distinguished from chats by so much.
SYSTEM_PROMPT_CHARS = 256
# A store keeps an entry for longer than the entry is valid, so that the router can distinguish an
# expired entry from one that never existed.
EXPIRED_ENTRY_RETENTION_S = 300.0
# An entry expires this share of the lease before the decode engine releases the KV.
LEASE_MARGIN_SHARE = 1 / 16
MAX_SESSIONS = 8192
MAX_TURNS = 4  # of a session: a chat, its title, two sub-agents
MAX_MARKS = 8
MAX_SOURCES = 4096
# The more conversations of a kind were left, the fewer are retained on trial: one in 2 ** bits.
TRIAL_BITS, MAX_TRIAL_BITS = 2, 10


class RecallOutcome(StrEnum):
    """The result of looking for the last turn's entry."""

    ENTRY = "entry"
    NEW = "new"
    EXPIRED = "expired"
    UNVERIFIED = "unverified"
    UNREADABLE = "unreadable"
    STORE_FAILED = "store_failed"


ENTRY, STORE_FAILED = RecallOutcome.ENTRY, RecallOutcome.STORE_FAILED


class Turn(Struct, eq=False):
    """One request of a conversation.

    `session` identifies the conversation in all of its turns. `take_key` is the store key of the
    last turn's entry, None for a first turn; `other_key` is that of a turn that this one changes,
    where it extends none. `keep_key` is the key for this turn's entry, to which the answer is added
    unless the request `is_named`. `recall` sets `recalled`, `entry` to what the last turn left for
    this one, `decision` to how much of it the prompt may use, and `answer_change`: see
    `find_answer_change`.

    `is_implicit`: the client sent no id, so only verified KV may be reused. `retains`: a next turn
    is expected. `sources` are the keys of this conversation in `ReturnTracker`.
    """

    session: str
    take_key: str | None
    keep_key: str
    prompt: Prompt
    sources: tuple[object, ...]
    other_key: str | None = None
    is_named: bool = True
    is_implicit: bool = False
    retains: bool = True
    recalled: RecallOutcome = RecallOutcome.NEW
    entry: Entry | None = None
    decision: ReuseDecision | None = None
    answer_change: str = ""


class KeepOutcome(Struct, frozen=True):
    """The result of keeping an entry.

    `unreachable` are the entries that no later turn can take: older ones that the store evicted,
    or the new one. The caller releases the KV that they describe.
    """

    is_kept: bool
    unreachable: Sequence[Entry]


class IdName(NamedTuple):
    """The header, the field of the body, or both, that may have an id."""

    header: bytes | None
    field: str | None

    @classmethod
    def parse(cls, name: str) -> IdName:
        header = name.lower().removeprefix(HEADER_MARK)
        is_field = header == name.lower() and not header.startswith("x-")
        is_header = "-" in name or not is_field
        return cls(header.encode("latin-1") if is_header else None, name if is_field else None)

    @property
    def max_left(self) -> int:
        """How many of its ids in a row may never come back before the next ones are ignored."""
        is_explicit = self.header in (None, OWN_HEADER)
        return MAX_LEFT_SESSIONS if is_explicit else MAX_LEFT_HEADER_IDS


# The id of a conversation that continues a stored response.
PREVIOUS_RESPONSE = IdName(None, "previous_response_id")


class Conversations:
    """The turns of all conversations, with their entries in one store.

    `names` tell how requests name their conversation (see above). `ttl` is how long an entry is
    valid, in seconds. It must be less than the time for which decode engines retain KV; where an
    engine reports that time, the earlier of the two counts. `clock` returns Unix time in seconds.
    `fleet` shows whether engines may retain KV and verify what they reuse of it.

    A request with none of `headers` and `fields` names no conversation. Its messages may be
    recognized if the router `uses_prefix`, or while the engines of `fleet_for_prefix` have turns.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        tenant_header: str,
        ttl: float,
        clock: Callable[[], float] = time.time,
        fleet: Fleet | None = None,
    ) -> None:
        self.store = store
        lowered = {name.lower() for name in names}
        self.uses_prefix = PREFIX in lowered
        self.fleet_for_prefix = fleet if VERIFIED_PREFIX in lowered else None
        given = [name for name in names if name.lower() not in (PREFIX, VERIFIED_PREFIX)]
        self._names = tuple(map(IdName.parse, given))
        self.fields = frozenset([name.field for name in self._names if name.field])
        self.headers = frozenset([name.header for name in self._names if name.header])
        self._places: dict[bytes | str | None, int] = {
            key: place for place, name in enumerate(self._names) for key in name
        }
        self._recent = RecentSessions()
        self._returns = ReturnTracker()
        self._returns_in = ReturnTracker()  # of the chats of one session
        self._tenant_header = tenant_header.lower().encode("latin-1")
        self._ttl = ttl
        self._clock = clock

    def turn_of(
        self, headers: Sequence[Header], body: Json, previous_response: str = ""
    ) -> Turn | None:
        """Return the turn that a request is, without its entry.

        `previous_response` identifies the conversation where nothing else does. Returns None for a
        request that belongs to no conversation, and for one whose prompt cannot be compared with
        another prompt.
        """
        seen: set[str] = set()
        for name, given in self._ids_in(headers, body):
            if given in seen:  # in another header, or it would be known here by this very request
                continue
            seen.add(given)
            tenant = tenant_of(headers, self._tenant_header)
            session, source = _hash(tenant, "id", given), (tenant, name)
            is_known = self._recent.note_request(session)
            if is_known:
                self._returns.note_return(source)
            if is_known or self._returns.may_return(source, name.max_left):
                if not is_known:
                    self._returns.note_new(source)
                return self._named_turn(tenant, given, session, source, body)
        fleet = self.fleet_for_prefix
        if self.uses_prefix or (fleet is not None and fleet.snapshot.has_turns):
            return self._turn_by_messages(headers, body)
        if previous_response:
            tenant = tenant_of(headers, self._tenant_header)
            session, source = _hash(tenant, "id", previous_response), (tenant, PREVIOUS_RESPONSE)
            self._recent.note_request(session)
            return self._named_turn(tenant, previous_response, session, source, body)
        return None

    def _named_turn(
        self, tenant: str, given: str, session: str, source: object, body: Json
    ) -> Turn | None:
        prompt = _comparable_prompt(body)
        if prompt is None:
            return None
        if not prompt.asked:  # no chat
            return Turn(session, session, session, prompt, (source,))
        take_key, keep_key = _chat_keys(tenant, given, prompt)
        other = self._recent.find_other(session, prompt)
        # An id may come back without any chat being continued: one key for a whole application.
        retains = self._returns_in.is_worth_retaining((session,), MAX_LEFT_SESSIONS)
        self._returns_in.note_new(session)
        return Turn(session, take_key, keep_key, prompt, (source,), other, retains=retains)

    def _turn_by_messages(self, headers: Sequence[Header], body: Json) -> Turn | None:
        """Return the turn of a chat that names no conversation.

        A request without an answer in it costs little here unless a next turn is expected.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return None
        tenant = tenant_of(headers, self._tenant_header)
        sources = (tenant, (tenant, _system_prompt_start(messages)))
        limit = MAX_LEFT_SESSIONS if self.uses_prefix else MAX_LEFT_CHATS
        retains = self._returns.is_worth_retaining(sources, limit)
        if not retains and not any(_role_of(message) == ASSISTANT for message in messages[::-1]):
            return None
        prompt = _comparable_prompt(body)
        if prompt is None or not prompt.asked:
            return None
        take_key, keep_key = _chat_keys(tenant, "", prompt)
        if take_key is not None:
            answer = digest_answer(messages[prompt.asked_before : prompt.answered])
            take_key = _hash(take_key, answer)
        session = _hash(tenant, "opening", prompt.digests[prompt.opening])
        for source in sources:
            self._returns.note_new(source)
        return Turn(
            session,
            take_key,
            keep_key,
            prompt,
            sources,
            is_named=False,
            is_implicit=not self.uses_prefix,
            retains=retains,
        )

    def _ids_in(self, headers: Sequence[Header], body: Json) -> Sequence[tuple[IdName, str]]:
        """Return the ids that are set, in the order of the configured names."""
        if self.headers.isdisjoint(map(NAME, headers)) and self.fields.isdisjoint(body):
            return ()
        given = {name: value for name, value in reversed(headers) if value}  # the first one counts
        found: list[tuple[IdName, str]] = []
        present = (self.headers & given.keys()) | (self.fields & body.keys())
        for place in sorted({self._places[key] for key in present}):
            name = self._names[place]
            text = given[name.header].decode("latin-1") if name.header in given else ""
            field = body.get(name.field) if name.field and not text else None
            if type(field) is int or isinstance(field, str):
                text = str(field)
            if text:
                found.append((name, text))
        return found

    async def recall(self, turn: Turn) -> None:
        """Take the last turn's entry out of the store, if there is one, and put it into `turn`."""
        raw: bytes | None = None
        try:
            for key in dict.fromkeys((turn.take_key, turn.other_key)):
                if key is not None and raw is None:
                    raw = await self.store.take(key)
                    self._recent.forget(turn.session, key)
        except StoreError as error:
            foreign = isinstance(error, UnverifiedError)
            turn.recalled = RecallOutcome.UNVERIFIED if foreign else RecallOutcome.STORE_FAILED
            return
        if raw is None:
            return
        entry = Entry.from_bytes(raw)
        decision = None if entry is None else decide_reuse(entry, turn.prompt)
        if entry is None:  # written by another version of the router
            turn.recalled = RecallOutcome.UNREADABLE
        elif entry.expires_at <= self._clock():
            turn.recalled = RecallOutcome.EXPIRED
        else:
            turn.recalled, turn.entry, turn.decision = ENTRY, entry, decision
            turn.answer_change = find_answer_change(entry, turn.prompt)
            turn.retains = True
            self._returns_in.note_return(turn.session)
            for source in turn.sources:
                self._returns.note_return(source)

    async def keep(
        self,
        turn: Turn,
        decoder: str,
        params: Json,
        answer: AnswerChoice | None,
        prompt_tokens: int | None,
        token_ids: Sequence[int] | None = None,
    ) -> KeepOutcome:
        """Store an entry for the next turn.

        `decoder` is the name of the decode engine that retains the KV, and `params` its
        `kv_transfer_params`. `answer` is what the client got, None where the router cannot know it.
        `token_ids` are those of prompt and answer, None if the engine did not report them.
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
            tokens=_token_prefix(prompt, params, token_ids),
            reasoning=digest_reasoning(None if answer is None else answer.message),
        )
        if entry.expires_at <= now or not (turn.is_named or entry.whole):
            return KeepOutcome(False, [entry])
        key = turn.keep_key
        try:
            if not turn.is_named and answer is not None:
                key = _hash(key, digest_answer([answer.message or {}]))
            raw = entry.to_bytes()
        except orjson.JSONEncodeError:  # nested too deep to be sent to an engine
            return KeepOutcome(False, [])
        try:
            seconds = entry.expires_at - now + EXPIRED_ENTRY_RETENTION_S
            dropped = await self.store.put(key, raw, seconds)
        except StoreError:
            return KeepOutcome(False, [entry])
        is_kept = raw not in dropped
        if is_kept:
            self._recent.add(turn.session, key, prompt, entry.prompts)
        unreachable = [one for one in map(Entry.from_bytes, dropped) if one is not None]
        return KeepOutcome(is_kept, unreachable)

    async def end(self, tenant: str, given: str) -> Sequence[Entry] | None:
        """End the conversation with this id, and return the entries of its last turns.

        Returns None for an id that the tenant has not used. Keys of chats contain their messages,
        so only the process that had the chat knows them. Raises StoreError.
        """
        session = _hash(tenant, "id", given)
        keys = self._recent.end(session)
        raws = [await self.store.take(key) for key in (session, *(keys or ()))]
        found = [raw for raw in raws if raw is not None]
        if keys is None and not found:
            return None
        return [entry for entry in map(Entry.from_bytes, found) if entry is not None]

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


def _token_prefix(
    prompt: Prompt, params: Json, token_ids: Sequence[int] | None
) -> TokenPrefix | None:
    """Return the digests of the tokens that have KV. Tokens do not show what an image is.

    All tokens have KV but the last one, perhaps. With any other number of ids, some are missing.
    """
    held = params.get("remote_num_tokens")
    if token_ids is None or prompt.has_media or type(held) is not int or held <= 0:
        return None
    if not held <= len(token_ids) <= held + 1:
        return None
    return TokenPrefix.of(token_ids[:held])


def _answer_size(answer: AnswerChoice | None) -> int:
    if answer is None:
        return 0
    text = answer.text if answer.message is None else answer.message.get("content")
    return len(str(text or ""))


def _comparable_prompt(body: Json) -> Prompt | None:
    try:
        return prompt_of(body)
    except orjson.JSONEncodeError:  # nested too deep; the router does not forward it either
        return None


def _chat_keys(tenant: str, given: str, prompt: Prompt) -> tuple[str | None, str]:
    """Return the keys of the last turn's entry and of this chat's. `given` is the id or empty."""
    keep_key = _hash(tenant, "chat", given, prompt.digests[prompt.asked])
    if not prompt.asked_before:
        return None, keep_key
    return _hash(tenant, "chat", given, prompt.digests[prompt.asked_before]), keep_key


def _role_of(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _system_prompt_start(messages: Sequence[object]) -> str:
    message = messages[0]
    content = message.get("content") if isinstance(message, dict) else None
    is_system = isinstance(content, str) and _role_of(message) in SYSTEM_ROLES
    return str(content)[:SYSTEM_PROMPT_CHARS] if is_system else ""


def tenant_of(headers: Sequence[Header], tenant_header: bytes) -> str:
    """Return a hash of the tenant's credential; requests without one share a tenant."""
    return _tenant(*[value for name, value in headers if name == tenant_header])


@lru_cache(maxsize=1024)
def _tenant(*values: bytes) -> str:
    return _hash("tenant", *(value.decode("latin-1") for value in values))


def _hash(*parts: str) -> str:
    """Hash the parts with their lengths, so that no two lists of parts are the same bytes."""
    written = "".join([f"{len(part)}:{part}" for part in parts])
    if written.isascii():
        raw = written.encode()
    else:
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        raw = b"".join([b"%d:%b" % (len(part), part) for part in encoded])
    return hashlib.blake2b(raw, digest_size=20).hexdigest()


class StoredTurn(Struct, frozen=True):
    """A turn that left an entry under `key`. Its prompt has `size` messages.

    `marks` are prefixes of its prompt, shortest first: the number of messages and their digest.
    """

    key: str
    size: int
    marks: tuple[tuple[int, str], ...]


class RecentSessions:
    """The ids that requests of this process named recently, with the last turns of each, oldest
    first. A hint: without it, the router reuses less."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, tuple[StoredTurn, ...]] = OrderedDict()

    def note_request(self, session: str) -> bool:
        """Return True if the session had a request before this one."""
        is_known = session in self._sessions
        self._sessions.setdefault(session, ())
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return is_known

    def add(
        self, session: str, key: str, prompt: Prompt, earlier: Iterable[PromptPrefix] = ()
    ) -> None:
        """Note that the turn with this prompt left an entry under `key`.

        `earlier` are prefixes of the prompt that were prompts themselves.
        """
        turns = self._sessions.get(session)
        if turns is None or not prompt.asked:
            return
        own = {prompt.opening - 1, prompt.asked_before, prompt.answered, prompt.asked} - {0}
        known = {one.count: one.digest for one in earlier if one.count <= prompt.asked}
        known |= {count: prompt.digests[count] for count in own}
        made = StoredTurn(key, prompt.asked, tuple(sorted(known.items())[-MAX_MARKS:]))
        rest = [one for one in turns if one.key != key]
        self._sessions[session] = (*rest, made)[-MAX_TURNS:]

    def find_other(self, session: str, prompt: Prompt) -> str | None:
        """Return the key of the turn that the prompt changes, where it extends no turn exactly.

        That is a turn of which the prompt repeats at least half. A prompt without answers in it may
        be a title request or a sub-agent, which begins a conversation of its own: it changes a turn
        only if it was a prompt before.
        """
        found, most = None, 0
        for turn in self._sessions.get(session, ()):
            common = _common(turn, prompt.digests)
            if common >= most and 2 * common >= turn.size:
                found, most = turn.key, common
        return found if prompt.asked_before or most == prompt.asked else None

    def end(self, session: str) -> Sequence[str] | None:
        """Forget the session. Return the keys of its turns, or None if it is unknown."""
        turns = self._sessions.pop(session, None)
        return None if turns is None else [turn.key for turn in turns]

    def forget(self, session: str, key: str) -> None:
        """Note that the entry under `key` is taken."""
        turns = self._sessions.get(session)
        if turns:
            self._sessions[session] = tuple([one for one in turns if one.key != key])


def _common(turn: StoredTurn, digests: Sequence[str]) -> int:
    """Return the number of messages that a prompt is known to share with the turn's."""
    for count, digest in reversed(turn.marks):
        if count < len(digests) and digests[count] == digest:
            return count
    return 0


class ReturnTracker:
    """Counts conversations that were not continued, by source: the tenant, and the kind of id.

    If many conversations in a row were not continued, the next ones will not be either: a client
    sends a new id with each request, or asks single questions. Then few of them are retained, until
    one is continued. A hint, like `RecentSessions`: without it, engines retain KV that no request
    reads.
    """

    def __init__(self) -> None:
        self._unreturned: OrderedDict[object, int] = OrderedDict()

    def note_new(self, source: object) -> None:
        self._unreturned[source] = self._unreturned.get(source, 0) + 1
        self._unreturned.move_to_end(source)
        if len(self._unreturned) > MAX_SOURCES:
            self._unreturned.popitem(last=False)

    def note_return(self, source: object) -> None:
        if self._unreturned.get(source):
            self._unreturned[source] = 0

    def may_return(self, source: object, limit: int) -> bool:
        """Return False if `limit` conversations in a row were not continued."""
        return self._unreturned.get(source, 0) < limit

    def is_worth_retaining(self, sources: Iterable[object], limit: int) -> bool:
        """Return False if `limit` conversations of a source in a row were not continued, but True
        now and then even so, by chance."""
        left = max([self._unreturned.get(source, 0) for source in sources])
        if left < limit:
            return True
        return not getrandbits(min(left.bit_length() + TRIAL_BITS, MAX_TRIAL_BITS))
