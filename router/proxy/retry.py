"""The decision after a failed leg: a table and one pure function.

A row of RULES reads: for this kind of failure, what follows if the prefill leg failed, what follows
if the decode leg failed, whether the failure counts against the engine, and whether the retry is
free. A free retry is not counted in the `RetryBudget`, because no engine did any work. The row
holds while the client has received nothing. `decide` applies it to the situation of one request.

An engine's 4xx has no row, because it is the answer to the request (LegRefusal).
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from typing import NamedTuple

from router.fleet.engine import PREFILL, EngineRole
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError

# A failure of a leg. Each kind has a row in RULES.
LegError = UpstreamError | EngineError

# Legs of one request that may fail before the router gives up.
MAX_FAILED_LEGS = 4


class Next(StrEnum):
    """The next step after a failed leg.

    AGAIN: retry on the same engine with a new connection.
    ELSEWHERE: send the same leg to another engine.
    AFRESH: prefill again before another decode engine is tried, because the failed one may have
    read the prefill engine's blocks. Without a prefill leg this is ELSEWHERE.
    RESUME: the client has a part of the answer, and another decode engine continues it.
    GIVE_UP: return the error to the client.
    END: end the started stream with an error event.
    """

    AGAIN = "again"
    ELSEWHERE = "elsewhere"
    AFRESH = "afresh"
    RESUME = "resume"
    GIVE_UP = "give_up"
    END = "end"


class Mark(Enum):
    """How the request treats the engine that failed."""

    NONE = auto()
    FAILED = auto()
    """The engine is not used again for this request."""
    CANNOT_LOAD = auto()
    """The decode engine could not load KV, and is the last choice from now on."""
    PREEMPTED = auto()
    """The decode engine returned the answer for lack of blocks. Others are preferred."""


class Rule(NamedTuple):
    prefill: Next
    decode: Next
    blames_engine: bool
    is_free: bool = False


RULES = {
    # Nothing was sent, so nothing has read the blocks of the prefill engine.
    "connect_refused": Rule(Next.ELSEWHERE, Next.ELSEWHERE, True, is_free=True),
    "connect_timeout": Rule(Next.ELSEWHERE, Next.ELSEWHERE, True, is_free=True),
    # It may be one that is configured wrongly, which probes find too; others may be right.
    "tls": Rule(Next.ELSEWHERE, Next.ELSEWHERE, True, is_free=True),
    # Another leg found it dead while this one waited for its connection.
    "connect": Rule(Next.ELSEWHERE, Next.ELSEWHERE, False, is_free=True),
    "dns": Rule(Next.ELSEWHERE, Next.ELSEWHERE, False, is_free=True),
    # Our own limits; they would be the same for every engine.
    "local": Rule(Next.GIVE_UP, Next.GIVE_UP, False),
    # A kept connection that the engine closed, most likely before it saw the request.
    "stale": Rule(Next.AGAIN, Next.AFRESH, False, is_free=True),
    # The engine received the request, and the router cannot know how far it got.
    "disconnected": Rule(Next.ELSEWHERE, Next.AFRESH, True),
    "engine_lost": Rule(Next.ELSEWHERE, Next.AFRESH, False),
    "timeout": Rule(Next.ELSEWHERE, Next.AFRESH, True),
    "broken_answer": Rule(Next.ELSEWHERE, Next.AFRESH, True),
    "status_5xx": Rule(Next.ELSEWHERE, Next.AFRESH, True),
    # The two engines do not reach each other, or P's blocks were gone: neither is at fault.
    "kv_load": Rule(Next.ELSEWHERE, Next.AFRESH, False),
    # The canary has found wrong KV. Which of the two engines is at fault, is not known.
    "kv_differs": Rule(Next.ELSEWHERE, Next.AFRESH, False),
    # Nothing was computed or read. Its list of models is outdated, or was never known.
    "unserved_model": Rule(Next.ELSEWHERE, Next.ELSEWHERE, False, is_free=True),
    # The engine is healthy, but does not disaggregate, or not for this request.
    "no_kv": Rule(Next.ELSEWHERE, Next.AFRESH, False),
    # The engine reported an overload. The router avoids it for its Retry-After.
    "overloaded": Rule(Next.ELSEWHERE, Next.AFRESH, False),
    # The router allowed the engine to return the answer instead of preempting it: no failure.
    "preempted": Rule(Next.ELSEWHERE, Next.AFRESH, False, is_free=True),
    # The router ended the leg, because the engine is drained.
    "migrated": Rule(Next.ELSEWHERE, Next.AFRESH, False, is_free=True),
    # The same everywhere.
    "answer_too_large": Rule(Next.GIVE_UP, Next.GIVE_UP, False),
    "reader_stalled": Rule(Next.GIVE_UP, Next.GIVE_UP, False),
}


class Situation(NamedTuple):
    """The state of a request when one of its legs has failed."""

    has_started: bool = False
    """The client has received a part of the answer."""
    can_resume: bool = False
    """Another engine can continue that part."""
    is_late: bool = False
    """The deadline of the whole request has passed."""
    num_failed: int = 0
    """Legs that failed before this one, without those of hedged requests that others outlived."""
    offered_turn: bool = False
    """The failed leg is a prefill leg that was to read the KV of the last turn."""
    returns_left: int = 0
    """Preemption returns that are still allowed."""


class Decision(NamedTuple):
    next: Next
    mark: Mark
    blames_engine: bool
    """The failure counts against the engine's circuit breaker."""
    is_free: bool
    """The retry is not counted in the budget."""
    spends_turn: bool
    """The retained KV of the last turn may have been read, and can be read only once."""

    @property
    def gives_up(self) -> bool:
        return self.next is Next.GIVE_UP or self.next is Next.END


def decide(kind: str, leg: EngineRole, now: Situation, is_of_pair: bool = False) -> Decision:
    """Return what follows from a failed leg.

    `kind` is the error's row in RULES. `is_of_pair`: a KV load failed because the two engines
    cannot exchange KV, whatever the request.
    """
    rule = RULES[kind]
    if now.has_started and not now.can_resume:
        what = Next.END
    elif leg is PREFILL:
        what = rule.prefill
    elif now.has_started and rule.decode is not Next.GIVE_UP:
        what = Next.RESUME
    else:
        what = rule.decode
    # The retained KV of the last turn may be what failed. The same engine may do without it.
    may_be_turn = now.offered_turn and not rule.is_free
    if kind in ("stale", "migrated"):
        mark = Mark.NONE
    elif kind == "preempted" and now.returns_left > 0:
        mark = Mark.PREEMPTED
    elif kind in ("kv_load", "kv_differs"):
        mark = Mark.CANNOT_LOAD
    elif may_be_turn and kind != "overloaded":
        mark = Mark.NONE
    else:
        mark = Mark.FAILED
    num_failed = now.num_failed + (mark is Mark.FAILED or mark is Mark.CANNOT_LOAD)
    if now.is_late or num_failed >= MAX_FAILED_LEGS:
        what = Next.END if now.has_started else Next.GIVE_UP
    return Decision(
        next=what,
        mark=mark,
        blames_engine=rule.blames_engine and not may_be_turn and not now.is_late,
        is_free=rule.is_free or is_of_pair,
        spends_turn=may_be_turn or (now.offered_turn and kind == "stale"),
    )
