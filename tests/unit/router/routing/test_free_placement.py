"""Tests of the costs by which engines of both roles are chosen."""

import math
from typing import Any

from msgspec.structs import replace

from router.fleet.step_model import StepModel
from router.routing.costs import PlaceLoad
from router.routing.free_placement import PROMPT_SHARE, Choice, place_freely

MODEL = StepModel(base=0.0106, token=52e-6, token_context=1.65e-9, context=32.1e-9, mixing=0.0)
IDLE = PlaceLoad(MODEL, 8192, 700_000, contexts=0, step_limit=0.045)


def replace_model(base: float) -> StepModel:
    return StepModel(base, MODEL.token, MODEL.token_context, MODEL.context, 0.0)


def choice(engine: str, uncached: int = 12_000, **changes: Any) -> Choice[str]:
    fields = {
        key: changes.pop(key)
        for key in ("answers", "transfers", "waiting_tokens")
        if key in changes
    }
    load = replace(IDLE, **changes)
    return Choice(engine, load, uncached, **({"answers": int(load.contexts > 0)} | fields))


def test_one_engine_takes_the_whole_request_while_there_is_little_load() -> None:
    engines = [choice(name) for name in "abc"]
    prefillers, decoders = place_freely(engines, 12_000)
    assert prefillers[0] == decoders[0]
    assert sorted(prefillers) == sorted(decoders) == ["a", "b", "c"]
    # A second request goes to an engine without answers.
    engines[0] = choice("a", contexts=12_000)
    prefillers, decoders = place_freely(engines, 12_000)
    assert prefillers[0] == decoders[0] != "a"


def test_engine_that_has_the_prefix_computes_the_prompt_unless_its_queue_is_long() -> None:
    assert place_freely([choice("a"), choice("b", uncached=2_000)], 12_000)[0] == ["b", "a"]
    queued = choice("b", uncached=2_000, queued_s=5.0)
    assert place_freely([choice("a"), queued], 12_000)[0] == ["a", "b"]


def test_answers_are_kept_together_while_prompts_wait() -> None:
    answering = choice("b", contexts=60_000, queued_s=1.0)
    empty = [choice(name, queued_s=1.0) for name in "ac"]
    prefillers, decoders = place_freely([*empty, answering], 12_000)
    assert prefillers[0] in "ac"
    assert decoders[0] == "b"
    # A prompt that is mostly known is answered where its prefix is.
    known = [replace(empty[0], uncached=4_000), *empty[1:], answering]
    assert [order[0] for order in place_freely(known, 12_000)] == ["a", "a"]
    # Without a limit of the steps' time, a prompt delays answers, and does not take from them.
    unlimited = [replace(one, load=replace(one.load, step_limit=math.inf)) for one in empty]
    unlimited.append(replace(answering, load=replace(answering.load, step_limit=math.inf)))
    prefillers, decoders = place_freely(unlimited, 12_000)
    assert decoders[0] == prefillers[0]

    # Nor are answers added where they already take most of each step.
    full = choice("b", contexts=520_000, queued_s=1.0)
    assert place_freely([*empty, full], 12_000)[1][0] != "b"


def test_prompt_goes_where_it_delays_fewer_answers() -> None:
    engines = [choice("a", contexts=60_000, answers=40), choice("b", contexts=60_000, answers=5)]
    assert place_freely(engines, 12_000)[0] == ["b", "a"]


def test_slow_network_keeps_the_request_on_one_engine() -> None:
    engines = [choice("a", queued_s=1.0), choice("b", contexts=60_000, queued_s=1.0)]
    assert place_freely(engines, 12_000) == (["a", "b"], ["b", "a"])
    waiting = [replace(one, transfers=40) for one in engines]
    assert place_freely(waiting, 12_000)[1] == ["a", "b"]
    # Tokens that the other engine already has are not transferred.
    waiting[1] = replace(waiting[1], uncached=100)
    assert place_freely(waiting, 12_000)[1] == ["b", "a"]


def test_engine_whose_kv_cache_is_full_is_avoided_for_both_legs() -> None:
    full = choice("a", uncached=100, cache_tokens=200_000, contexts=180_000)
    assert place_freely([full, choice("b")], 12_000) == (["b", "a"], ["b", "a"])
    # If all are full, the request is placed nevertheless.
    assert place_freely([full], 12_000) == (["a"], ["a"])


def test_home_of_the_conversation_answers_in_any_case() -> None:
    engines = [choice("a"), choice("b", contexts=400_000, queued_s=3.0)]
    prefillers, decoders = place_freely(engines, 12_000, home="b")
    assert prefillers[0] == "a"
    assert decoders == ["b", "a"]
    assert place_freely(engines, 12_000, home="gone")[1] == ["a", "b"]


def test_the_answer_does_not_move_for_a_small_difference_of_measured_steps() -> None:
    for base, decoder in ((0.0095, "a"), (0.005, "b")):
        faster = choice("b", uncached=12_000, model=replace_model(base))
        prefillers, decoders = place_freely([choice("a", uncached=1), faster], 12_000)
        assert (prefillers[0], decoders[0]) == ("a", decoder)


def test_an_engine_full_of_prompts_for_others_answers_the_next_one_itself() -> None:
    room = int(PROMPT_SHARE * IDLE.cache_tokens) - 12_000
    idle = choice("b", uncached=13_000, contexts=0)
    for waiting, queued, decoder in ((room, 0, "b"), (room, 1, "a"), (0, room + 1, "a")):
        held = {"waiting_tokens": waiting, "queued_tokens": queued}
        full = choice("a", uncached=1, contexts=600_000, **held)
        prefillers, decoders = place_freely([full, idle], 12_000)
        assert (prefillers[0], decoders[0]) == ("a", decoder)
    # The engine with the last turn computes the new part instead.
    full = choice("a", uncached=1, waiting_tokens=room + 1)
    assert place_freely([full, idle], 12_000, home="b")[0] == ["b", "a"]


def test_routers_that_share_engines_do_not_all_choose_the_same() -> None:
    engines = [choice(name) for name in "ab"]
    first = iter([0.9, 0.0, 0.0, 0.0])
    assert place_freely(engines, 12_000, chance=lambda: next(first))[0] == ["b", "a"]
    # The jitter is small beside real differences.
    engines[0] = choice("a", queued_s=30.0)
    second = iter([0.0, 0.99, 0.0, 0.99])
    assert place_freely(engines, 12_000, chance=lambda: next(second))[0] == ["b", "a"]


def test_absurd_loads_are_placed_without_an_error() -> None:
    worst = choice("a", uncached=1, contexts=10**12, queued_s=1e9, cache_tokens=0, answers=10**9)
    odd = choice("b", uncached=10**9, step_limit=1e-9, transfers=10**9)
    for engines in ([worst, odd], [odd, worst], [worst], [odd]):
        for total in (1, 10**9):
            prefillers, decoders = place_freely(engines, total)
            assert sorted(prefillers) == sorted(decoders) == sorted(one.engine for one in engines)
