"""A stranger's malformed NIXL metadata ends a process that the engine can lose, and not the engine.

No secret is set. The agents whose metadata is changed are real.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_ext.wire import notifications as wire
from engine_ext.wire.handshake import decode_metadata
from engine_ext.wire.listener import HandshakeServer
from tests.integration.legs import decode, decode_body, prefill
from tests.integration.malformed import Honest, deadly, renamed, with_agent
from tests.integration.oracle import complete, differences, text_of
from tests.integration.processes import Server, family, metric, wait_for
from tests.integration.stranger import handshake
from tests.unit.engine_ext.scheduler.fakes import told

ACCEPTED = "disagg_engine_kv_metadata_accepted_total"
REFUSED = "disagg_engine_kv_metadata_refused_total"
LOST = "disagg_engine_kv_validators_lost_total"


@pytest.fixture(autouse=True)
def every_engine_serves_afterwards(
    prefiller: Server, decoder: Server, alone: Server
) -> Iterator[None]:
    yield
    prompt = text_of(64, 17)
    turn = decode(decoder, prompt, prefill(prefiller, prompt))
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def say_hello(server: Server, stranger: Honest, metadata: bytes) -> None:
    """Returns when the engine has judged it."""
    params = prefill(server, text_of(8, 18))
    target = stranger.agent.add_remote_agent(decode_metadata(handshake(params)).agent_metadata)
    before = metric(server, ACCEPTED) + metric(server, REFUSED)
    stranger.agent.send_notif(target, wire.encode_extension(wire.Hello(metadata)))

    def is_judged() -> bool:
        stranger.agent.get_new_notifs()
        return metric(server, ACCEPTED) + metric(server, REFUSED) > before

    wait_for(is_judged, "the engine has judged the metadata", 20, poll=0.02)


def test_an_engine_survives_a_hello_with_malformed_metadata(prefiller: Server) -> None:
    """Under names of their own: NIXL takes no more from a name of which it refused something."""
    accepted, refused = metric(prefiller, ACCEPTED), metric(prefiller, REFUSED)
    strangers = [Honest(f"stranger {number}") for number in range(3)]
    for number, stranger in enumerate(strangers):
        say_hello(prefiller, stranger, deadly(stranger.metadata)[number])
    assert metric(prefiller, REFUSED) == refused + len(strangers)
    assert metric(prefiller, LOST) >= 1
    say_hello(prefiller, strangers[0], strangers[0].metadata)
    assert metric(prefiller, ACCEPTED) == accepted + 1


def test_an_engine_survives_a_handshake_that_answers_malformed_metadata(
    prefiller: Server, decoder: Server, alone: Server, free_ports: Callable[[int], list[int]]
) -> None:
    prompt = text_of(100, 19)
    params = prefill(prefiller, prompt)
    (port,) = free_ports(1)
    for number, metadata in enumerate(deadly(Honest("honest").metadata)):
        named = renamed(metadata, f"stranger {number}")
        assert status_with_another_host(decoder, prompt, params, named, port) == 500
    assert metric(decoder, LOST) >= 1
    turn = decode(decoder, prompt, params)
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def status_with_another_host(
    decoder: Server, prompt: str, params: dict[str, Any], agent_metadata: bytes, port: int
) -> int:
    """Of a request that names P at a port where a stranger answers with that metadata."""
    answer = with_agent(handshake(params), agent_metadata)
    listener = HandshakeServer("127.0.0.1", port, {(0, 0): answer})
    try:
        forged = told(params, remote_host="127.0.0.1", remote_port=port)
        return decoder.post("/v1/completions", decode_body(prompt, forged)).status_code
    finally:
        listener.close()


def test_a_validator_that_stands_still_delays_peers_that_are_not_known_and_no_others(
    prefiller: Server, decoder: Server, alone: Server, free_ports: Callable[[int], list[int]]
) -> None:
    prompts = [text_of(100, number) for number in (23, 24, 25)]
    waker = Honest("waker")
    say_hello(decoder, waker, waker.metadata)  # Another test may have had it replaced just now.
    decode(decoder, prompts[0], prefill(prefiller, prompts[0]))
    [validator] = [pid for pid in family(decoder.process.pid) if is_validator(pid)]
    os.kill(validator, signal.SIGSTOP)
    turn = decode(decoder, prompts[1], prefill(prefiller, prompts[1]))
    assert differences([complete(alone, prompts[1])], [turn.answer]) == []
    params = prefill(prefiller, prompts[2])
    unknown = renamed(Honest("honest").metadata, "not known")
    (port,) = free_ports(1)
    assert status_with_another_host(decoder, prompts[2], params, unknown, port) == 500
    wait_for(lambda: not is_validator(validator), "it is replaced", 20)


def is_validator(pid: int) -> bool:
    try:
        return b"validator_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("seed", [1])
def test_no_flipped_byte_of_metadata_and_no_random_change_ends_the_agent(seed: int) -> None:
    """Each byte behind the `Conns` tag; an agent and a validator in a process of their own."""
    command = [sys.executable, "-m", "tests.integration.validating_agent", str(seed), "300"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    total, accepted, refused, lost, is_honest_known = ended.stdout.splitlines()[-1].split()
    assert int(accepted) + int(refused) == int(total)
    assert int(accepted) > 0
    assert int(refused) > int(total) / 3
    assert int(lost) >= 1
    assert is_honest_known == "True"
