from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_ext.lease import HeartbeatTracker, LeaseTable
from tests.unit.engine_ext.fakes import source


def table() -> LeaseTable:
    return LeaseTable(duration=30, extension=20)


def test_a_lease_ends_when_it_runs_out_and_not_before() -> None:
    leases = table()
    leases.grant("a", now=0)
    assert leases.expire(29.9) == []
    assert leases.expire(30) == ["a"]
    assert leases.expire(1000) == []


def test_a_heartbeat_extends_and_never_shortens() -> None:
    leases = table()
    leases.grant("a", now=0)
    leases.renew(["a"], now=1)
    assert leases.expire(29) == []
    leases.renew(["a"], now=25)
    assert leases.expire(44.9) == []
    assert leases.expire(45) == ["a"]


def test_a_lease_behind_a_longer_one_expires_on_time() -> None:
    leases = table()
    leases.grant("long", now=0)
    leases.grant("short", now=1)
    leases.renew(["long"], now=29)
    assert leases.expire(31) == ["short"]


def test_a_read_ends_the_lease_once() -> None:
    leases = table()
    leases.grant("a", now=0)
    assert leases.release("a")
    assert not leases.release("a")
    assert leases.expire(1000) == []


def test_a_lease_read_by_several_ranks_ends_with_the_last() -> None:
    leases = table()
    leases.grant("a", now=0)
    assert not leases.release("a", readers=2)
    assert leases.release("a", readers=2)


def test_a_read_announced_before_the_grant_is_remembered() -> None:
    leases = table()
    leases.expect("a")
    assert not leases.release("a")
    assert not leases.grant("a", now=0)
    assert len(leases) == 0


def test_a_cancelled_request_leaves_nothing() -> None:
    leases = table()
    leases.expect("a")
    leases.cancel("a")
    assert len(leases) == 0


def test_ids_nobody_expects_change_nothing() -> None:
    leases = table()
    assert leases.renew(["x"], now=0) == 0
    assert not leases.release("x")
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
        self.read_early: set[str] = set()
        self.expected: set[str] = set()

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = {name for name, deadline in self.deadlines.items() if deadline <= self.now}
        assert set(self.leases.expire(self.now)) == due
        for name in due:
            del self.deadlines[name]

    @rule(name=ids)
    def expect(self, name: str) -> None:
        if name not in self.deadlines:
            self.expected.add(name)
        self.leases.expect(name)

    @rule(name=ids)
    def grant(self, name: str) -> None:
        if name in self.deadlines:
            return
        early = name in self.read_early
        assert self.leases.grant(name, self.now) is not early
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
        self.leases.renew([name], self.now)
        if name in self.deadlines:
            self.deadlines[name] = max(self.deadlines[name], self.now + 20)

    @rule(name=ids)
    def release(self, name: str) -> None:
        assert self.leases.release(name) is (name in self.deadlines)
        if name in self.expected:
            self.read_early.add(name)
        self.deadlines.pop(name, None)

    @invariant()
    def the_table_holds_what_is_expected_or_granted(self) -> None:
        assert len(self.leases) == len(self.deadlines) + len(self.expected)
        assert self.leases.num_granted == len(self.deadlines)
        if self.deadlines:
            first = self.leases.next_deadline()
            assert first is not None
            assert first <= min(self.deadlines.values())


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, deadline=None)


def test_one_message_renews_all_requests_of_an_engine() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", source("p1", "x"), now=0)
    beats.track("d2", source("p2", "x"), now=0)
    beats.track("d3", source("p3", "y"), now=0)
    due = {beat.source.engine_id: set(beat.remote_ids) for beat in beats.due(0)}
    assert due == {"x": {"p1", "p2"}, "y": {"p3"}}


def test_heartbeats_keep_the_interval() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", source("p1"), now=0)
    assert beats.due(0)
    assert not beats.due(4.9)
    assert beats.due(5)


def test_a_new_request_is_renewed_soon_but_an_engine_is_not_flooded() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", source("p1"), now=0)
    beats.due(0)
    beats.track("d2", source("p2"), now=0.1)
    assert not beats.due(0.2)
    assert beats.due(1)[0].remote_ids == ("p1", "p2")


def test_heartbeats_stop_with_the_last_request_of_an_engine() -> None:
    beats = HeartbeatTracker(interval=5)
    beats.track("d1", source("p1"), now=0)
    beats.untrack("d1")
    beats.untrack("d1")
    assert not beats.due(100)
    assert beats.next_due() is None
    assert len(beats) == 0
