"""Routers tell each other their load and their prompts; what they are told is bounded."""

from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.coordination.peers import (
    MAX_PEERS,
    MAX_REPORT_AGE_S,
    MAX_REPORT_BYTES,
    MAX_REPORTED_CHUNKS,
    VERSION,
    PeerReport,
    PeerRouters,
)
from router.routing.chunk_index import ChunkIndex
from router.routing.policy import RoutingQuery
from router.routing.prefix_cache import PrefillCost
from tests.unit.router.routing.engines import BOUND
from tests.unit.router.routing.engines import engines as routed_engines

NAMES = ("a:1", "b:1")


@dataclass
class SeenEngine:
    """An engine as one router sees it."""

    name: str
    in_flight: int = 0
    tokens_in_flight: int = 0
    local_prefill_s: float = 0.0
    local_prefill_tokens: int = 0
    elsewhere: tuple[int, int] = (0, 0)
    local_prefill_elsewhere: tuple[float, int] = (0.0, 0)
    cache_tokens: int = 0
    preferred_role: str = "prefill"

    def set_load_elsewhere(
        self, legs: int, tokens: int, local_prefill_s: float, local_prefill_tokens: int
    ) -> None:
        self.elsewhere = legs, tokens
        self.local_prefill_elsewhere = local_prefill_s, local_prefill_tokens


class OneRouter:
    def __init__(self) -> None:
        self.index = ChunkIndex()
        self.peers = PeerRouters(self.index)
        self.engines = [SeenEngine(name) for name in NAMES]
        self.peers.report(self.engines)

    def report(self) -> bytes:
        return self.peers.report(self.engines)

    def elsewhere(self, now: float) -> list[tuple[int, int]]:
        self.peers.update(now)
        return [engine.elsewhere for engine in self.engines]


def encoded(**changes: object) -> bytes:
    report = PeerReport(VERSION, "another", {}, [])
    return msgspec.msgpack.encode(msgspec.structs.replace(report, **changes))


def test_load_of_other_routers_is_added_and_expires() -> None:
    one, other, third = OneRouter(), OneRouter(), OneRouter()
    other.engines[0] = replace(other.engines[0], in_flight=2, tokens_in_flight=700)
    third.engines[0] = replace(third.engines[0], in_flight=1, tokens_in_flight=50)
    assert one.peers.take(other.report(), received=100.0)
    assert one.peers.take(third.report(), received=101.0)
    assert len(one.peers) == 2
    assert one.elsewhere(101.5) == [(3, 750), (0, 0)]
    assert one.elsewhere(100.0 + MAX_REPORT_AGE_S) == [(1, 50), (0, 0)]
    assert one.elsewhere(101.0 + MAX_REPORT_AGE_S) == [(0, 0), (0, 0)]
    assert len(one.peers) == 0


def test_prompts_that_other_routers_let_a_decode_engine_compute_are_added() -> None:
    one, *others = OneRouter(), OneRouter(), OneRouter()
    for number, other in enumerate(others):
        other.engines[1].in_flight = 1
        other.engines[1].local_prefill_s = 0.25 + number
        other.engines[1].local_prefill_tokens = 1000
        assert one.peers.take(other.report(), received=100.0)
    one.peers.update(100.0)
    assert one.engines[1].local_prefill_elsewhere == (1.5, 2000)
    one.peers.update(100.0 + MAX_REPORT_AGE_S)
    assert one.engines[1].local_prefill_elsewhere == (0.0, 0)


def test_later_report_replaces_an_earlier_one_and_old_ones_are_no_load() -> None:
    one, other = OneRouter(), OneRouter()
    other.engines[1].in_flight = 5
    assert one.peers.take(other.report(), received=10.0, age=MAX_REPORT_AGE_S)
    assert one.elsewhere(10.0) == [(0, 0), (0, 0)]
    assert one.peers.take(other.report(), received=10.0, age=0.1)
    other.engines[1].in_flight = 1
    assert one.peers.take(other.report(), received=10.2)
    assert one.elsewhere(10.3) == [(0, 0), (1, 0)]


def test_own_reports_come_back_and_count_for_nothing() -> None:
    one = OneRouter()
    one.engines[0].in_flight = 5
    assert one.peers.take(one.report(), received=10.0)
    assert one.elsewhere(10.0) == [(0, 0), (0, 0)]


def test_prompts_that_another_router_sent_are_known() -> None:
    one, other = OneRouter(), OneRouter()
    fleet = routed_engines(2)
    one.engines.append(SeenEngine(fleet[1].name))
    one.report()
    policy = PrefillCost(BOUND, other.index)
    policy.order(fleet, RoutingQuery(0, chunks=(9,)))
    policy.note_sent(fleet[1].name, RoutingQuery(1, chunks=(1, 2, 3)))
    policy.note_sent(fleet[0].name, RoutingQuery(1, chunks=(5,)))
    assert one.peers.take(other.report(), received=0.0)
    bit = one.index.bit(fleet[1].name)
    assert one.index.longest((1, 2, 3, 4), bit).depth == 3
    assert not one.index.bit(fleet[0].name), "an engine that this router does not know"
    assert msgspec.msgpack.decode(other.report())[3] == [], "each is told once"
    assert msgspec.msgpack.decode(one.report())[3] == [], "what was told is not told on"


def test_report_leaves_out_the_oldest_prompts_beyond_its_bound() -> None:
    one = OneRouter()
    for number in range(200):
        one.index.on_sent("a:1", tuple(range(1000 * number, 1000 * number + 100)))
    report = one.report()
    assert len(report) < MAX_REPORT_BYTES
    prompts = msgspec.msgpack.decode(report)[3]
    assert len(prompts) == MAX_REPORTED_CHUNKS // 100
    assert prompts[-1][1][0] == 199_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        encoded() + b"x",
        encoded(version=VERSION + 1),
        encoded(router=""),
        encoded(router="x" * 100),
        encoded(loads={"a:1": (-1, 0, 0, 0)}),
        encoded(loads={"a:1": (1, 10**12, 0, 0)}),
        encoded(loads={"a:1": (1, 1)}),
        encoded(prompts=[("a:1", tuple(range(1000)))]),
        encoded(prompts=[("a:1", ("x",))]),
        encoded(prompts=[("a:1", (-1,))]),
        encoded(router="x" * MAX_REPORT_BYTES),
    ],
)
def test_invalid_reports_change_nothing(content: bytes) -> None:
    one = OneRouter()
    assert not one.peers.take(content, received=0.0)
    assert len(one.peers) == 0
    assert len(one.index) == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(content: bytes) -> None:
    OneRouter().peers.take(content, received=0.0)


def test_number_of_other_routers_is_bounded() -> None:
    one = OneRouter()
    for number in range(2 * MAX_PEERS):
        assert one.peers.take(
            encoded(router=f"r{number}", loads={"a:1": (1, 1, 0, 0)}), received=0.0
        )
    assert len(one.peers) == MAX_PEERS
    assert one.elsewhere(1.0)[0] == (MAX_PEERS, MAX_PEERS)
