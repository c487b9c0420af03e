"""Tests of loans of the host's cached prefixes: grants, refusals and revocations."""

from collections.abc import Sequence

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import LeaseGrant, LoanAnswer, Revoke
from engine_ext.common.types import (
    BlockIds,
    CacheGeometry,
    EngineIdentity,
    FinishStatus,
    LoanRequest,
    TransferResults,
)
from engine_ext.scheduler.loans import LOAN_SECONDS, LOAN_SHARE, MAX_LOANS
from engine_ext.scheduler.scheduler import SchedulerConnector
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import Request

BLOCK = 16
NUM_BLOCKS = 800
MOST = int(LOAN_SHARE * NUM_BLOCKS)


class FakeCache:
    """Key b"7" names block 7, as long as `held` has it."""

    scheme = "numbers"

    def __init__(self) -> None:
        self.held = set(range(NUM_BLOCKS))
        self.pinned: dict[str, BlockIds] = {}

    def find(self, keys: Sequence[bytes]) -> BlockIds:
        found = []
        for key in keys:
            if int(key) not in self.held:
                break
            found.append(int(key))
        return (tuple(found),) if found else ()

    def pin(self, loan_id: str, block_ids: BlockIds) -> None:
        assert loan_id not in self.pinned
        self.pinned[loan_id] = block_ids


class Lender:
    """An engine's scheduler half; `clock` is the test's."""

    def __init__(self) -> None:
        self.cache = FakeCache()
        self.now = 0.0
        geometry = CacheGeometry(block_size=BLOCK, num_blocks=NUM_BLOCKS, lends=True)
        identity = EngineIdentity("h", "x", 1)
        config = ConnectorConfig(engine_id="h", bidirectional=True)
        self.half = SchedulerConnector(config, identity, geometry, clock=lambda: self.now)
        self.half.lend_from(self.cache)
        self.count = 0

    def ask(
        self, *blocks: int, reader: str = "r", scheme: str = "numbers", is_cut: bool = False
    ) -> LoanAnswer:
        """The answer that the workers are to send."""
        self.count += 1
        keys = tuple(b"%d" % block for block in blocks)
        request = LoanRequest(reader, self.count, scheme, keys, is_cut)
        self.half.update_connector_output(TransferResults(loan_requests=(request,)))
        self.meta = self.half.build_connector_meta()
        (answer,) = self.meta.all(LoanAnswer)
        assert (answer.reader, answer.sequence) == (reader, self.count)
        return answer

    def report(self, loan_id: str) -> None:
        """The workers hold it no longer."""
        self.half.update_connector_output(TransferResults(finished_sending=frozenset({loan_id})))


@pytest.fixture
def lender() -> Lender:
    return Lender()


def test_the_longest_cached_prefix_is_pinned_and_leased_before_it_is_answered(
    lender: Lender,
) -> None:
    lender.cache.held -= {3}
    answer = lender.ask(1, 2, 3, 4)
    assert (answer.block_ids, answer.num_tokens, answer.last_key) == (((1, 2),), 2 * BLOCK, b"2")
    assert lender.cache.pinned == {answer.loan_id: ((1, 2),)}
    (grant,) = ordered(lender.meta, LeaseGrant)
    assert (grant.request_id, grant.renewable) == (answer.loan_id, True)
    assert (grant.seconds, grant.extension) == (LOAN_SECONDS, LOAN_SECONDS)
    assert lender.meta.orders == (grant, *lender.meta.all(LoanAnswer)), "orders in this order"
    assert lender.half.num_leased == 1
    lender.report(answer.loan_id)
    assert lender.half.num_leased == 0


@pytest.mark.parametrize("why", ["evicted", "nothing asked", "other keys", "draining"])
def test_what_is_not_lent_is_refused_and_pins_nothing(lender: Lender, why: str) -> None:
    blocks = () if why == "nothing asked" else (1, 2)
    if why == "evicted":
        lender.cache.held -= {1}
    if why == "draining":
        lender.half.drain()
    answer = lender.ask(*blocks, scheme="other" if why == "other keys" else "numbers")
    assert (answer.loan_id, answer.num_tokens) == ("", 0)
    assert answer.may_hold_more == (why in ("other keys", "draining"))
    assert not lender.cache.pinned
    assert not ordered(lender.meta, LeaseGrant)


def test_a_prefix_that_is_not_cached_is_refused_beside_a_loan_and_after_it(lender: Lender) -> None:
    lent = lender.ask(1, 2)
    lender.cache.held -= {3}
    beside = lender.ask(3)
    lender.report(lent.loan_id)
    after = lender.ask(3)
    assert not any(one.loan_id or one.may_hold_more for one in (beside, after))


def test_readers_of_one_prefix_share_a_loan(lender: Lender) -> None:
    first = lender.ask(1, 2, reader="a")
    second = lender.ask(1, 2, reader="b")
    assert second.loan_id == first.loan_id
    assert len(lender.cache.pinned) == 1
    assert not ordered(lender.meta, LeaseGrant), "it is granted once"


def test_a_loan_that_is_being_revoked_is_not_shared(lender: Lender) -> None:
    first = lender.ask(1, 2)
    lender.half.end_turns()
    assert ordered(lender.half.build_connector_meta(), Revoke) == (first.loan_id,)
    assert lender.ask(1, 2).loan_id not in ("", first.loan_id)


def test_a_shared_prefix_counts_once_against_the_share_of_the_cache(lender: Lender) -> None:
    shared = range(MOST - 2)
    for last in (MOST - 2, MOST - 1):
        assert lender.ask(*shared, last).loan_id
    assert lender.ask(*shared, MOST).block_ids == (tuple(shared),)
    lender.report(next(iter(lender.cache.pinned)))
    assert lender.ask(*shared, MOST).block_ids == ((*shared, MOST),)


def test_a_prefix_that_is_longer_than_the_share_of_the_cache_is_cut(lender: Lender) -> None:
    long = range(MOST + 40)
    first, second = (lender.ask(*long, reader=reader) for reader in "ab")
    assert first.block_ids == (tuple(range(MOST)),)
    assert (first.num_tokens, first.last_key) == (MOST * BLOCK, b"%d" % (MOST - 1))
    assert second.loan_id == first.loan_id
    refused = lender.ask(MOST + 50)
    assert not refused.loan_id, "no room is left"
    assert all(one.may_hold_more for one in (first, second, refused))


def test_a_prefix_of_which_the_host_offers_a_part_may_be_longer(lender: Lender) -> None:
    lender.cache.held = {1, 2}
    for blocks, num_tokens in (((1, 2), 2 * BLOCK), ((3,), 0)):
        answer = lender.ask(*blocks, is_cut=True)
        assert (answer.num_tokens, answer.may_hold_more) == (num_tokens, True)


def test_revoked_loans_count_until_they_are_reported(lender: Lender) -> None:
    first = lender.ask(*range(MOST))
    lender.half.end_turns()
    assert not lender.ask(MOST + 1).loan_id
    lender.report(first.loan_id)
    assert lender.ask(MOST + 1).loan_id


def test_the_number_of_loans_is_bounded(lender: Lender) -> None:
    lent = [lender.ask(number).loan_id for number in range(MAX_LOANS)]
    assert all(lent)
    refused = lender.ask(MAX_LOANS)
    assert (refused.loan_id, refused.block_ids, refused.may_hold_more) == ("", (), True)
    lender.report(lent[0])
    assert lender.ask(MAX_LOANS).loan_id


def test_a_request_that_lacks_blocks_revokes_all_loans_before_any_turn(lender: Lender) -> None:
    turn = Request("t", {"retain": True}, 2 * BLOCK, 2 * BLOCK)
    lender.half.on_new_request(turn)
    assert lender.half.request_finished(turn, ((9, 10),), FinishStatus.STOPPED).delay_free
    lent = {lender.ask(1).loan_id, lender.ask(2).loan_id}
    waiting = Request("w")
    lender.half.on_new_request(waiting)
    revoked: list[str] = []
    for _ in range(2):  # asked about in two steps: it got no blocks in the first
        lender.half.get_num_new_matched_tokens(waiting, 0)
        revoked += ordered(lender.half.build_connector_meta(), Revoke)
        lender.now += 5.0
    assert set(revoked) == lent
    refused = lender.ask(3)
    assert not refused.loan_id, "the request waits for these blocks"
    assert refused.may_hold_more
    lender.half.update_state_after_alloc(waiting, ((3, 4, 5, 6, 7, 8, 9),), 0)
    assert lender.ask(11).loan_id


def test_a_request_that_is_preempted_revokes_all_loans(lender: Lender) -> None:
    lent = lender.ask(1).loan_id
    lender.half.on_preempted("r")
    assert ordered(lender.half.build_connector_meta(), Revoke) == (lent,)


def test_new_weights_end_loans_and_a_pause_refuses_them(lender: Lender) -> None:
    lent = lender.ask(1).loan_id
    lender.half.change_weights([])
    assert ordered(lender.half.build_connector_meta(), Revoke) == (lent,)
    lender.half.drain()
    assert not lender.ask(1).loan_id
    lender.half.resume()
    assert lender.ask(1).loan_id
