"""The side channel: who we are, answered to whoever dials.

One thread serves all connections in turn, one question of each at a time. A question is served only
when the answer to the one before it has left: who does not read answers is not read from, either.
"""

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping

import msgspec

from engine_ext.common.access import OPEN, Access
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.wire.channel import Channel
from engine_ext.wire.errors import Rank, WireError
from engine_ext.wire.secret_handshake import Asker, HandshakeAnswers, SideChannelAddress
from engine_ext.wire.visitors import MAX_VISITORS, Visitor, Visitors, most_visitors
from engine_ext.wire.zmtp import MessageLimits, ZmtpSession

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

MAX_REQUEST_BYTES = 4096
QUESTION = MessageLimits(frames=2, num_bytes=MAX_REQUEST_BYTES)
"""An empty frame, as REQ sockets put in front, and the question: stock's is 17 bytes, ours with a
proof 130."""
CHUNK = MAX_REQUEST_BYTES
KERNEL_BYTES = 128 << 10
"""Of each connection's buffers in the kernel, which would else grow to megabytes."""
MAX_ACCEPTED = 16
"""In one turn, so that a flood of connections delays no answer for long."""
SWEEP_SECONDS = 0.25
PAUSE_SECONDS = 0.1
"""How long no connection is taken when the process has no file left for one."""


class HandshakeServer:
    """Answers `get_meta_msg` for every rank of this engine, from a thread of its own.

    Raises OSError from the constructor when the address cannot be bound.
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
        name: tuple[str, int] = self._door.getsockname()[:2]
        own_address, self._port = name
        self._answers = HandshakeAnswers(
            payloads, access, SideChannelAddress(host, self._port), own_address
        )
        self._visitors = Visitors(most_visitors())
        self._reopens_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-handshake", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._port

    @property
    def num_connections(self) -> int:
        return len(self._visitors)

    @property
    def num_bytes_kept(self) -> int:
        """For all connections: heard and no question yet, or answered and not yet sent."""
        return sum(visitor.channel.num_bytes_kept for visitor in self._visitors)

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(timeout=5)

    def _open(self, host: str, port: int) -> None:
        self._door = self._owned.enter_context(_bind(host, port))
        self._selector = self._owned.enter_context(selectors.DefaultSelector())
        self._waker, woken = socket.socketpair()
        self._owned.enter_context(self._waker)
        self._owned.enter_context(woken)
        self._selector.register(woken, selectors.EVENT_READ)
        self._selector.register(self._door, selectors.EVENT_READ)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception:
                logger.exception("handshake listener")
                self._stop.wait(PAUSE_SECONDS)
        for visitor in self._visitors:
            self._dismiss(visitor)
        # A process that is being started holds a copy of every file until it has replaced itself.
        # Closing alone would leave the port taken for those milliseconds.
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._owned.close()

    def _turn(self) -> None:
        is_idle = not len(self._visitors) and self._reopens_at is None
        for key, events in self._selector.select(None if is_idle else SWEEP_SECONDS):
            if key.fileobj is self._door:
                self._accept()
            elif key.data in self._visitors:  # It may have made room for another.
                self._attend(key.data, events)
        now = time.monotonic()
        for visitor in self._visitors.overdue(now):
            self._dismiss(visitor)
        if self._reopens_at is not None and now >= self._reopens_at:
            self._reopens_at = None
            self._selector.register(self._door, selectors.EVENT_READ)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                connection, peer = self._door.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._shut(error)
                return
            try:
                self._admit(connection, peer[0])
            except OSError as error:
                logger.debug("handshake with %s: %s", peer[0], error)
                connection.close()

    def _shut(self, error: OSError) -> None:
        """No file is left, as a rule: the door would stay ready, and this thread would spin."""
        logger.warning("handshake listener: no connection can be taken: %s", error)
        self._make_room()
        self._selector.unregister(self._door)
        self._reopens_at = time.monotonic() + PAUSE_SECONDS

    def _admit(self, connection: socket.socket, address: str) -> None:
        if not self._answers.admit(address):
            logger.warning("%s is not one of this engine's allowed_peers: not let in", address)
            connection.close()
            return
        if self._visitors.is_full:
            self._make_room()
        channel = Channel(connection, ZmtpSession(b"ROUTER", QUESTION), CHUNK)
        asker = Asker(secrets.token_bytes(16), address)
        visitor = Visitor(channel, asker, time.monotonic())
        self._selector.register(connection, selectors.EVENT_WRITE, visitor)
        self._visitors.add(visitor)

    def _make_room(self) -> None:
        visitor = self._visitors.first_to_go()
        if visitor is not None:
            logger.debug("handshake with %s: makes room for others", visitor.asker.address)
            self._dismiss(visitor)

    def _dismiss(self, visitor: Visitor) -> None:
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.channel.socket)
        visitor.channel.close()

    def _attend(self, visitor: Visitor, events: int) -> None:
        try:
            self._serve(visitor, events)
        except (WireError, OSError) as error:
            logger.debug("handshake with %s: %s", visitor.asker.address, error)
            self._dismiss(visitor)
        except Exception:
            logger.exception("handshake with %s", visitor.asker.address)
            self._dismiss(visitor)

    def _serve(self, visitor: Visitor, events: int) -> None:
        """One question at most: others have theirs."""
        channel, now = visitor.channel, time.monotonic()
        if events & selectors.EVENT_READ:
            channel.read()
        channel.flush()
        question = None if channel.has_unsent else channel.session.next_message()
        if question is not None:
            visitor.ask(now)
            channel.session.send(self._answer(visitor.asker, question, now))
            channel.flush()
        if not channel.has_unsent:
            visitor.has_taken_all(now)
        is_busy = channel.has_unsent or (question is not None and channel.session.has_unread)
        self._await(visitor, selectors.EVENT_WRITE if is_busy else selectors.EVENT_READ)

    def _await(self, visitor: Visitor, events: int) -> None:
        if self._selector.get_key(visitor.channel.socket).events != events:
            self._selector.modify(visitor.channel.socket, events, visitor)

    def _answer(self, asker: Asker, frames: list[bytes], now: float) -> list[bytes]:
        """To `[b"", request]`, as REQ and DEALER sockets send it. Raises WireError for all else."""
        if len(frames) != 2 or frames[0]:
            raise WireError(f"{len(frames)} frames are no question")
        payload, mac, problem = self._answers.to(frames[1], asker, now)
        if problem is not None:
            logger.warning("handshake with %s refused: %s", asker.address, problem)
        clock = msgspec.msgpack.encode(time.perf_counter())
        return [b"", payload, clock] + ([] if mac is None else [mac])


def _bind(host: str, port: int) -> socket.socket:
    """IPv4 where it is a name, and both where it is all of IPv6."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.setblocking(False)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        if family == socket.AF_INET6:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        door.bind(found[0][4])
        door.listen(MAX_VISITORS)
    except OSError:
        door.close()
        raise
    return door
