"""Takes the entry that the last turn of a conversation left, and keeps the entry of this turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum

import orjson

from router.common.exact_json import number
from router.common.structs import FrozenStruct, IdentityStruct
from router.conversations.entry import (
    MAX_COUNT,
    MAX_PREFIXES,
    Entry,
    InexactReason,
    PromptPrefix,
    ReuseScope,
)
from router.conversations.identity import Conversation, ConversationResolver, Header
from router.conversations.prompt import Prompt, prompt_of
from router.conversations.reuse import rewrites_history, scope_of
from router.conversations.store import Store, StoreError, UnverifiedError
from router.openai.answers import AnswerChoice, Json

# A store keeps an entry for longer than the entry is valid, so that the router can distinguish an
# expired entry from one that never existed.
EXPIRED_ENTRY_RETENTION_S = 300.0
# An entry expires this share of the lease before the decode engine releases the KV.
LEASE_MARGIN_SHARE = 1 / 16
# The latest Unix time, in seconds, that the router accepts from an engine.
MAX_UNIX_TIME_S = 1e11


class RecallOutcome(StrEnum):
    """The result of looking for the last turn's entry."""

    ENTRY = "entry"
    NEW = "new"
    EXPIRED = "expired"
    UNVERIFIED = "unverified"
    UNREADABLE = "unreadable"
    STORE_FAILED = "store_failed"


class Turn(IdentityStruct):
    """One request of a conversation.

    `recall` sets `recalled`, and `entry` to what the last turn left for this one.
    """

    conversation: Conversation
    prompt: Prompt
    scope: ReuseScope
    rewrites_history: bool
    recalled: RecallOutcome = RecallOutcome.NEW
    entry: Entry | None = None


class KeepOutcome(FrozenStruct, frozen=True):
    """The result of keeping an entry.

    `unreachable` are the entries that no later turn can take: older ones that the store evicted,
    or the new one. The caller releases the KV that they describe.
    """

    is_kept: bool
    unreachable: Sequence[Entry]


class Conversations:
    """The turns of all conversations, with their entries in one store.

    `ttl` is how long an entry is valid, in seconds. It must be less than the time for which decode
    engines retain KV; where an engine reports that time, the earlier of the two counts. `clock`
    returns Unix time in seconds.
    """

    def __init__(
        self,
        store: Store,
        resolver: ConversationResolver,
        ttl: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._resolver = resolver
        self._ttl = ttl
        self._clock = clock

    @property
    def does_io(self) -> bool:
        """See `Store.does_io`."""
        return self._store.does_io

    def turn_of(self, headers: Sequence[Header], body: Json) -> Turn | None:
        """Return the turn that a request is, without its entry.

        Returns None for a request that belongs to no conversation, and for one whose prompt cannot
        be compared with another prompt.
        """
        given = self._resolver.id_of(headers, body)
        if given is None and not self._resolver.uses_prefix:
            return None
        try:
            prompt = prompt_of(body)
            if prompt is None:
                return None
            conversation = (
                self._resolver.by_messages(headers, prompt)
                if given is None
                else self._resolver.by_id(headers, given)
            )
            if conversation is None:
                return None
            return Turn(conversation, prompt, scope_of(body), rewrites_history(body))
        except orjson.JSONEncodeError:  # nested too deep; the router does not forward it either
            return None

    async def recall(self, turn: Turn) -> None:
        """Take the last turn's entry out of the store, if there is one, and put it into `turn`."""
        key = turn.conversation.take_key
        if key is None:
            return
        try:
            raw = await self._store.take(key)
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
        now = self._clock()
        entry = Entry(
            decoder=decoder,
            params=params,
            created_at=now,
            expires_at=self._valid_until(params, now),
            kind=turn.prompt.kind,
            scope=turn.scope,
            prompts=_reusable_prefixes(turn, prompt_tokens),
            whole=None if answer is None else turn.prompt.with_answer(answer),
            inexact=_why_inexact(turn, answer),
            size=turn.prompt.size + _answer_size(answer),
        )
        key = turn.conversation.key_after(entry.whole)
        if key is None or entry.expires_at <= now:
            return KeepOutcome(False, [entry])
        try:
            raw = entry.to_bytes()
        except orjson.JSONEncodeError:  # nested too deep to be sent to an engine
            return KeepOutcome(False, [])
        try:
            seconds = entry.expires_at - now + EXPIRED_ENTRY_RETENTION_S
            dropped = await self._store.put(key, raw, seconds)
        except StoreError:
            return KeepOutcome(False, [entry])
        unreachable = [one for one in map(Entry.from_bytes, dropped) if one is not None]
        return KeepOutcome(raw not in dropped, unreachable)

    async def close(self) -> None:
        await self._store.close()

    def _valid_until(self, params: Json, now: float) -> float:
        retained = number(params.get("retained_until"))
        if isinstance(retained, int | float) and not isinstance(retained, bool):
            # An integer may be too large for a float.
            retained = min(max(retained, 0), MAX_UNIX_TIME_S)
            return min(now + self._ttl, retained - (retained - now) * LEASE_MARGIN_SHARE)
        return now + self._ttl


def _reusable_prefixes(turn: Turn, prompt_tokens: int | None) -> tuple[PromptPrefix, ...]:
    """Return the earlier prompts that this prompt extends, oldest first, and this prompt."""
    prompt = turn.prompt
    older = turn.entry.prompts if turn.entry is not None else ()
    prefixes = [one for one in older if prompt.digest_at(one.count) == one.digest]
    digest = prompt.digest_at(prompt.count)
    known = prompt_tokens is not None and 0 <= prompt_tokens <= MAX_COUNT
    if known and digest is not None and prompt.traceless == prompt.count:
        prefixes = [one for one in prefixes if one.count < prompt.count]
        prefixes.append(PromptPrefix(prompt.count, digest, prompt_tokens))
    return tuple(prefixes[-MAX_PREFIXES:])


def _why_inexact(turn: Turn, answer: AnswerChoice | None) -> InexactReason:
    if answer is None:
        return "rendering"
    if answer.reasoned or turn.rewrites_history:
        return "reasoning"
    if answer.message is None:
        return ""
    content = answer.message.get("content")
    trimmed = isinstance(content, str) and content != content.strip()
    return "rendering" if trimmed or answer.message.get("tool_calls") else ""


def _answer_size(answer: AnswerChoice | None) -> int:
    if answer is None:
        return 0
    text = answer.text if answer.message is None else answer.message.get("content")
    return len(str(text or ""))
