"""Whose turn it is: the queue alone, without a clock or a socket."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.common.deadlines import Deadlines
from router.fleet.engine import BreakerRules, CircuitBreaker, Engine, EngineRole, EngineSpec, Health
from router.fleet.fleet import GroupPool, Snapshot, build_snapshot
from router.http_client.pool import EnginePool, PoolLimits
from router.routing.admission_queue import (
    MAX_SKIPPED_ROUNDS,
    AdmissionQueue,
    EngineLimits,
    Placement,
    QueueTicket,
    find_placement,
)
from router.settings import Address

LIMITS = PoolLimits(1.0, 1, 1.0, 1000)
ANY = EngineLimits(0, 0)
ONE = EngineLimits(1, 0)


def engine_at(
    name: str, role: EngineRole, models: Sequence[str] = (), group: str = "default"
) -> Engine:
    spec = EngineSpec(role, Address(name, 1), frozenset(models), group)
    pool = EnginePool(name, 1, LIMITS, Deadlines())
    return Engine(spec, pool, CircuitBreaker(BreakerRules()), Health.HEALTHY)


def fleet_of(prefillers: int, decoders: int) -> list[Engine]:
    made = [engine_at(f"p{n}", EngineRole.PREFILL) for n in range(prefillers)]
    return made + [engine_at(f"d{n}", EngineRole.DECODE) for n in range(decoders)]


def ticket(
    tenant: str = "a", priority: int = 0, tokens: int = 1, model: str = "m", alone: bool = False
) -> QueueTicket:
    return QueueTicket(tenant, priority, tokens, model, alone)


def served(
    queue: AdmissionQueue[QueueTicket], snapshot: Snapshot, room: EngineLimits = ANY
) -> list[QueueTicket]:
    """All that there is room for, none of which ends."""
    order = []
    while (found := queue.next(snapshot.pools, room)) is not None:
        ticket, where = found
        order.append(ticket)
        take(where, ticket)
    return order


def take(where: Placement, ticket: QueueTicket) -> None:
    for one in (where.prefiller, where.decoder):
        if one is not None:
            one.admitted += 1
    computing = where.decoder if ticket.decode_only else where.prefiller
    if computing is not None:
        computing.admitted_tokens += ticket.tokens


def leave(where: Placement, ticket: QueueTicket) -> None:
    for one in (where.prefiller, where.decoder):
        if one is not None:
            one.admitted -= 1
    computing = where.decoder if ticket.decode_only else where.prefiller
    if computing is not None:
        computing.admitted_tokens -= ticket.tokens


def test_room_needs_a_prefiller_and_a_decoder_of_one_group() -> None:
    p, d = (
        engine_at("p", EngineRole.PREFILL, group="x"),
        engine_at("d", EngineRole.DECODE, group="x"),
    )
    q, e = (
        engine_at("q", EngineRole.PREFILL, group="y"),
        engine_at("e", EngineRole.DECODE, group="y"),
    )
    pools = build_snapshot([p, d, q, e]).any_model
    assert find_placement(pools, 1, False, ONE) == ("x", p, d)
    p.admitted = 1
    assert find_placement(pools, 1, False, ONE) == ("y", q, e)
    e.admitted = 1
    assert find_placement(pools, 1, False, ONE) is None
    assert find_placement(pools, 1, True, ONE) == ("x", None, d), "alone it needs a decoder only"


def test_the_largest_prompt_fits_where_none_is_computed() -> None:
    p, d = fleet_of(1, 1)
    pools, room = build_snapshot([p, d]).any_model, EngineLimits(0, 100)
    assert find_placement(pools, 1000, False, room)
    p.admitted_tokens = 1
    assert find_placement(pools, 99, False, room)
    assert find_placement(pools, 100, False, room) is None


def test_a_role_without_engines_is_not_waited_for() -> None:
    p, d = fleet_of(1, 1)
    assert find_placement(build_snapshot([d]).any_model, 1, False, ONE) == ("default", None, d)
    assert find_placement(build_snapshot([p]).any_model, 1, False, ONE) == ("default", p, None)


def test_lower_priorities_go_first() -> None:
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(10)
    asked = [ticket(priority=priority) for priority in (3, 0, -5, 7)]
    for one in asked:
        queue.add(one)
    assert [one.priority for one in served(queue, build_snapshot(fleet_of(1, 1)))] == [-5, 0, 3, 7]


def test_tenants_take_turns_and_a_large_request_skips_rounds() -> None:
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(20)
    for tenant, tokens in [("a", 1)] * 3 + [("big", 2 * 4096)] * 2 + [("b", 1)] * 3:
        queue.add(ticket(tenant, tokens=tokens))
    order = [one.tenant for one in served(queue, build_snapshot(fleet_of(1, 1)))]
    assert order == ["a", "big", "b", "a", "b", "a", "b", "big"]


def test_a_modest_tenant_gets_its_share_beside_a_flood() -> None:
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(100)
    snapshot = build_snapshot(fleet_of(1, 1))
    for _ in range(50):
        queue.add(ticket("flood"))
    order: list[str] = []
    queue.add(ticket("modest"))
    while len(order) < 40:
        found = queue.next(snapshot.pools, ANY)
        assert found is not None
        order.append(found[0].tenant)
        if found[0].tenant == "modest":
            queue.add(ticket("modest"))
    assert order.count("modest") == 20


def test_an_abandoned_request_is_not_charged() -> None:
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(1000)
    tired = [ticket("a") for _ in range(500)]
    for one in tired:
        queue.add(one)
    for _ in range(3):
        queue.add(ticket("b"))
    for one in tired:
        assert queue.remove(one)
        assert not queue.remove(one)
    queue.add(ticket("a"))
    order = [one.tenant for one in served(queue, build_snapshot(fleet_of(1, 1)))]
    assert order == ["b", "a", "b", "b"]


def test_a_small_prompt_does_not_overtake_a_large_one_that_waits_for_its_engines() -> None:
    p, d = fleet_of(1, 1)
    p.admitted_tokens = 50
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(10)
    queue.add(ticket("a", tokens=1000))
    queue.add(ticket("b", tokens=1, model="adapter"))
    queue.add(ticket("c", tokens=1, alone=True))
    order = served(queue, build_snapshot([p, d]), EngineLimits(0, 100))
    assert [one.tenant for one in order] == ["c"], "which needs the decoder alone"
    p.admitted_tokens = 0
    assert [one.tenant for one in served(queue, build_snapshot([p, d]), EngineLimits(0, 100))] == [
        "a"
    ]


def test_another_models_requests_pass() -> None:
    m = [engine_at("p1", EngineRole.PREFILL, ["m"]), engine_at("d1", EngineRole.DECODE, ["m"])]
    n = [engine_at("p2", EngineRole.PREFILL, ["n"]), engine_at("d2", EngineRole.DECODE, ["n"])]
    m[0].admitted = 1
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(10)
    queue.add(ticket(model="m"))
    queue.add(ticket(model="n"))
    assert [one.model for one in served(queue, build_snapshot([*m, *n]), ONE)] == ["n"]


def test_a_request_that_no_engine_can_serve_leaves_the_queue() -> None:
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(10)
    queue.add(ticket())
    assert queue.next(build_snapshot([]).pools, ONE) is not None


@pytest.mark.parametrize(
    ("waiting", "newcomer", "goes", "is_outranked", "is_over_share"),
    [
        ([("a", 0)] * 4, ("a", 0), "newcomer", False, False),
        ([("a", 0)] * 4, ("b", 0), "a", False, True),
        ([("a", 0)] * 2 + [("b", 0)] * 2, ("a", 0), "newcomer", False, True),
        ([("a", 0), ("b", 0), ("c", 0), ("d", 0)], ("e", 0), "newcomer", False, False),
        ([("a", 0), ("b", 0), ("c", 0), ("d", 1)], ("e", 0), "d", True, False),
        ([("a", 0), ("b", 0), ("c", 0), ("d", 0)], ("e", 1), "newcomer", False, False),
    ],
)
def test_a_full_queue_sheds_the_right_request(
    waiting: list[tuple[str, int]],
    newcomer: tuple[str, int],
    goes: str,
    is_outranked: bool,
    is_over_share: bool,
) -> None:
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(4)
    for tenant, priority in waiting:
        queue.add(ticket(tenant, priority))
    late = ticket(*newcomer)
    queue.add(late)
    shed = queue.shed(late)
    assert shed is not None
    assert (shed.ticket is late) == (goes == "newcomer")
    assert goes == "newcomer" or shed.ticket.tenant == goes
    assert (shed.is_outranked, shed.is_over_share) == (is_outranked, is_over_share)
    assert queue.depth == 4
    assert queue.shed(late) is None


Step = tuple[str, str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "leave", "ask alone"]),
        st.sampled_from("abc"),
        st.integers(0, 2),
        st.sampled_from([1, 60, 5000, 90_000]),
    ),
    max_size=80,
)


@given(steps, st.integers(0, 5), st.integers(0, 3), st.sampled_from([0, 100]))
def test_limits_hold_and_no_request_is_lost(
    steps: list[Step], size: int, requests: int, tokens: int
) -> None:
    engines, room = fleet_of(2, 2), EngineLimits(requests, tokens)
    pools = build_snapshot(engines).pools
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(size)
    asked, running, gone, waiting = (
        0,
        list[tuple[QueueTicket, Placement]](),
        0,
        dict[QueueTicket, None](),
    )

    def settle() -> None:
        while (found := queue.next(pools, room)) is not None:
            take(found[1], found[0])
            running.append(found)
            del waiting[found[0]]

    for verb, tenant, priority, prompt in steps:
        if verb.startswith("ask"):
            one = ticket(tenant, priority, prompt, alone=verb == "ask alone")
            asked += 1
            waiting[one] = None
            queue.add(one)
            settle()
            if (shed := queue.shed(one)) is not None:
                del waiting[shed.ticket]
                gone += 1
        elif verb == "end" and running:
            found = running.pop(0)
            leave(found[1], found[0])
            gone += 1
            settle()
        elif verb == "leave" and waiting:
            one = next(iter(waiting))
            assert queue.remove(one)
            del waiting[one]
            gone += 1
            settle()
        assert queue.depth == len(waiting) <= size
        assert asked == gone + len(running) + len(waiting)
        for one_engine in engines:
            assert not requests or one_engine.admitted <= requests
            at = [t.tokens for t, w in running if one_engine in (w.prefiller, w.decoder)]
            assert not tokens or one_engine.admitted_tokens <= max(tokens, *at, 0)
    while running:
        found = running.pop(0)
        leave(found[1], found[0])
        settle()
    assert not queue.depth, "when all have ended, nobody waits"
    left = (queue._lines, queue._rounds, queue._waiting, queue._opened)
    assert not any(left)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 200_000)), min_size=1, max_size=40
    ),
    st.integers(1, 12),
    st.integers(0, 39),
)
def test_no_tenant_starves_whatever_arrives(
    first: list[tuple[str, int]], size: int, watched: int
) -> None:
    """Newcomers with tenants of their own fill every place that comes free, for ever; whoever
    waits is served all the same, within the rounds that its tenant may have to sit out."""
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(size)
    pools = build_snapshot(fleet_of(1, 1)).pools
    known = [ticket(tenant, tokens=tokens) for tenant, tokens in first[:size]]
    for one in known:
        queue.add(one)
    one = known[watched % len(known)]
    ahead = sum(other.tenant == one.tenant and other.number <= one.number for other in known)
    bound = ahead * (MAX_SKIPPED_ROUNDS + 2) * (size + 1)
    for number in range(bound):
        found = queue.next(pools, ANY)
        assert found is not None
        if found[0] is one:
            return
        queue.add(ticket(f"new{number}", tokens=number % 3 * 50_000))
    pytest.fail(f"not served among {bound}")


def test_the_memory_of_tenants_is_bounded() -> None:
    queue: AdmissionQueue[QueueTicket] = AdmissionQueue(4)
    pools: Sequence[GroupPool] = build_snapshot(fleet_of(1, 1)).any_model
    queue.add(ticket("first"))
    for number in range(2000):
        queue.add(ticket(f"{number}", tokens=10**6))
        assert queue.next(lambda _: pools, ANY) is not None
    assert queue.depth == 1
    assert len(queue._rounds) <= (MAX_SKIPPED_ROUNDS + 2) * 4 + 1
