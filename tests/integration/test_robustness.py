"""Nothing that a request or a peer sends stops an engine.

R1 to R14 are stock failures that were reproduced on vLLM 0.32: bodies and messages that ended the
engine, hung a request or gave wrong tokens. While each is sent, another request runs; afterwards
the engine is healthy, the next answer is right, and every block has come back.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from engine_ext.wire.handshake import decode_metadata, encode_request
from engine_ext.worker.agent import NixlAgent
from tests.integration.legs import (
    PREFILL,
    coordinates_in,
    decode,
    decode_body,
    prefill,
    prefill_body,
    take_turn,
)
from tests.integration.oracle import Answer, complete, differences, text_of, tokens_of
from tests.integration.processes import (
    BOTH_WAYS,
    CONNECTORS,
    Launcher,
    Server,
    cpu_seconds,
    metric,
    pause,
    wait_for,
)
from tests.integration.stranger import GARBAGE, NUM_UNKNOWN, handshake, stranger
from tests.unit.engine_ext.scheduler.fakes import told

LEASE = 3
"""Seconds: what a request that is not followed leaves to expire."""
EXPIRED = "disagg_engine_kv_leases_expired_total"
UNKNOWN = "disagg_engine_kv_notifications_unknown_total"
LEFT = {"do_remote_prefill": True}
BYSTANDER = text_of(120, 1)


@pytest.fixture(scope="module", params=["pull", "push"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prefiller(launcher: Launcher, mode: str) -> Iterator[Server]:
    extra = {**BOTH_WAYS, "kv_lease_duration": LEASE}
    with launcher.engine("prefill", extra=extra, connector=CONNECTORS[mode]) as server:
        yield server


@pytest.fixture(scope="module")
def decoder(launcher: Launcher, mode: str) -> Iterator[Server]:
    extra = {
        **BOTH_WAYS,
        "kv_lease_duration": LEASE,
        "push_registration_timeout": 2,
        "decoder_kv_blocks_ttl": 5,
    }
    with launcher.engine("decode", extra=extra, connector=CONNECTORS[mode]) as server:
        yield server


@contextmanager
def unharmed(server: Server, alone: Server) -> Iterator[None]:
    """The block's requests disturb no other one, leave no block behind and break nothing."""
    right = complete(alone, BYSTANDER, 100)
    ended = threading.Event()

    def one_after_another() -> list[Answer]:
        """So that one runs whenever the block looks, however late it gets there."""
        answers = [complete(server, BYSTANDER, 100)]
        while not ended.is_set():
            answers.append(complete(server, BYSTANDER, 100))
        return answers

    with ThreadPoolExecutor(1) as pool:
        bystanders = pool.submit(one_after_another)
        running = "disagg_engine_requests_running"
        try:
            wait_for(lambda: metric(server, running) >= 1, "another request runs")
            yield
        finally:
            ended.set()
        answers = bystanders.result(timeout=60)
        assert differences([right] * len(answers), answers) == []
    assert server.get("/health").status_code == 200
    prompt = text_of(70, time.monotonic_ns())
    assert differences([complete(alone, prompt)], [complete(server, prompt)]) == []
    every_block_is_back(server)


def every_block_is_back(server: Server, seconds: float = 20) -> None:
    total = metric(server, "disagg_engine_blocks")
    free = "disagg_engine_blocks_free"
    wait_for(lambda: metric(server, free) == total, f"{server.name} has its blocks back", seconds)


def ask(
    server: Server, prompt: Any, params: Any, more: dict[str, Any] | None = None
) -> tuple[int, Any]:
    response = server.post("/v1/completions", {**decode_body(prompt, params), **(more or {})})
    return response.status_code, response.json()


def answered_locally(server: Server, alone: Server, prompt: Any, params: Any) -> None:
    """Params that make no sense cost the transfer, not the answer."""
    status, answer = ask(server, prompt, params)
    assert status == 200, answer
    assert tuple(answer["choices"][0]["token_ids"]) == complete(alone, prompt).tokens


def where(prefiller: Server) -> dict[str, Any]:
    """P's coordinates, learned from an answer of its own."""
    answer = prefill(prefiller, "hello")
    return coordinates_in(answer)


def test_r1_r2_a_remote_prefill_that_names_nobody_is_computed_here(
    decoder: Server, alone: Server
) -> None:
    with unharmed(decoder, alone):
        answered_locally(decoder, alone, text_of(90, 2), LEFT)


@pytest.mark.parametrize(
    "missing",
    ["remote_request_id", "remote_engine_id", "remote_host", "remote_port", "remote_block_ids"],
)
def test_r3_r4_params_with_a_key_missing_are_not_followed(
    prefiller: Server, decoder: Server, alone: Server, mode: str, missing: str
) -> None:
    prompt = text_of(90, 3)
    params = prefill(prefiller, prompt)
    del params[missing]
    with unharmed(decoder, alone):
        answered_locally(decoder, alone, prompt, params)
    every_block_is_back(prefiller)


@pytest.mark.parametrize("length", [40, 1, 200])
def test_r5_a2_prompts_of_different_length_on_the_two_legs_are_answered_right(
    prefiller: Server, decoder: Server, alone: Server, mode: str, length: int
) -> None:
    """A shorter prefill than D's prompt, which D is told; of a longer one P must refuse to push."""
    params = prefill(prefiller, text_of(90, 4)[:length].ljust(length, "x"))
    with unharmed(decoder, alone):
        status, answer = ask(decoder, text_of(90, 4), params)
        if mode == "pull" or length < 90:
            assert status == 200, answer
            tokens = tuple(answer["choices"][0]["token_ids"])
            assert tokens == complete(alone, text_of(90, 4)).tokens
        else:
            assert status == 500, answer
    every_block_is_back(prefiller)


@pytest.mark.parametrize(
    "block_ids",
    [["a", "b", "c"], [["a"]], [[1.5, 2, 3]], [[None]], [[-1, -2, -3]], {"0": [1]}, "123", [[[1]]]],
)
def test_r6_block_ids_that_are_no_integers_are_not_followed(
    prefiller: Server, decoder: Server, alone: Server, mode: str, block_ids: Any
) -> None:
    if mode == "push":
        pytest.skip("a push registration carries no block ids of P's")
    prompt = text_of(90, 6)
    params = {**prefill(prefiller, prompt), "remote_block_ids": block_ids}
    with unharmed(decoder, alone):
        answered_locally(decoder, alone, prompt, params)
    every_block_is_back(prefiller)


def test_block_ids_outside_the_remote_memory_fail_one_request(
    prefiller: Server, decoder: Server, alone: Server, mode: str
) -> None:
    """Told by the engine itself: what got lost on the way is computed."""
    if mode == "push":
        pytest.skip("a push registration carries no block ids of P's")
    prompt = text_of(90, 7)
    nowhere = [[10**6, 10**6 + 1, 10**6 + 2]]
    params = told(prefill(prefiller, prompt), remote_block_ids=nowhere)
    with unharmed(decoder, alone):
        status, answer = ask(decoder, prompt, params)
        assert status == 500, answer
    every_block_is_back(prefiller)


@pytest.mark.parametrize("flat", [True, False])
def test_r7_an_unreachable_peer_fails_the_request_in_bounded_time(
    decoder: Server, alone: Server, flat: bool
) -> None:
    params = {
        **LEFT,
        "remote_engine_id": "nobody",
        "remote_request_id": "cmpl-1",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_block_ids": [1, 2, 3] if flat else [[1, 2, 3]],
        "tp_size": 1,
    }
    with unharmed(decoder, alone):
        started = time.monotonic()
        status, answer = ask(decoder, text_of(90, 8), params)
        assert status == 500, answer
        assert "error" in answer
        assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1\xc1",
        b"x" * 5000,
        encode_request((0, 7)),
        encode_request((-1, 1 << 40)),
    ],
)
def test_r8_a_message_that_is_no_handshake_does_not_end_the_listener(
    prefiller: Server, decoder: Server, alone: Server, mode: str, message: bytes
) -> None:
    params = prefill(prefiller, text_of(50, 9))
    context: zmq.Context[Any] = zmq.Context()
    peer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    peer.connect(f"tcp://127.0.0.1:{params['remote_port']}")
    for frames in ([message], [b"", message], [b"", message, message], [b"a", b"b", b"c", b"d"]):
        peer.send_multipart(frames)
    payload = handshake(params)
    assert decode_metadata(payload).engine_id == params["remote_engine_id"]
    context.destroy(linger=0)
    prompt = text_of(50, 9)
    turn = decode(decoder, prompt, params)
    assert differences([complete(alone, prompt)], [turn.answer]) == []
    every_block_is_back(prefiller)


def test_r9_turn_params_for_a_prefiller_without_the_flag_are_computed(
    launcher: Launcher, decoder: Server, alone: Server, mode: str
) -> None:
    prompt = tokens_of(100, 10)
    connector = CONNECTORS[mode]
    with launcher.engine("plain", connector=connector) as plain, unharmed(plain, alone):
        turn = take_turn(plain, decoder, prompt)
        longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 11)]
        response = plain.post("/v1/completions", prefill_body(longer, turn.params))
        assert response.status_code == 200
        again = decode(decoder, longer, response.json()["kv_transfer_params"])
        assert differences([complete(alone, longer)], [again.answer]) == []


def test_r10_a_turn_that_has_expired_is_computed(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(200, 12)
    turn = take_turn(prefiller, decoder, prompt)
    longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 13)]
    assert turn.params is not None
    every_block_is_back(decoder)
    right = complete(alone, longer)
    with unharmed(prefiller, alone):
        for until in (turn.params["retained_until"], time.time() + 100, None, "soon", -1):
            answer = prefill(prefiller, longer, {**turn.params, "retained_until": until})
            again = decode(decoder, longer, answer)
            assert differences([right], [again.answer]) == []
    every_block_is_back(prefiller)


def test_r11_a_shorter_turn_is_answered_right(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(320, 14)
    turn = take_turn(prefiller, decoder, prompt)
    shorter = prompt[:170]
    again = take_turn(prefiller, decoder, shorter, turn.params)
    assert differences([complete(alone, shorter)], [again.answer]) == []
    every_block_is_back(prefiller)
    every_block_is_back(decoder)


@pytest.mark.parametrize(
    "params",
    [
        {"foo": 1},
        {},
        [],
        "x",
        7,
        {"retain": "yes"},
        {"do_remote_prefill": "true"},
        {"do_remote_decode": 1},
        {**PREFILL, "do_remote_prefill": True},
        {"remote_block_ids": [[1]]},
    ],
)
def test_r12_params_that_ask_for_nothing_pin_no_block(
    decoder: Server, alone: Server, params: Any
) -> None:
    with unharmed(decoder, alone):
        prompt = text_of(100, 15)
        status, answer = ask(decoder, prompt, params)
        if isinstance(params, dict):
            assert status == 200, answer
            assert tuple(answer["choices"][0]["token_ids"]) == complete(alone, prompt).tokens
            assert answer.get("kv_transfer_params") is None
        else:
            assert status == 400, answer
    assert metric(decoder, "disagg_engine_kv_leases_active") == 0


@pytest.mark.nightly
def test_r13_an_idle_engine_and_one_that_holds_a_lease_use_two_percent_of_a_core_at_most(
    launcher: Launcher, mode: str
) -> None:
    extra = {"kv_lease_duration": 120}
    with launcher.engine("idle", connector=CONNECTORS[mode], extra=extra) as engine:
        assert cpu_share(engine) < 0.02
        params = prefill(engine, text_of(100, 16))
        pause(3, "the owner thread looks less and less often")
        assert cpu_share(engine) < 0.02
        assert metric(engine, "disagg_engine_kv_leases_active") == 1
        assert engine.post("/disagg/release", {"kv_transfer_params": params}).json()["released"]


def cpu_share(server: Server, seconds: float = 5) -> float:
    """Of one core, by all threads, while `seconds` pass."""
    engine = [server.process.pid]
    before, started = cpu_seconds(engine), time.monotonic()
    pause(seconds, "some time has passed")
    return (cpu_seconds(engine) - before) / (time.monotonic() - started)


def test_r14_notifications_that_make_no_sense_are_counted_and_survived(
    prefiller: Server, decoder: Server, alone: Server, mode: str
) -> None:
    """From any process that can fetch the metadata."""
    for server in (prefiller, decoder):
        with unharmed(server, alone), stranger() as agent:
            # Any engine answers a prefill leg, and so says where it is.
            metadata = decode_metadata(handshake(prefill(server, text_of(8, 18))))
            name = agent.add_remote(metadata.agent_metadata)
            before = metric(server, UNKNOWN)
            for message in GARBAGE:
                agent.notify(name, message)
            hears_of_garbage(server, agent, before)
    prompt = text_of(64, 17)
    turn = decode(decoder, prompt, prefill(prefiller, prompt))
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def hears_of_garbage(server: Server, sender: NixlAgent, before: float) -> None:
    """What an agent sends leaves when it polls."""

    def heard() -> bool:
        sender.notifications()
        return metric(server, UNKNOWN) - before >= NUM_UNKNOWN

    wait_for(heard, "the notifications have arrived", 10)
    assert metric(server, UNKNOWN) - before == NUM_UNKNOWN
