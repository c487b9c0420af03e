import pytest

from engine_ext.common.types import PeerAddress
from engine_ext.worker.heartbeats import (
    CLOCK_DRIFT,
    LONGEST_INTERVAL,
    SHORTEST_INTERVAL,
    HeartbeatTracker,
)


def address(engine_id: str = "p") -> PeerAddress:
    return PeerAddress(engine_id, "127.0.0.1", 5600)


def test_one_message_renews_all_requests_of_an_engine() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address("x"), "p1", now=0)
    beats.track("d2", address("x"), "p2", now=0)
    beats.track("d3", address("y"), "p3", now=0)
    due = {beat.address.engine_id: set(beat.remote_ids) for beat in beats.due(0)}
    assert due == {"x": {"p1", "p2"}, "y": {"p3"}}


def test_heartbeats_keep_the_interval() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    assert beats.due(0)
    assert not beats.due(4.9)
    assert beats.due(5)


def test_a_new_request_is_renewed_soon_but_an_engine_is_not_flooded() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.due(0)
    beats.track("d2", address(), "p2", now=0.1)
    assert not beats.due(0.2)
    assert beats.due(1)[0].remote_ids == ("p1", "p2")


def test_heartbeats_stop_with_the_last_request_of_an_engine() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.untrack("d1")
    beats.untrack("d1")
    assert not beats.due(100)
    assert len(beats) == 0


def test_an_id_that_is_gone_is_known_to_be_and_proves_nothing() -> None:
    beats = HeartbeatTracker(interval=5)
    for number in (1, 2):
        beats.track(f"d{number}", address(), f"p{number}", now=0)
    beats.sent(1, address(), "p", ("p1", "p2"), now=10)
    beats.answered("p", 1, 20, gone=("p1",))
    assert beats.is_gone("d1")
    assert beats.valid_until("d1", "p") < 0
    assert beats.valid_until("d2", "p") == 10 + 20 * (1 - CLOCK_DRIFT)
    assert beats.lost("p", ["p2"]) == [("d2", address(), "p2")]
    assert beats.is_gone("d2")
    assert beats.valid_until("d2", "p") < 0


def test_unanswered_heartbeats_are_bounded() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    for sequence in range(10_000):
        beats.sent(sequence, address(), "p", ("p1",), now=sequence)
    assert not beats.answered("p", 0, 20)
    assert beats.valid_until("d1", "p") < 0
    assert beats.answered("p", 9_999, 20)
    assert beats.valid_until("d1", "p") == 9_999 + 20 * (1 - CLOCK_DRIFT)


def test_an_engine_that_answers_nothing_costs_no_other_its_answer() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address("silent"), "p1", now=0)
    beats.track("d2", address("well"), "p2", now=0)
    beats.sent(1, address("well"), "well", ("p2",), now=0)
    for sequence in range(2, 10_000):
        beats.sent(sequence, address("silent"), "silent", ("p1",), now=sequence)
    assert beats.answered("well", 1, 20)
    assert not beats.answered("silent", 2, 20)
    assert beats.answered("silent", 9_999, 20)


def test_agents_that_were_asked_and_answer_nothing_are_bounded() -> None:
    """Those asked longest ago are forgotten first."""
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    for sequence in range(HeartbeatTracker.MAX_ASKED + 1):
        beats.sent(sequence, address(), f"p{sequence}", ("p1",), now=sequence)
    assert not beats.answered("p0", 0, 20)
    assert beats.answered("p1", 1, 20)


def test_only_the_agent_that_was_asked_can_answer() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.sent(1, address(), "p", ("p1",), now=10)
    assert not beats.answered("another", 1, 20)
    assert beats.valid_until("d1", "p") < 0
    assert beats.answered("p", 1, 20)


def test_only_the_agent_that_was_asked_can_report_a_lease_as_gone() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.sent(1, address(), "p", ("p1",), now=10)
    assert beats.lost("another", ["p1"]) == []
    assert not beats.is_gone("d1")


def test_a_lease_may_hold_for_less_than_the_others() -> None:
    beats = HeartbeatTracker(interval=5)
    for number in (1, 2):
        beats.track(f"d{number}", address(), f"p{number}", now=0)
    beats.sent(1, address(), "p", ("p1", "p2"), now=10)
    beats.answered("p", 1, 20, shorter={"p1": 1.0})
    assert beats.valid_until("d1", "p") == 10 + (1 - CLOCK_DRIFT)
    assert beats.valid_until("d2", "p") == 10 + 20 * (1 - CLOCK_DRIFT)


def test_an_engine_with_long_leases_is_beaten_for_at_once_when_asked_but_once_a_second() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.follow(address(), extension=400)
    beats.due(0)
    beats.hurry(address(), now=15)
    assert beats.due(15)
    beats.hurry(address(), now=15.5)
    assert not beats.due(15.9)
    assert beats.due(16)
    assert not beats.due(115.9)
    beats.hurry(address("unknown"), now=16)


def test_hurrying_sends_no_fewer_heartbeats_to_an_engine_with_short_leases() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.follow(address(), extension=2)
    beats.due(0)
    beats.hurry(address(), now=0.01)
    assert not beats.due(0.09)
    assert beats.due(0.1)


@pytest.mark.parametrize(
    ("extension", "interval"),
    [
        (1e-9, SHORTEST_INTERVAL),
        (0.1, SHORTEST_INTERVAL),
        (4, 1.0),
        (400, 100.0),
        (1e6, LONGEST_INTERVAL),
    ],
)
def test_the_interval_follows_the_leases_of_the_engine_within_bounds(
    extension: float, interval: float
) -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.due(0)
    beats.follow(address(), extension)
    beats.due(10)
    assert not beats.due(10 + 0.9 * interval)
    assert beats.due(10 + interval)


def beat(beats: HeartbeatTracker, *times: float) -> None:
    for now in times:
        assert beats.due(now)
        # Of a request each, as if they were too many for one message.
        for part in range(2):
            beats.sent(int(now * 10) + part, address(), "p", (f"p{part}",), now)


def is_silent(beats: HeartbeatTracker, now: float) -> bool:
    return beats.is_silent(address(), now, beats=3, at_least=3)


def test_an_engine_is_silent_after_three_of_its_own_beats() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.follow(address(), extension=8)
    beat(beats, 10, 12, 14)
    assert not is_silent(beats, 15.9)
    assert is_silent(beats, 16)
    assert beats.answered("p", 100, 20)
    assert not is_silent(beats, 100)
    beat(beats, 110)
    assert not is_silent(beats, 116)


def test_an_engine_with_long_leases_is_silent_after_15_seconds_of_hurried_heartbeats() -> None:
    """Not before: it may only be busy."""
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.follow(address(), extension=400)
    for now in range(10, 26):
        assert not is_silent(beats, now - 0.1)
        beats.hurry(address(), now)
        beat(beats, now)
    assert is_silent(beats, 25)


def test_a_beat_that_is_lost_does_not_make_an_engine_silent_however_long_ago() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.follow(address(), extension=400)
    beat(beats, 10, 110)
    assert not is_silent(beats, 209)


def test_a_confirmed_lease_proves_nothing_to_a_request_that_waits_for_it_later() -> None:
    """An answer that was on its way, or a renewal that overtakes the confirmation."""
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.sent(1, address(), "p", ("p1",), now=0)
    beats.confirm("p", "p1")
    beats.untrack("d1")
    beats.track("d2", address(), "p1", now=1)
    beats.sent(2, address(), "p", ("p1",), now=1)
    assert beats.answered("p", 1, 20)
    assert beats.answered("p", 2, 20)
    assert beats.is_gone("d2")
    assert beats.valid_until("d2", "p") < 0


def test_what_one_agent_granted_another_in_its_place_does_not_keep() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.sent(1, address(), "p", ("p1",), now=0)
    assert beats.answered("p", 1, 20)
    assert beats.valid_until("d1", "p reborn") < 0
