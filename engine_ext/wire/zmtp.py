"""ZMTP 3 without security, as libzmq sends it (rfc.zeromq.org/spec/23 and 37), with bounded memory.

This module does no I/O: bytes go in, messages come out. libzmq bounds a frame, but not the number
of frames of a message, so one endless message takes all memory of a process. Here nothing larger
than the `MessageLimits` is kept, and a frame that breaks a rule is refused by its header, before
its body has arrived. Methods raise WireError, after which the connection is to be closed.

    both peers send a greeting      signature, version 3, "NULL", padding: 64 bytes
    and their socket type           a command READY
    then messages                   frames, each but the last with MORE
    and commands at any time        PING is answered, ERROR ends the connection, others are ignored
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine_ext.wire.errors import WireError

MORE, LONG, COMMAND = 1, 2, 4

SIGNATURE = b"\xff" + b"\0" * 7 + b"\x01\x7f"
"""As libzmq sends it. For older peers, the eight bytes in the middle are the length of an
identity."""
GREETING_BYTES = 64
GREETING = (SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0")).ljust(GREETING_BYTES, b"\0")

MAX_COMMAND_BYTES = 512
"""READY has a socket type and an identity of at most 255 bytes. Other commands are shorter."""
MAX_COMMANDS = 64
"""Commands between two messages. After READY libzmq sends none, unless it was configured to look
for dead peers, and then about one per second. A connection that is idle for 30 s stays below."""
MAX_PING_CONTEXT = 16
"""The limit of the specification."""

PEERS = {b"ROUTER": (b"REQ", b"DEALER"), b"DEALER": (b"ROUTER",)}
"""The socket types of clients, and of listeners. libzmq allows more, which are of no use here."""


class MessageLimits(NamedTuple):
    """The limits of one message."""

    frames: int
    num_bytes: int


class _Header(NamedTuple):
    flags: int
    size: int
    body_at: int


class ZmtpSession:
    """One end of a connection. Pass received bytes to `feed`, and send the bytes in `outgoing`.

    It keeps at most one message within its limits, and the bytes that were fed last.
    """

    def __init__(self, socket_type: bytes, limits: MessageLimits) -> None:
        self._peers = PEERS[socket_type]
        self._limits = limits
        self._received = bytearray()
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._num_commands = 0
        self._is_greeted = False
        self.is_ready = False
        """The peer has sent READY. Before that it would reject messages."""
        self.outgoing: deque[memoryview] = deque(
            memoryview(part) for part in (GREETING, _ready(socket_type))
        )

    @property
    def num_kept(self) -> int:
        """Received bytes that are no complete message yet."""
        return len(self._received) + self._num_bytes

    @property
    def has_unread(self) -> bool:
        """True if there may be another message: call `next_message`."""
        return bool(self._received)

    def feed(self, data: bytes) -> None:
        self._received += data

    def send(self, frames: Sequence[bytes]) -> None:
        last = len(frames) - 1
        for place, frame in enumerate(frames):
            self.outgoing.append(memoryview(_header(MORE if place < last else 0, len(frame))))
            if frame:
                self.outgoing.append(memoryview(frame))

    def next_message(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if more bytes must be fed first."""
        if not self._is_greeted and not self._greet():
            return None
        while (header := self._next_header()) is not None:
            body = self._take(header)
            if header.flags & COMMAND:
                self._handle_command(body)
                continue
            self._frames.append(body)
            self._num_bytes += len(body)
            if not header.flags & MORE:
                frames, self._frames = self._frames, []
                self._num_bytes = self._num_commands = 0
                return frames
        return None

    def _greet(self) -> bool:
        start = bytes(self._received[: len(SIGNATURE)])
        if start[:1] not in (b"", b"\xff") or start[9:] not in (b"", b"\x7f"):
            raise WireError("this is not ZMTP")
        if len(self._received) < GREETING_BYTES:
            return False
        greeting = bytes(self._received[:GREETING_BYTES])
        if greeting[10] < 3:
            raise WireError(f"ZMTP version {greeting[10]}: at least 3 is needed")
        if greeting[12:32] != GREETING[12:32]:
            raise WireError(f"ZMTP mechanism {greeting[12:32].rstrip(bytes(1))!r}: NULL is needed")
        del self._received[:GREETING_BYTES]
        self._is_greeted = True
        return True

    def _next_header(self) -> _Header | None:
        """Return the header of a frame that has arrived completely, else None. Raises WireError for
        a header that breaks a rule."""
        received = self._received
        if not received:
            return None
        flags = received[0]
        if flags & ~(MORE | LONG | COMMAND) or (flags & COMMAND and flags & MORE):
            raise WireError(f"ZMTP frame with flags {flags:#x}")
        body_at = 9 if flags & LONG else 2
        if len(received) < body_at:
            return None
        size = int.from_bytes(received[1:body_at], "big")
        self._check(flags, size)
        return None if len(received) < body_at + size else _Header(flags, size, body_at)

    def _check(self, flags: int, size: int) -> None:
        if flags & COMMAND:
            if size > MAX_COMMAND_BYTES or self._num_commands >= MAX_COMMANDS:
                raise WireError(f"ZMTP command of {size} bytes after {self._num_commands} others")
        elif not self.is_ready:
            raise WireError("a message before the ZMTP handshake")
        elif len(self._frames) >= self._limits.frames:
            raise WireError(f"a message of more than {self._limits.frames} frames")
        elif self._num_bytes + size > self._limits.num_bytes:
            raise WireError(f"a message of more than {self._limits.num_bytes} bytes")

    def _take(self, header: _Header) -> bytes:
        end = header.body_at + header.size
        body = bytes(memoryview(self._received)[header.body_at : end])
        del self._received[:end]
        return body

    def _handle_command(self, body: bytes) -> None:
        self._num_commands += 1
        name, rest = _short_string(body)
        if name == b"ERROR":
            raise WireError(f"the peer ends the connection: {_short_string(rest)[0][:200]!r}")
        if not self.is_ready:
            self._handle_ready(name, rest)
        elif name == b"PING":
            self._answer_ping(rest[2:])

    def _handle_ready(self, name: bytes, properties: bytes) -> None:
        if name != b"READY":
            raise WireError(f"ZMTP command {name[:32]!r} where READY is due")
        peer = _properties(properties).get(b"socket-type")
        if peer not in self._peers:
            raise WireError(f"a ZMQ socket of type {peer!r:.40}")
        self.is_ready = True

    def _answer_ping(self, context: bytes) -> None:
        if len(context) > MAX_PING_CONTEXT:
            raise WireError(f"PING with {len(context)} bytes")
        body = b"\x04PONG" + context
        self.outgoing.append(memoryview(_header(COMMAND, len(body)) + body))


def _header(flags: int, size: int) -> bytes:
    if size < 256:
        return bytes((flags, size))
    return bytes((flags | LONG,)) + size.to_bytes(8, "big")


def _ready(socket_type: bytes) -> bytes:
    """Return exactly the command that libzmq sends for a socket without a name."""
    body = b"\x05READY" + _property(b"Socket-Type", socket_type) + _property(b"Identity", b"")
    return _header(COMMAND, len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _short_string(data: bytes) -> tuple[bytes, bytes]:
    """Split off a string whose length is in its first byte. Return the string and the rest."""
    if not data or len(data) <= data[0]:
        raise WireError("ZMTP command that is cut short")
    end = 1 + data[0]
    return data[1:end], data[end:]


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the properties by name in lower case: names are compared without case."""
    found = {}
    while data:
        name, rest = _short_string(data)
        end = 4 + int.from_bytes(rest[:4], "big")
        if len(rest) < max(end, 4):
            raise WireError("ZMTP property that is cut short")
        found[name.lower()] = rest[4:end]
        data = rest[end:]
    return found
