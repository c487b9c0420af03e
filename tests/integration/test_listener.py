"""The side channel: whatever connects to it, readers get their handshake, and soon."""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.wire.dialer import HandshakeClient
from engine_ext.wire.handshake import AgentMetadata, decode_metadata, encode_payload, encode_request
from engine_ext.wire.listener import HandshakeServer
from tests.integration.abusers import ZMTP_GREETING
from tests.integration.legs import decode_body, prefill
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import Launcher, Server, metric, wait_for
from tests.unit.engine_ext.wire.waiting import answer

METADATA = AgentMetadata(
    engine_id="p",
    agent_metadata=b"x" * 500,
    kv_caches_base_addr=list(range(64)),
    device_id=0,
    num_blocks=8,
    block_lens=[64] * 64,
    block_strides=[64] * 64,
    kv_cache_layout="LBHNC",
    block_size=16,
    attn_backend_name="CPU_ATTN",
)
PAYLOAD = encode_payload(METADATA, {"model": "m"})


@pytest.fixture(scope="module")
def listener() -> Iterator[HandshakeServer]:
    server = HandshakeServer("127.0.0.1", 0, {(0, 0): PAYLOAD})
    yield server
    server.close()


@pytest.fixture(scope="module")
def context() -> Iterator["zmq.Context[Any]"]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def answer_seconds(port: int) -> float:
    """Of one handshake, connection and all."""
    started = time.perf_counter()
    payload = answer(HandshakeClient("127.0.0.1", port, (0, 0)))
    assert decode_metadata(payload).engine_id == "p"
    return time.perf_counter() - started


@given(
    frames=st.lists(st.binary(max_size=300), min_size=1, max_size=5),
    raw=st.binary(max_size=300),
)
@settings(max_examples=60, deadline=None)
def test_no_frames_and_no_bytes_silence_the_listener(
    listener: HandshakeServer, context: "zmq.Context[Any]", frames: list[bytes], raw: bytes
) -> None:
    peer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    peer.connect(f"tcp://127.0.0.1:{listener.port}")
    peer.send_multipart(frames)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as connection:
        connection.sendall(raw)
    answer_seconds(listener.port)
    peer.close(linger=0)


@given(
    greeting=st.integers(0, len(ZMTP_GREETING)),
    rest=st.binary(max_size=100),
    flip=st.integers(0, 63),
)
@settings(max_examples=60, deadline=None)
def test_a_greeting_that_goes_wrong_anywhere_does_not_silence_it(
    listener: HandshakeServer, greeting: int, rest: bytes, flip: int
) -> None:
    begun = bytearray(ZMTP_GREETING)
    begun[flip] ^= 0x55
    for start in (ZMTP_GREETING, bytes(begun)):
        with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as connection:
            connection.sendall(start[:greeting] + rest)
    answer_seconds(listener.port)


def test_a_thousand_connections_that_say_nothing_do_not_silence_it(
    listener: HandshakeServer,
) -> None:
    with contextlib.ExitStack() as connections:
        for number in range(1000):
            connection = socket.create_connection(("127.0.0.1", listener.port), timeout=5)
            connections.enter_context(connection)
            if number % 2:
                connection.sendall(ZMTP_GREETING[: number % 64])
        times = [answer_seconds(listener.port) for _ in range(20)]
    assert statistics.median(times) < 1


def test_a_reader_that_never_reads_answers_costs_bounded_memory_and_nobody_else(
    context: "zmq.Context[Any]",
) -> None:
    """All its answers together would be a gigabyte."""
    large = msgspec.structs.replace(METADATA, agent_metadata=b"x" * 200_000)
    payload = encode_payload(large, {"model": "m"})
    listener = HandshakeServer("127.0.0.1", 0, {(0, 0): payload})
    greedy: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    greedy.setsockopt(zmq.RCVHWM, 1)
    greedy.setsockopt(zmq.SNDHWM, 100_000)
    greedy.connect(f"tcp://127.0.0.1:{listener.port}")
    before, started = resident_bytes(), time.monotonic()
    for _ in range(5_000):
        greedy.send_multipart([b"", encode_request((0, 0))])
    while time.monotonic() - started < 2:
        assert answer_seconds(listener.port) < 5
        assert resident_bytes() - before < 100 << 20
    greedy.close(linger=0)
    listener.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_half_its_answers_come_within_half_a_second_while_eight_clients_abuse_it(
    listener: HandshakeServer,
) -> None:
    """The abusers are a process of their own: in this one they would hold the interpreter's lock,
    which the listener needs, and be measured themselves."""
    command = [sys.executable, "-m", "tests.integration.abusers", str(listener.port), "8"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as abusers:
        assert abusers.stdout is not None
        assert abusers.stdout.readline() == "at it\n"
        times = [answer_seconds(listener.port) for _ in range(60)]
        counted, _ = abusers.communicate("enough\n", timeout=30)
    assert int(counted) > len(times), "they were not at it"
    assert statistics.median(times) < 0.5


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port where connections are taken and nothing is ever said."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        yield silent.getsockname()[1]


def test_a_peer_that_never_answers_delays_no_other_peers_requests(
    launcher: Launcher, alone: Server
) -> None:
    prompt = text_of(90, 1)
    with (
        black_hole() as port,
        launcher.engine("prefill") as prefiller,
        launcher.engine("decode") as decoder,
        ThreadPoolExecutor(12) as pool,
    ):
        params = prefill(prefiller, prompt)
        # Without proof of other tokens, so that each of them is worth loading.
        unproven = {key: value for key, value in params.items() if key != "prefix_proof"}
        dead = [
            {**unproven, "remote_port": port, "remote_engine_id": f"dead-{number}"}
            for number in range(12)
        ]
        started = time.monotonic()
        hopeless = [
            pool.submit(decoder.post, "/v1/completions", decode_body(text_of(90, 10 + i), one))
            for i, one in enumerate(dead)
        ]
        waiting = "disagg_engine_requests_waiting_for_remote_kv"
        wait_for(lambda: metric(decoder, waiting) == 12, "all of them shake hands")
        response = decoder.post("/v1/completions", decode_body(prompt, params))
        assert not any(one.done() for one in hopeless)
        assert response.status_code == 200
        tokens = tuple(response.json()["choices"][0]["token_ids"])
        right = complete(alone, prompt)
        assert tokens == right.tokens
        assert [one.result(timeout=60).status_code for one in hopeless] == [500] * 12
        assert time.monotonic() - started < 60, "one after the other, it would take minutes"
        assert differences([right], [complete(decoder, prompt)]) == []
