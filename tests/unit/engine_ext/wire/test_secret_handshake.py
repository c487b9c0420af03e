"""Who is answered what, and by whom: the pure half, then over real sockets."""

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.common.access import OPEN, Access, SharedSecret, parse_networks
from engine_ext.wire.dialer import HandshakeClient
from engine_ext.wire.errors import EXTENSION_VERSION, WireError
from engine_ext.wire.handshake import (
    HandshakePayload,
    HandshakeRefusedError,
    decode_metadata,
    decode_payload,
    encode_payload,
    encode_request,
)
from engine_ext.wire.listener import HandshakeServer
from engine_ext.wire.secret_handshake import (
    CHALLENGE_SECONDS,
    Challenges,
    ClientIdentity,
    HandshakeAnswers,
    Prover,
    SideChannelAddress,
)
from tests.unit.engine_ext.wire.metadata import METADATA as SOME_METADATA
from tests.unit.engine_ext.wire.waiting import answer, until

METADATA = msgspec.structs.replace(
    SOME_METADATA,
    agent_metadata=b"what a stranger must not have",
    disagg_ext=EXTENSION_VERSION,
)
PAYLOAD = encode_payload(METADATA, {"model": "m"})
RANK = (0, 0)
PLACE = SideChannelAddress("10.0.0.7", 5600)
ASKER = ClientIdentity(b"\0conn", "10.0.0.9")
SECRET = SharedSecret.of(b"a secret of the whole fleet")
REQUIRED, MIXED = Access(SECRET), Access(SECRET, is_mixed=True)
NOW = 1000.0


def listener(access: Access) -> HandshakeAnswers:
    return HandshakeAnswers({RANK: PAYLOAD}, access, PLACE, PLACE.host)


def shake(
    theirs: HandshakeAnswers,
    ours: Access,
    dialled: SideChannelAddress = PLACE,
    relay: Callable[[bytes], bytes] = lambda message: message,
) -> HandshakePayload:
    """Both questions, if there are two. `relay` has every answer in its hands."""
    prover = Prover(ours, RANK, dialled)
    question = encode_request(RANK)
    while True:
        payload, mac, _ = theirs.answer(question, ASKER, NOW)
        frames = [relay(payload), b"clock"] + ([] if mac is None else [mac])
        taken = prover.take(frames)
        if isinstance(taken, HandshakePayload):
            return taken
        question = taken


def extension(payload: HandshakePayload) -> int | None:
    return decode_metadata(payload).disagg_ext


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (OPEN, OPEN, EXTENSION_VERSION),
        (REQUIRED, REQUIRED, EXTENSION_VERSION),
        (REQUIRED, MIXED, EXTENSION_VERSION),
        (MIXED, REQUIRED, EXTENSION_VERSION),
        (MIXED, MIXED, EXTENSION_VERSION),
        (MIXED, OPEN, None),
        (OPEN, MIXED, None),
    ],
)
def test_only_two_holders_of_the_secret_or_two_without_one_speak_our_extension(
    theirs: Access, ours: Access, expected: int | None
) -> None:
    assert extension(shake(listener(theirs), ours)) == expected


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (REQUIRED, OPEN),
        (OPEN, REQUIRED),
        (Access(SharedSecret.of(b"another secret altogether")), REQUIRED),
        (Access(SharedSecret.of(b"another secret altogether"), is_mixed=True), MIXED),
    ],
)
def test_engines_that_do_not_share_what_one_asks_for_do_not_meet(
    theirs: Access, ours: Access
) -> None:
    with pytest.raises(WireError, match="secret"):
        shake(listener(theirs), ours)


def test_a_stranger_learns_nothing_but_that_there_is_a_secret() -> None:
    answer, mac, _ = listener(REQUIRED).answer(encode_request(RANK), ASKER, NOW)
    assert mac is None
    assert set(msgspec.msgpack.decode(answer)) == {"error", "challenge"}
    with pytest.raises(HandshakeRefusedError, match="shared secret"):
        decode_payload(answer)


@given(st.binary(max_size=400))
def test_whatever_is_asked_without_the_secret_no_metadata_leaves(request: bytes) -> None:
    answer, *_ = listener(REQUIRED).answer(request, ASKER, NOW)
    assert METADATA.agent_metadata not in answer


@given(challenge=st.binary(max_size=64), nonce=st.binary(max_size=32), mac=st.binary(max_size=64))
def test_no_made_up_proof_is_answered(challenge: bytes, nonce: bytes, mac: bytes) -> None:
    made_up = msgspec.msgpack.encode((b"disagg_meta_msg", 0, 0, challenge, nonce, mac))
    answer, seal, _ = listener(REQUIRED).answer(made_up, ASKER, NOW)
    assert seal is None
    assert METADATA.agent_metadata not in answer


def test_an_answer_that_was_changed_on_the_way_is_not_believed() -> None:
    other = encode_payload(msgspec.structs.replace(METADATA, agent_metadata=b"mine"), {})

    def swap(answer: bytes) -> bytes:
        return other if METADATA.agent_metadata in answer else answer

    with pytest.raises(WireError, match="does not hold the shared secret"):
        shake(listener(REQUIRED), REQUIRED, relay=swap)


def test_who_is_dialled_in_an_engines_stead_cannot_pass_question_and_answer_on() -> None:
    with pytest.raises(WireError, match=r"another address than 10\.0\.0\.7:5600"):
        shake(listener(REQUIRED), REQUIRED, dialled=SideChannelAddress("10.6.6.6", 5600))


@given(st.floats(0, CHALLENGE_SECONDS))
def test_a_challenge_is_good_for_its_connection_and_its_time(after: float) -> None:
    challenges = Challenges()
    challenge = challenges.make(ASKER, NOW)
    assert challenges.accept(challenge, ASKER, NOW + after)
    assert not challenges.accept(challenge, ASKER, NOW + CHALLENGE_SECONDS + 0.01 + after)
    assert not challenges.accept(challenge, ASKER, NOW - 0.01 - after)
    assert not challenges.accept(challenge, ASKER._replace(identity=b"\0else"), NOW)
    assert not challenges.accept(challenge, ASKER._replace(address="10.0.0.8"), NOW)
    assert not Challenges().accept(challenge, ASKER, NOW)


@given(st.binary(max_size=64), st.integers(0, 39), st.integers(1, 255))
def test_no_other_bytes_are_a_challenge(garbage: bytes, place: int, flip: int) -> None:
    challenges = Challenges()
    assert not challenges.accept(garbage, ASKER, NOW)
    forged = bytearray(challenges.make(ASKER, NOW))
    forged[place] ^= flip
    assert not challenges.accept(bytes(forged), ASKER, NOW)


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4))
def test_whatever_a_listener_answers_a_dialer_raises_one_error_at_most(frames: list[bytes]) -> None:
    prover = Prover(REQUIRED, RANK, PLACE)
    try:
        assert isinstance(prover.take(frames), bytes)
        prover.take(frames)
    except WireError:
        pass


def test_an_address_outside_of_the_allowed_peers_is_refused_whatever_it_asks() -> None:
    access = Access(SECRET, peers=parse_networks("allowed_peers", ["10.0.0.0/28", "::1"]))
    theirs = listener(access)
    assert extension(shake(theirs, REQUIRED)) == EXTENSION_VERSION
    for address in ("10.0.0.16", "192.168.0.1", "::2", "", "nonsense"):
        answer, *_ = theirs.answer(encode_request(RANK), ASKER._replace(address=address), NOW)
        with pytest.raises(HandshakeRefusedError, match="allowed_peers"):
            decode_payload(answer)
    for address in ("10.0.0.15", "::1", "::ffff:10.0.0.1", PLACE.host):
        answer, *_ = theirs.answer(encode_request(RANK), ASKER._replace(address=address), NOW)
        assert b"shared secret" in answer


def dial(server: HandshakeServer, access: Access, announced: str) -> HandshakePayload:
    return answer(HandshakeClient("127.0.0.1", server.port, RANK, access, announced))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_over_sockets_the_secret_is_proven_both_ways(host: str) -> None:
    server = HandshakeServer(host, 0, {RANK: PAYLOAD}, REQUIRED)
    try:
        assert dial(server, REQUIRED, host) == decode_payload(PAYLOAD)
        with pytest.raises(HandshakeRefusedError):
            dial(server, OPEN, host)
        with pytest.raises(WireError, match="another address than"):
            dial(server, REQUIRED, "another.host")
    finally:
        server.close()


def test_over_sockets_the_first_question_is_stocks_to_the_byte(
    context: "zmq.Context[Any]",
) -> None:
    stock: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    port = stock.bind_to_random_port("tcp://127.0.0.1")
    client = HandshakeClient("127.0.0.1", port, (0, 3), MIXED)
    try:
        until(lambda: client.receive() is not None or stock.poll(0))
        _, *frames = stock.recv_multipart()
    finally:
        client.close()
        stock.close(linger=0)
    assert frames == [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 3))]


def test_over_sockets_the_listener_lets_in_only_who_it_may_and_its_own_engine() -> None:
    nobody = parse_networks("allowed_peers", ["192.0.2.0/24"])
    elsewhere = HandshakeServer("0.0.0.0", 0, {RANK: PAYLOAD}, Access(peers=nobody))
    here = HandshakeServer("127.0.0.1", 0, {RANK: PAYLOAD}, Access(peers=nobody))
    try:
        with pytest.raises(WireError, match="is this engine one of its allowed_peers"):
            dial(elsewhere, OPEN, "127.0.0.1")
        assert dial(here, OPEN, "127.0.0.1") == decode_payload(PAYLOAD)
    finally:
        elsewhere.close()
        here.close()


def test_a_secret_is_shown_nowhere_and_a_short_one_is_none() -> None:
    shared = secrets.token_hex(32).encode()
    access = Access(SharedSecret.of(shared))
    assert access.secret is not None
    for shown in (repr(access), str(access)):
        assert shared.decode() not in shown
        assert repr(access.secret.seal_key) not in shown
    with pytest.raises(ValueError, match="15 bytes"):
        SharedSecret.of(b"x" * 15)
