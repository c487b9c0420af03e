"""What engines say they moved: read whatever they say, and joined to whose it was."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.common.inspection import Inspection, MovedSeen, TransferSeen
from engine_ext.http import leases
from router.fleet.engine import EngineRole
from router.ui.engine_reports import (
    MAX_AWAITED_REQUESTS,
    REPORT_TIMEOUT_S,
    RequestTransfers,
    Transfer,
    TransferHistory,
    TransferMatcher,
    TransferPage,
    TransferView,
    hash_request_id,
    parse_transfers,
)
from router.ui.live_requests import RequestSummary, summarize_request
from tests.unit.router.ui.test_live_requests import record

ROLES = {"p": EngineRole.PREFILL, "d": EngineRole.DECODE}
NAME = "cmpl-{}.0123456789" + "7-0-0a1b2c3d"


def rank(engine_id: str = "d-1", **fields: Any) -> dict[str, Any]:
    """As an engine says it."""
    return leases.rank(Inspection(0, engine_id=engine_id, **fields), leases.new_key())


def transfer(client: str = "id", what: str = "READ", blocks: int = 3, age: float = 1.0) -> Any:
    return TransferSeen(what, NAME.format(client), "p-1", blocks, blocks * 10, 0.25, age)


def summary(key: str = "k", **fields: Any) -> RequestSummary:
    made = record(prefiller="p", decoder="d", ended=101.0, **fields)
    return summarize_request(made, "w", 1000.0).model_copy(update={"key": key})


def test_an_engines_page_is_read_as_it_says_it() -> None:
    moved = (MovedSeen("READ", "p-1", 2, 60, 0.5, 0.25),)
    ranks = [rank(transfers=(transfer(), transfer()), moved=moved), rank("d-1_dp1", moved=moved)]
    page = parse_transfers({"ranks": ranks}, 50.0)
    assert page.ids == {"d-1", "d-1_dp1"}
    assert page.moved == {("READ", "p-1"): 120}
    assert page.transfers == {("READ", hash_request_id("id")): Transfer(6, 60, 0.5, 49.0)}


def test_ranks_move_the_same_blocks_at_the_same_time() -> None:
    ranks = [rank(transfers=(transfer(age=age),)) for age in (1.0, 2.0)]
    (one,) = parse_transfers({"ranks": ranks}, 50.0).transfers.values()
    assert one == Transfer(3, 60, 0.25, 49.0)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(list(rank())), inner),
    ).map(lambda ranks: {"ranks": [ranks]})
    | st.dictionaries(st.sampled_from(["what", "bytes", "engine_id"]), st.integers()).map(
        lambda entry: {"ranks": [{"moved": [entry], "transfers": entry}]}
    )
)
def test_no_page_breaks_it(content: object) -> None:
    parse_transfers(content, 1.0)


@pytest.mark.parametrize("count", [-1, 2**63, "x", None, 1.5, True, float("inf")])
def test_numbers_that_make_no_sense_are_not_there(count: object) -> None:
    entry = {"what": "READ", "engine_id": "p-1", "bytes": count}
    found = parse_transfers({"ranks": [{"moved": [entry, entry | {"bytes": 5}]}]}, 0.0).moved
    assert found in ({("READ", "p-1"): 5}, {("READ", "p-1"): 6})  # true may be one


def page(
    at: float, engine_id: str, what: str = "READ", peer: str = "", count: int = 0
) -> TransferPage:
    return parse_transfers(
        {"ranks": [rank(engine_id, moved=(MovedSeen(what, peer, 1, count, 0.1, 0.1),))]}, at
    )


def test_bytes_a_second_are_of_the_last_seconds_and_name_both_ends() -> None:
    traffic = TransferHistory()
    traffic.note("p", page(0.0, "p-1"))
    for at, count in ((0.0, 0), (1.0, 100), (2.0, 200), (6.0, 600), (7.0, 600), (11.0, 600)):
        traffic.note("d", page(at, "d-1", "READ", "p-1", count))
        if at == 2.0:
            assert traffic.byte_rates(ROLES, 0.0) == {("p", "d", "prompt"): 100.0}
    assert traffic.byte_rates(ROLES, 0.0) == {}, "nothing moves any more"
    assert traffic.byte_rates(ROLES, 10.5) == {}, "who reads from it is not told by p's old page"
    traffic.note("d", page(12.0, "d-1", "READ", "p-1", 5))
    assert traffic.byte_rates(ROLES, 0.0) == {}, "it has begun anew"
    traffic.keep(["p"])
    assert list(traffic.latest(0.0)) == ["p"]


@pytest.mark.parametrize(
    ("who", "what", "way"),
    [
        ("d", "READ", ("p", "d", "prompt")),
        ("p", "WRITE", ("p", "d", "prompt")),
        ("p", "READ", ("d", "p", "turn")),
    ],
)
def test_who_reads_and_who_writes_say_which_way_it_went(
    who: str, what: str, way: tuple[str, str, str]
) -> None:
    traffic, other = TransferHistory(), "p" if who == "d" else "d"
    traffic.note(other, page(0.0, f"{other}-1"))
    for at in (0.0, 2.0):
        traffic.note(who, page(at, f"{who}-1", what, f"{other}-1", int(at * 50)))
    assert traffic.byte_rates(ROLES, 0.0) == {way: 50.0}


def moved(at: float, *transfers: Any) -> TransferPage:
    return parse_transfers({"ranks": [rank(transfers=transfers)]}, at)


def test_a_request_is_told_once_what_was_moved_for_it() -> None:
    time = 200.0
    awaited = TransferMatcher(lambda: time)
    awaited.expect([summary()])
    assert awaited.take({"d": moved(200.0, transfer())}, 1000.0) == {}, "asked before its end"
    pages = {"d": moved(201.0, transfer(), transfer("another")), "p": moved(201.0)}
    # It came at 100 by our clock, and moved at 200.
    whole = RequestTransfers(prompt=TransferView(blocks=3, bytes=30, ms=250.0, ended=100_000.0))
    assert awaited.take(pages, 1000.0) == {"k": whole}
    assert awaited.take(pages, 1000.0) == {}


@pytest.mark.parametrize("role", EngineRole)
def test_a_loan_of_an_engine_of_any_role_is_shown_as_one(role: EngineRole) -> None:
    traffic = TransferHistory()
    traffic.note("q", page(0.0, "q-1"))
    for at in (0.0, 2.0):
        traffic.note("p", page(at, "p-1", "LOAN", "q-1", int(at * 50)))
    roles = {"p": EngineRole.PREFILL, "q": role}
    assert traffic.byte_rates(roles, 0.0) == {("q", "p", "loan"): 50.0}


def test_a_borrowed_prefix_is_matched_with_its_request() -> None:
    awaited = TransferMatcher(lambda: 200.0)
    awaited.expect([summary(borrowed_from="q")])
    (found,) = awaited.take({"p": moved(201.0, transfer(what="LOAN", blocks=5))}, 0.0).values()
    assert found.turn is not None
    assert found.turn.blocks == 5


def test_a_push_is_told_by_the_prefiller_and_a_turn_when_it_is_heard_of() -> None:
    time = 200.0
    awaited = TransferMatcher(lambda: time)
    awaited.expect([summary(reused_from="d")])
    pages = {"p": moved(201.0, transfer(what="WRITE", blocks=2)), "d": moved(201.0)}
    (first,) = awaited.take(pages, 1000.0).values()
    assert first.prompt is not None
    assert (first.prompt.blocks, first.turn) == (2, None)
    pages["p"] = moved(202.0, transfer(what="WRITE", blocks=2), transfer(blocks=5))
    (second,) = awaited.take(pages, 1000.0).values()
    assert second.turn is not None
    assert (second.prompt, second.turn.blocks) == (first.prompt, 5)


def test_who_waits_has_bounds_in_number_and_time() -> None:
    time = 200.0
    awaited = TransferMatcher(lambda: time)
    awaited.expect([summary(str(n)) for n in range(2 * MAX_AWAITED_REQUESTS)])
    time += REPORT_TIMEOUT_S + 1
    pages = {"d": moved(time, transfer())}
    assert len(awaited.take(pages, 1000.0)) == MAX_AWAITED_REQUESTS
    awaited.expect([summary("late")])
    time += REPORT_TIMEOUT_S + 1
    assert awaited.take({"d": TransferPage(0.0)}, 1000.0) == {}
    assert awaited.take({"d": moved(time, transfer())}, 1000.0) == {}
