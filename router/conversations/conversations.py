"""Takes what the last turn left, keeps what this one leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum

import orjson

from router.common.exact_json import number
from router.common.records import Thing, Value
from router.conversations.entry import (
    MAX_COUNT,
    MOST_MARKS,
    Entry,
    InexactReason,
    PromptPrefix,
    ReuseScope,
)
from router.conversations.identity import Conversation, ConversationResolver, Header
from router.conversations.prompt import Prompt, prompt_of
from router.conversations.reuse_scope import rewrites_history, scope_of
from router.conversations.store import Store, StoreError, UnverifiedError
from router.openai.answers import AnswerChoice, Json

# A store keeps an entry longer than it is valid, so that "came too late" can be told from "never
# was there".
AFTERLIFE = 300.0
MARGIN_SHARE = 1 / 16
# Of what an engine may say, in Unix seconds.
LATEST = 1e11


class RecallOutcome(StrEnum):
    """What looking for the last turn came to."""

    ENTRY = "entry"
    NEW = "new"
    EXPIRED = "expired"
    UNVERIFIED = "unverified"
    UNREADABLE = "unreadable"
    STORE_FAILED = "store_failed"


class Turn(Thing):
    """One request of a conversation: what it asks, and what the last turn left for it."""

    conversation: Conversation
    prompt: Prompt
    scope: ReuseScope
    rewritten: bool
    found: RecallOutcome = RecallOutcome.NEW
    entry: Entry | None = None


class KeepOutcome(Value, frozen=True):
    """Whether a turn could be kept, and the entries that nobody will take any more."""

    done: bool
    lost: Sequence[Entry]


class Conversations:
    """`ttl` is how long an entry is valid, in seconds: less than the decoder keeps its blocks."""

    def __init__(
        self,
        store: Store,
        identity: ConversationResolver,
        ttl: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._identity = identity
        self._ttl = ttl
        self._clock = clock

    @property
    def waits(self) -> bool:
        """See the store."""
        return self._store.waits

    def turn_of(self, headers: Sequence[Header], body: Json) -> Turn | None:
        """None for a request that belongs to no conversation, or that cannot be compared."""
        given = self._identity.id_of(headers, body)
        if given is None and not self._identity.by_prefix:
            return None
        try:
            return self._turn(headers, body, given)
        except orjson.JSONEncodeError:  # nested too deep: not to be forwarded either
            return None

    def _turn(
        self, headers: Sequence[Header], body: Json, given: tuple[str, str] | None
    ) -> Turn | None:
        prompt = prompt_of(body)
        if prompt is None:
            return None
        if given is not None:
            conversation: Conversation | None = self._identity.named(headers, given)
        else:
            conversation = self._identity.recognised(headers, prompt)
        if conversation is None:
            return None
        return Turn(conversation, prompt, scope_of(body), rewrites_history(body))

    async def recall(self, turn: Turn) -> None:
        """Takes the last turn's entry, if there is one: nobody else will get it."""
        key = turn.conversation.take_key
        if key is None:
            return
        try:
            raw = await self._store.take(key)
        except UnverifiedError:
            turn.found = RecallOutcome.UNVERIFIED
            return
        except StoreError:
            turn.found = RecallOutcome.STORE_FAILED
            return
        if raw is None:
            return
        entry = Entry.from_bytes(raw)
        if entry is None:  # another version's
            turn.found = RecallOutcome.UNREADABLE
        elif entry.expires_at <= self._clock():
            turn.found = RecallOutcome.EXPIRED
        else:
            turn.found, turn.entry = RecallOutcome.ENTRY, entry

    async def keep(
        self,
        turn: Turn,
        decoder: str,
        params: Json,
        said: AnswerChoice | None,
        prompt_tokens: int | None,
    ) -> KeepOutcome:
        """Leaves the decoder's params for the next turn, if it can."""
        entry = self._entry(turn, decoder, params, said, prompt_tokens)
        key = turn.conversation.key_after(entry.whole)
        if key is None or entry.expires_at <= entry.created_at:
            return KeepOutcome(False, [entry])
        raw = _written(entry)
        if raw is None:
            return KeepOutcome(False, [])
        try:
            given_up = await self._store.put(
                key, raw, entry.expires_at - entry.created_at + AFTERLIFE
            )
        except StoreError:
            return KeepOutcome(False, [entry])
        lost = [found for found in map(Entry.from_bytes, given_up) if found is not None]
        return KeepOutcome(raw not in given_up, lost)

    async def close(self) -> None:
        await self._store.close()

    def _entry(
        self,
        turn: Turn,
        decoder: str,
        params: Json,
        said: AnswerChoice | None,
        prompt_tokens: int | None,
    ) -> Entry:
        now = self._clock()
        return Entry(
            decoder=decoder,
            params=params,
            created_at=now,
            expires_at=self._valid_until(params, now),
            kind=turn.prompt.kind,
            scope=turn.scope,
            prompts=_marks(turn, prompt_tokens),
            whole=None if said is None else turn.prompt.with_answer(said),
            inexact=_why_inexact(turn, said),
            size=turn.prompt.size + _size(said),
        )

    def _valid_until(self, params: Json, now: float) -> float:
        """Our time limit, or a margin before the decoder's own where it tells it."""
        retained = number(params.get("retained_until"))
        if isinstance(retained, int | float) and not isinstance(retained, bool):
            retained = min(max(retained, 0), LATEST)  # an integer may be too large for a float
            return min(now + self._ttl, retained - (retained - now) * MARGIN_SHARE)
        return now + self._ttl


def _written(entry: Entry) -> bytes | None:
    """None for params that are nested too deep: nor could an engine be told of them."""
    try:
        return entry.to_bytes()
    except orjson.JSONEncodeError:
        return None


def _marks(turn: Turn, prompt_tokens: int | None) -> tuple[PromptPrefix, ...]:
    """The prompts so far that this one extends, and this one."""
    prompt = turn.prompt
    older = turn.entry.prompts if turn.entry is not None else ()
    kept = [mark for mark in older if prompt.digest_at(mark.count) == mark.digest]
    digest = prompt.digest_at(prompt.count)
    known = prompt_tokens is not None and 0 <= prompt_tokens <= MAX_COUNT
    if known and digest is not None and prompt.plain == prompt.count:
        kept = [mark for mark in kept if mark.count < prompt.count]
        kept.append(PromptPrefix(prompt.count, digest, prompt_tokens))
    return tuple(kept[-MOST_MARKS:])


def _why_inexact(turn: Turn, said: AnswerChoice | None) -> InexactReason:
    """Why a template may render the answer in the next prompt otherwise than it was generated."""
    if said is None:
        return "rendering"
    if said.reasoned or turn.rewritten:
        return "reasoning"
    if said.message is None:
        return ""
    content = said.message.get("content")
    trimmed = isinstance(content, str) and content != content.strip()
    return "rendering" if trimmed or said.message.get("tool_calls") else ""


def _size(said: AnswerChoice | None) -> int:
    if said is None:
        return 0
    if said.message is not None:
        return len(str(said.message.get("content") or ""))
    return len(said.text or "")
