"""Loans: what a leg's engine may read from the prefix cache of another engine.

`find_loan` is called for engines that borrow, when a leg is about to be sent. The leg names the
holders, and the engine asks them by itself. Its answer shows what it has borrowed, and corrects
what the router believes. A leg that is tried again names none, but for a stream that moves away
from a drained engine: `find_stream_loan` names this engine, which still has the blocks of the
prompt and of the answer.
"""

from __future__ import annotations

import re
from time import monotonic as now
from typing import TYPE_CHECKING, NamedTuple

from router.common.exact_json import dumps
from router.fleet.capabilities import RankEndpoint
from router.fleet.engine import (
    DECODE,
    PREFILL,
    Engine,
    EngineRank,
    EngineRole,
    Place,
    engine_of,
)
from router.routing.holders import LikelyHolder, NamedHolders
from router.routing.policy import RoutingQuery
from router.routing.prompt_chunks import has_media

if TYPE_CHECKING:
    from router.http_client.engine_answer import EngineAnswer
    from router.proxy.load_failure import LoadFailure
    from router.proxy.run import Run

BORROWED_KEY = b'"borrowed_tokens"'
FIELDS = rb'%b\s*:\s*(\d{1,9})(?:\s*,\s*"lender"\s*:\s*(\d{1,2}))?' % BORROWED_KEY
# With the comma before it, or else with the one behind it. No text of a model contains the key,
# since quotes in strings are escaped.
BORROWED = re.compile(rb"(?:,\s*)?%b(?=\s*\})|%b\s*," % (FIELDS, FIELDS))


class BorrowedTokens(NamedTuple):
    """The loan that an engine reports in its answer. `lender` is the index of the lending engine in
    the leg's `holders`, or None if the engine does not report it, as older ones do not."""

    tokens: int
    lender: int | None


class LegLoan:
    """The loan that one leg may get. `field` names its holders in the leg's params; `tokens` need
    not be computed if the engine gets it."""

    def __init__(self, run: Run, loan: NamedHolders[Place], query: RoutingQuery | None) -> None:
        self._run, self._loan, self._query = run, loan, query
        self._began, self._is_over = now(), False
        self._report: BorrowedTokens | None = None
        self.tokens = loan.tokens
        self.field = b'"holders":' + dumps([holder_entry(*holder) for holder in loan.holders])

    def watch(self, answer: EngineAnswer) -> None:
        """Read the report of a decode engine, which the client does not get."""
        if not answer.is_event_stream:
            return answer.replace_body(self.read(answer.peek()))
        before = answer.watch
        answer.watch = self.read if before is None else lambda block: self.read(before(block))

    def read(self, answer: bytes) -> bytes:
        """Read the report from (a part of) an answer, and return the answer without the report."""
        report, answer = take_borrowed_tokens(answer)
        self._report = report or self._report
        return answer

    def end(self, prompt: int | None, completion: int | None, cached: int | None) -> None:
        """The leg has an answer with these numbers of tokens. Only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        record, gateway, report = self._run.request.record, self._run.gateway, self._report
        holders, tokens = self._loan.holders, 0 if report is None else report.tokens
        if prompt is not None:
            tokens = min(tokens, prompt)
        lender = None
        if tokens and report is not None and (report.lender or 0) < len(holders):
            lender = report.lender
        outcome = "granted"
        if not tokens and 2 * (cached or 0) >= holders[0].tokens:
            outcome = "cached"
        elif not tokens:
            outcome = "refused" if report is None else "failed"
        gateway.metrics.loans.add((outcome,))
        if tokens:
            gateway.metrics.loan_tokens.add((), tokens)
            holder, reader = engine_of(holders[lender or 0].place), engine_of(self._loan.reader)
            record.borrowed_from, record.borrowed_tokens = holder.name, tokens
            gateway.fleet.unreachable_pairs.record_success(holder.name, reader.name)
        finder = gateway.routes.holders
        if finder is not None and self._query is not None and outcome != "failed":
            finder.note_answer(self._loan, self._query, cached, lender)
            if tokens and not completion and prompt is not None and cached is not None:
                moment, computed = now(), max(0, prompt - cached)
                finder.note_transfer(self._loan, tokens, computed, moment - self._began, moment)

    def note_failure(self, failure: LoadFailure) -> None:
        """The engine could not read a loan. If no other prompt's loan can be read either, the
        holder is not named to this engine for a while."""
        pairs, reader = self._run.gateway.fleet.unreachable_pairs, engine_of(self._loan.reader)
        for place, _ in self._loan.holders:
            endpoint = loan_endpoint(place)
            is_it = endpoint and failure.remote.startswith(f"{endpoint.remote_engine_id} at ")
            if is_it and failure.is_of_pair:
                pairs.record_failure(engine_of(place).name, reader.name, now())

    def close(self) -> None:
        """The leg is over. Without an answer, the loan has failed with it."""
        if not self._is_over:
            self._is_over = True
            self._run.gateway.metrics.loans.add(("failed",))


def take_borrowed_tokens(answer: bytes) -> tuple[BorrowedTokens | None, bytes]:
    """Return the report in an answer, or in a part of one (None without a report), and the answer
    without it."""
    found = None if answer.find(BORROWED_KEY) < 0 else BORROWED.search(answer)
    if found is None:
        return None, answer
    tokens, lender = found[1] or found[3], found[2] or found[4]
    report = BorrowedTokens(int(tokens), None if lender is None else int(lender))
    return report, answer[: found.start()] + answer[found.end() :]


def find_loan(run: Run, reader: Place, role: EngineRole) -> LegLoan | None:
    """Return the loan that a leg at `reader` may get, or None if none is worth it."""
    gateway, route, request = run.gateway, run.route, run.request
    finder, engine = gateway.routes.holders, engine_of(reader)
    own = route.prefill_feedback if role is PREFILL else route.decode_feedback
    if finder is None or own is None or own.query.marks:  # adapters' KV is not lent
        return None
    if run.failure is not None or run.resume.continued is not None or request.decode_only_reason:
        return None
    pairs, moment = gateway.fleet.unreachable_pairs, now()

    def expected_tokens(place: Place) -> int:
        if place is reader:
            return own.expected_tokens(place.name)
        holder = engine_of(place)
        if holder is engine or not may_lend(place, engine):
            return 0
        if holder.models is not None and request.model not in holder.models:
            return 0  # a source may name one group for engines of several models
        if pairs.failing and pairs.is_avoided(holder.name, engine.name, moment):
            return 0
        notes = route.decode_feedback if holder.role is DECODE else route.prefill_feedback
        return 0 if notes is None else notes.expected_tokens(place.name)

    lenders = gateway.fleet.snapshot.lenders
    loan = finder.find(reader, lenders, own.query, expected_tokens, moment)
    if loan is None or has_media(request.body):
        return None
    finder.note_named(loan, moment)
    return LegLoan(run, loan, own.query)


def find_stream_loan(run: Run, reader: Engine) -> LegLoan | None:
    """Return the loan of the blocks of a stream that has left a drained engine; None if the reader
    cannot borrow them, or is this engine. Only the first leg after that gets it."""
    can_borrow = may_borrow_stream(run, reader)
    holder, run.lender, buffer = run.lender, None, run.resume.continued
    if holder is None or buffer is None or not can_borrow or engine_of(holder) is reader:
        return None
    named = LikelyHolder(holder, buffer.num_all_tokens)
    return LegLoan(run, NamedHolders([named], reader, 0, False), None)


def may_borrow_stream(run: Run, reader: Engine) -> bool:
    """Return True if the reader can borrow the blocks of a stream that has left a drained engine.
    Adapters' KV is not lent."""
    model, adapters = run.request.model, run.gateway.fleet.snapshot.adapters
    if run.lender is None or (isinstance(model, str) and model in adapters):
        return False
    return reader.capabilities.borrows and may_lend(run.lender, reader)


def may_lend(place: Place, reader: Engine) -> bool:
    """Return True if an engine, which may be draining, lends its blocks to the reader."""
    holder = engine_of(place)
    return (
        holder.may_lend
        and holder.group == reader.group
        and loan_endpoint(place) is not None
        and holder.capabilities.names_blocks_as(reader.capabilities)
    )


def holder_entry(place: Place, tokens: int) -> dict[str, object]:
    """Return the entry of a holder in a leg's params."""
    endpoint = loan_endpoint(place)
    assert endpoint is not None
    return {
        "remote_engine_id": endpoint.remote_engine_id,
        "remote_host": endpoint.remote_host,
        "remote_port": endpoint.remote_port,
        "tp_size": endpoint.tp_size,
        "expected_tokens": tokens,
    }


def loan_endpoint(place: Place) -> RankEndpoint | None:
    """Return where an engine, or its data-parallel rank, is asked for loans; None if unknown."""
    known = engine_of(place).capabilities.rank_endpoints
    if isinstance(place, EngineRank):
        return known.get(place.number)
    return next(iter(known.values())) if len(known) == 1 else None
