"""Push mode: P writes into the blocks that D registered, whichever comes first."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from tests.integration.legs import (
    coordinates_in,
    decode,
    decode_body,
    prefill,
    prefill_body,
)
from tests.integration.oracle import Answer, complete, complete_all, differences, text_of, tokens_of
from tests.integration.processes import (
    BOTH_WAYS,
    UNCACHED,
    Launcher,
    Server,
    described,
    metric,
    pause,
    post_and_leave,
    wait_for,
)

PUSH = "DisaggPushConnector"
PUSHED = "disagg_engine_kv_pushes_ok_total"
EARLY = "disagg_engine_kv_early_blocks_total"
FETCHED = "disagg_engine_prompt_tokens_fetched_total"


PREFILLER = described("prefill", connector=PUSH)
DECODER = described("decode", UNCACHED, connector=PUSH)


@pytest.fixture(scope="module")
def coordinates(prefiller: Server) -> dict[str, Any]:
    """Where P is, learned from an answer of its own; that prefill's blocks wait for their lease."""
    answer = prefill(prefiller, "hello")
    assert answer["transfer_mode"] == "push"
    return coordinates_in(answer)


def push_params(coordinates: dict[str, Any], request_id: str) -> dict[str, Any]:
    """What a push router tells D before P has answered."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": request_id,
        **coordinates,
    }


def both_legs(
    prefiller: Server, decoder: Server, coordinates: dict[str, Any], prompt: str, **more: Any
) -> Answer:
    request_id = str(uuid.uuid4())
    params = {**push_params(coordinates, request_id), **more}
    body = prefill_body(prompt)
    body["kv_transfer_params"] = {**body["kv_transfer_params"], **more}
    with ThreadPoolExecutor(2) as pool:
        p_leg = pool.submit(prefiller.post, "/v1/completions", body, request_id=request_id)
        d_leg = pool.submit(decode, decoder, prompt, params, request_id=request_id)
        assert p_leg.result(timeout=60).status_code == 200
        return d_leg.result(timeout=60).answer


def released(server: Server, but: int = 0) -> bool:
    return metric(server, "disagg_engine_kv_leases_active") <= but


def has_all(server: Server) -> bool:
    """Its blocks, free."""
    return metric(server, "disagg_engine_blocks_free") == metric(server, "disagg_engine_blocks")


@pytest.mark.parametrize("named", [False, True])
def test_pushed_tokens_are_those_of_one_engine_alone(
    prefiller: Server, decoder: Server, coordinates: dict[str, Any], alone: Server, named: bool
) -> None:
    lengths = (1, 31, 32, 33, 64, 200, 500, 1500, 90, 70)
    prompts = [text_of(length, 100 + length) for length in lengths]
    right = complete_all(alone, prompts)
    pushed = metric(prefiller, PUSHED)

    def ask(prompt: str) -> Answer:
        more = {"transfer_id": f"xfer-{uuid.uuid4()}"} if named else {}
        return both_legs(prefiller, decoder, coordinates, prompt, **more)

    with ThreadPoolExecutor(4) as pool:
        assert differences(right, list(pool.map(ask, prompts))) == []
    assert metric(prefiller, PUSHED) - pushed == len(prompts)
    assert metric(decoder, "disagg_engine_kv_pushes_missed_total") == 0
    wait_for(lambda: released(prefiller, but=1), "P's blocks are freed")


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_either_side_may_come_first(
    prefiller: Server, decoder: Server, coordinates: dict[str, Any], alone: Server, first: str
) -> None:
    prompt, request_id = text_of(150, 201 if first == "prefill" else 202), str(uuid.uuid4())
    params = push_params(coordinates, request_id)
    with ThreadPoolExecutor(1) as pool:
        if first == "prefill":
            prefill(prefiller, prompt, request_id=request_id)
            turn = decode(decoder, prompt, params, request_id=request_id)
        else:
            leg = pool.submit(decode, decoder, prompt, params, request_id=request_id)
            waiting = "disagg_engine_requests_waiting_for_remote_kv"
            wait_for(lambda: metric(decoder, waiting) == 1, "D has registered")
            prefill(prefiller, prompt, request_id=request_id)
            turn = leg.result(timeout=30)
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def test_a_router_that_asks_p_first_may_hand_ps_answer_to_d(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = text_of(140, 210)
    turn = decode(decoder, prompt, prefill(prefiller, prompt))
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def test_only_what_the_decoder_lacks_is_written(
    launcher: Launcher, prefiller: Server, coordinates: dict[str, Any], alone: Server
) -> None:
    with launcher.engine("caching", connector=PUSH) as decoder:
        prompt = text_of(300, 220)
        both_legs(prefiller, decoder, coordinates, prompt)
        longer = prompt + text_of(50, 221)
        written = metric(decoder, FETCHED)
        answer = both_legs(prefiller, decoder, coordinates, longer)
        assert differences([complete(alone, longer)], [answer]) == []
        assert metric(decoder, FETCHED) - written == 350 - 9 * 32
        again = both_legs(prefiller, decoder, coordinates, longer)
        assert differences([complete(alone, longer)], [again]) == []
        wait_for(lambda: released(prefiller, but=1), "P's blocks are freed, read or not")


def test_a_prefill_that_is_aborted_ends_the_decoders_wait_at_once(
    launcher: Launcher, decoder: Server
) -> None:
    with launcher.engine("busy", "--max-num-seqs", "1", connector=PUSH) as prefiller:
        answer = prefill(prefiller, "hello")
        where = coordinates_in(answer)
        request_id = str(uuid.uuid4())
        occupant = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True}
        prompt = text_of(100, 230)
        body = decode_body(prompt, push_params(where, request_id))
        with ThreadPoolExecutor(1) as pool, post_and_leave(prefiller, occupant):
            wait_for(lambda: metric(prefiller, "disagg_engine_requests_running") == 1, "P is busy")
            leg = pool.submit(decoder.post, "/v1/completions", body, request_id=request_id)
            with post_and_leave(prefiller, prefill_body(prompt), request_id=request_id):
                waiting = "disagg_engine_requests_waiting"
                wait_for(lambda: metric(prefiller, waiting) == 1, "the P leg queues")
            assert leg.result(timeout=20).status_code == 500


def test_a_decode_that_is_aborted_frees_the_prefiller_and_is_not_written(
    prefiller: Server, decoder: Server, coordinates: dict[str, Any]
) -> None:
    request_id = str(uuid.uuid4())
    prompt = text_of(100, 240)
    body = decode_body(prompt, push_params(coordinates, request_id))
    pushed = metric(prefiller, PUSHED)
    with post_and_leave(decoder, body, request_id=request_id):
        waiting = "disagg_engine_requests_waiting_for_remote_kv"
        wait_for(lambda: metric(decoder, waiting) == 1, "D has registered")
    free = "disagg_engine_blocks_free"
    total = metric(decoder, "disagg_engine_blocks")
    wait_for(lambda: metric(decoder, free) == total, "D's blocks are free")
    prefill(prefiller, prompt, request_id=request_id)
    wait_for(lambda: released(prefiller, but=1), "P's blocks are freed")
    assert metric(prefiller, PUSHED) == pushed


# While the prompt is computed.


@pytest.fixture(scope="module")
def slow(launcher: Launcher) -> Iterator[Server]:
    """A prefiller that computes two blocks a step."""
    options = ("--max-num-batched-tokens", "64", UNCACHED)
    with launcher.engine("slow", *options, connector=PUSH) as server:
        yield server


@contextmanager
def prefilled_halfway(
    slow: Server, decoder: Server, prompt: str
) -> Iterator[tuple[ExitStack, ExitStack]]:
    """Both legs of a request, of which D has a part: closed, the client of P's leg, or D's, has
    left."""
    where = coordinates_in(slow.get("/disagg/identity").json()["ranks"][0])
    request_id, early = str(uuid.uuid4()), metric(slow, EARLY)
    with ExitStack() as prefilling, ExitStack() as decoding:
        body = decode_body(prompt, push_params(where, request_id))
        decoding.enter_context(post_and_leave(decoder, body, request_id))
        waiting = "disagg_engine_requests_waiting_for_remote_kv"
        wait_for(lambda: metric(decoder, waiting) == 1, "D has registered")
        prefilling.enter_context(post_and_leave(slow, prefill_body(prompt), request_id))
        wait_for(lambda: metric(slow, EARLY) > early, "the first part is written", poll=0.0)
        yield prefilling, decoding


def test_a_long_prompt_is_written_while_it_is_computed(
    slow: Server, decoder: Server, alone: Server
) -> None:
    where = coordinates_in(slow.get("/disagg/identity").json()["ranks"][0])
    early, pushed = metric(slow, EARLY), metric(slow, PUSHED)
    prompts = [text_of(length, 4500 + length) for length in (1500, 1100, 700)]
    right = complete_all(alone, prompts)
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(partial(both_legs, slow, decoder, where), prompts))
    assert differences(right, got) == []
    # Of 1500 tokens, 46 blocks are full. What still moves when the last step ends goes with it.
    assert metric(slow, EARLY) - early > (46 + 34 + 21) / 2
    assert metric(slow, PUSHED) - pushed == 3
    wait_for(lambda: released(slow), "P's blocks are freed")


def test_a_prompt_that_is_given_up_halfway_is_not_believed(
    slow: Server, decoder: Server, alone: Server
) -> None:
    missed = "disagg_engine_kv_pushes_missed_total"
    before = metric(decoder, missed)
    with prefilled_halfway(slow, decoder, text_of(3000, 4600)) as (prefilling, _):
        prefilling.close()
        wait_for(lambda: metric(decoder, missed) == before + 1, "D hears that it has failed")
        wait_for(lambda: has_all(slow) and has_all(decoder), "all blocks are free")
    prompt = text_of(300, 4601)
    where = coordinates_in(slow.get("/disagg/identity").json()["ranks"][0])
    assert differences([complete(alone, prompt)], [both_legs(slow, decoder, where, prompt)]) == []


def test_a_decoder_whose_client_leaves_halfway_is_written_no_more(
    slow: Server, decoder: Server
) -> None:
    with prefilled_halfway(slow, decoder, text_of(3000, 4700)) as (_, decoding):
        pushed = metric(slow, PUSHED)
        decoding.close()
        wait_for(lambda: has_all(decoder), "D's blocks are free")
        early = metric(slow, EARLY)
        assert metric(slow, "disagg_engine_requests_running") == 1
        wait_for(lambda: has_all(slow), "P has finished, for nobody, and its blocks are free")
        assert (metric(slow, EARLY), metric(slow, PUSHED)) == (early, pushed)
        assert metric(slow, "disagg_engine_kv_leases_expired_total") == 0


def test_a_prefill_that_never_comes_ends_by_policy(
    launcher: Launcher, coordinates: dict[str, Any], alone: Server
) -> None:
    extra = {"push_registration_timeout": 1}
    prompt = text_of(100, 250)
    for policy, status in (("fail", 500), ("recompute", 200)):
        with launcher.engine("lonely", connector=PUSH, extra=extra, policy=policy) as decoder:
            params = push_params(coordinates, str(uuid.uuid4()))
            response = decoder.post("/v1/completions", decode_body(prompt, params))
            assert response.status_code == status
            if status == 200:
                tokens = tuple(response.json()["choices"][0]["token_ids"])
                assert tokens == complete(alone, prompt).tokens
            assert metric(decoder, "disagg_engine_kv_pushes_missed_total") == 1


def test_a_decoder_that_queues_beyond_the_lease_keeps_it(launcher: Launcher, alone: Server) -> None:
    lease = 5.0
    extra = {"kv_lease_duration": lease}
    one = "--max-num-seqs"
    prompt = text_of(200, 260)
    with (
        launcher.engine("prefill", connector=PUSH, extra=extra) as prefiller,
        launcher.engine("decode", one, "1", connector=PUSH, extra=extra) as decoder,
        ThreadPoolExecutor(1) as pool,
    ):
        occupant = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True}
        with ExitStack() as occupants:
            for _ in range(4):
                occupants.enter_context(post_and_leave(decoder, occupant))
            waiting = "disagg_engine_requests_waiting"
            wait_for(lambda: metric(decoder, waiting) == 3, "D is busy")
            params = prefill(prefiller, prompt, request_id="queued")
            leg = pool.submit(decode, decoder, prompt, params, request_id="queued")
            pause(1.3 * lease, "more than a lease has passed")
            assert not leg.done()
        assert differences([complete(alone, prompt)], [leg.result(timeout=60).answer]) == []
        assert metric(prefiller, "disagg_engine_kv_leases_expired_total") == 0


# Through the router, which asks both at once.


@pytest.fixture(scope="module")
def router(launcher: Launcher, prefiller: Server, decoder: Server) -> Iterator[Server]:
    with launcher.router([prefiller], [decoder], "--decode-first-turns", "0") as server:
        wait_for(lambda: served(server, "push", at_least=1), "the router knows that they push")
        yield server


def served(router: Server, flow: str, at_least: int = 0) -> bool:
    """Whether so many requests went that way; asks one more first, if some are wanted."""
    if at_least:
        complete(router, "hello")
    ended = router.get("/metrics").text.splitlines()
    counts = [line for line in ended if f'flow="{flow}"' in line and 'outcome="ok"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts) >= at_least


def test_routed_turns_are_pulled_by_p_and_pushed_to_d(launcher: Launcher, alone: Server) -> None:
    with (
        launcher.engine("turn-p", UNCACHED, connector=PUSH, extra=BOTH_WAYS) as p,
        launcher.engine("turn-d", UNCACHED, connector=PUSH, extra=BOTH_WAYS) as d,
        launcher.router([p], [d], "--decode-first-turns", "0") as router,
    ):
        wait_for(lambda: served(router, "push", at_least=1), "the router knows that they push")
        prompt = tokens_of(500, 4100)
        for number in range(3):
            fetched = metric(p, FETCHED)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
            body |= {"return_token_ids": True, "logprobs": 1, "ignore_eos": True}
            said = router.post("/v1/completions", {**body, "conversation_id": "c"}).json()
            answer = Answer.in_body(said)
            assert differences([complete(alone, prompt)], [answer]) == []
            assert number == 0 or metric(p, FETCHED) > fetched, "the last turn was pulled"
            prompt = [*prompt, *answer.tokens, *tokens_of(90, 4110 + number)]


@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_an_engine_that_dies_in_mid_transfer_is_survived(
    launcher: Launcher, alone: Server, dies: str
) -> None:
    prompts = [text_of(1500, 4200 + number) for number in range(12)]
    right = complete_all(alone, prompts)
    # What a dead P may still write is waited for; over loopback it has landed long before.
    promises = {"kv_lease_duration": 6, "push_write_bound": 5}
    options = (UNCACHED,)
    with (
        launcher.engine("p1", *options, connector=PUSH, extra=promises) as p1,
        launcher.engine("p2", *options, connector=PUSH, extra=promises) as p2,
        launcher.engine("d1", *options, connector=PUSH, extra=promises) as d1,
        launcher.engine("d2", *options, connector=PUSH, extra=promises) as d2,
        launcher.router([p1, p2], [d1, d2], "--prefill-policy", "round_robin") as router,
    ):
        wait_for(lambda: served(router, "push", at_least=1), "the router knows that they push")
        victim = p1 if dies == "prefill" else d1
        counted = PUSHED if dies == "prefill" else "disagg_engine_kv_pushes_received_total"
        before = metric(victim, counted)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(complete_all, router, prompts, at_once=4)
            wait_for(
                lambda: metric(victim, counted) > before, "one was pushed, others are under way"
            )
            victim.kill()
            assert differences(right, answers.result(timeout=120)) == []
        for engine in (p1, p2, d1, d2):
            if engine is not victim:
                wait_for(lambda one=engine: is_free(one), f"{engine.name} has every block", 60)  # type: ignore[misc] # the default binds the loop's value


def is_free(engine: Server) -> bool:
    waiting = metric(engine, "disagg_engine_requests_waiting_for_remote_kv")
    return not waiting and released(engine)
