"""The listener of the side channel: it answers handshakes with this engine's metadata.

One thread serves all connections in turn, one request of each at a time. A request is served only
after the previous answer was sent: a client that does not read answers is not read from.

Bounds: the number of connections (`connection_limit`), the bytes of a request, and the time of each
connection. If there is no room for a new connection, the address with the most connections loses
its oldest one. So a client that floods the listener shuts out only itself, and a client from
another address gets its answer long before its connection is the oldest.
"""

import contextlib
import logging
import math
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping

import msgspec

from engine_ext.common.access import OPEN, Access
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.wire.channel import Channel
from engine_ext.wire.errors import Rank, WireError
from engine_ext.wire.secret_handshake import ClientIdentity, HandshakeAnswers, SideChannelAddress
from engine_ext.wire.zmtp import MessageLimits, ZmtpSession

MAX_CONNECTIONS = 512
"""An engine that faces 64 ranks opens 64 connections at once, each for milliseconds."""

REQUEST_SECONDS = 5.0
"""From the connection to the request, and from the request until the answer is sent."""
IDLE_SECONDS = 30.0
"""Between an answer and the next request. Our engines send at most two requests."""


class HandshakeConnection:
    """A connection to the listener. Only requests and answers move its deadline, and nothing else
    that the client sends."""

    def __init__(self, channel: Channel, client: ClientIdentity, now: float) -> None:
        self.channel = channel
        self.client = client
        self.deadline = now + REQUEST_SECONDS
        self._is_answer_pending = False

    def note_request(self, now: float) -> None:
        self.deadline = now + REQUEST_SECONDS
        self._is_answer_pending = True

    def note_answer_sent(self, now: float) -> None:
        """Note that nothing is left to send. Without a request this changes nothing."""
        if self._is_answer_pending:
            self.deadline = now + IDLE_SECONDS
            self._is_answer_pending = False


class ConnectionTable:
    """The open connections, by the client's address."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._number = 0
        self._by_address: dict[str, dict[HandshakeConnection, None]] = {}
        """The connections of each address, oldest first."""

    def __len__(self) -> int:
        return self._number

    def __contains__(self, connection: HandshakeConnection | None) -> bool:
        return connection is not None and connection in self._by_address.get(
            connection.client.address, {}
        )

    def __iter__(self) -> Iterator[HandshakeConnection]:
        return iter([one for ones in self._by_address.values() for one in ones])

    @property
    def is_full(self) -> bool:
        return self._number >= self.most

    def add(self, connection: HandshakeConnection) -> None:
        self._by_address.setdefault(connection.client.address, {})[connection] = None
        self._number += 1

    def remove(self, connection: HandshakeConnection) -> None:
        ones = self._by_address[connection.client.address]
        del ones[connection]
        self._number -= 1
        if not ones:
            del self._by_address[connection.client.address]

    def next_to_evict(self) -> HandshakeConnection | None:
        """Return the oldest connection of the address with the most connections, or None."""
        crowd = max(self._by_address.values(), key=len, default=None)
        return None if crowd is None else next(iter(crowd))

    def expired(self, now: float) -> list[HandshakeConnection]:
        return [connection for connection in self if connection.deadline <= now]


def connection_limit() -> int:
    """Return a quarter of the files that the process may open, and at most MAX_CONNECTIONS. The
    engine needs the other files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = math.inf if soft == resource.RLIM_INFINITY else soft
    return int(min(MAX_CONNECTIONS, max(files // 4, 1)))


logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

MAX_REQUEST_BYTES = 4096
REQUEST_LIMITS = MessageLimits(frames=2, num_bytes=MAX_REQUEST_BYTES)
"""An empty frame, which REQ sockets put in front, and the request: 17 bytes in stock, 130 in ours
with a proof."""
CHUNK = MAX_REQUEST_BYTES
KERNEL_BYTES = 128 << 10
"""The kernel's buffers of each connection, which would otherwise grow to megabytes."""
MAX_ACCEPTED = 16
"""Connections accepted in one poll, so that a flood of connections delays no answer for long."""
SWEEP_SECONDS = 0.25
PAUSE_SECONDS = 0.1
"""The pause in accepting connections when the process has no file left."""


class HandshakeServer:
    """Answers `get_meta_msg` for every rank of this engine, from a thread of its own.

    The constructor raises OSError if the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, payloads: Mapping[Rank, bytes], access: Access = OPEN
    ) -> None:
        self._owned = contextlib.ExitStack()
        try:
            self._open(host, port)
        except (OSError, UnicodeError, OverflowError) as error:
            self._owned.close()
            raise OSError(f"side channel {host}:{port}: {error}") from None
        name: tuple[str, int] = self._socket.getsockname()[:2]
        own_address, self.port = name
        self._answers = HandshakeAnswers(
            payloads, access, SideChannelAddress(host, self.port), own_address
        )
        self._connections = ConnectionTable(connection_limit())
        self._reopens_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-handshake", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_bytes_kept(self) -> int:
        """Bytes of all connections: received parts of requests, and answers not sent yet."""
        return sum(connection.channel.num_bytes_kept for connection in self._connections)

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(timeout=5)

    def _open(self, host: str, port: int) -> None:
        self._socket = self._owned.enter_context(_bind(host, port))
        self._selector = self._owned.enter_context(selectors.DefaultSelector())
        self._waker, woken = socket.socketpair()
        self._owned.enter_context(self._waker)
        self._owned.enter_context(woken)
        self._selector.register(woken, selectors.EVENT_READ)
        self._selector.register(self._socket, selectors.EVENT_READ)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._poll()
            except Exception:
                logger.exception("handshake listener")
                self._stop.wait(PAUSE_SECONDS)
        for connection in self._connections:
            self._close_connection(connection)
        # A process that is being started holds a copy of every file until it has replaced itself.
        # Closing alone would leave the port taken for those milliseconds.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._owned.close()

    def _poll(self) -> None:
        is_idle = not len(self._connections) and self._reopens_at is None
        for key, events in self._selector.select(None if is_idle else SWEEP_SECONDS):
            if key.fileobj is self._socket:
                self._accept()
            elif key.data in self._connections:  # it may have been evicted
                self._handle(key.data, events)
        now = time.monotonic()
        for connection in self._connections.expired(now):
            self._close_connection(connection)
        if self._reopens_at is not None and now >= self._reopens_at:
            self._reopens_at = None
            self._selector.register(self._socket, selectors.EVENT_READ)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                accepted, peer = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause_accepting(error)
                return
            try:
                self._admit(accepted, peer[0])
            except OSError as error:
                logger.debug("handshake with %s: %s", peer[0], error)
                accepted.close()

    def _pause_accepting(self, error: OSError) -> None:
        """Stop accepting for PAUSE_SECONDS, usually because the process has no file left. The
        socket would stay ready, and this thread would spin."""
        logger.warning("handshake listener: cannot accept connections: %s", error)
        self._make_room()
        self._selector.unregister(self._socket)
        self._reopens_at = time.monotonic() + PAUSE_SECONDS

    def _admit(self, accepted: socket.socket, address: str) -> None:
        if not self._answers.admit(address):
            logger.warning(
                "%s is not one of this engine's allowed_peers: its connection is closed", address
            )
            accepted.close()
            return
        if self._connections.is_full:
            self._make_room()
        channel = Channel(accepted, ZmtpSession(b"ROUTER", REQUEST_LIMITS), CHUNK)
        client = ClientIdentity(secrets.token_bytes(16), address)
        connection = HandshakeConnection(channel, client, time.monotonic())
        self._selector.register(accepted, selectors.EVENT_WRITE, connection)
        self._connections.add(connection)

    def _make_room(self) -> None:
        connection = self._connections.next_to_evict()
        if connection is not None:
            logger.debug(
                "handshake with %s: closed to make room for others", connection.client.address
            )
            self._close_connection(connection)

    def _close_connection(self, connection: HandshakeConnection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.channel.socket)
        connection.channel.close()

    def _handle(self, connection: HandshakeConnection, events: int) -> None:
        try:
            self._serve(connection, events)
        except (WireError, OSError) as error:
            logger.debug("handshake with %s: %s", connection.client.address, error)
            self._close_connection(connection)
        except Exception:
            logger.exception("handshake with %s", connection.client.address)
            self._close_connection(connection)

    def _serve(self, connection: HandshakeConnection, events: int) -> None:
        """Serve at most one request, because other connections have requests, too."""
        channel, now = connection.channel, time.monotonic()
        if events & selectors.EVENT_READ:
            channel.read()
        channel.flush()
        request = None if channel.has_unsent else channel.session.next_message()
        if request is not None:
            connection.note_request(now)
            channel.session.send(self._answer(connection.client, request, now))
            channel.flush()
        if not channel.has_unsent:
            connection.note_answer_sent(now)
        is_busy = channel.has_unsent or (request is not None and channel.session.has_unread)
        self._wait_for(connection, selectors.EVENT_WRITE if is_busy else selectors.EVENT_READ)

    def _wait_for(self, connection: HandshakeConnection, events: int) -> None:
        if self._selector.get_key(connection.channel.socket).events != events:
            self._selector.modify(connection.channel.socket, events, connection)

    def _answer(self, client: ClientIdentity, frames: list[bytes], now: float) -> list[bytes]:
        """Return the frames of the answer to `[b"", request]`, the form in which REQ and DEALER
        sockets send. Raises WireError for anything else."""
        if len(frames) != 2 or frames[0]:
            raise WireError(f"{len(frames)} frames are no request")
        payload, mac, problem = self._answers.answer(frames[1], client, now)
        if problem is not None:
            logger.warning("handshake with %s refused: %s", client.address, problem)
        clock = msgspec.msgpack.encode(time.perf_counter())
        return [b"", payload, clock] + ([] if mac is None else [mac])


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on IPv4 for a name, and on both for `::`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(found[0][4])
        listening.listen(MAX_CONNECTIONS)
    except OSError:
        listening.close()
        raise
    return listening
