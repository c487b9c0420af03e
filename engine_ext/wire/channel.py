"""A ZMTP connection over a non-blocking TCP socket."""

import socket
from itertools import islice

from engine_ext.wire.zmtp import ZmtpSession

MAX_PIECES = 64
"""Pieces that one call passes to the kernel. Linux takes 1,024."""


class Channel:
    """Owns its socket. Methods never block, and raise OSError when the connection has ended."""

    def __init__(self, connection: socket.socket, session: ZmtpSession, chunk: int) -> None:
        """`chunk` is the most bytes that one call reads."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.session = session
        self._chunk = chunk

    @property
    def has_unsent(self) -> bool:
        return bool(self.session.outgoing)

    @property
    def num_bytes_kept(self) -> int:
        return self.session.num_kept + sum(map(len, self.session.outgoing))

    def read(self) -> None:
        """Read what has arrived, at most one chunk."""
        try:
            data = self.socket.recv(self._chunk)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionAbortedError("the peer closed the connection")
        self.session.feed(data)

    def flush(self) -> None:
        """Send as much as the kernel takes."""
        outgoing = self.session.outgoing
        try:
            while outgoing:
                self._sent(self.socket.sendmsg(list(islice(outgoing, MAX_PIECES))))
        except (BlockingIOError, InterruptedError):
            return

    def close(self) -> None:
        self.session.outgoing.clear()
        self.socket.close()

    def _sent(self, count: int) -> None:
        outgoing = self.session.outgoing
        while outgoing and count >= len(outgoing[0]):
            count -= len(outgoing.popleft())
        if count:
            outgoing[0] = outgoing[0][count:]
