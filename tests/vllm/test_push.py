"""Push mode inside vLLM: the prefill engine writes."""

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import httpx
import pytest

from tests.integration.legs import Turn, coordinates_in, decode, decode_body, prefill, prefill_body
from tests.integration.oracle import Answer, Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, metric, post_and_leave, wait_for
from tests.vllm.measures import COMPUTED, FETCHED, counted, nothing_left, prompts, share_of_a_core
from tests.vllm.servers import CHUNK, CHUNKS, PUSH, SCHEDULER, Fleet, Kind
from tests.vllm.test_several import several_are_read_once

PAIR = (Kind("push-p", PUSH, (*SCHEDULER, *CHUNKS)), Kind("push-d", PUSH, SCHEDULER))


def where(prefiller: Server) -> dict[str, Any]:
    """P's coordinates, as P tells them to a router."""
    said = prefiller.get("/disagg/identity").json()
    assert said["transfer_modes"] == ["push"]
    (rank,) = said["ranks"]
    return coordinates_in(rank)


@pytest.fixture(scope="module")
def two_ranks(fleet: Fleet) -> Iterator[Server]:
    options = (*SCHEDULER, "--tensor-parallel-size", "2")
    with fleet.server(Kind("push-two-ranks", PUSH, options)) as server:
        yield server


def both_legs(
    prefiller: Server, decoder: Server, prompt: Prompt, previous: Any = None, max_tokens: int = 12
) -> Turn:
    """At once, as a router does that knows where P is. The answer is kept for the next turn."""
    request_id = str(uuid.uuid4())
    told = {"do_remote_prefill": True, "remote_request_id": request_id, "retain": True}
    body = prefill_body(prompt, previous)
    with ThreadPoolExecutor(2) as legs:
        p_leg = legs.submit(prefiller.post, "/v1/completions", body, request_id)
        d_leg = legs.submit(
            decode, decoder, prompt, {**told, **where(prefiller)}, max_tokens, request_id
        )
        assert p_leg.result(timeout=60).status_code == 200
        return d_leg.result(timeout=60)


@contextmanager
def registered(
    prefiller: Server, decoder: Server, prompt: Prompt
) -> Iterator[tuple[str, "Future[httpx.Response]"]]:
    """A D leg that waits for the prompt before P is asked to compute it, and its request id."""
    request_id = str(uuid.uuid4())
    told = {"do_remote_prefill": True, "remote_request_id": request_id, **where(prefiller)}
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(decoder.post, "/v1/completions", decode_body(prompt, told), request_id)
        wait_for(lambda: counted(decoder, "pushes_active") > 0, "D has registered")
        yield request_id, leg


def test_pushed_prompts_are_those_of_one_vllm_alone(pair: list[Server], alone: Server) -> None:
    prefiller, decoder = pair
    with ThreadPoolExecutor(3) as pool:
        turns = list(pool.map(partial(both_legs, prefiller, decoder), prompts()))
    right = [complete(alone, prompt) for prompt in prompts()]
    assert differences(right, [turn.answer for turn in turns]) == []


def test_prompts_are_written_while_they_are_computed(pair: list[Server], alone: Server) -> None:
    prefiller, decoder = pair
    asked = [tokens_of(length, 6600 + length) for length in (1700, 1000, 1400)]
    pushed = counted(prefiller, "pushes_ok")
    for prompt in asked:
        early = counted(prefiller, "early_blocks")
        with registered(prefiller, decoder, prompt) as (request_id, leg):
            told = prefiller.post("/v1/completions", prefill_body(prompt), request_id)
            assert told.status_code == 200
            answer = Answer.in_body(leg.result(timeout=60).json())
        assert differences([complete(alone, prompt)], [answer]) == []
        # Of 1700 tokens, six chunks come before the last. What is computed while a part moves goes
        # with the next part: how many blocks are early depends on the machine.
        assert 0 < counted(prefiller, "early_blocks") - early <= (len(prompt) - 1) // CHUNK * 8
    wait_for(lambda: counted(prefiller, "pushes_ok") == pushed + len(asked), "all were pushed")


def test_a_prompt_that_is_given_up_halfway_leaves_no_block(pair: list[Server]) -> None:
    prefiller, decoder = pair
    numbers = count()

    def is_given_up_halfway() -> bool:
        """False if P had computed all of the prompt before it noticed that the client has left."""
        prompt = tokens_of(2000, 6700 + next(numbers))
        early, missed = counted(prefiller, "early_blocks"), counted(decoder, "pushes_missed")
        with registered(prefiller, decoder, prompt) as (request_id, leg):
            with post_and_leave(prefiller, prefill_body(prompt), request_id):
                wait_for(lambda: counted(prefiller, "early_blocks") > early, "a part is written")
            status = leg.result(timeout=30).status_code
        assert status in (200, 500)
        assert counted(decoder, "pushes_missed") - missed == (status == 500)
        return status == 500

    with nothing_left(*pair):
        wait_for(is_given_up_halfway, "P stops in the middle of a prompt", 60, 0)


def test_turns_compute_only_what_is_new_and_are_pushed(pair: list[Server], alone: Server) -> None:
    prefiller, decoder = pair
    prompt, previous = tokens_of(600, 6000), None
    for number in range(3):
        pushed, fetched = counted(prefiller, "pushes_ok"), metric(prefiller, FETCHED)
        turn = both_legs(prefiller, decoder, prompt, previous, max_tokens=100)
        assert differences([complete(alone, prompt, 100)], [turn.answer]) == []
        wait_for(lambda: counted(prefiller, "pushes_ok") == pushed + 1, "it was pushed")  # noqa: B023 - now
        # The prefill engine has the prompt in its prefix cache, but not the answer.
        assert number == 0 or metric(prefiller, FETCHED) > fetched
        previous = turn.params
        prompt = [*prompt, *turn.answer.tokens, *tokens_of(90, 6010 + number)]


@pytest.mark.parametrize("order", ["2 to 1", "1 to 2"])
def test_between_engines_of_different_tensor_parallel_size(
    pair: list[Server], two_ranks: Server, alone: Server, order: str
) -> None:
    first, second = (two_ranks, pair[1]) if order == "2 to 1" else (pair[0], two_ranks)
    before = metric(second, FETCHED)
    lengths = (1, 33, 257, 700)
    for length in lengths:
        prompt = tokens_of(length, 6100 + length + 2000 * (order == "2 to 1"))
        turn = both_legs(first, second, prompt)
        assert differences([complete(alone, prompt)], [turn.answer]) == [], length
    assert metric(second, FETCHED) - before == sum(lengths) - 1


@pytest.mark.nightly  # test_answers.py measures the same wait on P in CI: up to 36 s saved
def test_an_engine_that_waits_for_a_prompt_uses_less_than_a_twentieth_of_a_core(
    pair: list[Server], alone: Server
) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(300, 62)
    with registered(prefiller, decoder, prompt) as (request_id, leg):
        # Of two windows, for in one something of an earlier request may still end, with a step.
        rests = any(share_of_a_core(decoder) < 0.05 for _ in range(2))
        assert counted(decoder, "pushes_active") == 1, "it waited all the time"
        said = prefiller.post("/v1/completions", prefill_body(prompt), request_id)
        assert said.status_code == 200
        answer = Answer.in_body(leg.result(timeout=60).json())
    assert differences([complete(alone, prompt)], [answer]) == []
    assert rests


@pytest.mark.parametrize("missing", ["everything", "remote_request_id", "remote_host", "tp_size"])
def test_r2_r3_params_with_a_key_missing_end_no_engine(
    pair: list[Server], alone: Server, missing: str
) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(100, 7)
    params = {"do_remote_prefill": True}
    if missing != "everything":
        params |= {**prefill(prefiller, prompt)}
        del params[missing]
    response = decoder.post("/v1/completions", decode_body(prompt, params))
    assert response.status_code == 200, response.text
    tokens = tuple(response.json()["choices"][0]["token_ids"])
    assert tokens == complete(alone, prompt).tokens


def test_an_engine_that_pushes_and_one_that_pulls_part_in_words(
    pair: list[Server], decoder: Server
) -> None:
    prompt = tokens_of(100, 8)
    params = prefill(pair[0], prompt)
    response = decoder.post("/v1/completions", decode_body(prompt, params))
    assert response.status_code == 500
    assert "transfer_mode (pull here, push there)" in decoder.log.read_text()


# Through the router, which asks both at once. What kills an engine of the pair comes last.


@pytest.fixture(scope="module")
def second(fleet: Fleet) -> Iterator[Server]:
    """Another decode engine."""
    with fleet.server(Kind("push-d2", PUSH, SCHEDULER)) as server:
        yield server


@pytest.fixture(scope="module")
def router(fleet: Fleet, pair: list[Server], second: Server) -> Iterator[Server]:
    prefiller, decoder = pair
    options = ("--decode-first-turns", "0", "--decode-policy", "round_robin")
    with fleet.router([prefiller], [decoder, second], *options) as server:
        wait_for(lambda: complete(server, [1]) and is_pushed(server), "it knows that they push")
        yield server


def is_pushed(router: Server) -> bool:
    return 'flow="push",outcome="ok"' in router.get("/metrics").text


def test_routed_pushes_are_those_of_one_vllm_alone(
    router: Server, pair: list[Server], alone: Server
) -> None:
    right = [complete(alone, prompt) for prompt in prompts()]
    pushed = counted(pair[0], "pushes_ok")
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(partial(complete, router), prompts()))
    assert differences(right, got) == []
    assert counted(pair[0], "pushes_ok") > pushed + len(prompts()) / 2, "or D had it cached"
    compared = r'disagg_router_kv_canary_total\{outcome="agreed"\}'
    assert metric(router, compared) > len(prompts()) / 2


def test_clients_that_leave_a_routed_push_leave_no_block(
    router: Server, pair: list[Server], second: Server
) -> None:
    computed = metric(pair[0], COMPUTED)
    with nothing_left(*pair, second), ExitStack() as clients:
        for number in range(6):
            body = {"model": "tiny", "prompt": tokens_of(1500, 6300 + number), "max_tokens": 300}
            body |= {"stream": number % 2 == 0, "ignore_eos": True}
            clients.enter_context(post_and_leave(router, body))
        wait_for(lambda: metric(pair[0], COMPUTED) > computed, "the first is prefilled", 60)


def test_several_answers_are_those_of_one_vllm_and_are_written_once(
    fleet: Fleet, pair: list[Server], alone: Server
) -> None:
    prefiller, decoder = pair
    several_are_read_once(fleet, prefiller, decoder, alone)


def test_engines_that_die_in_mid_transfer_are_survived(
    router: Server, pair: list[Server], second: Server, alone: Server
) -> None:
    """First a decoder, then the only prefiller, whose work the other decoder then does."""
    for victim, counter in ((pair[1], "pushes_received"), (pair[0], "pushes_ok")):
        asked = [tokens_of(1200, 6400 + 50 * (victim is pair[0]) + number) for number in range(8)]
        right, before = [complete(alone, prompt) for prompt in asked], counted(victim, counter)
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(complete, router, prompt) for prompt in asked]
            wait_for(lambda: counted(victim, counter) > before, "one was pushed", 60)  # noqa: B023 - now
            victim.kill()
            assert differences(right, [answer.result(timeout=180) for answer in answers]) == []
