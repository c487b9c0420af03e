"""The NIXL agent: one object, used by one thread at a time, without NIXL's progress thread.

NIXL's own progress thread burns a core when idle; here whoever owns the agent polls it. Completion
notifications leave only when the initiator polls, so an owner polls its own transfers.
"""

import enum
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nixl._api import nixl_agent, nixl_agent_config

from engine_ext.plan import Indices, PeerLayout, descriptor_indices, strided_descriptors
from engine_ext.types import Region

logger = logging.getLogger(__name__)


class AgentError(Exception):
    """NIXL refused or failed; the message says what was tried."""


class TransferState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PeerHandle:
    """A remote agent that NIXL knows, and its prepared descriptors."""

    name: str
    layout: PeerLayout
    descriptors: Any
    has_extension: bool = False
    lease_extension: float = 0.0
    """Seconds that an answered heartbeat proves a lease for."""


Transfer = Any
"""One READ or WRITE in flight; opaque."""


class Agent(Protocol):
    """What the transfer machines need of NIXL. Every method may raise AgentError."""

    def metadata(self) -> bytes: ...
    def add_remote(self, metadata: bytes) -> str:
        """Makes a remote agent known, for notifications; returns its name. Twice is once."""

    def remove_remote(self, name: str) -> None: ...
    def prepare(self, name: str, layout: PeerLayout) -> Any:
        """The remote's descriptors, for `start_read`."""

    def drop(self, peer: PeerHandle) -> None:
        """Frees what `prepare` made."""

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        """READs remote blocks into local ones, all regions. Shapes: [blocks], block ids.

        `notification` reaches the peer once the data is here and `poll` has been called.
        """

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        """WRITEs local blocks into remote ones; else as `start_read`."""

    def poll(self, transfer: Transfer) -> TransferState: ...
    def release(self, transfer: Transfer) -> None:
        """Forgets the transfer; raises AgentError while it still runs and cannot be stopped."""

    def notify(self, name: str, message: bytes) -> None: ...
    def notifications(self) -> list[tuple[str, bytes]]:
        """What remote agents sent since the last call: (name, message)."""

    def close(self) -> None: ...


class NixlAgent:
    """`Agent` over the real library. Raises AgentError when the memory cannot be registered."""

    def __init__(self, regions: Sequence[Region], backends: Sequence[str], threads: int) -> None:
        self._regions = tuple(regions)
        self._mem_type = self._only_mem_type()
        self._region_num_blocks = [region.num_blocks for region in regions]
        with _errors("create the NIXL agent"):
            self._nixl = nixl_agent(
                str(uuid.uuid4()),
                nixl_agent_config(
                    enable_prog_thread=False, num_threads=threads, backends=list(backends)
                ),
            )
        missing = [name for name in backends if name not in self._nixl.backends]
        if missing:
            raise AgentError(f"NIXL backend not available: {', '.join(missing)}")
        with _errors("register the KV cache"):
            self._registered = self._nixl.register_memory(
                [(r.base_addr, self._extent(r), r.device_id, "") for r in self._regions],
                self._mem_type,
            )
            self._descriptors = self._nixl.prep_xfer_dlist(
                "NIXL_INIT_AGENT", strided_descriptors(self._regions), self._mem_type
            )

    def metadata(self) -> bytes:
        with _errors("read the agent's metadata"):
            return bytes(self._nixl.get_agent_metadata())

    def add_remote(self, metadata: bytes) -> str:
        with _errors("add a remote agent"):
            name = self._nixl.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_remote(self, name: str) -> None:
        with _errors("remove a remote agent"):
            self._nixl.remove_remote_agent(name)

    def prepare(self, name: str, layout: PeerLayout) -> Any:
        mem_types = {region.mem_type for region in layout.regions}
        if len(mem_types) != 1:
            raise AgentError(f"the peer's regions mix memory types {sorted(mem_types)}")
        with _errors("prepare the remote agent's blocks"):
            return self._nixl.prep_xfer_dlist(
                name, strided_descriptors(layout.regions), mem_types.pop()
            )

    def drop(self, peer: PeerHandle) -> None:
        with _errors("drop the remote agent's blocks"):
            self._nixl.release_dlist_handle(peer.descriptors)

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        return self._start("READ", peer, local, remote, notification)

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        return self._start("WRITE", peer, local, remote, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        with _errors("poll a transfer"):
            state = self._nixl.check_xfer_state(transfer)
        return _STATES.get(state, TransferState.FAILED)

    def release(self, transfer: Transfer) -> None:
        with _errors("release a transfer"):
            self._nixl.release_xfer_handle(transfer)

    def notify(self, name: str, message: bytes) -> None:
        with _errors("send a notification"):
            self._nixl.send_notif(name, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        with _errors("read notifications"):
            received = self._nixl.get_new_notifs()
        return [(name, message) for name, messages in received.items() for message in messages]

    def close(self) -> None:
        with _errors("close the agent"):
            self._nixl.release_dlist_handle(self._descriptors)
            self._nixl.deregister_memory(self._registered)

    def _start(
        self,
        operation: str,
        peer: PeerHandle,
        local: Indices,
        remote: Indices,
        notification: bytes,
    ) -> Transfer:
        here = descriptor_indices(local, self._region_num_blocks)
        there = descriptor_indices(remote, peer.layout.region_num_blocks)
        with _errors(f"start a {operation}"):
            transfer = self._nixl.make_prepped_xfer(
                operation, self._descriptors, here, peer.descriptors, there, notification
            )
        try:
            self._nixl.transfer(transfer)
        except Exception as error:
            # Part of it may be under way: whoever polls it finds out, and lets go of it.
            logger.warning("could not start a %s: %s", operation, error)
        return transfer

    def _only_mem_type(self) -> str:
        mem_types = {region.mem_type for region in self._regions}
        if len(mem_types) != 1:
            raise AgentError(f"KV regions of one memory type are needed, not {sorted(mem_types)}")
        return mem_types.pop()

    @staticmethod
    def _extent(region: Region) -> int:
        return region.block_stride * (region.num_blocks - 1) + region.block_len


_STATES = {"DONE": TransferState.DONE, "PROC": TransferState.RUNNING}


class _errors:  # noqa: N801 - reads as a statement
    """NIXL's bindings raise their own exception types, one per status code."""

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise AgentError(f"could not {self._action}: {error}") from error
