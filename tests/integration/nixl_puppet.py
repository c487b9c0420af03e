"""A process with a NIXL agent and its memory and nothing else, moved step by step through a pipe.

NIXL works only while a step runs, so whoever holds the strings decides what happens in between.
"""

import gc
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

PIECES = 4096
"""Of which a transfer moves some thousand: from 1,024 on NIXL's worker threads share them out."""
PIECE_BYTES = 8192
LENGTH = PIECES * PIECE_BYTES
"""Much more than the sockets of a connection hold, so that a transfer can stick half way."""
TCP = {"UCX_TLS": "tcp", "UCX_TCP_SNDBUF": "256k", "UCX_TCP_RCVBUF": "256k"}
"""Without shared memory a transfer takes time, and needs both ends; sockets hold little of it."""


class Puppet:
    def __init__(self, name: str, threads: int) -> None:
        self.memory = np.zeros((PIECES, PIECE_BYTES), dtype=np.uint8)
        self.agent: Any = nixl_agent(
            name,
            nixl_agent_config(enable_prog_thread=False, num_threads=threads, backends=["UCX"]),
        )
        self.registered: Any = self.agent.register_memory(
            [(self.address(), self.memory.nbytes, 0, "")], "DRAM"
        )
        self.prepared: list[Any] = []
        self.transfers: list[Any] = []

    def metadata(self) -> str:
        return bytes(self.agent.get_agent_metadata()).hex()

    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def meet(self, metadata: str) -> None:
        self.agent.add_remote_agent(bytes.fromhex(metadata))

    def start(self, operation: str, peer: str, address: int, first: int, count: int) -> int:
        """Moves so many pieces, the peer's in reverse order: in the same one NIXL would make them a
        single piece. Returns the transfer's number."""
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", _pieces(self.address()), "DRAM")
        remote = self.agent.prep_xfer_dlist(peer, _pieces(address), "DRAM")
        indices = np.arange(first, first + count, dtype=np.int32)
        transfer = self.agent.make_prepped_xfer(
            operation, local, indices, remote, indices[::-1].copy(), b"moved"
        )
        self.prepared += [local, remote]
        self.transfers.append(transfer)
        self.agent.transfer(transfer)
        return len(self.transfers) - 1

    def poll(self, number: int) -> str:
        return str(self.agent.check_xfer_state(self.transfers[number]))

    def work(self) -> list[str]:
        """What NIXL does when it is asked for notifications; those that came, and from whom."""
        received = self.agent.get_new_notifs().items()
        return [f"{sender}: {text.decode()}" for sender, texts in received for text in texts]

    def release(self, number: int) -> None:
        self.agent.release_xfer_handle(self.transfers[number])

    def part(self, peer: str) -> None:
        self.agent.remove_remote_agent(peer)

    def say(self, peer: str, message: str) -> None:
        self.agent.send_notif(peer, message.encode())

    def deregister(self) -> None:
        self.agent.deregister_memory(self.registered)

    def destroy(self) -> None:
        """The agent and all that belongs to it."""
        self.transfers.clear()
        self.prepared.clear()
        self.registered = self.agent = None
        gc.collect()

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def count(self, value: int, first: int = 0, count: int = PIECES) -> int:
        """Bytes of that value in so many pieces."""
        return int((self.memory[first : first + count] == value).sum())


def _pieces(start: int) -> Any:
    return np.array(
        [(start + i * PIECE_BYTES, PIECE_BYTES, 0) for i in range(PIECES)], dtype=np.uint64
    )
