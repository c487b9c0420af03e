"""NIXL metadata of a real agent, changed: what a stranger may send, and UCX may die of."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from engine_ext.wire.handshake import HandshakePayload, decode_metadata
from tests.integration.stranger import agent_called

HEAD, TAG = b"nixlSerDes|Agent", b"Conns"


class Honest:
    """An agent that shows two pieces of memory."""

    def __init__(self, name: str) -> None:
        self.memory = np.zeros(1 << 17, dtype=np.uint8)
        self.agent: Any = agent_called(name)
        half, start = self.memory.nbytes // 2, self.memory.ctypes.data
        pieces = [(start, half, 0, ""), (start + half, half, 0, "")]
        self._registered = self.agent.register_memory(pieces, "DRAM")
        self.metadata = bytes(self.agent.get_agent_metadata())


def flipped(metadata: bytes) -> Iterator[bytes]:
    """Each byte behind the tag, with all of its bits changed."""
    for place in range(metadata.index(TAG) + len(TAG), len(metadata)):
        yield _with(metadata, {place: metadata[place] ^ 0xFF})


def changed(metadata: bytes, seed: int) -> Iterator[bytes]:
    """One to four bytes behind the tag, without an end."""
    rng = random.Random(seed)
    start = metadata.index(TAG) + len(TAG)
    while True:
        places = [rng.randrange(start, len(metadata)) for _ in range(rng.randint(1, 4))]
        yield _with(metadata, {place: rng.randrange(256) for place in places})


def deadly(metadata: bytes) -> list[bytes]:
    """Each of these ends a process with NIXL 1.5 that loads it: UCX's address begins with another
    version, NIXL's memory type is none, and UCX's is none in the first key."""
    address = metadata.index(b"|c") + 10
    kind = metadata.index(b"nixlSDList|t") + 20
    key = metadata.index(b"|", kind + 4 + 17) + 9 + 24
    return [
        _with(metadata, {address: metadata[address] ^ 0xFF}),
        _with(metadata, {kind: 0xFF, kind + 1: 0xFF, kind + 2: 0xFF}),
        _with(metadata, {key + 8: 0xFF}),
    ]


def renamed(metadata: bytes, name: str) -> bytes:
    """As that agent's, without a look at the rest."""
    start = len(HEAD) + 8
    end = start + int.from_bytes(metadata[len(HEAD) : start], "little")
    return HEAD + len(name).to_bytes(8, "little") + name.encode() + metadata[end:]


def with_agent(payload: HandshakePayload, agent_metadata: bytes) -> bytes:
    """The handshake's answer with that NIXL metadata in it."""
    metadata = msgspec.structs.replace(decode_metadata(payload), agent_metadata=agent_metadata)
    inner = msgspec.msgpack.encode(metadata)
    return msgspec.msgpack.encode(msgspec.structs.replace(payload, agent_metadata_bytes=inner))


def _with(metadata: bytes, bytes_at: dict[int, int]) -> bytes:
    altered = bytearray(metadata)
    for place, value in bytes_at.items():
        altered[place] = value
    return bytes(altered)
