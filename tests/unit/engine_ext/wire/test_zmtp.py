"""ZMTP, byte by byte: what libzmq says is what we say, and whatever a peer says is bounded."""

import socket
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.wire.errors import WireError
from engine_ext.wire.zmtp import (
    GREETING,
    GREETING_BYTES,
    MAX_COMMAND_BYTES,
    MAX_COMMANDS,
    MessageLimits,
    ZmtpSession,
)
from tests.unit.engine_ext.wire.waiting import SECONDS

LIMITS = MessageLimits(frames=3, num_bytes=1000)

KINDS: dict[bytes, int] = {b"REQ": zmq.REQ, b"DEALER": zmq.DEALER, b"ROUTER": zmq.ROUTER}


def said(session: ZmtpSession) -> bytes:
    """What it has to say by now."""
    told = b"".join(session.outgoing)
    session.outgoing.clear()
    return told


def frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body


def ready(kind: bytes) -> bytes:
    return frame(4, b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind)


def met(peer: bytes = b"REQ") -> ZmtpSession:
    """A session that its peer has greeted, and that has nothing left to say."""
    session = ZmtpSession(b"ROUTER", LIMITS)
    session.feed(GREETING + ready(peer))
    assert session.next_message() is None
    assert session.is_ready
    said(session)
    return session


def messages(session: ZmtpSession) -> list[list[bytes]]:
    return list(iter(session.next_message, None))


def recorded(context: "zmq.Context[Any]", kind: bytes, peer: bytes) -> bytes:
    """All that libzmq says until it has heard READY."""
    with (
        context.socket(KINDS[kind]) as theirs,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        theirs.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(SECONDS)
            connection.sendall(GREETING + ready(peer))
            return exactly(connection, len(said(ZmtpSession(b"ROUTER", LIMITS))) - 6 + len(kind))


def exactly(connection: socket.socket, count: int) -> bytes:
    heard = b""
    while len(heard) < count:
        heard += connection.recv(count - len(heard))
    return heard


@pytest.mark.parametrize(("kind", "peer"), [(b"ROUTER", b"DEALER"), (b"DEALER", b"ROUTER")])
def test_the_greeting_and_ready_are_libzmqs_to_the_byte(
    context: "zmq.Context[Any]", kind: bytes, peer: bytes
) -> None:
    """But for the minor version: 3.1 adds commands, of which we need none."""
    theirs = bytearray(recorded(context, kind, peer))
    assert theirs[11] in (0, 1)
    theirs[11] = 0
    assert said(ZmtpSession(kind, LIMITS)) == bytes(theirs)


@pytest.mark.parametrize(
    ("ours", "peer"), [(b"ROUTER", b"REQ"), (b"ROUTER", b"DEALER"), (b"DEALER", b"ROUTER")]
)
def test_what_libzmq_says_of_itself_is_understood(
    context: "zmq.Context[Any]", ours: bytes, peer: bytes
) -> None:
    session = ZmtpSession(ours, LIMITS)
    session.feed(recorded(context, peer, ours))
    assert session.next_message() is None
    assert session.is_ready


@pytest.mark.parametrize("peer", [b"PUB", b"", b"router", b"REQ\0"])
def test_a_socket_of_another_type_is_refused(peer: bytes) -> None:
    with pytest.raises(WireError, match="socket of type"):
        met(peer=peer)


FRAMES = st.lists(st.binary(max_size=300), min_size=1, max_size=3)


@given(sent=st.lists(FRAMES, max_size=4), cuts=st.lists(st.integers(1, 400), max_size=30))
def test_however_the_bytes_are_cut_the_messages_are_the_same(
    sent: list[list[bytes]], cuts: list[int]
) -> None:
    dialer, listener = ZmtpSession(b"DEALER", LIMITS), ZmtpSession(b"ROUTER", LIMITS)
    for frames in sent:
        dialer.send(frames)
    stream, heard = said(dialer), list[list[bytes]]()
    for cut in [*cuts, len(stream)]:
        listener.feed(stream[:cut])
        stream = stream[cut:]
        heard += messages(listener)
    assert heard == sent
    assert listener.num_kept == 0


def grammar() -> st.SearchStrategy[bytes]:
    """Bytes that get past the first checks more often than chance would have it."""
    framed = st.builds(frame, st.integers(0, 8), st.binary(max_size=400))
    command = st.sampled_from([b"\x04PING\0\1abc", b"\x05ERROR\x03why", b"\x05READY", b"\x04PONG"])
    part = framed | st.binary(max_size=40) | st.builds(frame, st.just(4), command)
    start = st.sampled_from([b"", GREETING, GREETING + ready(b"REQ"), GREETING[:10]])
    return st.builds(lambda first, rest: first + b"".join(rest), start, st.lists(part, max_size=12))


@given(stream=grammar(), chunk=st.integers(1, 700))
def test_whatever_a_peer_says_costs_one_error_at_most_and_no_more_than_its_limits(
    stream: bytes, chunk: int
) -> None:
    session = ZmtpSession(b"ROUTER", LIMITS)
    most = LIMITS.num_bytes + MAX_COMMAND_BYTES + GREETING_BYTES
    try:
        for at in range(0, len(stream), chunk):
            session.feed(stream[at : at + chunk])
            for message in messages(session):
                assert len(message) <= LIMITS.frames
                assert sum(map(len, message)) <= LIMITS.num_bytes
            assert session.num_kept <= most
            assert sum(map(len, session.outgoing)) <= len(stream) + 200
    except WireError:
        pass


def test_a_message_that_does_not_end_is_refused_by_its_first_frame_too_many() -> None:
    session = met()
    session.feed(frame(1, b"x") * LIMITS.frames)
    assert session.next_message() is None
    session.feed(frame(1, b"x")[:2])
    with pytest.raises(WireError, match="more than 3 frames"):
        session.next_message()


def test_empty_frames_count_as_frames() -> None:
    session = met()
    session.feed(frame(1, b"") * 1000)
    with pytest.raises(WireError, match="more than 3 frames"):
        session.next_message()


def test_a_frame_that_is_too_large_is_refused_by_what_it_announces() -> None:
    for size in (LIMITS.num_bytes + 1, 1 << 40, (1 << 64) - 1):
        session = met()
        session.feed(b"\x02" + size.to_bytes(8, "big"))
        with pytest.raises(WireError, match="more than 1000 bytes"):
            session.next_message()


def test_frames_that_are_too_large_together_are_refused() -> None:
    session = met()
    session.feed(frame(1, b"x" * 600) + frame(0, b"x" * 401)[:9])
    with pytest.raises(WireError, match="more than 1000 bytes"):
        session.next_message()
    assert session.num_kept <= LIMITS.num_bytes


def test_a_ping_is_answered_with_what_it_brings_and_unknown_commands_mean_nothing() -> None:
    session = met()
    session.feed(frame(1, b"a") + frame(4, b"\x04PING\0\x0awhat") + frame(4, b"\x03ODDx"))
    session.feed(frame(0, b"b"))
    assert session.next_message() == [b"a", b"b"]
    assert said(session) == frame(4, b"\x04PONGwhat")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (b"\x04PING\0\0" + b"x" * 17, "PING"),
        (b"\x05ERROR\x06enough", "enough"),
        (b"\x05ERROR\x06eno", "cut short"),
        (b"", "cut short"),
        (b"\x07x", "cut short"),
        (b"\x03ODD" + b"x" * MAX_COMMAND_BYTES, "command of"),
    ],
)
def test_a_command_that_makes_no_sense_is_an_end(command: bytes, problem: str) -> None:
    session = met()
    session.feed(frame(4, command))
    with pytest.raises(WireError, match=problem):
        session.next_message()


def test_commands_without_end_are_an_end() -> None:
    session = met()
    session.feed(frame(4, b"\x04PING\0\0") * MAX_COMMANDS)
    with pytest.raises(WireError, match="after 64 others"):
        session.next_message()
    assert len(session.outgoing) < MAX_COMMANDS


def test_a_message_ends_the_count_of_commands() -> None:
    session = met()
    for _ in range(5):
        session.feed(frame(4, b"\x04PONG") * (MAX_COMMANDS - 1) + frame(0, b"x"))
        assert session.next_message() == [b"x"]


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (b"GET / HTTP/1.1", "not ZMTP"),
        (b"\xff" + b"\0" * 8 + b"\x7e", "not ZMTP"),
        (GREETING[:10] + b"\x02" + GREETING[11:], "version 2"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:], "CURVE"),
        (GREETING + frame(0, b"x"), "before the ZMTP handshake"),
        (GREETING + frame(4, b"\x04PING\0\0"), "READY is due"),
        (GREETING + frame(4, b"\x05READY\x0bSocket-Type\0\0\0\x09REQ"), "cut short"),
        (GREETING + frame(4, b"\x05READY"), "socket of type None"),
        (GREETING + b"\x05\0", "flags 0x5"),
        (GREETING + b"\x08\0", "flags 0x8"),
    ],
)
def test_a_beginning_that_is_none_is_an_end(start: bytes, problem: str) -> None:
    session = ZmtpSession(b"ROUTER", LIMITS)
    session.feed(start)
    with pytest.raises(WireError, match=problem):
        session.next_message()


def test_names_of_properties_are_the_same_in_any_case() -> None:
    session = ZmtpSession(b"ROUTER", LIMITS)
    session.feed(GREETING + frame(4, b"\x05READY\x0bSOCKET-TYPE\0\0\0\x03REQ"))
    assert session.next_message() is None
    assert session.is_ready
