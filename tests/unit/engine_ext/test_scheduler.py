from typing import Any

import pytest

from engine_ext.scheduler import SchedulerConnector
from engine_ext.types import (
    CacheGeometry,
    EngineIdentity,
    FinishStatus,
    RemoteSource,
    TransferResults,
)
from tests.unit.engine_ext.fakes import Request

BLOCKS = ((6, 5, 4, 3, 2, 1, 0),)


@pytest.fixture
def scheduler() -> SchedulerConnector:
    return SchedulerConnector(EngineIdentity("me", "10.0.0.2", 5601), CacheGeometry(16, 32))


def answer_of_p(**changes: Any) -> dict[str, Any]:
    """What a prefill engine answers for a prompt of 100 tokens."""
    prefiller = SchedulerConnector(EngineIdentity("p", "10.0.0.1", 5600), CacheGeometry(16, 32))
    request = Request("p-1", {"do_remote_decode": True}, num_computed_tokens=100)
    prefiller.on_new_request(request)
    params = prefiller.request_finished(request, BLOCKS, FinishStatus.LENGTH_CAPPED)[1]
    assert params is not None
    return {**params, **changes}


def offered(scheduler: SchedulerConnector, **changes: Any) -> Request:
    request = Request("d-1", answer_of_p(**changes))
    scheduler.on_new_request(request)
    return request


def test_a_finished_prefill_is_leased_and_described(scheduler: SchedulerConnector) -> None:
    request = Request("r", {"do_remote_decode": True}, num_computed_tokens=33)
    scheduler.on_new_request(request)
    assert scheduler.build_connector_meta().expects == ("r",)
    delay, params = scheduler.request_finished(request, BLOCKS, FinishStatus.LENGTH_CAPPED)
    assert delay
    assert params is not None
    assert params["remote_block_ids"] == [[6, 5, 4]]
    assert params["remote_num_tokens"] == 33
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("me", "r")
    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.2", 5601)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert scheduler.build_connector_meta().grants == ("r",)
    scheduler.update_connector_output(TransferResults(finished_sending=frozenset("r")))
    assert scheduler.num_leased == 0


@pytest.mark.parametrize("status", [FinishStatus.ABORTED, FinishStatus.ERROR])
def test_an_aborted_prefill_is_freed_at_once(
    scheduler: SchedulerConnector, status: FinishStatus
) -> None:
    request = Request("r", {"do_remote_decode": True}, num_computed_tokens=33)
    scheduler.on_new_request(request)
    scheduler.build_connector_meta()
    assert scheduler.request_finished(request, BLOCKS, status) == (False, None)
    assert scheduler.build_connector_meta().cancels == ("r",)


def test_a_local_request_leaves_no_trace(scheduler: SchedulerConnector) -> None:
    request = Request("r")
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, BLOCKS, 0)
    assert scheduler.request_finished(request, BLOCKS, FinishStatus.STOPPED) == (False, None)
    assert not scheduler.has_pending_work()
    assert not scheduler.build_connector_meta()


def test_renewal_starts_with_the_arrival_of_the_request(scheduler: SchedulerConnector) -> None:
    offered(scheduler)
    (track,) = scheduler.build_connector_meta().tracks
    assert (track.request_id, track.source.request_id) == ("d-1", "p-1")


def test_only_what_the_local_cache_lacks_is_pulled(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler)
    assert scheduler.get_num_new_matched_tokens(request, 32) == (68, True)
    scheduler.update_state_after_alloc(request, BLOCKS, 68)
    (order,) = scheduler.build_connector_meta().pulls
    assert (order.first_token, order.last_token) == (32, 100)
    assert order.local_block_ids == BLOCKS


def test_asking_twice_changes_nothing_and_one_pull_is_ordered(
    scheduler: SchedulerConnector,
) -> None:
    request = offered(scheduler)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (100, True)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (100, True)
    scheduler.update_state_after_alloc(request, BLOCKS, 100)
    scheduler.update_state_after_alloc(request, BLOCKS, 0)
    meta = scheduler.build_connector_meta()
    assert len(meta.pulls) == 1
    assert meta.releases == ()


def test_a_loaded_request_that_is_preempted_is_computed_locally(
    scheduler: SchedulerConnector,
) -> None:
    request = offered(scheduler)
    scheduler.update_state_after_alloc(request, BLOCKS, 100)
    scheduler.update_connector_output(TransferResults(finished_recving=frozenset(["d-1"])))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert scheduler.build_connector_meta().untracks == ("d-1",)


def test_a_full_local_hit_releases_the_remote(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler)
    assert scheduler.get_num_new_matched_tokens(request, 100) == (0, False)
    scheduler.update_state_after_alloc(request, BLOCKS, 0)
    meta = scheduler.build_connector_meta()
    assert [release.request_id for release in meta.releases] == ["p-1"]
    assert meta.pulls == ()
    scheduler.request_finished(request, BLOCKS, FinishStatus.STOPPED)
    assert scheduler.build_connector_meta().releases == ()


def test_an_abort_in_the_queue_releases_the_remote(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler)
    scheduler.request_finished(request, ((),), FinishStatus.ABORTED)
    meta = scheduler.build_connector_meta()
    assert [release.request_id for release in meta.releases] == ["p-1"]
    assert meta.untracks == ("d-1",)


def test_an_abort_while_loading_leaves_the_release_to_the_read(
    scheduler: SchedulerConnector,
) -> None:
    request = offered(scheduler)
    scheduler.update_state_after_alloc(request, BLOCKS, 100)
    scheduler.request_finished(request, BLOCKS, FinishStatus.ABORTED)
    assert scheduler.build_connector_meta().releases == ()


def test_tokens_the_remote_does_not_hold_are_not_asked_for(scheduler: SchedulerConnector) -> None:
    assert (
        scheduler.get_num_new_matched_tokens(offered(scheduler, remote_num_tokens=40), 0)[0] == 40
    )
    short_list = offered(scheduler, remote_block_ids=[[1, 2]], remote_num_tokens=None)
    assert scheduler.get_num_new_matched_tokens(short_list, 0)[0] == 32


def test_a_remote_that_holds_more_than_the_prompt_gives_the_prompt(
    scheduler: SchedulerConnector,
) -> None:
    request = offered(scheduler, remote_num_tokens=100)
    request.num_prompt_tokens = 50
    assert scheduler.get_num_new_matched_tokens(request, 0)[0] == 50


def test_broken_params_make_a_local_request(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler, remote_host=None)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not scheduler.build_connector_meta()


def test_both_legs_on_one_engine_release_without_a_read(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler, remote_engine_id="me")
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    meta = scheduler.build_connector_meta()
    assert [type(release) for release in meta.releases] == [RemoteSource]
    assert meta.tracks == ()
