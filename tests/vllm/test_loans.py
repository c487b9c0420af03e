"""Loans inside vLLM: a prefill engine reads a system prompt of 4,096 tokens out of another one's
cache, and every answer is that of one vLLM alone. The holder schedules ahead of the model."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration import stopping_engine
from tests.integration.legs import decode, holders, prefill, prefill_body
from tests.integration.nixl_puppet import TCP
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for, wait_until_stopped
from tests.vllm import forced_async, forged_loans
from tests.vllm.measures import COMPUTED, FETCHED, counted, freed, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, TRUSTING, Fleet, Kind
from tests.vllm.test_async import ASYNC

SYSTEM = 4096
"""Tokens of a system prompt."""
LONG = ("--max-model-len", "8192", "--kv-cache-memory-bytes", "1G")
BRIEF = ("--max-num-batched-tokens", "512")
"""So a prompt is computed in many steps."""
CONVERSATIONS = 500


class Engines(NamedTuple):
    to_stop: Path
    """The file with the ids of the processes that the reader stops in the middle of a READ."""
    alone: Server
    holder: Server
    reader: Server
    decoder: Server
    """It lends as well, but what it answers is forged."""

    @property
    def connected(self) -> tuple[Server, Server, Server]:
        return self.holder, self.reader, self.decoder


@pytest.fixture(scope="module")
def engines(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    to_stop = tmp_path_factory.mktemp("holder") / "processes"
    stopping = {**TCP, stopping_engine.HOLDER: str(to_stop)}
    longer = (*SCHEDULER, *LONG)
    kinds = (
        Kind("loans-alone", None, LONG),
        Kind(
            "loans-holder",
            OURS,
            (*ASYNC, *LONG, *BRIEF),
            environment={"VLLM_SERVER_DEV_MODE": "1"},
            plugins=(forced_async,),
        ),
        Kind("loans-reader", TRUSTING, longer, environment=stopping, plugins=(stopping_engine,)),
        Kind("loans-decoder", TRUSTING, longer, plugins=(forged_loans,)),
    )
    with fleet.servers(*kinds) as servers:
        yield Engines(to_stop, *servers)


def borrow(engines: Engines, prompt: list[int], params: dict[str, Any]) -> tuple[int, int]:
    """Answer the prompt by the reader and the decoder, and compare it with one vLLM alone. Return
    how many tokens the reader has borrowed and computed."""
    reader = engines.reader
    fetched, computed = metric(reader, FETCHED), metric(reader, COMPUTED)
    answer = prefill(reader, prompt, params)
    borrowed = answer.get("borrowed_tokens", 0)
    wait_for(lambda: metric(reader, COMPUTED) > computed, "it is counted")
    assert metric(reader, FETCHED) - fetched == borrowed
    turn = decode(engines.decoder, prompt, answer)
    assert differences([complete(engines.alone, prompt)], [turn.answer]) == []
    return borrowed, int(metric(reader, COMPUTED) - computed)


def known_to(holder: Server, seed: int) -> list[int]:
    """Return a system prompt that the holder has in its cache."""
    system = tokens_of(SYSTEM, seed)
    complete(holder, [*system, *tokens_of(20, seed + 1)], 1)
    return system


def test_identity_pages_tell_who_lends_and_borrows(engines: Engines) -> None:
    for server in engines.connected:
        wait_for(lambda: lends_and_borrows(server), f"{server.name} lends and borrows")  # noqa: B023
        (rank,) = server.get("/disagg/identity").json()["ranks"]
        assert rank["num_blocks"] // 8 >= SYSTEM // 32, "the system prompt may be lent"


def lends_and_borrows(server: Server) -> bool:
    """A page that the engine's process is late for lacks what only that process knows."""
    (rank,) = server.get("/disagg/identity").json()["ranks"]
    return bool(rank["lends"] and rank["borrows"])


def test_a_system_prompt_is_read_from_an_idle_engine(engines: Engines) -> None:
    system = known_to(engines.holder, 100)
    wait_for(lambda: freed(engines.holder), "the holder is idle")
    with nothing_left(*engines.connected):
        prompt = [*system, *tokens_of(64, 102)]
        assert borrow(engines, prompt, holders(engines.holder, SYSTEM)) == (SYSTEM, 64)
        # From now on the reader has it.
        prompt = [*system, *tokens_of(64, 103)]
        assert borrow(engines, prompt, holders(engines.holder, SYSTEM)) == (0, 64)


def test_time_to_the_first_token(engines: Engines) -> None:
    """It is printed and not compared: the machine may be busy."""
    seconds = {}
    for seed in (200, 210):
        system = known_to(engines.holder, seed)
        for what, server, params in (
            ("borrowed", engines.reader, holders(engines.holder, SYSTEM)),
            ("cached", engines.holder, {}),
        ):
            began = time.monotonic()
            complete(server, [*system, *tokens_of(64, seed + 2)], 1, kv_transfer_params=params)
            seconds[what] = time.monotonic() - began
        began = time.monotonic()
        complete(engines.reader, tokens_of(SYSTEM + 64, seed + 3), 1)
        seconds["computed"] = time.monotonic() - began
    print(*(f"{what}: {1e3 * each:.0f} ms" for what, each in seconds.items()))


def test_a_decode_only_leg_borrows(engines: Engines) -> None:
    prompt = [*known_to(engines.holder, 300), *tokens_of(64, 302)]
    answer = decode(engines.decoder, prompt, holders(engines.holder, SYSTEM))
    assert answer.params == {"borrowed_tokens": SYSTEM, "lender": 0}
    assert differences([complete(engines.alone, prompt)], [answer.answer]) == []


def test_what_a_step_under_way_computes_is_not_lent(engines: Engines) -> None:
    """The holder has 4,000 tokens in its cache as soon as their steps are scheduled."""
    prompts = [tokens_of(SYSTEM + 32, seed) for seed in (400, 401, 402)]
    with nothing_left(*engines.connected), ThreadPoolExecutor(1) as pool:
        for prompt in prompts:
            wait_for(lambda: freed(engines.holder), "the holder is idle")
            first = pool.submit(complete, engines.holder, prompt)
            wait_for(lambda: first.done() or not freed(engines.holder), "it computes")  # noqa: B023
            borrow(engines, [*prompt, *tokens_of(30, 403)], holders(engines.holder, SYSTEM))
            assert differences([complete(engines.alone, prompt)], [first.result()]) == []


def test_an_evicted_prefix_is_computed(engines: Engines) -> None:
    system = known_to(engines.holder, 500)
    wait_for(lambda: freed(engines.holder), "the holder is idle")
    assert engines.holder.post("/reset_prefix_cache", {}).status_code == 200
    prompt = [*system, *tokens_of(64, 502)]
    assert borrow(engines, prompt, holders(engines.holder, SYSTEM)) == (0, SYSTEM + 64)


def test_a_loan_with_another_key_is_computed(engines: Engines) -> None:
    system, granted = known_to(engines.decoder, 550), counted(engines.decoder, "loans_given")
    prompt = [*system, *tokens_of(64, 552)]
    with nothing_left(*engines.connected):
        assert borrow(engines, prompt, holders(engines.decoder, SYSTEM)) == (0, SYSTEM + 64)
    assert counted(engines.decoder, "loans_given") - granted == 1, "it was given, and given back"


def test_a_frozen_holder_costs_its_time_and_no_request(engines: Engines) -> None:
    system = known_to(engines.holder, 600)
    params = holders(engines.holder, SYSTEM)
    with engines.holder.frozen():
        prompt = [*system, *tokens_of(64, 602)]
        assert borrow(engines, prompt, params) == (0, SYSTEM + 64)
    wait_for(lambda: freed(engines.holder), "the holder has its blocks back")


def test_a_holder_frozen_in_the_middle_of_a_read_fails_the_leg_and_not_its_retry(
    engines: Engines,
) -> None:
    prompt = [*known_to(engines.holder, 650), *tokens_of(64, 652)]
    body = prefill_body(prompt, holders(engines.holder, SYSTEM))
    stopping_engine.stop_at_next_read(engines.holder, engines.to_stop)
    with nothing_left(*engines.connected), ThreadPoolExecutor(1) as pool:
        leg = pool.submit(engines.reader.post, "/v1/completions", body)
        wait_until_stopped(engines.holder.process.pid)
        with engines.holder.frozen():
            answer = leg.result(timeout=60)
            assert "kv_load" in answer.text, "a READ may still write into its blocks"
            assert borrow(engines, prompt, {}) == (0, SYSTEM + 64)


def test_pauses_and_resets_succeed_beside_a_loan_that_is_out(engines: Engines) -> None:
    """Each mode of each of vLLM's calls. The reader has begun to read, and stands still."""
    holder, reader = engines.holder, engines.reader
    prompt = [*known_to(holder, 680), *tokens_of(64, 682)]
    body = prefill_body(prompt, holders(holder, SYSTEM))
    calls = [("/reset_prefix_cache", ""), ("/sleep?level=1", "/wake_up")]
    calls += [(f"/pause?mode={mode}", "/resume") for mode in ("wait", "abort", "keep")]
    calls += [("/pause?mode=wait&clear_cache=false", "/resume")]
    stopping_engine.stop_at_next_read(reader, engines.to_stop)
    with nothing_left(*engines.connected), ThreadPoolExecutor(1) as pool:
        leg = pool.submit(reader.post, "/v1/completions", body)
        wait_until_stopped(reader.process.pid)
        with reader.frozen():
            for call, undo in calls:
                assert holder.post(call, {}).status_code == 200, call
                if undo:
                    assert holder.post(undo, {}).status_code == 200, undo
                own = tokens_of(64, 683)
                assert differences([complete(engines.alone, own)], [complete(holder, own)]) == []
        params = leg.result(timeout=60).json()["kv_transfer_params"]
        turn = decode(engines.decoder, prompt, params)
        assert differences([complete(engines.alone, prompt)], [turn.answer]) == []


@pytest.mark.nightly
def test_hundreds_of_conversations_are_those_of_one_vllm_alone(engines: Engines) -> None:
    """They branch off each other, at both engines, which name each other."""
    known: list[list[int]] = [tokens_of(SYSTEM // 2, 700)]
    choices = {
        True: (engines.holder, holders(engines.reader, SYSTEM)),
        False: (engines.reader, holders(engines.holder, SYSTEM)),
    }
    total = 0

    def talk(number: int) -> list[str]:
        dice = random.Random(number)
        prompt = list(dice.choice(known))[: dice.randrange(64, SYSTEM)]
        prompt += tokens_of(dice.randrange(1, 200), 1000 + number)
        server, params = choices[dice.random() < 0.5]
        answer = prefill(server, prompt, params)
        nonlocal total
        total += answer.get("borrowed_tokens", 0)
        turn = decode(engines.decoder, prompt, answer)
        known.append([*prompt, *turn.answer.tokens])
        return differences([complete(engines.alone, prompt)], [turn.answer])

    with nothing_left(*engines.connected), ThreadPoolExecutor(4) as pool:
        wrong = [line for lines in pool.map(talk, range(CONVERSATIONS)) for line in lines]
    assert wrong == []
    assert total > CONVERSATIONS * 32


def test_a_holder_killed_in_the_middle_of_a_read_costs_no_request(engines: Engines) -> None:
    """From now on the engine is gone."""
    read, requested = known_to(engines.holder, 800), known_to(engines.holder, 810)
    params = holders(engines.holder, SYSTEM)
    received = counted(engines.reader, "loans_received")
    stopping_engine.stop_at_next_read(engines.holder, engines.to_stop)
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(borrow, engines, [*read, *tokens_of(64, 802)], params)
        wait_until_stopped(engines.holder.process.pid)
        engines.holder.kill()
        assert leg.result(timeout=120) == (0, SYSTEM + 64)
    assert counted(engines.reader, "loans_received") - received == 1
    assert borrow(engines, [*requested, *tokens_of(64, 812)], params) == (0, SYSTEM + 64)
