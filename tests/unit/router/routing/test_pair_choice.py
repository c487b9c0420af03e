"""The choice of another pair where KV moves slowly between the first engines of both roles."""

from collections.abc import Sequence

from router.routing.pair_choice import EXPLORED, choose_pair
from router.routing.policy import mix
from tests.unit.router.routing.engines import Engine

TOKENS = 10_000
TURN = next(turn for turn in range(100) if mix(turn) % EXPLORED)
NAMES = ("p1", "p2"), ("d1", "d2")


def fleet() -> tuple[list[Engine], list[Engine]]:
    prefillers, decoders = ([Engine(name) for name in names] for names in NAMES)
    return prefillers, decoders


def choose(
    orders: tuple[Sequence[Engine], Sequence[Engine]],
    slow: dict[tuple[str, str], float],
    turn: int = TURN,
    held: tuple[dict[str, int], dict[str, int]] = ({}, {}),
) -> tuple[str, str]:
    prefillers, decoders = choose_pair(
        orders,
        TOKENS,
        turn,
        lambda source, target: slow.get((source, target), 1.0),
        (lambda name: held[0].get(name, 0), lambda name: held[1].get(name, 0)),
    )
    assert {one.name for one in prefillers} == {one.name for one in orders[0]}
    assert {one.name for one in decoders} <= {one.name for one in orders[1]}
    return prefillers[0].name, decoders[0].name


def test_without_a_slow_pair_in_front_the_orders_stay_as_they_are() -> None:
    orders = fleet()
    for slow in ({}, {("p1", "d2"): 10.0}, {("p2", "d1"): 10.0}):
        assert choose(orders, slow) == ("p1", "d1")


def test_another_decode_engine_is_chosen_instead_of_a_slow_pair() -> None:
    assert choose(fleet(), {("p1", "d1"): 10.0}) == ("p1", "d2")


def test_another_prefill_engine_is_chosen_if_all_pairs_of_the_first_are_slow() -> None:
    slow = {("p1", "d1"): 10.0, ("p1", "d2"): 10.0}
    assert choose(fleet(), slow) == ("p2", "d1")
    assert choose(([Engine("p1")], fleet()[1]), slow) == ("p1", "d1")


def test_a_slow_pair_serves_while_the_other_engines_are_busy() -> None:
    prefillers, decoders = fleet()
    decoders[1].total_tokens = 10_000_000
    prefillers[1].total_tokens = 10_000_000
    assert choose((prefillers, decoders), {("p1", "d1"): 10.0}) == ("p1", "d1")


def test_a_decode_engine_without_room_in_its_cache_is_not_chosen_instead() -> None:
    prefillers, decoders = fleet()
    decoders[1].cache_tokens = TOKENS
    assert choose((prefillers, decoders), {("p1", "d1"): 10.0}) == ("p2", "d1")


def test_a_long_prefix_in_a_cache_is_worth_a_slow_transfer() -> None:
    held = {"p1": TOKENS - 16}, {"d1": TOKENS - 16}
    assert choose(fleet(), {("p1", "d1"): 10.0}, held=held) == ("p1", "d1")


def test_now_and_then_a_request_measures_whether_the_pair_is_still_slow() -> None:
    found = [choose(fleet(), {("p1", "d1"): 10.0}, turn) for turn in range(1600)]
    assert 50 < found.count(("p1", "d1")) < 200
    assert {*found} == {("p1", "d1"), ("p1", "d2")}
