"""Holders of prompts: who is named, and when a loan is worth it."""

import pytest

from router.routing.chunk_index import ChunkIndex
from router.routing.costs import LOAN_LATENCY_S, TRANSFER_TOKENS_PER_S
from router.routing.holders import (
    MAX_HOLDERS,
    MIN_LOANS,
    HolderFinder,
    NamedHolders,
)
from router.routing.policy import RoutingQuery
from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from tests.unit.router.routing.engines import Engine, engines

PROMPT = tuple(range(1, 41))
QUERY = RoutingQuery(7, chunks=PROMPT, tokens=10_300)


class Fleet:
    """A reader without any cache and lenders that hold the first chunks of PROMPT, as many as
    given."""

    def __init__(self, *held: int) -> None:
        self.index = ChunkIndex()
        self.finder = HolderFinder(self.index)
        self.reader, *lenders = engines(1 + len(held))
        self.lenders = (self.reader, *lenders)
        self.index.register(*zip(*((e.name, 0, e.role) for e in self.lenders), strict=True))
        for engine, chunks in zip(lenders, held, strict=True):
            self.index.add(engine.name, PROMPT[:chunks])

    def expected(self, engine: Engine) -> int:
        return self.index.longest(PROMPT, self.index.bit(engine.name)).depth * TOKENS_PER_CHUNK

    def find(self, now: float = 0.0, query: RoutingQuery = QUERY) -> NamedHolders[Engine] | None:
        return self.finder.find(self.reader, self.lenders, query, self.expected, now)


def test_the_engines_that_hold_most_are_named_best_first_and_at_most_four() -> None:
    fleet = Fleet(8, 40, 20, 12, 30, 16)
    loan = fleet.find()
    assert loan is not None
    assert [held.tokens for held in loan.holders] == [
        n * TOKENS_PER_CHUNK for n in (40, 30, 20, 16)
    ]
    assert (len(loan.holders), loan.tokens) == (MAX_HOLDERS, 40 * TOKENS_PER_CHUNK)


def test_nothing_is_named_for_a_short_prefix_or_a_reader_that_holds_nearly_as_much() -> None:
    assert Fleet(3).find() is None
    assert Fleet().find() is None
    fleet = Fleet(40)
    fleet.index.add(fleet.reader.name, PROMPT[:37])
    assert fleet.find() is None
    fleet = Fleet(40)
    fleet.index.add(fleet.reader.name, PROMPT[:30])
    loan = fleet.find()
    assert loan is not None
    assert loan.tokens == 10 * TOKENS_PER_CHUNK


def test_an_engine_that_computes_the_prompt_faster_than_a_transfer_borrows_nothing() -> None:
    fleet = Fleet(40)
    fleet.reader.prefill_rate.token_seconds = LOAN_LATENCY_S / (40 * TOKENS_PER_CHUNK)
    assert fleet.find() is None
    fleet.reader.prefill_rate.token_seconds *= 5
    assert fleet.find() is not None


def test_loans_that_were_named_before_count_as_queued_at_both_engines() -> None:
    fleet = Fleet(40)
    seconds = 40 * TOKENS_PER_CHUNK / TRANSFER_TOKENS_PER_S
    assert fleet.find() == fleet.find(), "what is found and not named costs nothing"
    loans = 0
    while loan := fleet.find():
        fleet.finder.note_named(loan, 0.0)
        loans += 1
    assert 0 < loans < 40 * TOKENS_PER_CHUNK * 50e-6 / seconds
    assert fleet.find(now=100.0)


def test_a_slow_network_ends_the_naming_of_holders_for_a_while() -> None:
    fleet = Fleet(40)
    fleet.reader.prefill_rate.token_seconds = 50e-6
    for number in range(MIN_LOANS):
        loan = fleet.find(now=10.0 * number)
        assert loan is not None
        borrowed, computed = loan.tokens, 1000
        # It took longer than computing it would have taken.
        seconds = computed * 50e-6 + borrowed * 60e-6 + LOAN_LATENCY_S
        fleet.finder.note_transfer(loan, borrowed, computed, seconds, 10.0 * number + 1)
    assert fleet.find(now=40.0) is None
    assert fleet.find(now=200.0) is not None


def test_holders_that_answer_late_do_not_make_the_network_slow() -> None:
    fleet = Fleet(40)
    fleet.reader.prefill_rate.token_seconds = 50e-6
    for number, wait in enumerate((1.0, 0.0, 1.0, 1.0, 1.0)):
        loan = fleet.find(now=10.0 * number)
        assert loan is not None
        seconds = loan.tokens / TRANSFER_TOKENS_PER_S + LOAN_LATENCY_S + wait
        fleet.finder.note_transfer(loan, loan.tokens, 0, seconds, 10.0 * number + 2)
    assert fleet.find(now=50.0) is not None


def test_only_readers_without_other_legs_show_the_pace_of_a_transfer() -> None:
    fleet = Fleet(40)
    fleet.reader.total_legs, fleet.reader.prefill_rate.token_seconds = 1, 50e-6
    for number in range(2 * MIN_LOANS):
        loan = fleet.find(now=10.0 * number)
        assert loan is not None
        fleet.finder.note_transfer(loan, loan.tokens, 0, 100.0, 10.0 * number)


def test_an_answer_with_less_than_half_corrects_the_belief_about_this_prompt_alone() -> None:
    fleet = Fleet(40, 16)
    holder = fleet.lenders[1]
    other = (*PROMPT[:4], 100, 101, 102, 103, 104, 105)
    fleet.index.add(holder.name, other)
    loan = fleet.find()
    assert loan is not None
    fleet.finder.note_answer(loan, QUERY, 16 * TOKENS_PER_CHUNK)  # the second one lent it
    assert fleet.expected(holder) == 16 * TOKENS_PER_CHUNK
    bit = fleet.index.bit(holder.name)
    assert fleet.index.longest(other, bit).depth == len(other)
    fleet.finder.note_answer(loan, QUERY, None)
    fleet.finder.note_answer(loan, QUERY, 20 * TOKENS_PER_CHUNK)
    assert fleet.expected(holder) == 16 * TOKENS_PER_CHUNK


@pytest.mark.parametrize("role", ["reader", "holder"])
def test_a_forgotten_engine_is_found_again_when_it_holds_the_prompt_again(role: str) -> None:
    fleet = Fleet(40)
    assert fleet.find() is not None
    name = (fleet.reader if role == "reader" else fleet.lenders[1]).name
    fleet.index.forget(name)
    fleet.finder.forget(name)
    assert (fleet.find(now=10.0) is None) is (role == "holder")
    fleet.index.add(fleet.lenders[1].name, PROMPT)
    assert fleet.find(now=20.0) is not None
