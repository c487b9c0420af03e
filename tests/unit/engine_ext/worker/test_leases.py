from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_ext.common.types import ConnectorStats
from engine_ext.worker.leases import MAX_READERS, NEXT, LeaseEvent, LeaseState, LeaseTable

EXTENSION = 20


def table() -> LeaseTable:
    return LeaseTable(extension=EXTENSION, grace=1)


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
    assert leases.renew("a", "d", now=1) == EXTENSION
    assert leases.expire(29) == []
    leases.renew("a", "d", now=25)
    assert leases.expire(44.9) == []
    assert leases.expire(45) == ["a"]


def test_a_turn_that_waits_is_not_renewed() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30, renewable=False)
    leases.renew("a", "d", now=29)
    assert leases.expire(30) == ["a"]


def test_a_lease_with_a_short_extension_is_renewed_by_no_more() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=5, extension=5)
    assert leases.renew("a", "d", now=4) == 5
    assert leases.expire(8.9) == []
    assert leases.expire(9) == ["a"]
    leases.grant("b", now=0, seconds=5, extension=10 * EXTENSION)
    assert leases.renew("b", "d", now=4) == EXTENSION, "readers rely on what the handshake says"


def test_a_lease_behind_a_longer_one_expires_on_time() -> None:
    leases = table()
    leases.grant("long", now=0, seconds=30)
    leases.grant("short", now=1, seconds=30)
    leases.renew("long", "d", now=29)
    assert ended(leases, 31) == ["short"]


def test_confirmations_that_end_nothing_take_no_memory() -> None:
    """Forged, of a lease whose request somebody knows."""
    leases = table()
    leases.grant("a", now=0, seconds=30)
    for number in range(3 * MAX_READERS):
        assert not leases.confirm("a", 1, readers=10**9, reader="always the same")
        if number < MAX_READERS - 2:
            assert not leases.confirm("a", 1, readers=10**9, reader=f"reader {number}")
    assert len(leases._by_end) == 1
    assert leases.confirm("a", 1, readers=2, reader="the last that is counted")
    assert len(leases) == 0


def test_a_lease_whose_readers_have_confirmed_ends_with_the_last_horizon() -> None:
    """Before the end at which it was to be looked at."""
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert leases.renew("a", "slow", now=0) == EXTENSION
    assert not leases.confirm("a", 1, readers=1, reader="quick")
    assert leases.reap(EXTENSION - 0.1) == []
    assert leases.reap(EXTENSION) == ["a"]


def test_a_confirmation_ends_the_lease_once() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert leases.confirm("a", now=1)
    assert not leases.confirm("a", now=1)
    assert ended(leases, 1000) == []


def test_a_revoked_lease_can_be_confirmed_in_its_grace_and_not_renewed() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert leases.revoke("a", now=5)
    assert not leases.revoke("a", now=5)
    assert leases.renew("a", "d", now=5) is None
    assert leases.knows("a")
    assert leases.confirm("a", now=5.5)
    assert leases.reap(100) == []


def test_a_lease_read_by_several_ranks_ends_with_the_last() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    assert not leases.confirm("a", now=1, readers=2, reader="d-0")
    assert not leases.confirm("a", now=1, readers=2, reader="d-0")
    assert leases.confirm("a", now=1, readers=2, reader="d-1")


def test_a_reader_that_confirms_ends_its_own_share_only() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    leases.renew("a", "d", now=1)
    assert not leases.confirm("a", now=2, reader="another")
    assert leases.renew("a", "d", now=3) == EXTENSION
    assert leases.confirm("a", now=4, reader="d")


def test_a_lease_whose_count_is_full_ends_with_the_last_horizon() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    leases.renew("a", "d", now=1)
    leases.confirm("a", now=2, reader="another")
    assert leases.expire(1 + EXTENSION) == []
    assert leases.reap(0.9 + EXTENSION) == []
    assert leases.reap(1 + EXTENSION) == ["a"]


def test_a_revoked_lease_stays_until_its_readers_confirm_or_their_horizons_pass() -> None:
    leases = table()
    for name in "ab":
        leases.grant(name, now=0, seconds=30)
        leases.renew(name, "d", now=1)
        leases.revoke(name, now=2)
    assert leases.readers_of("a") == ["d"]
    assert leases.reap(20) == []
    assert leases.confirm("a", now=20, reader="d")
    assert leases.reap(1 + EXTENSION) == ["b"]


def test_no_horizon_reaches_beyond_a_lease_that_is_not_renewed() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30, renewable=False)
    assert leases.renew("a", "d", now=1) == EXTENSION
    assert leases.renew("a", "d", now=25) == 5
    assert leases.renew("a", "d", now=30) == 0
    assert leases.expire(30) == ["a"]


def test_a_reader_that_has_confirmed_is_granted_nothing_more() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    leases.confirm("a", now=1, readers=2, reader="d-0")
    assert leases.renew("a", "d-0", now=2) is None
    assert leases.renew("a", "d-1", now=2) == EXTENSION


def test_a_lease_that_is_expected_grants_no_horizon_yet() -> None:
    leases = table()
    leases.expect("a")
    assert leases.renew("a", "d", now=0) == 0
    assert leases.readers_of("a") == []


def test_a_lease_that_was_written_ends_after_it_is_put_back_and_horizons_pass() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    leases.renew("a", "d", now=1)
    assert leases.take("a")
    assert not leases.take("a")
    assert not leases.confirm("a", now=2, reader="another")
    assert leases.expire(1000) == leases.reap(1000) == []
    leases.put_back("a")
    assert leases.reap(EXTENSION) == []
    assert leases.reap(1 + EXTENSION) == ["a"]


def test_readers_with_a_horizon_are_bounded() -> None:
    leases = table()
    leases.grant("a", now=0, seconds=30)
    granted = [leases.renew("a", f"d-{number}", now=0) for number in range(MAX_READERS + 5)]
    assert granted == [EXTENSION] * MAX_READERS + [0.0] * 5


def test_a_confirmation_before_the_grant_is_remembered() -> None:
    leases = table()
    leases.expect("a")
    assert not leases.confirm("a", now=0)
    assert not leases.grant("a", now=0, seconds=30)
    assert len(leases) == 0


def test_a_cancelled_request_leaves_nothing() -> None:
    leases = table()
    leases.expect("a")
    leases.cancel("a")
    assert len(leases) == 0


def test_unknown_ids_are_gone_and_change_nothing() -> None:
    leases = table()
    assert leases.renew("x", "d", now=0) is None
    assert not leases.confirm("x", now=0)
    assert not leases.revoke("x", now=0)
    leases.cancel("x")
    assert len(leases) == 0


@pytest.mark.parametrize(("state", "event"), [*product(LeaseState, LeaseEvent)])
def test_an_event_without_a_meaning_in_a_state_changes_nothing(
    state: LeaseState, event: LeaseEvent
) -> None:
    leases = table()
    leases.expect("a")
    if state is not LeaseState.EXPECTED:
        leases.grant("a", now=0, seconds=30)
    if state is LeaseState.REVOKED:
        leases.revoke("a", now=0)
    if state is LeaseState.WRITING:
        leases.take("a")
    held = leases.is_held("a")
    happens: dict[LeaseEvent, Callable[[], object]] = {
        LeaseEvent.GRANT: lambda: leases.grant("a", now=0, seconds=30),
        LeaseEvent.CANCEL: lambda: leases.cancel("a"),
        LeaseEvent.REVOKE: lambda: leases.revoke("a", now=0),
        LeaseEvent.TAKE: lambda: leases.take("a"),
        LeaseEvent.PUT_BACK: lambda: leases.put_back("a"),
        LeaseEvent.END: lambda: leases.reap(1000),
    }
    happens[event]()
    if (state, event) not in NEXT:
        assert leases.is_held("a") is held
        assert leases.knows("a")


class LeaseMachine(RuleBasedStateMachine):
    """Every granted id ends exactly once, with one outcome, and never while a reader may believe
    in it."""

    ids = st.sampled_from("abcde")
    readers = st.sampled_from(["d", "e"])

    def __init__(self) -> None:
        super().__init__()
        self.stats = ConnectorStats()
        self.leases = LeaseTable(extension=EXTENSION, grace=1, stats=self.stats)
        self.now = 0.0
        self.undecided: set[str] = set()
        """Granted, and neither expired, nor revoked, nor ended."""
        self.num_granted = 0
        self.writing: set[str] = set()
        self.expected: set[str] = set()
        self.held: dict[str, float] = {}
        """Until when at least, if nobody confirms."""
        self.horizons: dict[tuple[str, str], float] = {}
        self.confirmed: set[tuple[str, str]] = set()

    def believers(self, name: str) -> list[str]:
        return [
            reader
            for (lease, reader), until in self.horizons.items()
            if lease == name and until > self.now
        ]

    def over(self, name: str) -> None:
        assert not self.believers(name)
        self.held.pop(name)
        self.undecided.discard(name)
        self.horizons = {key: until for key, until in self.horizons.items() if key[0] != name}
        self.confirmed = {key for key in self.confirmed if key[0] != name}

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for name in self.leases.expire(self.now):
            assert self.held[name] <= self.now
            assert not self.believers(name)
            self.undecided.remove(name)
        for name in self.leases.reap(self.now):
            was_read = any(lease == name for lease, _ in self.confirmed)
            assert was_read or self.held[name] <= self.now
            self.over(name)

    @rule()
    def a_long_time_passes(self) -> None:
        for name in list(self.writing):
            self.put_back(name)
        self.time_passes(1000)
        self.time_passes(1000)
        assert not self.held

    @rule(name=ids)
    def expect(self, name: str) -> None:
        if name not in self.held:
            self.expected.add(name)
        self.leases.expect(name)

    @rule(name=ids, renewable=st.booleans())
    def grant(self, name: str, renewable: bool) -> None:
        if name in self.held:
            return
        early = any(lease == name for lease, _ in self.confirmed)
        assert self.leases.grant(name, self.now, 30, renewable) is not early
        self.expected.discard(name)
        self.held[name] = self.now + 30
        self.num_granted += 1
        self.undecided.add(name)
        if early:
            self.over(name)

    @rule(name=ids)
    def cancel(self, name: str) -> None:
        self.leases.cancel(name)
        if name in self.expected:
            self.expected.discard(name)
            self.confirmed = {key for key in self.confirmed if key[0] != name}

    @rule(name=ids, reader=readers)
    def renew(self, name: str, reader: str) -> None:
        seconds = self.leases.renew(name, reader, self.now)
        if (name, reader) in self.confirmed or name not in {*self.held, *self.expected}:
            assert seconds is None
        if seconds:
            assert name in self.held
            self.horizons[name, reader] = self.now + seconds

    @rule(name=ids)
    def revoke(self, name: str) -> None:
        if self.leases.revoke(name, self.now):
            self.held[name] = self.now + 1
            self.undecided.remove(name)

    @rule(name=ids)
    def take(self, name: str) -> None:
        if self.leases.take(name):
            self.writing.add(name)

    @rule(name=ids)
    def put_back(self, name: str) -> None:
        self.leases.put_back(name)
        self.writing.discard(name)

    @rule(name=ids, reader=readers)
    def confirm(self, name: str, reader: str) -> None:
        if name in self.held or name in self.expected:
            self.confirmed.add((name, reader))
        self.horizons.pop((name, reader), None)
        if self.leases.confirm(name, self.now, reader=reader):
            self.over(name)

    @invariant()
    def each_lease_has_one_outcome_or_none_yet(self) -> None:
        stats = self.stats
        outcomes = stats.leases_released + stats.leases_expired + stats.leases_revoked
        assert stats.leases_granted == self.num_granted
        assert outcomes + len(self.undecided) == self.num_granted

    @invariant()
    def the_table_holds_what_is_expected_or_granted(self) -> None:
        assert len(self.leases) == len(self.held) + len(self.expected)
        assert self.leases.num_held == len(self.held)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=100, deadline=None)
