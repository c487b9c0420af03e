"""What goes wrong between two engines: every NIXL call, every message, a peer that dies.

Both engines run the real scheduler halves and loops over a simulated NIXL, which checks that each
order is reported once, that no wrong KV is accepted and that no WRITE lands late.
"""

import logging

import pytest

from engine_ext.wire.notifications import (
    PushExtension,
    Withdraw,
    encode_extension,
    encode_registration,
)
from tests.unit.engine_ext.scheduler.fakes import push_registration
from tests.unit.engine_ext.simulation.pair import LONGEST, Pair, connected, tokens
from tests.unit.engine_ext.simulation.scenario import METHODS
from tests.unit.engine_ext.simulation.world import SimRequest, Weather

MODES = ("pull", "push")


@pytest.mark.parametrize("mode", MODES)
def test_without_faults_every_request_is_served(mode: str) -> None:
    pair = Pair(mode)
    assert all(pair.is_served() for _ in range(5))
    pair.world.pass_time(5)
    pair.prefiller.assert_empty()
    pair.decoder.assert_empty()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["prefiller", "decoder"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["from the start", "once connected"])
def test_a_nixl_error_ends_each_order_once_and_the_next_is_served(
    mode: str, side: str, method: str, when: str
) -> None:
    pair = Pair(mode)
    if when == "once connected":
        assert pair.is_served()
    agent = getattr(pair, side).agent
    agent.failing = {method}
    asked = [pair.ask(hurry=True) for _ in range(3)]
    pair.world.pass_time(LONGEST)
    assert all(one in pair.decoder.outcomes for one in asked)
    agent.failing = set()
    pair.world.pass_time(10)
    assert pair.is_served()
    pair.assert_all_ended()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["prefiller", "decoder"])
@pytest.mark.parametrize("mode", MODES)
def test_a_nixl_error_in_the_middle_of_a_transfer_ends_it_once(
    mode: str, side: str, method: str
) -> None:
    pair = Pair(mode)
    pair.world.network.weather = Weather(transfer=2.0)
    asked = pair.ask()
    pair.world.until(lambda: pair.world.network.transfers)
    agent = getattr(pair, side).agent
    agent.failing = {method}
    pair.world.pass_time(1.0)
    agent.failing = set()
    pair.world.until(lambda: asked in pair.decoder.outcomes, LONGEST)
    pair.world.network.weather = Weather()
    pair.world.pass_time(10)
    assert pair.is_served()
    pair.assert_all_ended()


@pytest.mark.parametrize("method", ["notify", "add_remote", "notifications", "remove_remote"])
@pytest.mark.parametrize("side", ["prefiller", "decoder"])
@pytest.mark.parametrize("mode", MODES)
def test_a_nixl_error_while_the_decoder_queues_costs_no_block(
    mode: str, side: str, method: str
) -> None:
    """Heartbeats, their answers, and the release when the client leaves."""
    pair = Pair(mode)
    leg = pair.prefiller.prefill("cmpl-x-0-0000000a", tokens(1))
    params = pair.prefiller.finish(leg)
    queued = SimRequest(
        "cmpl-x-0-0000000d", tokens(1), params if mode == "pull" else pair.where("x")
    )
    pair.decoder.scheduler.on_new_request(queued)
    pair.world.pass_time(12)
    agent = getattr(pair, side).agent
    agent.failing = {method}
    pair.world.pass_time(12)
    pair.decoder.abort(queued)
    pair.world.pass_time(12)
    agent.failing = set()
    pair.assert_all_ended()
    assert pair.is_served()


STORMS = {
    "lost": Weather(lose=0.3),
    "all lost": Weather(lose=1.0),
    "doubled": Weather(copies=2, spread=0.5),
    "reordered": Weather(spread=2.0),
    "late": Weather(delay=3.0),
    "minutes late": Weather(late=0.3),
    "all": Weather(lose=0.3, copies=2, spread=3.0, transfer=1.0, handshake=2.0, late=0.2),
}


@pytest.mark.parametrize("storm", STORMS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_messages_lost_doubled_reordered_or_late_end_each_order_once(
    mode: str, storm: str, seed: int
) -> None:
    pair = Pair(mode, seed)
    pair.world.network.weather = STORMS[storm]
    asked = []
    for seconds in pair.world.network.dice.roll("between requests", 6):
        asked.append(pair.ask(hurry=True))
        pair.world.pass_time(seconds * 4)
    pair.world.pass_time(LONGEST)
    assert all(one in pair.decoder.outcomes for one in asked)
    pair.world.network.weather = Weather()
    assert pair.is_served()
    pair.assert_all_ended()


@pytest.mark.parametrize("message", ["registration", "completion"])
def test_a_push_message_that_was_lost_is_asked_for_again(message: str) -> None:
    pair = connected("push")
    network = pair.world.network
    if message == "registration":
        network.weather = Weather(lose=1.0)
        asked = pair.ask()
    else:
        network.weather = Weather(transfer=0.5)
        asked = pair.ask()
        network.weather = Weather(lose=1.0)
    pair.world.pass_time(0.3)
    network.weather = Weather()
    assert asked not in pair.decoder.outcomes
    pair.world.until(lambda: asked in pair.decoder.outcomes, 10)
    assert pair.decoder.outcomes[asked]
    pair.assert_all_ended()


@pytest.mark.parametrize("prefilled_after", [0.5, 30.0, 60.0])
def test_a_prefiller_with_long_leases_knows_of_a_registration_whenever_it_has_prefilled(
    prefilled_after: float,
) -> None:
    """It hears a heartbeat every 100 s, and each answer tells its clock, by which it is asked."""
    pair = Pair("push", lease_duration=600.0)
    pair.decoder = pair.world.engine("d2", "push", port=3, lease_duration=30.0)
    assert pair.is_served()
    pair.world.pass_time(12.0)
    leg = pair.prefiller.prefill("cmpl-x9-0-0000000a", tokens(9))
    pair.decoder.decode("cmpl-x9-0-0000000d", tokens(9), pair.where("x9"))
    pair.world.pass_time(prefilled_after)
    sent = pair.decoder.stats.heartbeats_sent
    pair.prefiller.finish(leg)
    pair.world.until(lambda: pair.decoder.outcomes.get("cmpl-x9-0-0000000d"), 2.0)
    assert sent < 3 + prefilled_after / 5
    pair.assert_all_ended()


@pytest.mark.parametrize("moment", ["before", "connecting", "moving", "queued"])
@pytest.mark.parametrize("mode", MODES)
def test_a_prefiller_that_dies_ends_its_requests_within_a_bound(mode: str, moment: str) -> None:
    pair = Pair(mode)
    if moment != "connecting":
        assert pair.is_served()
    network = pair.world.network
    network.weather = Weather(handshake=1.0, transfer=5.0)
    asked = ""
    if mode == "push" and moment == "queued":
        asked = "cmpl-x9-0-0000000d"
        pair.decoder.decode(asked, tokens(9), pair.where("x9"))
        pair.world.pass_time(6)
    elif moment != "before":
        asked = pair.ask(hurry=True)
        pair.world.pass_time(0.5 if moment == "connecting" else 1.5)
    pair.prefiller.die()
    if moment == "before" and mode == "push":
        asked = "cmpl-x9-0-0000000d"
        pair.decoder.decode(asked, tokens(9), pair.where("x9"))
    elif moment == "before":
        pair.count += 1
        asked = "cmpl-x2-0-0000000d"
        leg = pair.prefiller.prefill("cmpl-x2-0-0000000a", tokens(2))
        pair.decoder.decode(asked, tokens(2), pair.prefiller.finish(leg))
    pair.world.until(lambda: asked in pair.decoder.outcomes, 40)
    assert not pair.decoder.outcomes[asked]
    pair.world.pass_time(LONGEST)
    pair.decoder.assert_empty()


@pytest.mark.parametrize("lease", [30.0, 600.0])
@pytest.mark.parametrize("waited", [1.0, 12.0])
def test_a_prefiller_with_long_leases_that_dies_is_found_out_as_soon_as_one_with_short_ones(
    waited: float, lease: float
) -> None:
    """It wants to be beaten for every 100 s, D asks it sooner, whatever D's own leases are."""
    pair = Pair("push", lease_duration=600.0)
    pair.decoder = pair.world.engine("d2", "push", port=3, lease_duration=lease)
    assert pair.is_served()
    pair.decoder.decode("cmpl-x9-0-0000000d", tokens(9), pair.where("x9"))
    pair.world.pass_time(waited)
    pair.prefiller.die()
    pair.world.until(lambda: "cmpl-x9-0-0000000d" in pair.decoder.outcomes, within=40.0)
    assert not pair.decoder.outcomes["cmpl-x9-0-0000000d"]


@pytest.mark.parametrize("lease", [30.0, 600.0])
def test_a_prefiller_that_stands_still_for_seconds_is_waited_for(lease: float) -> None:
    pair = connected("push", lease_duration=lease)
    leg = pair.prefiller.prefill("cmpl-x9-0-0000000a", tokens(9))
    pair.decoder.decode("cmpl-x9-0-0000000d", tokens(9), pair.where("x9"))
    for _ in range(4):
        pair.world.pass_time(5.0)
        pair.prefiller.freeze(4.0)
    pair.world.pass_time(5.0)
    pair.prefiller.finish(leg)
    pair.world.until(lambda: "cmpl-x9-0-0000000d" in pair.decoder.outcomes, within=10.0)
    assert pair.decoder.outcomes["cmpl-x9-0-0000000d"]


@pytest.mark.parametrize("name", ["p2", "p"])
@pytest.mark.parametrize("mode", MODES)
def test_a_prefiller_back_on_its_address_is_used_within_ten_seconds_or_twenty_if_its_id_is_the_same(
    mode: str, name: str
) -> None:
    """A new id is a new engine. With its old one it is taken for silent, after three heartbeats."""
    pair = connected(mode)
    died = pair.world.network.now
    pair.prefiller.die()
    del pair.world.engines["p"]
    pair.world.pass_time(0.5)
    reborn = pair.world.engine(name, mode, port=1, registration_timeout=60.0)
    pair.prefiller = reborn
    is_served = pair.is_served()
    if name == "p":
        is_served = is_served or pair.is_served()
    assert is_served
    assert pair.world.network.now - died < (20 if name == "p" else 10)
    pair.assert_all_ended()


def test_whose_blocks_a_dead_prefiller_may_write_knocks_at_its_address_once_a_heartbeat() -> None:
    """Where another engine answers by now: each knock is a handshake."""
    pair = connected("push")
    asked = "cmpl-x9-0-0000000d"
    pair.decoder.decode(asked, tokens(9), pair.where("x9"))
    pair.world.pass_time(6)
    pair.prefiller.die()
    del pair.world.engines["p"]
    pair.world.engine("p2", "push", port=1)
    pair.world.until(lambda: asked in pair.decoder.outcomes, 40)
    stats = pair.decoder.stats
    before = stats.handshakes_failed
    pair.world.pass_time(60)
    assert stats.pushes_active
    assert 1 <= stats.handshakes_failed - before <= 13, "for it beats every five seconds"


@pytest.mark.parametrize("fate", ["ends well", "fails"])
@pytest.mark.parametrize("where", ["the same engine", "another engine"])
def test_a_request_sent_twice_is_never_answered_with_another_requests_kv(
    where: str, fate: str
) -> None:
    """A router that repeats a decode leg: the first read frees the blocks, and others fill them."""
    pair = Pair("pull")
    network = pair.world.network
    twin = pair.decoder if where == "the same engine" else pair.world.engine("d2", port=3)
    leg = pair.prefiller.prefill("cmpl-x-0-0000000a", tokens(1))
    params = pair.prefiller.finish(leg)
    # Both leases are proven by a heartbeat's answer before the first read ends.
    network.weather = Weather(transfer=3.0)
    pair.decoder.decode("cmpl-x-0-0000000d", tokens(1), params)
    pair.world.pass_time(0.1)
    network.weather = Weather(transfer=4.5)
    twin.decode("cmpl-x-0-0000000e", tokens(1), params)
    pair.world.pass_time(2.5)
    if fate == "fails":
        network.fail(network.transfers[0])
    for number in range(20):
        pair.world.pass_time(0.1)
        other = pair.prefiller.prefill(f"cmpl-y{number}-0-0000000a", tokens(100 + number))
        if pair.prefiller.finish(other) is None:
            break
    pair.world.pass_time(LONGEST)
    assert pair.decoder.outcomes["cmpl-x-0-0000000d"] is (fate == "ends well")
    # A twin of the same engine shares its agent, which has confirmed; another reader's share is its
    # own, and the blocks were kept for it.
    assert twin.outcomes["cmpl-x-0-0000000e"] is (where == "another engine")


def test_a_read_that_nixl_neither_ends_nor_lets_go_of_keeps_its_blocks() -> None:
    pair = connected("pull")
    pair.world.network.weather = Weather(transfer=20.0)
    asked = pair.ask()
    pair.world.pass_time(1)
    pair.decoder.agent.failing = {"poll", "discard"}
    pair.world.pass_time(25)
    assert asked not in pair.decoder.outcomes
    pair.decoder.agent.failing = set()
    pair.world.until(lambda: asked in pair.decoder.outcomes)
    pair.assert_all_ended()


@pytest.mark.parametrize("loss", [False, True])
def test_a_write_under_way_keeps_the_blocks_of_an_aborted_decode(loss: bool) -> None:
    """Far longer than the grace for a prefiller that cannot be reached."""
    pair = connected("push")
    network = pair.world.network
    network.weather = Weather(transfer=100.0)
    request = pair.decoder.decode("cmpl-x-0-0000000d", tokens(9), pair.where("x"))
    assert request is not None
    pair.prefiller.finish(pair.prefiller.prefill("cmpl-x-0-0000000a", tokens(9)))
    pair.world.until(lambda: network.num_writes == 2)
    network.weather = Weather(lose=float(loss), transfer=100.0)
    pair.decoder.abort(request)
    pair.world.pass_time(90)
    assert request.request_id not in pair.decoder.outcomes
    pair.world.until(lambda: request.request_id in pair.decoder.outcomes, 100 if loss else 20)
    pair.assert_all_ended()


def test_two_attempts_with_one_request_id_are_told_apart_by_their_transfer() -> None:
    """The router gives up an attempt and makes another, with the same X-Request-Id."""
    pair = Pair("push")
    first = pair.decoder.decode("cmpl-x-0-0000000d", tokens(1), pair.where("x", transfer_id="t1"))
    assert first is not None
    pair.world.pass_time(1)
    pair.decoder.abort(first)
    pair.world.pass_time(1)
    leg = pair.prefiller.prefill("cmpl-x-0-0000000b", tokens(1), transfer_id="t2")
    pair.decoder.decode("cmpl-x-0-0000000e", tokens(1), pair.where("x", transfer_id="t2"))
    pair.world.pass_time(1)
    pair.prefiller.finish(leg)
    pair.world.pass_time(1)
    assert pair.decoder.outcomes == {"cmpl-x-0-0000000d": False, "cmpl-x-0-0000000e": True}
    pair.assert_all_ended()


@pytest.mark.parametrize(("pause", "is_served"), [(30.0, True), (0.5, False)])
def test_a_retry_after_an_attempt_that_never_reached_p_is_served_or_ends_soon(
    pause: float, is_served: bool
) -> None:
    """Same X-Request-Id, no transfer_id, and a prefill that is faster than D. Soon after D has
    withdrawn the first, P takes what it offers for the first's."""
    pair = connected("push", registration_timeout=480.0)
    first = SimRequest("cmpl-x-0-0000000d", tokens(7), pair.where("x"))
    pair.decoder.queue(first)
    pair.world.pass_time(1.0)
    pair.decoder.abort(first)
    pair.world.pass_time(pause)
    pair.prefiller.finish(pair.prefiller.prefill("cmpl-x-0-0000000b", tokens(7)))
    pair.world.pass_time(0.2)
    assert pair.decoder.decode("cmpl-x-0-0000000e", tokens(7), pair.where("x"))
    pair.world.until(lambda: "cmpl-x-0-0000000e" in pair.decoder.outcomes, within=10.0)
    assert pair.decoder.outcomes["cmpl-x-0-0000000e"] is is_served
    pair.assert_all_ended()


@pytest.mark.parametrize("comes", ["while it prefills", "when it has offered"])
def test_a_decline_that_comes_during_the_next_attempt_does_not_leave_it_waiting(
    comes: str,
) -> None:
    pair = Pair("push", registration_timeout=480.0)
    network = pair.world.network
    assert pair.is_served()
    leg = pair.prefiller.prefill("cmpl-x-0-0000000b", tokens(7))
    pair.world.pass_time(0.5)
    if comes == "when it has offered":
        pair.prefiller.finish(leg)
        pair.world.pass_time(0.5)
    late = encode_extension(Withdraw("cmpl-x-0-0000000d", 0, "x"))
    network.deliver(pair.decoder.agent.name, pair.prefiller.agent.name, late)
    pair.world.pass_time(0.5)
    if comes == "while it prefills":
        pair.prefiller.finish(leg)
        pair.world.pass_time(0.5)
    pair.decoder.decode("cmpl-x-0-0000000e", tokens(7), pair.where("x"))
    pair.world.until(lambda: "cmpl-x-0-0000000e" in pair.decoder.outcomes, within=10.0)
    pair.assert_all_ended()


@pytest.mark.parametrize("declined", ["while P prefills", "when P has offered"])
def test_a_request_declined_in_the_queue_is_served_when_it_is_tried_again(declined: str) -> None:
    """The first attempt's blocks are free at once, and the second's registration waits for its
    own, however long that takes."""
    pair = connected("push", registration_timeout=480.0)
    leg = pair.prefiller.prefill("cmpl-x-0-0000000a", tokens(7))
    first = pair.decoder.queue(SimRequest("cmpl-x-0-0000000d", tokens(7), pair.where("x")))
    pair.world.pass_time(1.0)
    if declined == "when P has offered":
        pair.prefiller.finish(leg)
        pair.world.pass_time(1.0)
    pair.decoder.abort(first)
    pair.world.pass_time(1.0)
    if declined == "while P prefills":
        pair.prefiller.finish(leg)
        pair.world.pass_time(1.0)
    assert not pair.prefiller.held
    pair.decoder.decode("cmpl-x-0-0000000e", tokens(7), pair.where("x"))
    pair.world.pass_time(3.0)
    again = pair.prefiller.prefill("cmpl-x-0-0000000b", tokens(7))
    pair.world.pass_time(30.0)
    pair.prefiller.finish(again)
    pair.world.pass_time(2.0)
    assert pair.decoder.outcomes["cmpl-x-0-0000000e"]
    pair.assert_all_ended()


NAMESAKES = {"a": 7, "b": 8}
"""Two clients that chose the same X-Request-Id: P's leg of each, and its prompt."""


@pytest.mark.parametrize("registers", ["before", "after"])
@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("number", [7, 8])
def test_of_two_requests_of_one_name_each_is_written_its_own(
    number: int, order: str, registers: str
) -> None:
    """With the same prompt or another."""
    pair = connected("push", registration_timeout=480.0)
    prompts = {"a": tokens(7), "b": tokens(number)}
    legs = {c: pair.prefiller.prefill(f"cmpl-x-0-0000000{c}", prompts[c]) for c in "ab"}
    finishing = [legs[c] for c in order]
    if registers == "after":
        for leg in finishing:
            pair.prefiller.finish(leg)
    for c in "ab":
        assert pair.decoder.decode(f"cmpl-x-0-{c * 8}", prompts[c], pair.where("x"))
        pair.world.pass_time(0.2)
    if registers == "before":
        for leg in finishing:
            pair.world.pass_time(20.0)
            pair.prefiller.finish(leg)
    pair.world.pass_time(2.0)
    assert pair.decoder.outcomes["cmpl-x-0-aaaaaaaa"]
    assert pair.decoder.outcomes["cmpl-x-0-bbbbbbbb"]
    pair.assert_all_ended()


@pytest.mark.parametrize("first", ["offer", "registration"])
def test_a_registration_of_another_prompt_ends_within_seconds_and_costs_the_right_one_nothing(
    first: str,
) -> None:
    pair = connected("push", registration_timeout=480.0)
    leg = pair.prefiller.prefill("cmpl-x-0-0000000a", tokens(7))
    if first == "offer":
        pair.prefiller.finish(leg)
    pair.decoder.decode("cmpl-x-0-0000000e", tokens(8), pair.where("x"))
    pair.world.pass_time(0.5)
    if first == "registration":
        pair.prefiller.finish(leg)
    pair.world.until(lambda: "cmpl-x-0-0000000e" in pair.decoder.outcomes, within=10.0)
    assert not pair.decoder.outcomes["cmpl-x-0-0000000e"]
    pair.decoder.decode("cmpl-x-0-0000000d", tokens(7), pair.where("x"))
    pair.world.pass_time(1.0)
    assert pair.decoder.outcomes["cmpl-x-0-0000000d"]
    pair.assert_all_ended()


@pytest.mark.parametrize("cancelled", ["before it registers", "after it has registered"])
@pytest.mark.parametrize("name", NAMESAKES)
def test_of_two_requests_of_one_name_the_one_that_p_gives_up_costs_the_other_nothing(
    name: str, cancelled: str
) -> None:
    pair = connected("push", registration_timeout=480.0)
    legs = {
        c: pair.prefiller.prefill(f"cmpl-x-0-0000000{c}", tokens(number))
        for c, number in NAMESAKES.items()
    }
    pair.world.pass_time(0.5)
    given_up = legs.pop(name)
    if cancelled == "before it registers":
        pair.prefiller.abort(given_up)
        pair.world.pass_time(0.5)
    for c, number in NAMESAKES.items():
        assert pair.decoder.decode(f"cmpl-x-0-{c * 8}", tokens(number), pair.where("x"))
        pair.world.pass_time(0.5)
    if cancelled == "after it has registered":
        pair.prefiller.abort(given_up)
    pair.world.pass_time(20.0)
    (leg,) = legs.values()
    pair.prefiller.finish(leg)
    pair.world.pass_time(10.0)
    outcomes = {c: pair.decoder.outcomes[f"cmpl-x-0-{c * 8}"] for c in NAMESAKES}
    assert outcomes == {c: c in legs for c in NAMESAKES}
    pair.assert_all_ended()


@pytest.mark.parametrize("moment", ["at once", "while it moves"])
@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_ends_during_its_load_is_no_fault_in_log_or_counters(
    mode: str, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = connected(mode)
    caplog.set_level(logging.WARNING, "engine_ext")
    network, decoder = pair.world.network, pair.decoder
    network.weather = Weather(transfer=5.0)
    asked = pair.ask()
    if moment == "while it moves":
        pair.world.until(lambda: network.transfers)
    decoder.abort(decoder.loading[asked])
    pair.world.pass_time(10)
    assert decoder.outcomes[asked] is False
    assert caplog.messages == []
    stats = decoder.stats
    aborted = (1, 0) if mode == "pull" else (0, 1)
    assert (stats.pulls_aborted, stats.pushes_aborted) == aborted
    assert (stats.pulls_failed, stats.pushes_missed) == (0, 0)
    assert pair.prefiller.stats.pushes_failed == 0
    assert pair.is_served()
    assert (stats.handshakes_ok, pair.prefiller.stats.handshakes_ok) == ((1, 0), (1, 1))[
        mode == "push"
    ]
    pair.assert_all_ended()


@pytest.mark.parametrize("who", ["P", "both"])
def test_a_prefill_that_ends_before_it_is_written_is_no_fault_in_log_or_counters(
    who: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = connected("push")
    caplog.set_level(logging.WARNING, "engine_ext")
    leg = pair.prefiller.prefill("cmpl-x-0-0000000a", tokens(9))
    request = pair.decoder.decode("cmpl-x-0-0000000d", tokens(9), pair.where("x"))
    assert request is not None
    pair.world.pass_time(1)
    pair.prefiller.abort(leg)
    if who == "both":
        pair.decoder.abort(request)
    pair.world.pass_time(10)
    assert caplog.messages == []
    assert pair.prefiller.stats.pushes_failed == 0
    counted = (pair.decoder.stats.pushes_missed, pair.decoder.stats.pushes_aborted)
    assert counted == ((1, 0) if who == "P" else (0, 1))
    pair.assert_all_ended()


@pytest.mark.parametrize("end", ["written", "withdrawn"])
def test_a_registration_that_comes_again_after_its_end_is_never_written(end: str) -> None:
    """Its blocks are others' by then, and another attempt of the request offers its KV."""
    pair = connected("push")
    network = pair.world.network
    network.weather = Weather(copies=2, spread=3.0)
    request = pair.decoder.decode("cmpl-x-0-0000000d", tokens(9), pair.where("x"))
    assert request is not None
    if end == "written":
        pair.prefiller.finish(pair.prefiller.prefill("cmpl-x-0-0000000a", tokens(9)))
    else:
        pair.decoder.step()
        pair.decoder.abort(request)
    pair.world.pass_time(5)
    assert pair.decoder.outcomes[request.request_id] is (end == "written")
    writes = network.num_writes
    pair.prefiller.finish(pair.prefiller.prefill("cmpl-x-0-0000000b", tokens(9)))
    pair.world.pass_time(5)
    assert network.num_writes == writes
    pair.assert_all_ended()


def test_a_registration_with_other_names_than_its_last_one_stops_nothing() -> None:
    """What a peer sends twice with different names once ended the owner thread's orders."""
    pair = connected("push")
    network, names = pair.world.network, (pair.decoder.agent.name, pair.prefiller.agent.name)
    for transfer_id in ("t1", "t2"):
        extension = PushExtension(
            int(transfer_id[1]), 0, 10, b"of another prompt", "z", network.now + 60
        )
        message = push_registration(
            "cmpl-z-0-0000000d",
            decode_host="sim",
            decode_port=2,
            local_block_ids=((1, 2, 3),),
            remote_host="sim",
            remote_port=1,
            transfer_id=transfer_id,
            disagg=extension,
        )
        network.send(*names, encode_registration(message))
    pair.world.pass_time(1)
    for transfer_id in ("t2", "t1"):
        request_id = f"cmpl-{transfer_id}-0-0000000a"
        leg = pair.prefiller.prefill(request_id, tokens(50), transfer_id=transfer_id)
        pair.prefiller.finish(leg)
        pair.world.pass_time(1)
    assert pair.is_served()
