"""One handshake with another engine, from its question to the answer."""

from typing import Any

import zmq

from engine_ext.base.access import OPEN, Access
from engine_ext.wire.errors import Rank, WireError
from engine_ext.wire.handshake import HandshakePayload, encode_request
from engine_ext.wire.listener import zmq_address
from engine_ext.wire.secret_handshake import Place, Prover

MAX_REPLY_BYTES = 64 << 20


class HandshakeClient:
    """One handshake in flight. Never blocks: poll `socket` for reading, then call `receive`."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        host: str,
        port: int,
        rank: Rank,
        access: Access = OPEN,
        announced: str | None = None,
    ) -> None:
        """`announced`: the name whose address `host` is, and that the listener knows itself by."""
        self._prover = Prover(access, rank, Place(announced or host, port))
        try:
            self.socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise WireError(f"handshake with {host}:{port}: {error}") from None
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            self.socket.setsockopt(zmq.IPV6, int(":" in host))
            self.socket.connect(zmq_address(host, port))
            self._ask(encode_request(rank))
        except zmq.ZMQError as error:
            self.close()
            raise WireError(f"handshake with {host}:{port}: {error}") from None

    def receive(self) -> HandshakePayload | None:
        """The reply, or None while it has not come. Raises WireError."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) < 2 or frames[0]:
                raise WireError(f"handshake reply of {len(frames)} frames")
            answer = self._prover.take(frames[1:])
            if isinstance(answer, HandshakePayload):
                return answer
            self._ask(answer)
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            raise WireError(f"handshake: {error}") from None
        return None

    def _ask(self, question: bytes) -> None:
        self.socket.send_multipart([b"", question], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(linger=0)
