"""What a dialer takes from whoever it was sent to: a listener's answer, and else one error."""

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.common.access import OPEN, Access, parse_networks
from engine_ext.common.types import PeerAddress
from engine_ext.wire.dialer import CHUNK, REPLY, HandshakeClient, PeerRank, TcpDialer
from engine_ext.wire.errors import WireError
from engine_ext.wire.handshake import MAX_REPLY_BYTES, decode_payload, encode_payload
from engine_ext.wire.zmtp import GREETING
from tests.unit.engine_ext.wire.metadata import METADATA
from tests.unit.engine_ext.wire.waiting import answer, until

PAYLOAD = encode_payload(METADATA, {"model": "m"})
RANK = (0, 3)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER"


class Talker:
    """A listener that says what it likes to one client, who takes it as it comes."""

    def __init__(self, client: HandshakeClient, connection: socket.socket) -> None:
        self.client = client
        self.connection = connection
        self.answer: object = None
        connection.setblocking(False)

    def says(self, data: bytes) -> None:
        """To the end, or to the client's. Raises what the client does."""
        while data:
            _, writable, _ = select.select([], [self.connection], [], 0)
            if writable:
                data = data[self.connection.send(data) :]
            self.answer = self.client.receive()


@contextmanager
def talking() -> Iterator[Talker]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        client = HandshakeClient("127.0.0.1", door.getsockname()[1], RANK)
        connection, _ = door.accept()
        with connection:
            try:
                yield Talker(client, connection)
            finally:
                client.close()


def test_a_stock_listener_is_asked_in_its_own_words_and_understood(
    context: "zmq.Context[Any]",
) -> None:
    with context.socket(zmq.ROUTER) as stock:
        port = stock.bind_to_random_port("tcp://127.0.0.1")
        client = HandshakeClient("127.0.0.1", port, RANK)
        until(lambda: client.receive() is not None or stock.poll(0))
        identity, empty, question = stock.recv_multipart()
        assert empty == b""
        assert question == msgspec.msgpack.encode((b"get_meta_msg", *RANK))
        stock.send_multipart([identity, b"", PAYLOAD, msgspec.msgpack.encode(1.5)])
        assert answer(client) == decode_payload(PAYLOAD)


def test_an_answer_as_large_as_allowed_is_taken_in_pieces(context: "zmq.Context[Any]") -> None:
    large = encode_payload(
        msgspec.structs.replace(METADATA, agent_metadata=b"x" * (MAX_REPLY_BYTES - 2000)), {}
    )
    with context.socket(zmq.ROUTER) as stock:
        port = stock.bind_to_random_port("tcp://127.0.0.1")
        client = HandshakeClient("127.0.0.1", port, RANK)
        until(lambda: client.receive() is not None or stock.poll(0))
        identity, *_ = stock.recv_multipart()
        stock.send_multipart([identity, b"", large, b"\xc0"])
        assert answer(client) == decode_payload(large)


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20])
def test_an_answer_that_never_ends_is_an_error_before_it_is_large(size: int) -> None:
    part = b"\x03" + size.to_bytes(8, "big") + b"A" * size
    with talking() as talker:
        talker.says(GREETING + READY)
        with pytest.raises(WireError, match="a message of more than"):
            talker.says(part * 100)
        assert talker.client.num_bytes_kept <= REPLY.num_bytes + CHUNK


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-x\r\n",
        GREETING + READY[:-6] + b"DEALER",
        GREETING + b"\0\x01x",
        GREETING + READY + b"\0\x01x",
        GREETING + READY + b"\x01\x01x\0\x01x",
        GREETING + READY + b"\x01\0\0\x01x",
        GREETING + READY + b"\x04\x09\x04PING\0\0ab" * 100,
        GREETING + READY + b"\x04\x0a\x05ERROR\x03bad",
    ],
    ids=["ssh", "dealer", "too early", "one frame", "no delimiter", "no map", "pings", "error"],
)
def test_an_answer_that_is_none_is_an_error(said: bytes) -> None:
    with talking() as talker, pytest.raises(WireError):
        talker.says(said + b"\0")


@given(st.binary(max_size=300), st.sampled_from([b"", GREETING, GREETING + READY]))
@settings(max_examples=50, deadline=None)
def test_whatever_is_answered_is_one_error_at_most(said: bytes, start: bytes) -> None:
    with talking() as talker, suppress(WireError):
        talker.says(start + said)


def test_a_listener_that_is_not_there_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(WireError, match=f"127.0.0.1:{port}: .*refused"):
        answer(HandshakeClient("127.0.0.1", port, RANK))


def test_a_listener_that_goes_is_an_error() -> None:
    with talking() as talker:
        talker.says(GREETING + READY)
        talker.connection.close()
        with pytest.raises(WireError, match=r"closed the connection|reset by peer"):
            until(talker.client.receive)


def test_who_is_not_let_in_is_told_what_to_look_at() -> None:
    with talking() as talker:
        talker.connection.close()
        with pytest.raises(WireError, match="allowed_peers"):
            until(talker.client.receive)


ODD_HOSTS = [
    "::ffff:127.0.0.2%lo]:0;[::ffff:127.0.0.1",
    "::ffff:127.0.0.2%1]:0;[::ffff:127.0.0.1",
    "::ffff:127.0.0.2%lo;127.0.0.1",
    "127.0.0.2;127.0.0.1",
    "localhost",
    "127.1",
    "0x7f.1",
    "",
]


@pytest.mark.parametrize("host", ODD_HOSTS)
def test_what_is_dialled_is_what_was_judged_and_nothing_is_looked_up(host: str) -> None:
    """127.0.0.1 has a listener, and is not allowed."""
    access = Access(peers=parse_networks("allowed_peers", ["127.0.0.2"]))
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.setblocking(False)
        peer = PeerRank(PeerAddress("p", host, door.getsockname()[1]), 0)
        with pytest.raises(WireError):
            to_the_end(TcpDialer(lambda name: name, access), peer)
        with pytest.raises(BlockingIOError):
            door.accept()


def to_the_end(dialer: TcpDialer, peer: PeerRank) -> None:
    handshake = dialer.dial(peer)
    try:
        until(handshake.receive)
    finally:
        handshake.close()


@pytest.mark.parametrize("host", ["localhost", "127.1", "", "fe80::1%nowhere0", "not an address"])
def test_a_client_dials_numbers_alone(host: str) -> None:
    with pytest.raises(WireError, match=r"handshake with|numeric"):
        HandshakeClient(host, 1, RANK, OPEN)


@pytest.mark.parametrize("port", [-1, 1 << 16, 1 << 70])
def test_a_port_that_is_none_is_an_error(port: int) -> None:
    with pytest.raises(WireError, match="port"):
        HandshakeClient("127.0.0.1", port, RANK)
