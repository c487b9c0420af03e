"""A process that can reach an engine and is none: it knows the protocol, and keeps to it or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import zmq

from engine_ext.base.types import Region
from engine_ext.transfer.agent import NixlAgent
from engine_ext.wire import notifications as wire
from engine_ext.wire.client import HandshakeClient
from engine_ext.wire.handshake import HandshakePayload
from tests.integration.processes import wait_for

GARBAGE = (
    b"",
    b"no colon",
    b":",
    b"\xff\xfe",
    b"x:0",
    b"HB:",
    b"HB:,,,",
    b"PUSH_REG:",
    b"PUSH_REG:\xc1",
    b"PUSH_REG:" + msgspec.msgpack.encode({"request_id": 1}),
    b"DX:",
    b"DX:\x81",
    b"DX:" + msgspec.msgpack.encode({"type": "hello", "metadata": b"nonsense"}),
    b"DX:" + msgspec.msgpack.encode({"type": "renew", "sequence": -1, "request_ids": ["", "x"]}),
    b"DX:" + msgspec.msgpack.encode({"type": "withdraw", "request_id": "x", "generation": 3}),
    wire.encode_extension(wire.Withdraw("x", 3, "y")),
    wire.encode_extension(wire.PushDone("x", 3)),
    wire.encode_extension(wire.PushFailed("x", 3, "y" * 10_000)),
    wire.encode_extension(wire.ReadAck(99, True)),
    wire.encode_extension(wire.Gone(("x",) * 1000)),
    b"x" * 60_000,
)
"""Notifications that make no sense."""
NUM_UNKNOWN = sum(
    isinstance(wire.decode_notification(message), wire.UnknownMessage) for message in GARBAGE
)
"""Those that are no message at all; the others are of requests that nobody knows."""


def handshake(params: dict[str, Any]) -> HandshakePayload:
    """As a reader makes it, with the engine that these params name."""
    context: zmq.Context[Any] = zmq.Context()
    client = HandshakeClient(context, params["remote_host"], params["remote_port"], (0, 0))
    try:
        payload = wait_for(client.receive, "the handshake is answered", 5)
    finally:
        client.close()
        context.destroy(linger=0)
    assert payload is not None
    return payload


@contextmanager
def stranger() -> Iterator[NixlAgent]:
    """A process that speaks NIXL and nothing else."""
    memory = np.zeros(4096, dtype=np.uint8)
    agent = NixlAgent([Region("none", memory.ctypes.data, 1024, 1024, 4)], ["UCX"], 0)
    yield agent
    agent.close()
