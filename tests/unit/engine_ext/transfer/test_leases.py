from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_ext.base.types import PeerAddress
from engine_ext.transfer.heartbeats import HeartbeatTracker
from engine_ext.transfer.leases import LeaseTable


def address(engine_id: str = "p") -> PeerAddress:
    return PeerAddress(engine_id, "10.0.0.1", 5600)


def table() -> LeaseTable:
    return LeaseTable(extension=20, grace=1)


def ended(leases: LeaseTable, now: float) -> list[str]:
    """What the passing of time ends, revocation and grace taken as one."""
    revoked = leases.expire(now)
    assert set(leases.reap(now + 1)) >= set(revoked)
    return revoked


def test_a_lease_ends_when_it_runs_out_and_not_before() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert leases.expire(29.9) == []
    assert leases.expire(30) == ["a"]
    assert leases.reap(30.9) == []
    assert leases.reap(31) == ["a"]
    assert ended(leases, 1000) == []


def test_a_heartbeat_extends_and_never_shortens() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert leases.renew(["a"], now=1) == []
    assert leases.expire(29) == []
    leases.renew(["a"], now=25)
    assert leases.expire(44.9) == []
    assert leases.expire(45) == ["a"]


def test_a_turn_that_waits_is_not_renewed() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30, renewable=False)
    leases.renew(["a"], now=29)
    assert leases.expire(30) == ["a"]


def test_a_lease_behind_a_longer_one_expires_on_time() -> None:
    leases = table()
    leases.grant("long", now=0, seconds=30)
    leases.grant("short", now=1, seconds=30)
    leases.renew(["long"], now=29)
    assert ended(leases, 31) == ["short"]


def test_a_read_ends_the_lease_once() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert leases.confirm("a")
    assert not leases.confirm("a")
    assert ended(leases, 1000) == []


def test_a_revoked_lease_can_be_read_in_its_grace_and_not_renewed() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert leases.revoke("a", now=5)
    assert not leases.revoke("a", now=5)
    assert leases.renew(["a"], now=5) == ["a"]
    assert leases.knows("a")
    assert leases.confirm("a")
    assert leases.reap(100) == []


def test_a_lease_read_by_several_ranks_ends_with_the_last() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert not leases.confirm("a", readers=2, reader="d-0")
    assert not leases.confirm("a", readers=2, reader="d-0")
    assert leases.confirm("a", readers=2, reader="d-1")


def test_a_read_announced_before_the_grant_is_remembered() -> None:
    leases = table()
    leases.expect("a")
    assert not leases.confirm("a")
    assert not leases.grant("a", now=0, seconds=30)
    assert len(leases) == 0


def test_a_cancelled_request_leaves_nothing() -> None:
    leases = table()
    leases.expect("a")
    leases.cancel("a")
    assert len(leases) == 0


def test_ids_nobody_expects_are_gone_and_change_nothing() -> None:
    leases = table()
    assert leases.renew(["x"], now=0) == ["x"]
    assert not leases.confirm("x")
    assert not leases.revoke("x", now=0)
    leases.cancel("x")
    assert len(leases) == 0


class LeaseMachine(RuleBasedStateMachine):
    """Every granted id ends exactly once, read or expired, never before its deadline."""

    ids = st.sampled_from("abcde")

    def __init__(self) -> None:
        super().__init__()
        self.leases = table()
        self.now = 0.0
        self.deadlines: dict[str, float] = {}
        self.revoked: dict[str, float] = {}
        self.read_early: set[str] = set()
        self.expected: set[str] = set()

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = {name for name, deadline in self.deadlines.items() if deadline <= self.now}
        assert set(self.leases.expire(self.now)) == due
        for name in due:
            del self.deadlines[name]
            self.revoked[name] = self.now + 1
        over = {name for name, deadline in self.revoked.items() if deadline <= self.now}
        assert set(self.leases.reap(self.now)) == over
        for name in over:
            del self.revoked[name]

    @rule(name=ids)
    def expect(self, name: str) -> None:
        if name not in self.deadlines and name not in self.revoked:
            self.expected.add(name)
        self.leases.expect(name)

    @rule(name=ids)
    def grant(self, name: str) -> None:
        if name in self.deadlines or name in self.revoked:
            return
        early = name in self.read_early
        assert self.leases.grant(name, self.now, seconds=30) is not early
        if not early:
            self.deadlines[name] = self.now + 30
        self.expected.discard(name)
        self.read_early.discard(name)

    @rule(name=ids)
    def cancel(self, name: str) -> None:
        self.leases.cancel(name)
        self.expected.discard(name)
        self.read_early.discard(name)

    @rule(name=ids)
    def renew(self, name: str) -> None:
        gone = self.leases.renew([name], self.now)
        assert (gone == [name]) is (name not in self.deadlines and name not in self.expected)
        if name in self.deadlines:
            self.deadlines[name] = max(self.deadlines[name], self.now + 20)

    @rule(name=ids)
    def revoke(self, name: str) -> None:
        assert self.leases.revoke(name, self.now) is (name in self.deadlines)
        if self.deadlines.pop(name, None) is not None:
            self.revoked[name] = self.now + 1

    @rule(name=ids)
    def confirm(self, name: str) -> None:
        held = name in self.deadlines or name in self.revoked
        assert self.leases.confirm(name) is held
        if name in self.expected:
            self.read_early.add(name)
        self.deadlines.pop(name, None)
        self.revoked.pop(name, None)

    @invariant()
    def the_table_holds_what_is_expected_or_granted(self) -> None:
        held = len(self.deadlines) + len(self.revoked)
        assert len(self.leases) == held + len(self.expected)
        assert self.leases.num_held == held


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, deadline=None)


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


def test_an_answered_heartbeat_proves_the_lease_for_its_extension() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.sent(1, address(), ("p1",), now=10, extension=20)
    assert beats.valid_until("d1") < 0
    beats.answered(1, gone=())
    assert beats.valid_until("d1") == 30


def test_an_id_that_is_gone_is_known_to_be_and_proves_nothing() -> None:
    beats = HeartbeatTracker(interval=5)
    for number in (1, 2):
        beats.track(f"d{number}", address(), f"p{number}", now=0)
    beats.sent(1, address(), ("p1", "p2"), now=10, extension=20)
    beats.answered(1, gone=("p1",))
    assert beats.is_gone("d1")
    assert beats.valid_until("d1") < 0
    assert beats.valid_until("d2") == 30
    beats.lost(["p2"])
    assert beats.is_gone("d2")
    assert beats.valid_until("d2") < 0


def test_an_answer_to_no_question_proves_nothing() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    beats.answered(99, gone=())
    assert beats.valid_until("d1") < 0


def test_unanswered_heartbeats_are_bounded() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", address(), "p1", now=0)
    for sequence in range(10_000):
        beats.sent(sequence, address(), ("p1",), now=sequence, extension=20)
    beats.answered(0, gone=())
    assert beats.valid_until("d1") < 0
    beats.answered(9_999, gone=())
    assert beats.valid_until("d1") == 10_019
