"""The side channel: who we are, answered to whoever dials."""

import logging
import threading
import time
from collections.abc import Mapping

import msgspec
import zmq

from engine_ext.base.access import OPEN, Access
from engine_ext.base.seldom import Seldom
from engine_ext.wire.errors import Rank
from engine_ext.wire.secret_handshake import Answers, Asker, Place

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

MAX_REQUEST_BYTES = 4096
SILENT_CONNECTION_MS = 5000
"""What a connection that does not begin to speak is kept for."""
UNREAD_ANSWERS = 16


class HandshakeServer:
    """Answers `get_meta_msg` for every rank of this engine, from a thread of its own.

    Raises OSError from the constructor when the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, payloads: Mapping[Rank, bytes], access: Access = OPEN
    ) -> None:
        self._context = zmq.Context()
        self._stop = threading.Event()
        try:
            self._socket = self._bind(host, port)
        except zmq.ZMQError as error:
            self._context.term()
            raise OSError(f"side channel {host}:{port}: {error}") from None
        self._answers = Answers(payloads, access, Place(host, self._port), self._own_address)
        self._thread = threading.Thread(target=self._run, name="kv-handshake", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._context.destroy(linger=0)

    def _bind(self, host: str, port: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            socket.setsockopt(zmq.HANDSHAKE_IVL, SILENT_CONNECTION_MS)
            # A reader has one question at a time; who does not read the answers loses them.
            socket.setsockopt(zmq.SNDHWM, UNREAD_ANSWERS)
            socket.setsockopt(zmq.RCVHWM, UNREAD_ANSWERS)
            socket.setsockopt(zmq.IPV6, int(":" in host))
            socket.bind(zmq_address(host, port))
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        bound_to = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        address, _, bound_port = bound_to.rpartition(":")
        self._own_address, self._port = address.strip("[]"), int(bound_port)
        return socket

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(100):
                    self._answer(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                continue
            except zmq.ZMQError:
                logger.exception("handshake listener")
                self._stop.wait(0.1)
        self._socket.close(linger=0)

    def _answer(self, frames: "list[zmq.Frame]") -> None:
        """`[peer, b"", request]` from a REQ or DEALER socket; anything else gets no answer."""
        if len(frames) != 3 or len(frames[1]):
            logger.debug("handshake listener: ignored %d frames", len(frames))
            return
        asker = Asker(frames[0].bytes, str(frames[2].get("Peer-Address")))
        payload, mac, problem = self._answers.to(frames[2].bytes, asker, time.monotonic())
        if problem is not None:
            logger.warning("handshake with %s refused: %s", asker.address, problem)
        clock = msgspec.msgpack.encode(time.perf_counter())
        answer = [asker.identity, b"", payload, clock] + ([] if mac is None else [mac])
        self._socket.send_multipart(answer, zmq.NOBLOCK)


def zmq_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
