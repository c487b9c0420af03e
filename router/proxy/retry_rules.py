"""What is done when a leg fails: one table, and the budget that bounds it.

Read a row as: this went wrong; if it was the prefill leg, if it was the decode leg, of a request
whose client has seen nothing yet; whether that speaks against the engine; whether another leg costs
some of the budget (not where nobody was asked for anything). Once the client has seen a byte of the
answer there is one thing left, whatever the row says: the stream ends, and says why.

An engine's 4xx is in no row: it is the answer (EngineRejectedError). And when the request's own
time is over, nothing speaks against the engine that had it last.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from router.fleet.engine_spec import EngineRole


class Next(StrEnum):
    """AGAIN: the same engine, on a connection of its own. ELSEWHERE: another engine is asked for
    the same. AFRESH: a decoder may have read the prefiller's blocks, so another one is asked after
    another prefill leg (whose prompt is in that prefiller's cache); without prefill, ELSEWHERE.
    GIVE_UP: the client is told. RESUME: the client has some of the answer, and another decoder goes
    on with it. END: the stream ends with an error event."""

    AGAIN = "again"
    ELSEWHERE = "elsewhere"
    AFRESH = "afresh"
    GIVE_UP = "give_up"
    RESUME = "resume"
    END = "end"


class Rule(NamedTuple):
    prefill: Next
    decode: Next
    blames_engine: bool
    is_free: bool = False


RULES = {
    # Nothing was sent: P's blocks are surely unread.
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
    # The engine was asked, and what it did with it nobody knows.
    "disconnected": Rule(Next.ELSEWHERE, Next.AFRESH, True),
    "engine_lost": Rule(Next.ELSEWHERE, Next.AFRESH, False),
    "timeout": Rule(Next.ELSEWHERE, Next.AFRESH, True),
    "broken_answer": Rule(Next.ELSEWHERE, Next.AFRESH, True),
    "status_5xx": Rule(Next.ELSEWHERE, Next.AFRESH, True),
    # The two engines do not reach each other, or P's blocks were gone: neither is at fault.
    "kv_load": Rule(Next.ELSEWHERE, Next.AFRESH, False),
    # It said so itself, and is left alone for as long as it said.
    "overloaded": Rule(Next.ELSEWHERE, Next.AFRESH, False),
    # As it was asked to, rather than compute the answer again: nothing has failed.
    "preempted": Rule(Next.ELSEWHERE, Next.AFRESH, False, is_free=True),
    # The same everywhere.
    "answer_too_large": Rule(Next.GIVE_UP, Next.GIVE_UP, False),
    "reader_stalled": Rule(Next.GIVE_UP, Next.GIVE_UP, False),
}


def next_of(kind: str, leg: EngineRole, has_seen: bool, can_go_on: bool = False) -> Next:
    """After a failure of this kind. `has_seen`: the client has some of the answer; `can_go_on`:
    another decoder can be told which."""
    if has_seen and not can_go_on:
        return Next.END
    rule = RULES[kind]
    if leg is EngineRole.PREFILL:
        return rule.prefill
    return Next.RESUME if has_seen and rule.decode is not Next.GIVE_UP else rule.decode


class RetryBudget:
    """At most `share` of the requests of a window are tried once more, and `floor` of them in any
    case: an outage is not doubled by those who ask again.

    Two halves of a window are counted, so what is remembered is one to two halves old. Seconds.
    """

    def __init__(self, share: float = 0.2, floor: int = 100, window: float = 10.0) -> None:
        self._share = share
        self._floor = floor
        self._half = window / 2
        self._turns_at = 0.0
        self._requests = [0, 0]
        self._retries = [0, 0]

    def note_request(self, now: float) -> None:
        if now >= self._turns_at:
            self._turn(now)
        self._requests[0] += 1

    def take(self, now: float) -> bool:
        """Whether one more leg may be sent; it counts then."""
        if not self.is_left(now):
            return False
        self._retries[0] += 1
        return True

    def is_left(self, now: float) -> bool:
        if now >= self._turns_at:
            self._turn(now)
        return sum(self._retries) < max(self._floor, self._share * sum(self._requests))

    def _turn(self, now: float) -> None:
        is_long_ago = now >= self._turns_at + self._half
        self._requests = [0, 0 if is_long_ago else self._requests[0]]
        self._retries = [0, 0 if is_long_ago else self._retries[0]]
        self._turns_at = now + self._half
