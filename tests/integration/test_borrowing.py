"""Engines borrow the beginning of a prompt from engines that hold it: real engines over NIXL."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_ext.common.types import Region
from engine_ext.wire.handshake import AgentMetadata, decode_metadata, encode_payload
from engine_ext.wire.listener import HandshakeServer
from engine_ext.wire.notifications import (
    AskLoan,
    Hello,
    Loan,
    Read,
    decode_notification,
    encode_extension,
)
from engine_ext.worker.agent import NixlAgent
from tests.integration.legs import decode, prefill, prefill_body
from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import (
    BOTH_WAYS,
    Launcher,
    Server,
    metric,
    post_and_leave,
    wait_for,
)
from tests.integration.stranger import handshake

COMPUTED = "disagg_engine_prompt_tokens_computed_total"
FETCHED = "disagg_engine_prompt_tokens_fetched_total"
DELAYED = "disagg_engine_blocks_delayed"
REQUESTED = "disagg_engine_kv_loans_requested_total"
RECEIVED = "disagg_engine_kv_loans_received_total"
LOAN_BYTES = "disagg_engine_kv_loan_bytes_received_total"
BYTES = "disagg_engine_kv_bytes_received_total"
GIVEN = "disagg_engine_kv_loans_given_total"
SHARED = 640
PATIENT = {**BOTH_WAYS, "loan_timeout": 60.0, "prefill_load_timeout": 60.0}
"""For an engine that has to connect first, on a machine that may stand still."""


def named(holder: Server, num_tokens: int = SHARED) -> dict[str, Any]:
    (rank,) = holder.get("/disagg/identity").json()["ranks"]
    assert rank["lends"]
    return as_holder(rank, num_tokens)


def as_holder(rank: dict[str, Any], num_tokens: int = SHARED) -> dict[str, Any]:
    names = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
    return {**{name: rank[name] for name in names}, "expected_tokens": num_tokens}


@pytest.fixture(scope="module")
def asker(launcher: Launcher) -> Iterator[Server]:
    with launcher.engine("asker", extra=BOTH_WAYS) as server:
        yield server


def warm(holder: Server, seed: int) -> list[int]:
    """The holder answers a request with this prefix. Return the prefix."""
    system = tokens_of(SHARED, seed)
    complete(holder, [*system, *tokens_of(20, seed + 1)])
    return system


def prefill_and_decode(
    asker: Server, decoder: Server, prompt: list[int], *holders: dict[str, Any]
) -> tuple[Answer, int]:
    """Return the answer, and the number of tokens that were borrowed for it."""
    params = prefill(asker, prompt, {"holders": list(holders)})
    return decode(decoder, prompt, params).answer, params.get("borrowed_tokens", 0)


def test_a_prefill_leg_borrows_and_computes_what_is_left(
    asker: Server, decoder: Server, alone: Server
) -> None:
    prompt = [*warm(decoder, 1), *tokens_of(50, 3)]
    computed, fetched = metric(asker, COMPUTED), metric(asker, FETCHED)
    lent, received = metric(asker, LOAN_BYTES), metric(asker, BYTES)
    answer, borrowed = prefill_and_decode(asker, decoder, prompt, named(decoder))
    assert borrowed == SHARED
    assert metric(asker, LOAN_BYTES) - lent == metric(asker, BYTES) - received > 0
    assert metric(decoder, BYTES) > metric(decoder, LOAN_BYTES) == 0
    assert metric(asker, FETCHED) - fetched == SHARED
    assert metric(asker, COMPUTED) - computed == 50
    assert differences([complete(alone, prompt)], [answer]) == []
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back", 5)


def test_a_decode_only_leg_borrows_and_reports_it(
    asker: Server, decoder: Server, alone: Server
) -> None:
    prompt = [*warm(decoder, 10), *tokens_of(50, 13)]
    turn = decode(asker, prompt, {"holders": [named(decoder)]})
    assert turn.params == {"borrowed_tokens": SHARED, "lender": 0}
    assert differences([complete(alone, prompt)], [turn.answer]) == []
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back", 5)


def test_what_the_own_cache_holds_is_not_requested(asker: Server, decoder: Server) -> None:
    prompt = [*warm(decoder, 20), *tokens_of(50, 23)]
    complete(asker, prompt)
    requested = metric(asker, REQUESTED)
    assert prefill_and_decode(asker, decoder, prompt, named(decoder))[1] == 0
    assert metric(asker, REQUESTED) == requested


def test_what_the_holder_has_evicted_is_computed_and_the_next_holder_is_asked(
    launcher: Launcher, asker: Server, decoder: Server, alone: Server
) -> None:
    system = warm(decoder, 30)
    with launcher.engine("small", "--num-blocks", "40", extra=BOTH_WAYS) as small:
        warm(small, 30)
        for seed in range(33, 38):
            complete(small, tokens_of(1000, seed))
        first, second = [*system, *tokens_of(50, 38)], [*system, *tokens_of(50, 39)]
        answer, borrowed = prefill_and_decode(asker, decoder, first, named(small))
        assert borrowed == 0
        assert differences([complete(alone, first)], [answer]) == []
        small_first = (named(small), named(decoder))
        with launcher.engine("fresh", extra=PATIENT) as fresh:
            answer, borrowed = prefill_and_decode(fresh, decoder, second, *small_first)
        assert borrowed == SHARED
        assert differences([complete(alone, second)], [answer]) == []


def test_requests_and_engines_with_one_prefix_share_what_is_lent(
    launcher: Launcher, asker: Server, decoder: Server, alone: Server
) -> None:
    """Four requests at each of two engines: each engine reads it once."""
    system, holder = warm(decoder, 40), named(decoder)
    prompts = [[*system, *tokens_of(50, 43 + number)] for number in range(8)]
    with launcher.engine("other", extra=PATIENT) as other, ThreadPoolExecutor(8) as pool:
        before = [metric(one, FETCHED) for one in (asker, other)]
        legs = [
            pool.submit(prefill_and_decode, one, decoder, prompt, holder)
            for prompt, one in zip(prompts, [asker, other] * 4, strict=True)
        ]
        results = [leg.result(timeout=60) for leg in legs]
        after = [metric(one, FETCHED) for one in (asker, other)]
    assert [a - b for a, b in zip(after, before, strict=True)] == [SHARED, SHARED]
    assert sum(borrowed for _, borrowed in results) == 2 * SHARED
    expected = [complete(alone, prompt) for prompt in prompts]
    assert differences(expected, [answer for answer, _ in results]) == []
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back", 5)


def test_a_frozen_holder_costs_little_and_its_late_loan_is_given_back(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    """Between engines that know each other."""
    system, holder = warm(decoder, 50), named(decoder)
    wait_for(
        lambda: prefill(prefiller, [*system, *tokens_of(50, 60)], {"holders": [holder]}).get(
            "borrowed_tokens"
        ),
        "the engines know each other",
    )
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back", 40)
    prompt = [*system, *tokens_of(50, 53)]
    computes = time.monotonic()
    prefill(prefiller, [*tokens_of(SHARED, 54), *tokens_of(50, 55)])
    computes = time.monotonic() - computes
    with decoder.frozen():
        begun = time.monotonic()
        params = prefill(prefiller, prompt, {"holders": [holder]})
        waited = time.monotonic() - begun - computes
    assert params["borrowed_tokens"] == 0, "it has not refused"
    assert waited < BOTH_WAYS["loan_timeout"] + 10, "a frozen holder never answers"
    assert differences([complete(alone, prompt)], [decode(decoder, prompt, params).answer]) == []
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back", 5)


def test_a_killed_holder_costs_the_loan(
    launcher: Launcher, asker: Server, decoder: Server, alone: Server
) -> None:
    with launcher.engine("victim", extra=BOTH_WAYS) as victim:
        system, holder = warm(victim, 70), named(victim)
        known = [*system, *tokens_of(50, 72)]
        assert prefill_and_decode(asker, decoder, known, holder)[1] == SHARED
        victim.kill()
        prompt = [*tokens_of(SHARED, 73), *tokens_of(50, 74)]
        answer, borrowed = prefill_and_decode(asker, decoder, prompt, holder)
    assert borrowed == 0
    assert differences([complete(alone, prompt)], [answer]) == []
    wait_for(lambda: metric(asker, DELAYED) == 0, "nothing is kept", 5)


def test_a_client_that_leaves_while_its_request_waits_gives_the_loan_back(
    asker: Server, decoder: Server
) -> None:
    system, holder = warm(decoder, 80), named(decoder)
    assert prefill(asker, [*system, *tokens_of(50, 82)], {"holders": [holder]})
    prompt = [*warm(decoder, 83), *tokens_of(50, 85)]
    requested, given = metric(asker, REQUESTED), metric(decoder, GIVEN)
    body = prefill_body(prompt, {"holders": [holder]})
    with decoder.frozen(), post_and_leave(asker, body):
        wait_for(lambda: metric(asker, REQUESTED) > requested, "the holder is asked")
    wait_for(lambda: metric(decoder, GIVEN) > given, "the holder lends when it thaws")
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back", 5)
    assert metric(asker, "disagg_engine_requests_waiting") == 0


def test_an_asker_without_free_blocks_gives_the_loan_back(
    launcher: Launcher, decoder: Server, alone: Server
) -> None:
    prompt = [*warm(decoder, 90), *tokens_of(50, 93)]
    with (
        launcher.engine("full", "--num-blocks", "40", extra=BOTH_WAYS) as full,
        ThreadPoolExecutor(2) as pool,
    ):
        long = pool.submit(decode, full, tokens_of(700, 94), {}, 480)
        wait_for(lambda: metric(full, "disagg_engine_requests_running") == 1, "it runs")
        short = pool.submit(decode, full, prompt, {"holders": [named(decoder)]})
        wait_for(lambda: metric(full, RECEIVED) == 1, "it gets a loan")
        turn = short.result(timeout=120)
        long.result(timeout=120)
    assert differences([complete(alone, prompt)], [turn.answer]) == []
    wait_for(lambda: metric(decoder, DELAYED) == 0, "the blocks come back", 5)


class Liar:
    """An engine's side channel and agent with a lie for each request for a loan."""

    def __init__(self, engine: Server, engine_id: str, port: int) -> None:
        (rank,) = engine.get("/disagg/identity").json()["ranks"]
        payload = handshake(rank)
        metadata = decode_metadata(payload)
        self.size, self.num_blocks = rank["block_size"], 64
        self.memory = [
            np.zeros(stride * self.num_blocks, dtype=np.uint8) for stride in metadata.block_strides
        ]
        starts = [one.ctypes.data for one in self.memory]
        self.agent = NixlAgent(
            [
                Region(f"region {index}", start, length, stride, self.num_blocks)
                for index, (start, length, stride) in enumerate(
                    zip(starts, metadata.block_lens, metadata.block_strides, strict=True)
                )
            ],
            ["UCX"],
            0,
        )
        ours: AgentMetadata = msgspec.structs.replace(
            metadata,
            engine_id=engine_id,
            agent_metadata=self.agent.metadata(),
            kv_caches_base_addr=starts,
            num_blocks=self.num_blocks,
            region_num_blocks=[self.num_blocks] * len(starts),
        )
        served = encode_payload(ours, payload.compat_factors or {})
        self.server = HandshakeServer("127.0.0.1", port, {(0, 0): served})
        self.holder = {**as_holder(rank), "remote_engine_id": engine_id}
        self.holder["remote_port"] = self.server.port
        self.returned: list[str] = []

    def listen(self, lie: Callable[[AskLoan], Loan]) -> bool:
        """Answer what came with the lie. Return True if there was a request for a loan."""
        has_lied = False
        for sender, message in self.agent.notifications():
            match decode_notification(message):
                case Hello(metadata):
                    self.agent.add_remote(metadata)
                case AskLoan() as ask:
                    self.agent.notify(sender, encode_extension(lie(ask)))
                    has_lied = True
                case Read(name):
                    self.returned.append(name)
        return has_lied

    def close(self) -> None:
        self.server.close()
        self.agent.close()


@pytest.fixture
def liar(decoder: Server, launcher: Launcher) -> Iterator[Liar]:
    (port,) = launcher.free_ports(1)
    made = Liar(decoder, f"liar-{port}", port)
    yield made
    made.close()


@pytest.mark.parametrize("lie", ["other key", "no such blocks", "too few blocks", "too long"])
def test_a_holder_that_lies_costs_the_loan(
    asker: Server, decoder: Server, alone: Server, liar: Liar, lie: str
) -> None:
    def tell(ask: AskLoan) -> Loan:
        blocks, key, count = tuple(range(20)), ask.keys[19], 20
        if lie == "other key":
            key = ask.keys[18]
        if lie == "no such blocks":
            blocks = tuple(range(10_000, 10_020))
        if lie == "too few blocks":
            blocks = blocks[:1]
        if lie == "too long":
            blocks, count = tuple(range(40)), 40
        return Loan(ask.sequence, "loan-lie", (blocks,), count * liar.size, key, 10.0)

    seed = 1000 + sum(map(ord, lie))
    prompt = tokens_of(SHARED + 50, seed)
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(prefill, asker, prompt, {"holders": [liar.holder]})
        wait_for(lambda: liar.listen(tell), "it is asked")
        params = leg.result(timeout=60)
    assert not params.get("borrowed_tokens")
    assert differences([complete(alone, prompt)], [decode(decoder, prompt, params).answer]) == []
    wait_for(lambda: liar.listen(tell) or liar.returned, "it is given back")
    assert set(liar.returned) == {"loan-lie"}
