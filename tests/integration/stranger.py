"""A process that can reach an engine and is none: it knows the protocol, and keeps to it or not."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from engine_ext.common.types import Region
from engine_ext.wire import notifications as wire
from engine_ext.wire.dialer import HandshakeClient
from engine_ext.wire.handshake import HandshakePayload
from engine_ext.worker.agent import NixlAgent
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


def forged(request_id: str, number: int = 1) -> tuple[bytes, ...]:
    """All that an engine may say to another of a request. `number`: what its messages count by,
    a sequence or a generation."""
    return (
        wire.encode_read_done(request_id),
        wire.encode_heartbeat([request_id]),
        wire.encode_extension(wire.Renew(number, (request_id,))),
        wire.encode_extension(wire.Renewed(number, 20.0, (request_id,))),
        wire.encode_extension(wire.Renewed(number, 20.0, (), {}, 1e6)),
        wire.encode_extension(wire.Read(request_id)),
        wire.encode_extension(wire.Read(request_id, 3, number)),
        wire.encode_extension(wire.ReadAck(number, False)),
        wire.encode_extension(wire.ReadAck(number, True)),
        wire.encode_extension(wire.Gone((request_id,))),
        wire.encode_extension(wire.PushDone(request_id, number)),
        wire.encode_extension(wire.PushFailed(request_id, number, "no")),
        wire.encode_extension(wire.Withdraw(request_id, 0, request_id)),
        wire.encode_extension(wire.Withdraw(request_id, number, request_id)),
    )


def registration(
    request_id: str, engine_id: str, host: str, port: int, block_ids: Sequence[Sequence[int]]
) -> bytes:
    """Write that request's KV into these blocks, of the engine there."""
    return wire.encode_registration(
        wire.PushRegistered(
            request_id=request_id,
            decode_engine_id=engine_id,
            decode_host=host,
            decode_port=port,
            decode_tp_size=1,
            local_block_ids=tuple(map(tuple, block_ids)),
            remote_engine_id="p",
            remote_host="127.0.0.1",
            remote_port=1,
            remote_tp_size=1,
        )
    )


def agent_called(name: str) -> nixl_agent:
    """Anybody may call his agent as he likes."""
    config = nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=["UCX"])
    return nixl_agent(name, config)


def handshake(params: dict[str, Any]) -> HandshakePayload:
    """As a reader makes it, with the engine that these params name."""
    client = HandshakeClient(params["remote_host"], params["remote_port"], (0, 0))
    try:
        payload = wait_for(client.receive, "the handshake is answered")
    finally:
        client.close()
    assert payload is not None
    return payload


@contextmanager
def stranger() -> Iterator[NixlAgent]:
    """A process that speaks NIXL and nothing else."""
    memory = np.zeros(4096, dtype=np.uint8)
    agent = NixlAgent([Region("none", memory.ctypes.data, 1024, 1024, 4)], ["UCX"], 0)
    yield agent
    agent.close()
