"""Tests of borrowing in the scheduler half: when it asks, what it accepts and gives back."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import Decline, LoanAsk, PullOrder, StepMetadata, Untrack
from engine_ext.common.types import (
    CacheGeometry,
    EngineIdentity,
    EngineRequest,
    FinishStatus,
    LoadProblem,
    LoanReport,
    PeerAddress,
    RemoteSource,
    TransferResults,
)
from engine_ext.scheduler.loans import LATE_SECONDS, OFFER_SECONDS
from engine_ext.scheduler.scheduler import SchedulerConnector
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import Request

BLOCK = 16
HOLDER = {
    "remote_engine_id": "h",
    "remote_host": "10.0.0.2",
    "remote_port": 5601,
    "tp_size": 1,
    "expected_tokens": 96,
}
PREFILL = {"do_remote_decode": True}
GEOMETRY = CacheGeometry(block_size=BLOCK, num_blocks=800)


class NumberKeys:
    """Block k of every request has the key b"k"."""

    scheme = "numbers"

    def keys_of(self, request: EngineRequest) -> Sequence[bytes]:
        return [b"%d" % block for block in range(len(request.token_ids) // BLOCK)]


class Borrower:
    """An engine's scheduler half; `clock` is the test's."""

    def __init__(self, geometry: CacheGeometry = GEOMETRY, **config: Any) -> None:
        self.now = 0.0
        settings = ConnectorConfig(engine_id="b", recompute_threshold=64, **config)
        identity = EngineIdentity("b", "x", 1)
        self.half = SchedulerConnector(settings, identity, geometry, clock=lambda: self.now)
        self.half.borrow_with(NumberKeys())

    def arrive(self, name: str, length: int = 100, **params: Any) -> Request:
        request = Request(name, {**PREFILL, "holders": [HOLDER], **params}, length)
        self.half.on_new_request(request)
        return request

    def ask(self, request: Request, local: int = 0) -> LoanAsk:
        assert self.half.get_num_new_matched_tokens(request, local) == (None, False)
        (ask,) = self.orders().all(LoanAsk)
        return ask

    def orders(self) -> StepMetadata:
        return self.half.build_connector_meta()

    def report(
        self, name: str, source: RemoteSource | None, key: bytes = b"", is_refused: bool = True
    ) -> None:
        report = LoanReport(name, source, key, is_refused)
        self.half.update_connector_output(TransferResults(loan_reports=(report,)))

    def end_load(self, name: str, problem: LoadProblem | None = None) -> None:
        names = frozenset({name})
        failed = names if problem else frozenset()
        problems = {name: problem} if problem else {}
        self.half.update_connector_output(
            TransferResults(finished_recving=names, failed_recving=failed, problems=problems)
        )

    def finish(self, request: Request) -> Any:
        request.num_computed_tokens = request.num_prompt_tokens
        blocks = (tuple(range(7)),)
        decision = self.half.request_finished(request, blocks, FinishStatus.LENGTH_CAPPED)
        return decision.kv_transfer_params


def loan(num_blocks: int = 6) -> RemoteSource:
    blocks = (tuple(range(100, 100 + num_blocks)),)
    address = PeerAddress("h", "10.0.0.2", 5601)
    return RemoteSource(address, "loan-1", 1, blocks, num_blocks * BLOCK, BLOCK)


@pytest.fixture
def borrower() -> Borrower:
    return Borrower()


@pytest.mark.parametrize("role", [PREFILL, {"do_remote_decode": False}])
def test_a_request_asks_loads_what_it_lacks_and_reports_how_much(
    borrower: Borrower, role: dict[str, Any]
) -> None:
    shorter = {**HOLDER, "remote_engine_id": "s", "expected_tokens": 64}
    request = borrower.arrive("r", **role, holders=[shorter, HOLDER])
    ask = borrower.ask(request, local=16)
    assert ask.holders == (PeerAddress("h", "10.0.0.2", 5601),)
    assert (ask.scheme, ask.keys) == ("numbers", (b"0", b"1", b"2", b"3", b"4", b"5"))
    assert ask.least_tokens == 16 + 64
    assert borrower.half.get_num_new_matched_tokens(request, 16) == (None, False)
    assert not ordered(borrower.orders(), LoanAsk), "it is asked once"
    borrower.report("r", loan(), b"5")
    assert borrower.half.get_num_new_matched_tokens(request, 16) == (80, True)
    borrower.half.update_state_after_alloc(request, (tuple(range(7)),), 80)
    (pull,) = ordered(borrower.orders(), PullOrder)
    assert (pull.source, pull.first_token, pull.last_token) == (loan(), 16, 96)
    assert pull.is_proven
    assert (pull.recomputes, pull.timeout) == (False, 1.0), "a frozen holder costs a second"
    borrower.end_load("r")
    assert ordered(borrower.orders(), Untrack) == ("r",)
    answer = borrower.finish(request)
    assert (answer["borrowed_tokens"], answer["lender"]) == (80, 1)


@pytest.mark.parametrize(
    ("why", "reported"), [("refused", None), ("silent", 0), ("no blocks", 0), ("not read", 0)]
)
def test_a_loan_that_failed_is_reported_and_a_refusal_is_not(
    borrower: Borrower, why: str, reported: int | None
) -> None:
    request, is_granted = borrower.arrive("r"), why in ("no blocks", "not read")
    borrower.ask(request)
    borrower.report("r", loan() if is_granted else None, b"5", why == "refused")
    if why == "no blocks":
        borrower.now = OFFER_SECONDS
        borrower.orders()
    if why == "not read":
        assert borrower.half.get_num_new_matched_tokens(request, 0) == (96, True)
        borrower.half.update_state_after_alloc(request, (tuple(range(7)),), 96)
        borrower.end_load("r", LoadProblem("it took too long", True))
    assert borrower.half.get_num_new_matched_tokens(request, 0) == (0, False)
    borrower.half.update_state_after_alloc(request, (tuple(range(7)),), 0)
    assert borrower.finish(request).get("borrowed_tokens") == reported
    assert not ordered(borrower.orders(), LoanAsk)


@pytest.mark.parametrize(
    ("why", "local", "length", "params"),
    [
        ("the router expects no more than is here", 48, 100, {}),
        ("the prompt is short", 0, 60, {}),
        ("nothing is expected", 0, 100, {"holders": [{**HOLDER, "expected_tokens": 0}]}),
        ("no holders", 0, 100, {"holders": []}),
    ],
)
def test_a_loan_that_is_not_worth_it_is_not_requested(
    borrower: Borrower, why: str, local: int, length: int, params: dict[str, Any]
) -> None:
    request = borrower.arrive("r", length, **params)
    matched = borrower.half.get_num_new_matched_tokens(request, local)
    assert matched == (0, False), why
    assert not ordered(borrower.orders(), LoanAsk)


def test_engines_whose_blocks_depend_on_more_than_tokens_borrow_nothing() -> None:
    borrower = Borrower(CacheGeometry(block_size=BLOCK, num_blocks=800, group_windows=(None, 64)))
    request = borrower.arrive("r")
    assert borrower.half.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("why", ["ended", "other tokens", "other request"])
def test_a_loan_that_does_not_fit_is_given_back(borrower: Borrower, why: str) -> None:
    request = borrower.arrive("r")
    borrower.ask(request)
    if why == "ended":
        borrower.finish(request)
        assert ordered(borrower.orders(), Untrack) == ("r",), "the worker half stops asking"
    borrower.report(
        "x" if why == "other request" else "r", loan(), b"4" if why == "other tokens" else b"5"
    )
    orders = borrower.orders()
    assert ordered(orders, Decline) == (loan(),)
    assert not ordered(orders, PullOrder)


def test_a_loan_without_blocks_is_given_back_in_time(borrower: Borrower) -> None:
    request = borrower.arrive("r")
    borrower.ask(request)
    borrower.report("r", loan(), b"5")
    assert borrower.half.get_num_new_matched_tokens(request, 0) == (96, True), "no blocks are free"
    borrower.now = OFFER_SECONDS - 0.1
    assert not ordered(borrower.orders(), Decline)
    borrower.now = OFFER_SECONDS
    assert ordered(borrower.orders(), Decline) == (loan(),)
    assert borrower.half.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_client_that_leaves_gives_an_offered_loan_back(borrower: Borrower) -> None:
    request = borrower.arrive("r")
    borrower.ask(request)
    borrower.report("r", loan(), b"5")
    borrower.half.request_finished(request, ((),), FinishStatus.ABORTED)
    orders = borrower.orders()
    assert (ordered(orders, Untrack), ordered(orders, Decline)) == (("r",), (loan(),))


def test_requests_with_one_prefix_wait_for_the_first_one(borrower: Borrower) -> None:
    first, second = borrower.arrive("a"), borrower.arrive("b")
    borrower.ask(first)
    assert borrower.half.get_num_new_matched_tokens(second, 0) == (None, False)
    assert not ordered(borrower.orders(), LoanAsk)
    borrower.report("a", loan(), b"5")
    borrower.half.update_state_after_alloc(first, (tuple(range(7)),), 96)
    assert borrower.half.get_num_new_matched_tokens(second, 0) == (None, False)
    borrower.end_load("a")
    assert borrower.half.get_num_new_matched_tokens(second, 96) == (0, False), "it is here"


def test_followers_of_a_refused_request_ask_once_themselves(borrower: Borrower) -> None:
    first, *others = [borrower.arrive(name) for name in "abc"]
    borrower.ask(first)
    for other in others:
        assert borrower.half.get_num_new_matched_tokens(other, 0) == (None, False)
    borrower.report("a", None)
    for other in others:
        borrower.half.get_num_new_matched_tokens(other, 0)
    assert [ask.request_id for ask in ordered(borrower.orders(), LoanAsk)] == ["b", "c"], (
        "not one by one"
    )


def test_one_follower_asks_for_all_when_the_first_requests_client_has_disconnected(
    borrower: Borrower,
) -> None:
    first, *others = [borrower.arrive(name) for name in "abcd"]
    borrower.ask(first)
    for other in others:
        borrower.half.get_num_new_matched_tokens(other, 0)
    borrower.half.request_finished(first, ((),), FinishStatus.ABORTED)
    for other in others:
        assert borrower.half.get_num_new_matched_tokens(other, 0) == (None, False)
    assert [ask.request_id for ask in ordered(borrower.orders(), LoanAsk)] == ["b"]


@pytest.mark.parametrize(("in_quarantine", "policy"), [(True, "fail"), (False, "recompute")])
def test_a_failed_load_computes_unless_a_read_may_still_write(
    borrower: Borrower, in_quarantine: bool, policy: str
) -> None:
    request = borrower.arrive("r")
    borrower.ask(request)
    borrower.report("r", loan(), b"5")
    borrower.half.get_num_new_matched_tokens(request, 0)
    borrower.half.update_state_after_alloc(request, (tuple(range(7)),), 96)
    borrower.end_load("r", LoadProblem("it took too long", True, in_quarantine))
    assert borrower.half.load_failure_policy(request) == policy
    assert borrower.half.get_num_new_matched_tokens(request, 0) == (0, False), "it asks once"


def test_new_weights_give_up_what_is_not_loaded_yet(borrower: Borrower) -> None:
    request = borrower.arrive("r")
    borrower.ask(request)
    borrower.half.change_weights(["r"])
    assert ordered(borrower.orders(), Untrack) == ("r",)
    borrower.report("r", loan(), b"5")
    assert ordered(borrower.orders(), Decline) == (loan(),)
    assert borrower.half.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_request_without_a_report_is_passed_over_until_its_deadline(borrower: Borrower) -> None:
    request, later = borrower.arrive("r"), borrower.arrive("later")
    borrower.ask(request)
    assert borrower.half.get_num_new_matched_tokens(later, 0) == (None, False)
    assert borrower.half.is_passed_over("r")
    assert borrower.half.is_passed_over("later")
    borrower.now += ConnectorConfig(engine_id="b").loan_timeout + LATE_SECONDS
    assert ordered(borrower.orders(), Untrack) == ("r",)
    assert borrower.half.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not borrower.half.is_passed_over("r")
    borrower.report("r", loan(), b"5")
    assert ordered(borrower.orders(), Decline) == (loan(),), "it came too late"
