"""Requests and messages that end stock vLLM 0.32, or hang it, or make it answer wrong.

R1, R2: params without a peer end the engine. R3, R4: a missing key ends it, or the request waits
forever. R5: prompts of the two legs differ in length. R6, R7: block ids that are no integers, or
flat; unreachable peer. R8: an odd message ends the listener. R9, R10: turns: flag off, expired.
R11: a shorter or edited turn gives wrong KV. R12: params that request nothing pin blocks. R13: an
idle engine uses a core. R14: a notification without `:` ends the engine. R2 and R3 are tested in
test_push.py, R8 in tests/integration/test_listener.py, R9 in test_queue.py, R11 and R13 in
test_answers.py.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import zmq

from engine_ext.wire.handshake import decode_metadata, encode_request
from engine_ext.wire.listener import HandshakeServer
from engine_ext.wire.notifications import Hello, encode_extension
from tests.integration.legs import decode, decode_body, prefill, take_turn
from tests.integration.malformed import Honest, deadly, renamed, with_agent
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.integration.stranger import GARBAGE, NUM_UNKNOWN, handshake, stranger
from tests.unit.engine_ext.scheduler.fakes import told
from tests.vllm.measures import COMPUTED, counted, nothing_left
from tests.vllm.servers import Fleet

PULL = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "tp_size": 1}
NOBODY = {"remote_host": "127.0.0.1", "remote_port": 1}
FAR = [[2**30, 5, 6, 7]]

FORGED: dict[str, tuple[dict[str, Any], int]] = {
    "R1 nobody named": ({"do_remote_prefill": True}, 200),
    "R4 no host": ({**PULL, "remote_block_ids": [[1]]}, 200),
    "R6 block ids that are none": ({**PULL, **NOBODY, "remote_block_ids": ["a"]}, 200),
    "a port that is none": (
        {**PULL, **NOBODY, "remote_port": "x", "remote_block_ids": [[1]]},
        200,
    ),
    "R7 a flat list, nobody there": ({**PULL, **NOBODY, "remote_block_ids": [0, 1, 2, 3]}, 500),
    "nobody there": ({**PULL, **NOBODY, "remote_block_ids": [[0]]}, 500),
    "R12 nothing asked": ({"foo": 1}, 200),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_params_cost_their_request_at_most(
    decoder: Server, alone: Server, name: str
) -> None:
    params, status = FORGED[name]
    # A prompt of its own: what D holds already, it does not fetch.
    prompt = tokens_of(100, 3000 + list(FORGED).index(name))
    with nothing_left(decoder):
        response = decoder.post("/v1/completions", decode_body(prompt, params))
        assert response.status_code == status, response.text
        assert complete(decoder, prompt).tokens == complete(alone, prompt).tokens


CHANGED: dict[str, tuple[Callable[[list[int]], list[int]], dict[str, Any], int]] = {
    "R5 a shorter prefill": (lambda prompt: prompt[:40], {}, 200),
    "A2 a longer prefill": (lambda prompt: [*prompt, *tokens_of(100, 8)], {}, 200),
    "blocks that P has not": (lambda prompt: prompt, {"remote_block_ids": FAR}, 500),
    "another engine's name": (lambda prompt: prompt, {"remote_engine_id": "other"}, 500),
}
"""As if P had said so."""


@pytest.mark.parametrize("name", CHANGED)
def test_legs_that_do_not_fit_are_answered_right_or_fail_alone(
    prefiller: Server, decoder: Server, alone: Server, name: str
) -> None:
    change, forged, status = CHANGED[name]
    prompt = tokens_of(100, 3100 + list(CHANGED).index(name))
    params = prefill(prefiller, change(prompt))
    response = decoder.post("/v1/completions", decode_body(prompt, told(params, **forged)))
    assert response.status_code == status, response.text
    right = complete(alone, prompt)
    if status == 200:
        assert tuple(response.json()["choices"][0]["token_ids"]) == right.tokens
    else:
        again = decode(decoder, prompt, prefill(prefiller, prompt))
        assert differences([right], [again.answer]) == []


@pytest.mark.parametrize("forged", [{"remote_block_ids": FAR}, {"remote_engine_id": "other"}])
def test_what_p_has_not_said_is_computed(
    prefiller: Server, decoder: Server, alone: Server, forged: dict[str, Any]
) -> None:
    prompt = tokens_of(100, 3150 + ("remote_engine_id" in forged))
    params = prefill(prefiller, prompt)
    turn = decode(decoder, prompt, {**params, **forged})
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def test_r8_the_handshake_is_answered_whatever_was_sent_before(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(50, 3200)
    params = prefill(prefiller, prompt)
    context: zmq.Context[Any] = zmq.Context()
    peer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    peer.connect(f"tcp://127.0.0.1:{params['remote_port']}")
    for message in (b"", b"\xc1\xc1", b"x" * 5000, encode_request((0, 7))):
        for frames in ([message], [b"", message], [b"a", b"b", message, b"d"]):
            peer.send_multipart(frames)
    payload = handshake(params)
    assert decode_metadata(payload).engine_id == params["remote_engine_id"]
    context.destroy(linger=0)
    turn = decode(decoder, prompt, params)
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def test_r10_a_turn_that_is_over_is_computed(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    """Expired by its own word; read before."""
    prompt = tokens_of(300, 3300)
    right = complete(alone, prompt)
    longer = [*prompt, *right.tokens, *tokens_of(40, 3301)]

    def computed(params: dict[str, Any]) -> float:
        before = metric(prefiller, COMPUTED)
        answer = decode(decoder, longer, prefill(prefiller, longer, params)).answer
        assert differences([complete(alone, longer)], [answer]) == []
        return metric(prefiller, COMPUTED) - before

    with nothing_left(prefiller, decoder):
        expired, held = (take_turn(prefiller, decoder, prompt).params for _ in range(2))
        assert expired is not None
        assert held is not None
        assert computed({**expired, "retained_until": time.time() - 1}) == len(longer)
        assert computed(held) <= len(longer) - held["remote_num_tokens"] + 1
        assert computed(held) == len(longer)


def test_r14_notifications_that_make_no_sense_are_survived(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    for server in (prefiller, decoder):
        hears_garbage(server)
    prompt = tokens_of(64, 3401)
    turn = decode(decoder, prompt, prefill(prefiller, prompt))
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def test_malformed_metadata_ends_no_engine(
    prefiller: Server, decoder: Server, alone: Server, fleet: Fleet
) -> None:
    """A stranger's, in a hello to each engine and in answer to D's handshake. No secret is set."""
    forgers = [Honest(f"stranger {number}") for number in range(3)]
    for server in (prefiller, decoder):
        for number, forger in enumerate(forgers):
            hears_malformed_hello(server, forger, deadly(forger.metadata)[number])
    prompt = tokens_of(100, 3500)
    params = prefill(prefiller, prompt)
    payload = handshake(params)
    for number, metadata in enumerate(deadly(forgers[0].metadata)):
        answer = with_agent(payload, renamed(metadata, f"another {number}"))
        (port,) = fleet.free_ports(1)
        listener = HandshakeServer("127.0.0.1", port, {(0, 0): answer})
        try:
            asked = decode_body(prompt, told(params, remote_host="127.0.0.1", remote_port=port))
            assert decoder.post("/v1/completions", asked).status_code == 500
        finally:
            listener.close()
    for server in (prefiller, decoder):
        lost = partial(counted_after_a_step, server, "validators_lost")
        wait_for(lost, f"{server.name} has lost a validator")
    turn = decode(decoder, prompt, prefill(prefiller, prompt))
    assert differences([complete(alone, prompt)], [turn.answer]) == []


def hears_malformed_hello(server: Server, forger: Honest, metadata: bytes) -> None:
    before = counted(server, "metadata_refused")
    answered = decode_metadata(handshake(prefill(server, tokens_of(8, 3501))))
    target = forger.agent.add_remote_agent(answered.agent_metadata)
    forger.agent.send_notif(target, encode_extension(Hello(metadata)))

    def is_refused() -> bool:
        forger.agent.get_new_notifs()
        return counted_after_a_step(server, "metadata_refused") > before

    wait_for(is_refused, "the metadata is refused")


def counted_after_a_step(server: Server, name: str) -> float:
    """vLLM counts when it steps."""
    complete(server, [1], 1)
    return counted(server, name)


def hears_garbage(server: Server) -> None:
    before = counted(server, "notifications_unknown")
    with stranger() as agent:
        metadata = decode_metadata(handshake(prefill(server, tokens_of(8, 3400))))
        name = agent.add_remote(metadata.agent_metadata)
        for message in GARBAGE:
            agent.notify(name, message)

        def heard() -> bool:
            """What an agent sends leaves when it polls; vLLM counts when it steps."""
            agent.notifications()
            complete(server, [1], 1)
            return counted(server, "notifications_unknown") - before >= NUM_UNKNOWN

        wait_for(heard, "the notifications have arrived")
