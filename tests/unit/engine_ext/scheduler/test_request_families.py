"""The requests that hosts make of several answers to one prompt: one reads, the others wait."""

from typing import Any

import pytest

from engine_ext.common.orders import (
    Decline,
    PullOrder,
    PushRegistration,
    PushWithdrawal,
    TrackOrder,
)
from engine_ext.common.types import FinishStatus, MatchedTokens, TransferResults
from engine_ext.scheduler.loads import MAX_FAMILIES, RequestFamilies
from engine_ext.scheduler.scheduler import SchedulerConnector
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import Request
from tests.unit.engine_ext.scheduler.test_scheduler import BLOCKS, answer_of_p, make

LATER = (None, False)
NOTHING = (0, False)


def children(
    decoder: SchedulerConnector, number: int = 3, parent: str = "d-1", **changes: Any
) -> list[Request]:
    params = answer_of_p(**changes)
    made = [Request(f"{child}_{parent}", params) for child in range(number)]
    for request in made:
        decoder.on_new_request(request)
    return made


def asked(decoder: SchedulerConnector, requests: list[Request]) -> list[MatchedTokens]:
    return [decoder.get_num_new_matched_tokens(request, 0) for request in requests]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_first_reads_and_the_others_ask_again_until_it_has(mode: Any) -> None:
    decoder = make("d", transfer_mode=mode)
    requests = children(decoder)
    assert asked(decoder, requests) == [(100, True), LATER, LATER]
    decoder.update_state_after_alloc(requests[0], BLOCKS, 100)
    assert asked(decoder, requests[1:]) == [LATER, LATER]
    orders = decoder.build_connector_meta()
    assert len(ordered(orders, PullOrder)) + len(ordered(orders, PushRegistration)) == 1
    assert len(ordered(orders, TrackOrder)) == 1
    decoder.update_connector_output(TransferResults(finished_recving=frozenset(["0_d-1"])))
    assert asked(decoder, requests[1:]) == [NOTHING, NOTHING]
    for request in requests[1:]:
        decoder.update_state_after_alloc(request, BLOCKS, 0)
        assert not decoder.request_finished(request, BLOCKS, FinishStatus.STOPPED).delay_free
    orders = decoder.build_connector_meta()
    assert (ordered(orders, PullOrder), ordered(orders, PushRegistration)) == ((), ())
    assert (ordered(orders, Decline), ordered(orders, PushWithdrawal)) == ((), ())


@pytest.mark.parametrize("loads", [False, True])
def test_where_the_first_ends_before_the_others_compute(loads: bool) -> None:
    decoder = make("d")
    requests = children(decoder)
    if loads:
        decoder.update_state_after_alloc(requests[0], BLOCKS, 100)
    decoder.request_finished(requests[0], BLOCKS, FinishStatus.ABORTED)
    assert asked(decoder, requests[1:]) == [NOTHING, NOTHING]
    assert len(ordered(decoder.build_connector_meta(), Decline)) == (not loads), (
        "the holder gets one message"
    )


def test_one_that_comes_when_the_first_has_ended_does_not_read() -> None:
    decoder = make("d")
    (first,) = children(decoder, 1)
    decoder.update_state_after_alloc(first, BLOCKS, 100)
    decoder.update_connector_output(TransferResults(finished_recving=frozenset(["0_d-1"])))
    decoder.request_finished(first, BLOCKS, FinishStatus.STOPPED)
    late = Request("1_d-1", answer_of_p())
    decoder.on_new_request(late)
    assert asked(decoder, [late]) == [NOTHING]


def test_a_family_waits_for_its_own_and_no_other() -> None:
    decoder = make("d")
    one, other = children(decoder, 2, "d-1"), children(decoder, 2, "d-2")
    assert asked(decoder, one + other) == [(100, True), LATER] * 2
    alone = Request("d-3", answer_of_p())
    decoder.on_new_request(alone)
    assert asked(decoder, [alone]) == [(100, True)]


def test_of_several_one_is_kept_for_the_next_turn() -> None:
    decoder = make("d", bidirectional=True)
    params = answer_of_p(retain=True)
    requests = [
        Request(f"{child}_d-1", params, num_computed_tokens=120, answer=range(100, 121))
        for child in range(3)
    ]
    for request in requests:
        decoder.on_new_request(request)
    decoder.update_state_after_alloc(requests[0], BLOCKS, 100)
    decoder.update_connector_output(TransferResults(finished_recving=frozenset(["0_d-1"])))
    blocks = (tuple(range(8)),)
    ended = [decoder.request_finished(one, blocks, FinishStatus.STOPPED) for one in requests]
    assert [one.delay_free for one in ended] == [True, False, False]


def test_only_so_many_families_are_remembered() -> None:
    siblings = RequestFamilies()
    for number in range(MAX_FAMILIES + 10):
        siblings.join(f"0_d-{number}")
        siblings.join(f"1_d-{number}")
        assert siblings.first_of(f"1_d-{number}") == f"0_d-{number}"
    assert siblings.first_of("1_d-0") == "1_d-0"
    assert siblings.first_of("cmpl-1_d") == "cmpl-1_d"
