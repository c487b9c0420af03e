"""A turn reuses what the last one left on the decode engine: proven tokens only, over real NIXL."""

import time

from tests.integration.legs import check_three_turns, decode, prefill, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import (
    BOTH_WAYS,
    UNCACHED,
    Launcher,
    Server,
    freed,
    metric,
    wait_for,
)

COMPUTED = "disagg_engine_prompt_tokens_computed_total"
GRANTED = "disagg_engine_kv_leases_granted_total"


def test_three_turns_compute_only_what_is_new(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    check_three_turns(prefiller, decoder, alone, tokens_of(1100, 1))
    wait_for(lambda: freed(prefiller), "P's blocks are freed")
    assert metric(decoder, "disagg_engine_kv_leases_active") == 1


def test_a_turns_params_are_used_once(prefiller: Server, decoder: Server, alone: Server) -> None:
    prompt = tokens_of(400, 30)
    turn = take_turn(prefiller, decoder, prompt)
    assert turn.params is not None
    longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 31)]
    right = complete(alone, longer)
    for reused in (turn.params["remote_num_tokens"], 0):
        before = metric(prefiller, COMPUTED)
        again = take_turn(prefiller, decoder, longer, turn.params)
        assert differences([right], [again.answer]) == []
        assert metric(prefiller, COMPUTED) - before == len(longer) - reused


def test_a_turn_is_kept_unless_the_proxy_says_no(prefiller: Server, decoder: Server) -> None:
    """Upstream's proxies say nothing, ours says yes or no."""
    prompt = tokens_of(100, 40)
    for retain, is_kept in ((None, True), (True, True), (False, False)):
        held = metric(decoder, GRANTED)
        turn = decode(decoder, prompt, {**prefill(prefiller, prompt), "retain": retain})
        assert (turn.params is not None) == is_kept
        # The answer does not wait for the thread that grants, and counts.
        wait_for(lambda: metric(decoder, GRANTED) == held + is_kept, "as many leases are granted")  # noqa: B023 - now


def test_a_turn_that_waited_too_long_is_computed(launcher: Launcher, alone: Server) -> None:
    extra = {**BOTH_WAYS, "decoder_kv_blocks_ttl": 1}
    with (
        launcher.engine("prefill", UNCACHED, extra=BOTH_WAYS) as prefiller,
        launcher.engine("decode", extra=extra) as decoder,
    ):
        prompt = tokens_of(300, 50)
        turn = take_turn(prefiller, decoder, prompt)
        wait_for(lambda: freed(decoder), "the turn has run out")
        longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 51)]
        assert turn.params is not None
        for params in (turn.params, {**turn.params, "retained_until": time.time() + 100}):
            again = take_turn(prefiller, decoder, longer, params)
            assert differences([complete(alone, longer)], [again.answer]) == []
        assert metric(prefiller, "disagg_engine_prompt_tokens_fetched_total") == 0


def test_a_decoder_that_died_costs_the_next_turn_only_time(
    launcher: Launcher, decoder: Server, alone: Server
) -> None:
    with launcher.engine("prefill", UNCACHED, extra=BOTH_WAYS) as prefiller:
        prompt = tokens_of(300, 60)
        with launcher.engine("dying", extra=BOTH_WAYS) as dying:
            turn = take_turn(prefiller, dying, prompt)
            dying.kill()
        longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 61)]
        started = time.monotonic()
        again = take_turn(prefiller, decoder, longer, turn.params)
        assert time.monotonic() - started < 15
        assert metric(prefiller, "disagg_engine_kv_pulls_failed_total") == 1
        assert differences([complete(alone, longer)], [again.answer]) == []


def test_a_frozen_decoder_costs_the_next_turn_only_seconds(
    launcher: Launcher, alone: Server
) -> None:
    with (
        launcher.engine("prefill", UNCACHED, extra=BOTH_WAYS) as prefiller,
        launcher.engine("decode", extra=BOTH_WAYS) as decoder,
    ):
        prompt = tokens_of(300, 65)
        turn = take_turn(prefiller, decoder, prompt)
        longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 66)]
        with decoder.frozen():
            started = time.monotonic()
            params = prefill(prefiller, longer, turn.params)
            assert time.monotonic() - started < 30, "a frozen engine never answers"
            assert metric(prefiller, "disagg_engine_kv_pulls_failed_total") == 1
        again = decode(decoder, longer, params)
        assert differences([complete(alone, longer)], [again.answer]) == []


def test_a_prefiller_without_the_flag_computes_and_frees_the_decoder(
    launcher: Launcher, alone: Server
) -> None:
    with (
        launcher.engine("prefill", UNCACHED) as prefiller,
        launcher.engine("decode", extra=BOTH_WAYS) as decoder,
    ):
        prompt = tokens_of(300, 70)
        turn = take_turn(prefiller, decoder, prompt)
        longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 71)]
        params = prefill(prefiller, longer, turn.params)
        assert metric(prefiller, "disagg_engine_prompt_tokens_fetched_total") == 0
        wait_for(lambda: freed(decoder), "D's blocks are freed")
        again = decode(decoder, longer, params)
        assert differences([complete(alone, longer)], [again.answer]) == []


def test_waiting_turns_leave_room_for_new_requests_and_turn_up_as_gone(
    launcher: Launcher, alone: Server
) -> None:
    extra = {**BOTH_WAYS, "retained_blocks_share": 0.5}
    with (
        launcher.engine("prefill", UNCACHED, extra=BOTH_WAYS) as prefiller,
        launcher.engine("decode", "--num-blocks", "65", extra=extra) as decoder,
    ):
        prompts = [tokens_of(300, 80 + number) for number in range(8)]
        turns = [take_turn(prefiller, decoder, prompt) for prompt in prompts]
        assert metric(decoder, "disagg_engine_kv_leases_revoked_total") >= 4
        delayed = "disagg_engine_blocks_delayed"
        wait_for(lambda: metric(decoder, delayed) <= 32, "the oldest turns have made room")
        for prompt, turn in zip(prompts, turns, strict=True):
            longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 90)]
            again = decode(decoder, longer, prefill(prefiller, longer, turn.params))
            assert differences([complete(alone, longer)], [again.answer]) == []
        assert metric(prefiller, "disagg_engine_kv_pulls_failed_total") >= 4
