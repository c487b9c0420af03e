"""The listener's door over real sockets: who comes in, for how long, and what it may cost.

Nothing is measured: what is kept is counted, and what must happen is waited for.
"""

import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import msgspec
import pytest
import zmq

from engine_ext.common.access import OPEN, Access, SharedSecret, parse_networks
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.wire import listener as listener_module
from engine_ext.wire.channel import Channel
from engine_ext.wire.dialer import HandshakeClient
from engine_ext.wire.errors import Rank
from engine_ext.wire.handshake import Proof, decode_payload, encode_payload, encode_request
from engine_ext.wire.listener import (
    CHUNK,
    IDLE_SECONDS,
    MAX_REQUEST_BYTES,
    ConnectionTable,
    HandshakeConnection,
    HandshakeServer,
)
from engine_ext.wire.secret_handshake import ClientIdentity
from engine_ext.wire.zmtp import GREETING, MessageLimits, ZmtpSession
from tests.unit.engine_ext.wire.metadata import METADATA
from tests.unit.engine_ext.wire.waiting import SECONDS, answer, until

PAYLOAD = encode_payload(METADATA, {"model": "m"})
RANK = (0, 0)
LARGE_RANK = (0, 1)
LARGE = b"x" * (8 << 20)
"""More than the kernel keeps for two who do not read."""
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03REQ"


def question(rank: Rank) -> bytes:
    request = encode_request(rank)
    return b"\x01\0\0" + bytes((len(request),)) + request


QUESTION = question(RANK)


class Listen(Protocol):
    def __call__(self, host: str = "127.0.0.1", access: Access = OPEN) -> HandshakeServer: ...


@pytest.fixture
def listen() -> Iterator[Listen]:
    with ExitStack() as servers:

        def listen(host: str = "127.0.0.1", access: Access = OPEN) -> HandshakeServer:
            server = HandshakeServer(host, 0, {RANK: PAYLOAD, LARGE_RANK: LARGE}, access)
            servers.callback(server.close)
            return server

        yield listen


@pytest.fixture(autouse=True)
def no_client_is_closed_for_a_pause_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "REQUEST_SECONDS", SECONDS)


@contextmanager
def connected(server: HandshakeServer, start: bytes = b"", via: str = "127.0.0.1") -> Iterator[Any]:
    """A plain connection that has said this much; `via` is its own address."""
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=SECONDS, source_address=(via, 0)) as connection:
        connection.sendall(start)
        yield connection


def is_over(connection: socket.socket) -> bool:
    """Closed by the other side, whatever was said before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def ask(server: HandshakeServer, host: str = "127.0.0.1", access: Access = OPEN) -> bool:
    client = HandshakeClient(host, server.port, RANK, access)
    return answer(client) == decode_payload(PAYLOAD)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_libzmqs_sockets_ask_as_often_as_they_like_on_one_connection(
    listen: Listen, context: "zmq.Context[Any]", kind: int
) -> None:
    server = listen()
    with context.socket(kind) as peer:
        peer.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        peer.connect(f"tcp://127.0.0.1:{server.port}")
        front = [b""] if kind == zmq.DEALER else []
        for _ in range(5):
            peer.send_multipart([*front, encode_request(RANK)])
            *before, payload, clock = peer.recv_multipart()
            assert (before, payload) == (front, PAYLOAD)
            assert isinstance(msgspec.msgpack.decode(clock), float)
        assert server.num_connections == 1


def test_questions_that_come_together_are_answered_in_their_order(
    listen: Listen, context: "zmq.Context[Any]"
) -> None:
    server = listen()
    with context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        peer.connect(f"tcp://127.0.0.1:{server.port}")
        for rank in [*[LARGE_RANK, RANK] * 3, (0, 9)]:
            peer.send_multipart([b"", encode_request(rank)])
        answers = [peer.recv_multipart()[1] for _ in range(7)]
    assert answers[:6] == [LARGE, PAYLOAD] * 3
    assert b"no worker of pipeline" in answers[6]


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
def test_it_listens_where_it_is_told_to(listen: Listen, host: str) -> None:
    assert ask(listen(host))


@pytest.mark.parametrize(("host", "dialled"), [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")])
def test_it_listens_to_ipv6(listen: Listen, host: str, dialled: str) -> None:
    if not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    assert ask(listen(host), dialled)


def test_a_host_that_is_none_is_an_os_error() -> None:
    with pytest.raises(OSError, match="side channel no-such-host"):
        HandshakeServer("no-such-host.invalid", 0, {})
    with pytest.raises(OSError, match=r"side channel 192\.0\.2\.1"):
        HandshakeServer("192.0.2.1", 0, {})
    with pytest.raises(OSError, match="side channel xx"):
        HandshakeServer("x" * 70 + ".y", 0, {})
    with pytest.raises(OSError, match="side channel"):
        HandshakeServer("127.0.0.1", 1 << 70, {})


@pytest.mark.parametrize("size", [0, 1, 255, 1000])
def test_a_message_that_never_ends_ends_its_connection(listen: Listen, size: int) -> None:
    server = listen()
    part = bytes((1, size)) if size < 256 else b"\x03" + size.to_bytes(8, "big")
    with connected(server, GREETING + READY) as stranger:
        until(lambda: is_cut_off(stranger, (part + b"x" * size) * 100))
        assert kept(server) <= MAX_REQUEST_BYTES + CHUNK
    until(lambda: server.num_connections == 0)
    assert ask(server)


def is_cut_off(connection: socket.socket, message: bytes) -> bool:
    """It can send no more."""
    try:
        connection.sendall(message)
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


def kept(server: HandshakeServer) -> int:
    while True:
        try:
            return server.num_bytes_kept
        except RuntimeError:
            continue  # It changed while we counted.


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING + QUESTION,
        GREETING + READY + b"\0\x05hello",
        GREETING + READY + b"\x01\0\x01\x01a\0\x01b",
        GREETING + READY + b"\x01\0\x02\0\0\0\0\0\0\xff\xff",
        GREETING + READY + b"\x04\x09\x04PING\0\0ab" * 100,
    ],
    ids=["http", "no READY", "one frame", "three frames", "a large frame", "pings"],
)
def test_what_is_no_question_ends_its_connection(listen: Listen, start: bytes) -> None:
    server = listen()
    with connected(server, start) as stranger:
        assert is_over(stranger)
    assert ask(server)


@pytest.mark.parametrize(
    "start",
    [b"", GREETING[:20], GREETING + READY, GREETING + READY + b"\1"],
    ids=["nothing", "half a greeting", "no question", "half a question"],
)
def test_who_does_not_come_to_its_question_is_shown_out(
    listen: Listen, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(listener_module, "REQUEST_SECONDS", 0.05)
    server = listen()
    with connected(server, start) as stranger:
        assert is_over(stranger)
    until(lambda: server.num_connections == 0)


def test_who_asks_nothing_more_is_shown_out(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "IDLE_SECONDS", 0.05)
    server = listen()
    with connected(server, GREETING + READY + QUESTION) as stranger:
        assert is_over(stranger)


def test_a_visitors_time_moves_with_questions_and_answers_alone() -> None:
    with tcp_pair() as (ours, _):
        visitor = visitor_of("a", ours, now=0)
        visitor.note_answer_sent(4)
        assert visitor.deadline == SECONDS
        visitor.note_request(4)
        assert visitor.deadline == 4 + SECONDS
        visitor.note_answer_sent(6)
        visitor.note_answer_sent(20)
        assert visitor.deadline == 6 + IDLE_SECONDS


def test_who_does_not_read_answers_is_not_read_from(listen: Listen) -> None:
    """A hundred answers would be most of a gigabyte; one is kept, and it is the payload itself."""
    server = listen()
    with connected(server, GREETING + READY + question(LARGE_RANK) * 100):
        until(lambda: kept(server) > len(LARGE) // 2)
        for _ in range(20):
            assert ask(server)
            assert kept(server) <= len(LARGE) + 2 * CHUNK


def test_who_does_not_read_answers_is_shown_out(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = listen()
    with connected(server, GREETING + READY + question(LARGE_RANK)) as stranger:
        exactly(stranger, 1)
        later = Later(SECONDS)
        monkeypatch.setattr(listener_module, "time", later)

        def is_gone() -> bool:
            later.seconds += SECONDS  # the byte has let one more piece be sent, perhaps only now
            return server.num_connections == 0

        until(is_gone)
        assert server.num_bytes_kept == 0


class Later:
    """Stands in for the module `time` and is ahead of it by so many seconds."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds


@contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        theirs = socket.create_connection(door.getsockname())
        ours, _ = door.accept()
        with ours, theirs:
            yield ours, theirs


def visitor_of(address: str, connection: socket.socket, now: float = 0.0) -> HandshakeConnection:
    channel = Channel(connection, ZmtpSession(b"ROUTER", MessageLimits(2, 100)), 100)
    return HandshakeConnection(channel, ClientIdentity(b"", address), now)


def test_the_address_with_the_most_connections_makes_room_with_its_oldest() -> None:
    with tcp_pair() as (ours, _):
        visitors = ConnectionTable(5)
        came = [visitor_of(address, ours) for address in "abbab"]
        for one in came:
            assert not visitors.is_full
            visitors.add(one)
        assert visitors.is_full
        assert visitors.next_to_evict() is came[1]
        visitors.remove(came[1])
        assert visitors.next_to_evict() in (came[0], came[2])
        assert len(visitors) == 4
        for one in list(visitors):
            visitors.remove(one)
        assert visitors.next_to_evict() is None


def test_a_flood_of_connections_keeps_out_the_flooder_alone(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "connection_limit", lambda: 8)
    server = listen("0.0.0.0")
    with ExitStack() as connections, connected(server, GREETING + READY) as early:
        until(lambda: server.num_connections == 1)
        flood = [
            connections.enter_context(connected(server, GREETING + READY, via="127.0.0.2"))
            for _ in range(50)
        ]
        until(lambda: sum(map(is_ended, flood)) == 50 - 7)
        assert server.num_connections == 8
        early.sendall(QUESTION)
        exactly(early, len(PAYLOAD))
        assert ask(server)


def is_ended(connection: socket.socket) -> bool:
    """Without waiting."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def exactly(connection: socket.socket, count: int) -> bytes:
    heard = b""
    while len(heard) < count:
        part = connection.recv(count)
        assert part, "closed"
        heard += part
    return heard


def test_it_takes_a_quarter_of_the_files_at_most() -> None:
    with files_limited_to(400):
        assert listener_module.connection_limit() == 100
    with files_limited_to(40_000):
        assert listener_module.connection_limit() <= 512


@contextmanager
def files_limited_to(soft: int) -> Iterator[None]:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_a_process_without_files_left_waits_and_lives(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    for rarely in listener_module.logger.filters:
        assert isinstance(rarely, LogRateLimit)
        rarely.clear()
    server = listen()
    lowest = os.open("/dev/null", os.O_RDONLY)
    client = socket.socket()
    client.settimeout(SECONDS)
    os.close(lowest)
    with client:
        with files_limited_to(lowest):
            started = time.monotonic()
            client.connect(("127.0.0.1", server.port))
            until(lambda: caplog.text.count("cannot accept connections") >= 3)
            assert time.monotonic() - started >= 2 * listener_module.PAUSE_SECONDS
        client.sendall(GREETING + READY + QUESTION)
        exactly(client, len(PAYLOAD))
    assert ask(server)


def test_who_is_not_allowed_is_not_let_in(listen: Listen) -> None:
    access = Access(peers=parse_networks("allowed_peers", ["127.0.0.2"]))
    server = listen("0.0.0.0", access=access)
    with connected(server) as stranger:
        assert is_over(stranger)
        assert server.num_connections == 0
    with connected(server, GREETING + READY + QUESTION, via="127.0.0.2") as peer:
        exactly(peer, len(PAYLOAD))


def test_a_challenge_is_for_the_connection_that_asked(
    listen: Listen, context: "zmq.Context[Any]"
) -> None:
    """Two of one address: nothing but the connection tells them apart."""
    server = listen(access=Access(SharedSecret.of(b"a secret of the whole fleet")))
    with context.socket(zmq.REQ) as one, context.socket(zmq.REQ) as another:
        for peer in (one, another):
            peer.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
            peer.connect(f"tcp://127.0.0.1:{server.port}")
        challenge = msgspec.msgpack.decode(told(one, encode_request(RANK)))["challenge"]
        proof = encode_request(RANK, Proof(challenge, b"nonce", b"mac"))
        assert b"the peer's secret differs" in told(one, proof)
        assert b"this engine did not send the challenge" in told(another, proof)


def told(peer: "zmq.Socket[bytes]", request: bytes) -> bytes:
    peer.send(request)
    return peer.recv_multipart()[0]


def test_closing_ends_every_connection_and_the_listener(listen: Listen) -> None:
    server = listen()
    with ExitStack() as connections:
        open_ones = [connections.enter_context(connected(server, GREETING)) for _ in range(5)]
        until(lambda: server.num_connections == 5)
        server.close()
        assert all(is_over(one) for one in open_ones)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    server.close()


def test_closed_port_is_free_while_a_process_that_is_being_started_has_copies_of_all_files(
    listen: Listen,
) -> None:
    server = listen()
    forked, in_child = os.pipe()
    may_go_on, let_go = os.pipe()

    def hold_the_copies() -> None:
        os.write(in_child, b"x")
        os.read(may_go_on, 1)

    def start() -> None:
        subprocess.run(["true"], preexec_fn=hold_the_copies, check=True, timeout=30)

    starting = threading.Thread(target=start)
    starting.start()
    try:
        os.read(forked, 1)
        server.close()
        HandshakeServer("127.0.0.1", server.port, {RANK: PAYLOAD}).close()
    finally:
        os.write(let_go, b"x")
        starting.join(timeout=30)
        for end in (forked, in_child, may_go_on, let_go):
            os.close(end)
