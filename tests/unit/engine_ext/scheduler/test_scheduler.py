import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from engine_ext.common.access import Access, SharedSecret, parse_networks
from engine_ext.common.config import ConnectorConfig, TransferMode
from engine_ext.common.orders import (
    Decline,
    Expect,
    LeaseCancel,
    LeaseGrant,
    PartialOffer,
    PullOrder,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Revoke,
    TrackOrder,
    Untrack,
)
from engine_ext.common.prefix_hashes import ContentKey, Keys
from engine_ext.common.types import (
    STATE,
    BlockIds,
    CacheGeometry,
    EngineIdentity,
    FinishDecision,
    FinishStatus,
    RemoteSource,
    TransferResults,
    chunked,
)
from engine_ext.scheduler.scheduler import SchedulerConnector
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import Request, told

BLOCKS = ((6, 5, 4, 3, 2, 1, 0),)
GEOMETRY = CacheGeometry(16, 32)


@pytest.fixture
def scheduler() -> SchedulerConnector:
    return make("me", 5601)


def make(
    engine_id: str, port: int = 5600, geometry: CacheGeometry = GEOMETRY, **settings: Any
) -> SchedulerConnector:
    config = ConnectorConfig(engine_id=engine_id, **settings)
    identity = EngineIdentity(engine_id, "10.0.0.2", port)
    return SchedulerConnector(config, identity, geometry, lambda: 1000.0)


def prefilled(
    prefiller: SchedulerConnector, request: Request, blocks: BlockIds = BLOCKS
) -> dict[str, Any] | None:
    """Begin and end a prefill leg. Return its params."""
    prefiller.on_new_request(request)
    return prefiller.request_finished(
        request, blocks, FinishStatus.LENGTH_CAPPED
    ).kv_transfer_params


def answer_of_p(**changes: Any) -> dict[str, Any]:
    """What a prefill engine answers for a prompt of 100 tokens."""
    request = Request("p-1", {"do_remote_decode": True}, num_computed_tokens=100)
    params = prefilled(make("p"), request)
    assert params is not None
    return told(params, **changes)


def offered(scheduler: SchedulerConnector, **changes: Any) -> Request:
    request = Request("d-1", answer_of_p(**changes))
    scheduler.on_new_request(request)
    return request


def test_a_finished_prefill_is_leased_and_described(scheduler: SchedulerConnector) -> None:
    request = Request("r", {"do_remote_decode": True}, num_computed_tokens=33)
    scheduler.on_new_request(request)
    assert ordered(scheduler.build_connector_meta(), Expect) == (Expect("r"),)
    delay, params = scheduler.request_finished(request, BLOCKS, FinishStatus.LENGTH_CAPPED)
    assert delay
    assert params is not None
    assert params["remote_block_ids"] == [[6, 5, 4]]
    assert params["remote_num_tokens"] == 33
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("me", "r")
    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.2", 5601)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert ordered(scheduler.build_connector_meta(), LeaseGrant) == (LeaseGrant("r", 30.0),)
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
    assert ordered(scheduler.build_connector_meta(), LeaseCancel) == (LeaseCancel("r"),)


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
    (track,) = ordered(scheduler.build_connector_meta(), TrackOrder)
    assert (track.request_id, track.remote_id) == ("d-1", "p-1")


def test_only_what_the_local_cache_lacks_is_pulled(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler)
    assert scheduler.get_num_new_matched_tokens(request, 32) == (68, True)
    scheduler.update_state_after_alloc(request, BLOCKS, 68)
    (order,) = ordered(scheduler.build_connector_meta(), PullOrder)
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
    assert len(ordered(meta, PullOrder)) == 1
    assert ordered(meta, Decline) == ()


def test_a_loaded_request_that_is_preempted_is_computed_locally(
    scheduler: SchedulerConnector,
) -> None:
    request = offered(scheduler)
    scheduler.update_state_after_alloc(request, BLOCKS, 100)
    scheduler.update_connector_output(TransferResults(finished_recving=frozenset(["d-1"])))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert ordered(scheduler.build_connector_meta(), Untrack) == ("d-1",)


def test_a_full_local_hit_releases_the_remote(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler)
    assert scheduler.get_num_new_matched_tokens(request, 100) == (0, False)
    scheduler.update_state_after_alloc(request, BLOCKS, 0)
    meta = scheduler.build_connector_meta()
    assert [declined.request_id for declined in ordered(meta, Decline)] == ["p-1"]
    assert ordered(meta, PullOrder) == ()
    scheduler.request_finished(request, BLOCKS, FinishStatus.STOPPED)
    assert ordered(scheduler.build_connector_meta(), Decline) == ()


def test_an_abort_in_the_queue_releases_the_remote(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler)
    scheduler.request_finished(request, ((),), FinishStatus.ABORTED)
    meta = scheduler.build_connector_meta()
    assert [declined.request_id for declined in ordered(meta, Decline)] == ["p-1"]
    assert ordered(meta, Untrack) == ("d-1",)


def test_an_abort_while_loading_leaves_the_release_to_the_read(
    scheduler: SchedulerConnector,
) -> None:
    request = offered(scheduler)
    scheduler.update_state_after_alloc(request, BLOCKS, 100)
    scheduler.request_finished(request, BLOCKS, FinishStatus.ABORTED)
    assert ordered(scheduler.build_connector_meta(), Decline) == ()


def test_tokens_the_remote_does_not_hold_are_not_asked_for(scheduler: SchedulerConnector) -> None:
    assert (
        scheduler.get_num_new_matched_tokens(offered(scheduler, remote_num_tokens=40), 0)[0] == 40
    )
    short_list = offered(scheduler, remote_block_ids=[[1, 2]], remote_num_tokens=None)
    assert scheduler.get_num_new_matched_tokens(short_list, 0)[0] == 32


def test_a_remote_that_holds_more_than_the_prompt_gives_the_prompt(
    scheduler: SchedulerConnector,
) -> None:
    request = Request("d-1", answer_of_p(prefix_proof=None), num_prompt_tokens=50)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0)[0] == 50


def test_broken_params_make_a_local_request(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler, remote_host=None)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not scheduler.build_connector_meta()


def test_both_legs_on_one_engine_release_without_a_read(scheduler: SchedulerConnector) -> None:
    request = offered(scheduler, remote_engine_id="me")
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    meta = scheduler.build_connector_meta()
    assert [type(declined) for declined in ordered(meta, Decline)] == [RemoteSource]
    assert ordered(meta, TrackOrder) == ()


def test_a_prompt_of_other_tokens_gets_only_what_is_proven_equal(
    scheduler: SchedulerConnector,
) -> None:
    request = Request("d-1", answer_of_p(), num_prompt_tokens=50)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (48, True)


# What a proof is worth.


def without_last_character(proof: dict[str, Any]) -> dict[str, Any]:
    return {**proof, "h": proof["h"][:-1]}


TAMPERED = {
    "empty": lambda proof: {},
    "empty text": lambda proof: "",
    "of an older version": lambda proof: {**proof, "v": 1},
    "of a newer version": lambda proof: {**proof, "v": 5},
    "cut by a character": without_last_character,
    "without hashes": lambda proof: {**proof, "h": ""},
    "of other blocks": lambda proof: {**proof, "b": "A" * 22 + "=="},
}


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED.keys())
def test_an_unreadable_proof_loads_nothing_is_counted_and_declined(
    scheduler: SchedulerConnector, tamper: Callable[[dict[str, Any]], Any]
) -> None:
    good = answer_of_p()["prefix_proof"]
    request = offered(scheduler, prefix_proof=tamper(good))
    assert scheduler.proofs_unreadable == 1
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, BLOCKS, 0)
    meta = scheduler.build_connector_meta()
    assert [source.request_id for source in ordered(meta, Decline)] == ["p-1"]
    assert (ordered(meta, TrackOrder), ordered(meta, PullOrder)) == ((), ())
    failure = scheduler.load_failures.take("d-1")
    assert failure is not None
    assert (failure["remote_engine_id"], failure["scope"]) == ("p", "request")


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED.keys())
def test_a_turn_with_an_unreadable_proof_is_not_loaded_on_the_operators_word_either(
    tamper: Callable[[dict[str, Any]], Any],
) -> None:
    prefiller = make("me", bidirectional=True, trust_unproven_prefix=True)
    request = next_turn(prefiller, prefix_proof=tamper(retained()["prefix_proof"]))
    assert prefiller.get_num_new_matched_tokens(request, 0) == (0, False)
    assert prefiller.proofs_unreadable == 1
    assert len(ordered(prefiller.build_connector_meta(), Decline)) == 1


@pytest.mark.parametrize("proof", [answer_of_p, lambda: {"prefix_proof": None}])
def test_a_pull_says_whether_it_is_proven(
    scheduler: SchedulerConnector, proof: Callable[[], dict[str, Any]]
) -> None:
    given = proof()["prefix_proof"]
    request = offered(scheduler, prefix_proof=given)
    scheduler.update_state_after_alloc(request, BLOCKS, 100)
    (order,) = ordered(scheduler.build_connector_meta(), PullOrder)
    assert order.is_proven == (given is not None)
    assert scheduler.proofs_unreadable == 0


def test_a_turn_that_is_trusted_on_the_operators_word_is_not_called_proven() -> None:
    prefiller = make("me", bidirectional=True, trust_unproven_prefix=True)
    request = next_turn(prefiller, prefix_proof=None)
    assert prefiller.get_num_new_matched_tokens(request, 0) == (120, True)
    prefiller.update_state_after_alloc(request, BLOCKS, 120)
    assert not ordered(prefiller.build_connector_meta(), PullOrder)[0].is_proven


def test_a_prompt_of_which_nothing_is_proven_is_declined_when_it_arrives(
    scheduler: SchedulerConnector,
) -> None:
    """P frees its blocks at once, instead of waiting for D's queue."""
    request = Request("d-1", answer_of_p(), num_prompt_tokens=15)
    scheduler.on_new_request(request)
    meta = scheduler.build_connector_meta()
    assert [source.request_id for source in ordered(meta, Decline)] == ["p-1"]
    assert ordered(meta, TrackOrder) == ()


def test_what_a_prefiller_generated_itself_does_not_spoil_the_proof_of_the_prompt(
    scheduler: SchedulerConnector,
) -> None:
    prefiller = make("p")
    request = Request("p-1", {"do_remote_decode": True}, 2000, 2003, answer=range(4))
    params = prefilled(prefiller, request, ((*range(126),),))
    decode = Request("d-1", params, num_prompt_tokens=2000)
    scheduler.on_new_request(decode)
    assert scheduler.get_num_new_matched_tokens(decode, 0) == (2000, True)


KEYS: dict[str, Keys] = {
    "nothing": (),
    "adapter": (ContentKey("lora", ("a", "/a")),),
    "adapter of that name from elsewhere": (ContentKey("lora", ("a", "/b")),),
    "salt": (ContentKey("cache_salt", ("x",)),),
    "another salt": (ContentKey("cache_salt", ("y",)),),
    "image": (ContentKey("mm", ("1",), 3, 9),),
    "another image": (ContentKey("mm", ("2",), 3, 9),),
    "image elsewhere": (ContentKey("mm", ("1",), 4, 10),),
    "two images": (ContentKey("mm", ("1",), 3, 9), ContentKey("mm", ("1",), 12, 18)),
}


@pytest.mark.parametrize(("held", "wanted"), list(product(KEYS, KEYS)))
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_requests_of_the_same_tokens_share_kv_only_where_all_else_is_the_same(
    held: str, wanted: str, mode: TransferMode
) -> None:
    prefiller, decoder = make("p", transfer_mode=mode), make("d", transfer_mode=mode)
    leg = Request("p-1", {"do_remote_decode": True}, 16, 16, content_keys=KEYS[held])
    params = prefilled(prefiller, leg, ((1,),))
    request = Request("d-1", params, 16, content_keys=KEYS[wanted])
    decoder.on_new_request(request)
    loadable = decoder.get_num_new_matched_tokens(request, 0).num_tokens
    decoder.update_state_after_alloc(request, ((1,),), loadable or 0)
    if mode == "pull":
        assert loadable == (16 if held == wanted else 0)
        return
    (offer,) = ordered(prefiller.build_connector_meta(), PushOffer)
    (registration,) = ordered(decoder.build_connector_meta(), PushRegistration)
    assert (offer.digest == registration.digest) == (held == wanted)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("sampled", [1, 4])
@pytest.mark.parametrize("given", [0, 3])
def test_who_goes_on_loads_all_that_the_prefiller_has_of_prompt_and_answer(
    mode: TransferMode, given: int, sampled: int
) -> None:
    """The last token's KV is nobody's: it was sampled, and has not run."""
    prefiller, decoder = make("p", transfer_mode=mode), make("d", transfer_mode=mode)
    answer = tuple(range(900, 900 + given + sampled))
    held = 40 + len(answer) - 1
    leg = Request("p-1", {"do_remote_decode": True, "hand_over": True}, 40, 0, answer[:given])
    prefiller.on_new_request(leg)
    leg.num_computed_tokens, leg.answer = held, answer
    params = prefiller.request_finished(leg, ((1, 2, 3),), FinishStatus.LENGTH_CAPPED)[1]
    assert params is not None
    assert params["remote_num_tokens"] == held
    request = Request("d-1", params, 40, 0, answer)
    decoder.on_new_request(request)
    assert decoder.get_num_new_matched_tokens(request, 0) == (held, True)
    decoder.update_state_after_alloc(request, ((1, 2, 3),), held)
    if mode == "push":
        (offer,) = ordered(prefiller.build_connector_meta(), PushOffer)
        (registration,) = ordered(decoder.build_connector_meta(), PushRegistration)
        assert (offer.num_tokens, registration.last_token) == (held, held)
        assert offer.digest == registration.digest


@pytest.mark.parametrize("place", [0, 39, 41, 43])
def test_what_differs_in_the_prompt_or_in_the_answer_is_not_loaded(place: int) -> None:
    decoder = make("d")
    prefiller = make("p")
    answer = (900, 901, 902, 903)
    leg = Request("p-1", {"do_remote_decode": True, "hand_over": True}, 40, 0, answer)
    prefiller.on_new_request(leg)
    leg.num_computed_tokens, leg.answer = 44, (*answer, 904)
    params = prefiller.request_finished(leg, ((1, 2, 3),), FinishStatus.LENGTH_CAPPED)[1]
    tokens = [*range(40), *answer, 904]
    tokens[place] = 7777

    class Other(Request):
        @property
        def token_ids(self) -> Sequence[int]:
            return tokens

    request = Other("d-1", params)
    decoder.on_new_request(request)
    assert decoder.get_num_new_matched_tokens(request, 0).num_tokens == place // 16 * 16


@pytest.mark.parametrize("sampled", [1, 4])
@pytest.mark.parametrize("given", [0, 3])
def test_a_push_that_begins_on_both_sides_at_once_is_of_what_both_were_given(
    given: int, sampled: int
) -> None:
    prefiller, decoder = make("p", transfer_mode="push"), make("d", transfer_mode="push")
    answer = tuple(range(900, 900 + given + sampled))
    leg = Request("p-1", {"do_remote_decode": True}, 40, 0, answer[:given])
    prefiller.on_new_request(leg)
    leg.num_computed_tokens, leg.answer = 40 + len(answer) - 1, answer
    assert prefiller.request_finished(leg, ((1, 2, 3),), FinishStatus.LENGTH_CAPPED)[0]
    untold = {key: value for key, value in answer_of_p().items() if key != "remote_num_tokens"}
    request = Request("d-1", untold, 40, 0, answer[:given])
    decoder.on_new_request(request)
    assert decoder.get_num_new_matched_tokens(request, 0) == (40 + given, True)
    decoder.update_state_after_alloc(request, ((1, 2, 3),), 40 + given)
    (offer,) = ordered(prefiller.build_connector_meta(), PushOffer)
    (registration,) = ordered(decoder.build_connector_meta(), PushRegistration)
    assert offer.digest == registration.digest


def test_an_image_behind_what_is_asked_for_changes_nothing_before_it(
    scheduler: SchedulerConnector,
) -> None:
    image = (ContentKey("mm", ("1",), 100, 110),)
    request = Request("d-1", answer_of_p(), num_prompt_tokens=130, content_keys=image)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (100, True)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_cannot_be_told_is_never_offered(mode: TransferMode) -> None:
    """A prompt of embeddings."""
    prefiller = make("p", transfer_mode=mode)
    leg = Request("p-1", {"do_remote_decode": True}, 100, 100, content_keys=None)
    prefiller.on_new_request(leg)
    assert prefiller.request_finished(leg, BLOCKS, FinishStatus.LENGTH_CAPPED) == (False, None)
    meta = prefiller.build_connector_meta()
    assert (ordered(meta, LeaseGrant), ordered(meta, PushOffer), ordered(meta, LeaseCancel)) == (
        (),
        (),
        (LeaseCancel("p-1"),),
    )


def test_what_cannot_be_told_is_not_kept_for_the_next_turn() -> None:
    decoder = make("d", bidirectional=True)
    request = Request("t-1", {"retain": True}, 100, 120, range(21), content_keys=None)
    decoder.on_new_request(request)
    assert decoder.request_finished(request, BLOCKS, FinishStatus.STOPPED) == (False, None)


@pytest.mark.parametrize("proof", [{}, {"prefix_proof": None}])
def test_what_cannot_be_told_is_never_read(
    scheduler: SchedulerConnector, proof: dict[str, Any]
) -> None:
    request = Request("d-1", answer_of_p(**proof), content_keys=None)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert len(ordered(scheduler.build_connector_meta(), Decline)) == 1


def test_what_cannot_be_told_is_never_registered_for_a_push() -> None:
    decoder = make("d", transfer_mode="push")
    request = Request("d-1", answer_of_p(), content_keys=None)
    decoder.on_new_request(request)
    assert decoder.get_num_new_matched_tokens(request, 0) == (0, False)
    meta = decoder.build_connector_meta()
    assert (
        len(ordered(meta, PushWithdrawal)),
        ordered(meta, PushRegistration),
        ordered(meta, TrackOrder),
    ) == (1, (), ())


# Turns: a decode engine keeps what it answered, a prefill engine pulls it for the next turn.


def retained(
    request_id: str = "t-1", decoder: SchedulerConnector | None = None, **changes: Any
) -> dict[str, Any]:
    """What a decode engine answers for a turn of 100 prompt and 21 answer tokens."""
    decoder = decoder or make("d", 5602, bidirectional=True)
    answer = loaded_and_answered(decoder, request_id, answer_of_p(retain=True))
    assert answer.delay_free
    assert answer.kv_transfer_params is not None
    return told(answer.kv_transfer_params, **changes)


def loaded_and_answered(
    decoder: SchedulerConnector, name: str, params: dict[str, Any]
) -> FinishDecision:
    request = Request(name, params, num_computed_tokens=120, answer=range(100, 121))
    decoder.on_new_request(request)
    decoder.update_state_after_alloc(request, BLOCKS, 100)
    decoder.update_connector_output(TransferResults(finished_recving=frozenset({name})))
    return decoder.request_finished(request, (tuple(range(8)),), FinishStatus.STOPPED)


def next_turn(scheduler: SchedulerConnector, prompt_tokens: int = 150, **changes: Any) -> Request:
    request = Request("n-1", retained(**changes), num_prompt_tokens=prompt_tokens)
    scheduler.on_new_request(request)
    return request


@pytest.fixture
def prefiller() -> SchedulerConnector:
    return make("me", bidirectional=True)


def test_a_turn_is_not_kept_where_turns_are_off_or_it_is_not_wanted() -> None:
    params = answer_of_p()
    for config, asked in ((True, False), (False, True)):
        decoder = make("d", bidirectional=config)
        answer = loaded_and_answered(decoder, "t-1", {**params, "retain": asked})
        assert answer == (False, None)


def test_a_kept_turn_says_where_until_when_and_which_tokens() -> None:
    decoder = make("d", 5602, bidirectional=True)
    answer = retained(decoder=decoder)
    assert answer["do_remote_decode"] is True
    assert answer["do_remote_prefill"] is False
    assert answer["remote_num_tokens"] == 120
    assert answer["retained_until"] == 1480
    (grant,) = ordered(decoder.build_connector_meta(), LeaseGrant)
    assert grant == LeaseGrant("t-1", 480.0, renewable=False)


def test_the_next_turn_pulls_what_it_extends(prefiller: SchedulerConnector) -> None:
    request = next_turn(prefiller)
    assert prefiller.get_num_new_matched_tokens(request, 16) == (104, True)
    prefiller.update_state_after_alloc(request, BLOCKS, 104)
    meta = prefiller.build_connector_meta()
    assert (ordered(meta, PullOrder)[0].first_token, ordered(meta, PullOrder)[0].last_token) == (
        16,
        120,
    )
    assert ordered(meta, Expect) == (Expect("n-1"),)
    assert ordered(meta, TrackOrder) == ()


@pytest.mark.parametrize("prompt_tokens", [70, 100, 119])
def test_a_shorter_history_pulls_whole_blocks_of_equal_tokens(
    prefiller: SchedulerConnector, prompt_tokens: int
) -> None:
    request = next_turn(prefiller, prompt_tokens)
    matched = prefiller.get_num_new_matched_tokens(request, 0).num_tokens
    assert matched == prompt_tokens - prompt_tokens % 16


def test_an_edited_history_pulls_what_stands_before_the_edit() -> None:
    scheduler = make("me", bidirectional=True, recompute_threshold=16)

    class Edited(Request):
        @property
        def prompt_token_ids(self) -> Sequence[int]:
            return [*range(40), 7777, *range(41, 150)]

    request = Edited("n-1", retained(), num_prompt_tokens=150)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_proof": None},
        {"retained_until": 999.0},
        {"remote_num_tokens": 63},
        {"remote_block_ids": [[1, 2, 3]]},
    ],
)
def test_a_turn_that_cannot_be_used_is_computed_and_given_back(
    prefiller: SchedulerConnector, changes: dict[str, Any]
) -> None:
    request = Request("n-1", retained(**changes), num_prompt_tokens=150)
    prefiller.on_new_request(request)
    assert prefiller.get_num_new_matched_tokens(request, 0) == (0, False)
    prefiller.update_state_after_alloc(request, BLOCKS, 0)
    assert [source.request_id for source in ordered(prefiller.build_connector_meta(), Decline)] == [
        "t-1"
    ]


def test_a_turn_that_is_over_by_this_clock_is_logged(
    prefiller: SchedulerConnector, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request("n-1", retained(retained_until=400.0), num_prompt_tokens=150)
    prefiller.on_new_request(request)
    assert "ended 600 s ago by this machine's clock" in caplog.text


def test_a_prefiller_without_the_flag_computes_and_gives_the_turn_back(
    scheduler: SchedulerConnector,
) -> None:
    request = next_turn(scheduler)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert len(ordered(scheduler.build_connector_meta(), Decline)) == 1


def test_a_turn_with_broken_params_is_an_ordinary_prefill(prefiller: SchedulerConnector) -> None:
    request = next_turn(prefiller, remote_port="x")
    assert prefiller.get_num_new_matched_tokens(request, 0) == (0, False)
    assert ordered(prefiller.build_connector_meta(), Expect) == (Expect("n-1"),)


def test_few_missing_tokens_are_computed_and_the_turn_given_back(
    prefiller: SchedulerConnector,
) -> None:
    request = next_turn(prefiller)
    assert prefiller.get_num_new_matched_tokens(request, 64) == (0, False)
    prefiller.update_state_after_alloc(request, BLOCKS, 0)
    assert len(ordered(prefiller.build_connector_meta(), Decline)) == 1


def test_a_prefill_that_lost_its_turn_computes_whatever_the_policy(
    prefiller: SchedulerConnector,
) -> None:
    request = next_turn(prefiller)
    assert prefiller.load_failure_policy(request) == "recompute"
    assert prefiller.load_failure_policy(Request("other")) == "fail"


def test_waiting_turns_hold_no_more_than_their_share_and_the_oldest_goes() -> None:
    decoder = make("d", bidirectional=True, retain_share=0.5)
    for name in ("t-1", "t-2", "t-3"):
        retained(name, decoder)
    meta = decoder.build_connector_meta()
    assert [grant.request_id for grant in ordered(meta, LeaseGrant)] == ["t-1", "t-2", "t-3"]
    assert ordered(meta, Revoke) == ("t-1",)


def test_a_turn_larger_than_the_share_is_not_kept() -> None:
    decoder = make("d", bidirectional=True, retain_share=0.1)
    assert loaded_and_answered(decoder, "t-1", answer_of_p(retain=True)) == (False, None)


@pytest.mark.parametrize(
    ("said", "is_kept"), [({}, True), ({"retain": None}, True), ({"retain": False}, False)]
)
def test_a_turn_is_kept_by_default_where_a_remote_has_prefilled(
    said: dict[str, Any], is_kept: bool
) -> None:
    decoder = make("d", bidirectional=True)
    for name, params in (("t-1", {**answer_of_p(), **said}), ("local", said)):
        decision = loaded_and_answered(decoder, name, params)
        assert decision.delay_free == (is_kept and name == "t-1")


def test_a_turn_that_stock_may_read_never_gives_way_and_what_does_not_fit_is_not_kept() -> None:
    decoder = make("d", bidirectional=True, retain_share=0.5)
    proven = answer_of_p()
    stock = answer_of_p(prefix_proof=None)
    kept = [turn(decoder, f"t-{number}", stock) for number in range(3)]
    assert kept == [True, True, False]
    assert not turn(decoder, "t-3", proven)
    decoder.drain()
    assert ordered(decoder.build_connector_meta(), Revoke) == ()
    decoder.resume()
    decoder.update_connector_output(TransferResults(finished_sending=frozenset({"t-0"})))
    assert turn(decoder, "t-4", proven)
    assert turn(decoder, "t-5", stock)
    assert ordered(decoder.build_connector_meta(), Revoke) == ("t-4",)


@pytest.mark.parametrize(
    ("said", "gives_way"),
    [({"proves_prefix": True}, True), ({}, False), ({"proves_prefix": "yes"}, False)],
)
def test_a_turn_that_was_pushed_gives_way_if_the_router_says_who_prefilled(
    said: dict[str, Any], gives_way: bool
) -> None:
    decoder = make("d", bidirectional=True, transfer_mode="push")
    assert turn(decoder, "t", answer_of_p(prefix_proof=None) | said)
    decoder.drain()
    assert ordered(decoder.build_connector_meta(), Revoke) == (("t",) if gives_way else ())


def test_an_engine_that_lets_in_who_lacks_the_secret_keeps_every_turn_for_its_time() -> None:
    """To those it is a stock engine, whatever they prove of themselves."""
    access = Access(SharedSecret.of(b"known to some engines"), is_mixed=True)
    decoder = make("d", bidirectional=True, access=access)
    assert turn(decoder, "t", answer_of_p())
    decoder.drain()
    assert ordered(decoder.build_connector_meta(), Revoke) == ()


def test_stock_is_told_of_no_turn_that_may_go_and_our_engines_are_told_that_it_may() -> None:
    decoder = make("d", bidirectional=True)
    proven = answer_of_p()
    stock = answer_of_p(prefix_proof=None)
    for params, is_firm in ((proven, False), (stock, True)):
        request = Request("t", params, num_computed_tokens=120, answer=range(100, 121))
        decoder.on_new_request(request)
        told = decoder.request_finished(request, BLOCKS, FinishStatus.STOPPED)[1]
        assert told is not None
        assert told["revocable"] is not is_firm
        assert (told["remote_blocks_expiry_time"] > time.perf_counter()) is is_firm


def turn(decoder: SchedulerConnector, name: str, params: dict[str, Any]) -> bool:
    """Whether one of 120 tokens is kept."""
    return loaded_and_answered(decoder, name, params).delay_free


def test_an_engine_that_drains_gives_up_waiting_turns_and_keeps_leases() -> None:
    decoder = make("d", bidirectional=True)
    retained("t-1", decoder)
    prefilled(decoder, Request("r", {"do_remote_decode": True}, num_computed_tokens=33))
    decoder.drain()
    assert ordered(decoder.build_connector_meta(), Revoke) == ("t-1",)
    decoder.drain()
    assert not decoder.has_pending_work()


def test_turns_of_other_weights_end_but_those_that_stock_may_read() -> None:
    decoder = make("d", bidirectional=True, retain_share=0.5)
    proven = answer_of_p()
    stock = answer_of_p(prefix_proof=None)
    assert turn(decoder, "t-0", proven)
    assert decoder.end_turns()
    assert ordered(decoder.build_connector_meta(), Revoke) == ("t-0",)
    assert turn(decoder, "t-1", stock)
    assert not decoder.end_turns()
    assert turn(decoder, "t-2", proven)


def test_what_other_weights_computed_ends_but_turns_that_stock_may_read() -> None:
    decoder = make("d", bidirectional=True, retain_share=0.5)
    proven = answer_of_p()
    stock = answer_of_p(prefix_proof=None)
    assert turn(decoder, "t", proven)
    assert turn(decoder, "firm", stock)
    for name in ("leased", "unrelated"):
        prefilled(decoder, Request(name, {"do_remote_decode": True}, num_computed_tokens=33))
    decoder.build_connector_meta()
    decoder.change_weights(["t", "firm", "leased", "unknown"])
    assert ordered(decoder.build_connector_meta(), Revoke) == ("t", "leased")


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_other_weights_computed_is_not_loaded(mode: TransferMode) -> None:
    decoder = make("d", transfer_mode=mode)
    waiting, loading = (Request(name, answer_of_p()) for name in ("waiting", "loading"))
    for request in (waiting, loading):
        decoder.on_new_request(request)
    decoder.update_state_after_alloc(loading, BLOCKS, 100)
    decoder.build_connector_meta()
    decoder.change_weights(["waiting", "loading"])
    assert decoder.get_num_new_matched_tokens(waiting, 0) == (0, False)
    decoder.update_state_after_alloc(waiting, BLOCKS, 0)
    meta = decoder.build_connector_meta()
    assert (ordered(meta, PullOrder), ordered(meta, PushRegistration)) == ((), ())
    assert [len(ordered(meta, Decline)), len(ordered(meta, PushWithdrawal))] == (
        [1, 0] if mode == "pull" else [0, 2]
    )
    assert (decoder.is_stale_load("waiting"), decoder.is_stale_load("loading")) == (False, True)
    failed = frozenset({"loading"})
    decoder.update_connector_output(TransferResults(finished_recving=failed, failed_recving=failed))
    assert not decoder.is_stale_load("loading")


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_where_nothing_may_be_loaded_all_is_computed_and_the_holder_hears_of_it(mode: str) -> None:
    decoder = make("d", geometry=CacheGeometry(16, 32, may_load=False), transfer_mode=mode)
    request = Request("d-1", answer_of_p())
    decoder.on_new_request(request)
    assert decoder.get_num_new_matched_tokens(request, 0) == (0, False)
    decoder.update_state_after_alloc(request, BLOCKS, 0)
    meta = decoder.build_connector_meta()
    assert (ordered(meta, PullOrder), ordered(meta, PushRegistration)) == ((), ())
    assert [len(ordered(meta, Decline)), len(ordered(meta, PushWithdrawal))] == (
        [1, 0] if mode == "pull" else [0, 1]
    )


def test_what_is_released_by_name_is_revoked_once_and_nothing_else_is() -> None:
    prefiller = make("p")
    request = Request("r", {"do_remote_decode": True}, num_computed_tokens=33)
    prefiller.on_new_request(request)
    assert not prefiller.release("p", "r"), "it is not finished"
    prefiller.request_finished(request, BLOCKS, FinishStatus.LENGTH_CAPPED)
    assert not prefiller.release("another", "r")
    assert prefiller.release("p", "r")
    assert ordered(prefiller.build_connector_meta(), Revoke) == ("r",)
    prefiller.update_connector_output(TransferResults(frozenset({"r"})))
    assert not prefiller.release("p", "r")
    assert not prefiller.has_pending_work()


@pytest.mark.parametrize(("windows", "loaded"), [((None,), 100), ((64, None), 99)])
def test_where_a_group_has_a_window_the_last_token_is_left_to_compute(
    windows: tuple[int | None, ...], loaded: int
) -> None:
    geometry = CacheGeometry(16, 32, group_windows=windows)
    decoder = make("d", geometry=geometry)
    blocks = BLOCKS * len(windows)
    request = offered(decoder, remote_block_ids=[list(group) for group in blocks])
    assert decoder.get_num_new_matched_tokens(request, 32) == (loaded - 32, True)
    decoder.update_state_after_alloc(request, blocks, loaded - 32)
    (order,) = ordered(decoder.build_connector_meta(), PullOrder)
    assert (order.first_token, order.last_token) == (32, loaded)


@pytest.mark.parametrize(
    ("lookahead", "windows", "other", "loaded"),
    [
        (1, (None,), 100, 100),  # the host computes the last one of all again
        (1, (None,), 64, 63),
        (1, (64, None), 100, 99),
        (1, (64, None), 64, 63),
        (3, (None,), 100, 97),
        (3, (64, None), 100, 97),
        (3, (None,), 64, 61),
        (3, (None,), 0, 0),
    ],
)
def test_no_kv_is_taken_that_depends_on_tokens_that_are_not_known_to_be_the_same(
    lookahead: int, windows: tuple[int | None, ...], other: int, loaded: int
) -> None:
    """From token `other` on, of 100, the remote's are others."""
    geometry = CacheGeometry(16, 32, group_windows=windows, lookahead=lookahead)
    decoder = make("d", geometry=geometry)
    blocks = [list(group) for group in BLOCKS * len(windows)]
    params, others = answer_of_p(remote_block_ids=blocks), range(other + 1, 101)
    request = Request("d-1", params, num_prompt_tokens=other, answer=others)
    decoder.on_new_request(request)
    assert decoder.get_num_new_matched_tokens(request, 0) == (loaded, loaded > 0)


@pytest.mark.parametrize("proof", ["as it was", "none"])
@pytest.mark.parametrize("number", [99, None])
def test_a_window_is_not_placed_by_a_number_that_got_lost_or_changed_on_the_way(
    proof: str, number: int | None
) -> None:
    """Its list ends with the remote's last token, and only the number of tokens says where."""
    geometry = CacheGeometry(16, 32, group_windows=(None, 49))
    decoder = make("d", geometry=geometry)
    whole = list(BLOCKS[0])
    changes = {
        "remote_block_ids": [whole, whole],
        **({"prefix_proof": None} if proof == "none" else {}),
    }
    params = answer_of_p(**changes)
    request = Request("d-1", {**params, "remote_num_tokens": number})
    decoder.on_new_request(request)
    is_stock = proof == "none" and number is not None
    assert decoder.get_num_new_matched_tokens(request, 0) == (99 if is_stock else 0, is_stock)


@pytest.mark.parametrize(
    ("block_size", "window", "listed", "loaded"),
    [
        # The token behind 99 sees from 51 on, in block 3.
        (16, 49, 5, 99),
        (16, 49, 4, 99),
        (16, 49, 3, 0),
        # Our block of 32 tokens begins with token 32, in its block 2.
        (32, 49, 5, 99),
        (32, 49, 4, 0),
        # The token behind 99 sees from 64 on, in block 4.
        (16, chunked(64), 4, 99),
        (16, chunked(64), 3, 99),
        (16, chunked(64), 2, 0),
    ],
)
def test_a_remote_that_gave_up_what_a_window_or_a_chunk_needs_is_not_read(
    block_size: int, window: int, listed: int, loaded: int
) -> None:
    """The remote engine holds 100 tokens in 7 blocks of 16."""
    decoder = make("d", geometry=CacheGeometry(block_size, 32, group_windows=(None, window)))
    whole = list(BLOCKS[0])
    given = {"remote_block_ids": [whole, [0, *whole[-listed:]]], "remote_block_size": 16}
    request = offered(decoder, **given)
    assert decoder.get_num_new_matched_tokens(request, 0) == (loaded, loaded > 0)
    if not loaded:
        decoder.update_state_after_alloc(request, BLOCKS * 2, 0)
        assert len(ordered(decoder.build_connector_meta(), Decline)) == 1


# Groups with blocks of other sizes.


UNLIKE = CacheGeometry(32, 32, group_windows=(None, 49), group_block_sizes=(16, 32))
LISTS = (BLOCKS[0], (11, 12, 13, 14))
"""100 tokens in 7 blocks of 16, and in 4 of 32."""


@pytest.mark.parametrize(("listed", "loaded"), [(3, 99), (2, 0)])
def test_the_blocks_of_each_group_are_counted_by_its_own_size(listed: int, loaded: int) -> None:
    """The token behind 99 sees from 51 on, in the second block of 32."""
    decoder = make("d", geometry=UNLIKE)
    given = [list(LISTS[0]), list(LISTS[1][-listed:])]
    request = offered(decoder, remote_block_ids=given, remote_block_size=16)
    assert decoder.get_num_new_matched_tokens(request, 48)[0] == max(0, loaded - 48)
    if loaded:
        decoder.update_state_after_alloc(request, LISTS, loaded - 48)
        (order,) = ordered(decoder.build_connector_meta(), PullOrder)
        assert order.first_token == 32, "a block begins there in both groups"


def test_what_is_answered_and_offered_early_ends_with_a_block_of_each_group() -> None:
    request = Request("r", {"do_remote_decode": True}, num_computed_tokens=40)
    prefiller = make("p", geometry=UNLIKE)
    prefiller.on_new_request(request)
    decision = prefiller.request_finished(request, LISTS, FinishStatus.LENGTH_CAPPED)
    assert decision.kv_transfer_params is not None
    assert decision.kv_transfer_params["remote_block_ids"] == [[6, 5, 4], [11, 12]]
    pushing = make("p", geometry=UNLIKE, transfer_mode="push")
    pushing.on_new_request(request)
    pushing.on_step("r", LISTS, 60, 16)
    (offer,) = ordered(pushing.build_connector_meta(), PartialOffer)
    assert (offer.num_tokens, offer.block_ids) == (32, ((6, 5), (11,)))


# Layers that keep a state.


def with_state(engine_id: str, **settings: Any) -> SchedulerConnector:
    geometry = CacheGeometry(16, 32, group_windows=(None, STATE))
    return make(engine_id, geometry=geometry, **settings)


@pytest.mark.parametrize(
    ("params", "num_tokens", "num_left"),
    [
        ({"do_remote_decode": True}, 100, 1),
        ({"do_remote_decode": True}, 1, 0),
        ({"do_remote_decode": True, "hand_over": True}, 100, 0),
        ({"do_remote_prefill": True}, 100, None),
        ({"do_remote_decode": 3}, 100, None),
        (None, 100, None),
    ],
)
def test_a_prefill_stops_before_the_token_that_its_reader_computes(
    params: Any, num_tokens: int, num_left: int | None
) -> None:
    request = Request("r", params, num_prompt_tokens=num_tokens)
    assert with_state("p").backs_off(request) == num_left
    assert make("p").backs_off(request) is None


def test_what_nobody_can_read_is_computed_whole() -> None:
    request = Request("r", {"do_remote_decode": True}, content_keys=None)
    assert with_state("p").backs_off(request) is None


@pytest.mark.parametrize(("computed", "loaded"), [(98, 98), (99, 99), (100, 0)])
def test_a_state_is_read_only_where_it_is_of_just_those_tokens(computed: int, loaded: int) -> None:
    """Of 100 tokens the last is computed again, which a state of all has in it already."""
    prefiller, decoder = with_state("p"), with_state("d")
    done = Request("p-1", {"do_remote_decode": True}, num_computed_tokens=computed)
    blocks = BLOCKS[0], (9,)
    params = prefilled(prefiller, done, blocks)
    assert params is not None
    assert params["remote_block_ids"][1] == [9]
    request = Request("d-1", params)
    decoder.on_new_request(request)
    assert decoder.get_num_new_matched_tokens(request, 0) == (loaded, loaded > 0)
    decoder.update_state_after_alloc(request, blocks, loaded)
    meta = decoder.build_connector_meta()
    assert (len(ordered(meta, PullOrder)), len(ordered(meta, Decline))) == (
        (1, 0) if loaded else (0, 1)
    )


@pytest.mark.parametrize("num_told", [None, 98, 99])
@pytest.mark.parametrize("computed", [97, 98, 99, 100])
def test_a_state_is_written_only_where_it_is_of_just_the_tokens_that_are_awaited(
    computed: int, num_told: int | None
) -> None:
    """Of the prompt's 100 tokens the last is left out; `num_told`: P has answered before."""
    prefiller, decoder = (with_state(name, transfer_mode="push") for name in "pd")
    leg = Request("p-1", {"do_remote_decode": True}, 99)
    prefiller.on_new_request(leg)
    assert not prefiller.wants_steps_of("p-1"), "no part of it is written early"
    leg.num_computed_tokens, leg.answer = computed, (1000 + 99,)
    prefiller.request_finished(leg, (BLOCKS[0], (9,)), FinishStatus.LENGTH_CAPPED)
    (offer,) = ordered(prefiller.build_connector_meta(), PushOffer)
    request = Request("d-1", answer_of_p(remote_num_tokens=num_told), 100)
    decoder.on_new_request(request)
    wanted = num_told or 99
    assert decoder.get_num_new_matched_tokens(request, 0) == (wanted, True)
    decoder.update_state_after_alloc(request, (BLOCKS[0], (5,)), wanted)
    (registration,) = ordered(decoder.build_connector_meta(), PushRegistration)
    assert registration.last_token == wanted
    assert (registration.digest == offer.digest) == (computed == wanted)


def test_a_state_is_of_no_turn() -> None:
    """A token may be computed behind the answer's end before the engine knows of the end."""
    decoder = with_state("d", bidirectional=True)
    assert not turn(decoder, "t", told(answer_of_p(), retain=True))
    reader = with_state("p", bidirectional=True)
    leg = {**told(retained("t-1", make("d2", bidirectional=True))), "do_remote_decode": True}
    request = Request("p-1", leg, num_prompt_tokens=200)
    reader.on_new_request(request)
    assert reader.get_num_new_matched_tokens(request, 0) == (0, False)


# What is pushed while it is computed.


@pytest.mark.parametrize(
    ("settings", "windows", "is_early"),
    [
        ({"transfer_mode": "push"}, (None,), True),
        ({"transfer_mode": "push"}, (None, 64), True),
        ({"transfer_mode": "push"}, (64,), False),
        ({"transfer_mode": "push", "writes_early": False}, (None,), False),
        ({}, (None,), False),
    ],
)
def test_who_is_told_of_a_prompt_that_is_being_computed(
    settings: dict[str, Any], windows: tuple[int | None, ...], is_early: bool
) -> None:
    geometry = CacheGeometry(16, 32, group_windows=windows)
    prefiller = make("p", geometry=geometry, **settings)
    prefiller.on_new_request(Request("r", {"do_remote_decode": True}))
    assert prefiller.wants_steps_of("r") is is_early
    prefiller.on_step("r", BLOCKS * len(windows), 48, 16)
    offers = ordered(prefiller.build_connector_meta(), PartialOffer)
    assert [offer.num_tokens for offer in offers] == ([48] if is_early else [])


def test_an_engine_that_may_not_be_dialled_is_named_as_one_of_a_pair_that_fails() -> None:
    elsewhere = parse_networks("allowed_peers", ["192.0.2.0/24"])
    scheduler = make("d", access=Access(peers=elsewhere))
    offered(scheduler)
    failure = scheduler.load_failures.take("d-1")
    assert failure is not None
    assert (failure["remote_engine_id"], failure["scope"]) == ("p", "pair")
    assert (failure["remote_host"], failure["remote_port"]) == ("10.0.0.2", 5600)
    assert "allowed_peers" in failure["reason"]
    assert scheduler.load_failures.take("d-1") is None
