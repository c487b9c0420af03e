"""One handshake with another engine, from its question to the answer."""

from typing import Any

import zmq

from engine_ext.wire.errors import Rank, WireError
from engine_ext.wire.handshake import HandshakePayload, decode_payload, encode_request
from engine_ext.wire.listener import zmq_address

MAX_REPLY_BYTES = 64 << 20


class HandshakeClient:
    """One handshake in flight. Never blocks: poll `socket` for reading, then call `receive`."""

    def __init__(self, context: "zmq.Context[Any]", host: str, port: int, rank: Rank) -> None:
        try:
            self.socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise WireError(f"handshake with {host}:{port}: {error}") from None
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            self.socket.setsockopt(zmq.IPV6, int(":" in host))
            self.socket.connect(zmq_address(host, port))
            self.socket.send_multipart([b"", encode_request(rank)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.close()
            raise WireError(f"handshake with {host}:{port}: {error}") from None

    def receive(self) -> HandshakePayload | None:
        """The reply, or None while it has not come. Raises WireError."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise WireError(f"handshake: {error}") from None
        if len(frames) < 2 or frames[0]:
            raise WireError(f"handshake reply of {len(frames)} frames")
        return decode_payload(frames[1])

    def close(self) -> None:
        self.socket.close(linger=0)
