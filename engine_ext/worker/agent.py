"""The NIXL agent: one object, used by one thread at a time, without NIXL's progress thread.

NIXL's progress thread uses a whole core when idle, so the agent's owner polls instead. The
notification of a completed transfer leaves only when its initiator polls.
"""

import enum
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from nixl._api import nixl_agent, nixl_agent_config, nixlBind

from engine_ext.common.types import ConnectorStats, Region
from engine_ext.layout.plan import Indices, PeerLayout, Rows, strided_descriptors
from engine_ext.wire.nixl_metadata import agent_name
from engine_ext.worker.process_end import skip_library_exit_handlers

logger = logging.getLogger(__name__)


WARM_UP_SECONDS = 1.0


class AgentError(Exception):
    """NIXL refused or failed; the message names the action."""


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
    """Seconds by which a heartbeat extends a lease there."""
    write_bound: float = 0.0
    """Seconds after which a WRITE that has begun there has landed, or never will."""
    readers: int = 1
    """How many ranks of ours read from this one: it keeps its blocks until all have confirmed."""
    refusal: str | None = None
    """Why no KV may move between this engine and us."""
    returns_blocks: bool = False
    """It answers `AwaitPrompt` and `ReturnBlocks`."""


Transfer = Any
"""One READ or WRITE in flight; opaque."""


class Agent(Protocol):
    """What the transfer machines need of NIXL. Every method may raise AgentError."""

    @property
    def name(self) -> str:
        """The name that other agents know, and that its notifications carry."""

    def metadata(self) -> bytes: ...
    def add_remote(self, metadata: bytes) -> str:
        """Make a remote agent known, for notifications, and return its name. Other metadata for a
        known name is refused."""

    def remove_remote(self, name: str) -> None:
        """Not while a transfer with it runs, because its end could not be polled then."""

    def prepare(self, name: str, layout: PeerLayout) -> Any:
        """Prepare both sides' descriptors, for `start_read`."""

    def unprepare(self, peer: PeerHandle) -> None:
        """Free what `prepare` made."""

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        """READ remote bytes into local ones. Shapes: [descriptors], indices into the rows of the
        peer's layout. `notification` reaches the peer once the data is here and `poll` was called.
        """

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        """WRITE local bytes into remote ones; else as `start_read`."""

    def poll(self, transfer: Transfer) -> TransferState: ...
    def discard(self, transfer: Transfer) -> None:
        """Free the handle of a transfer that has ended. This stops no transfer."""

    def notify(self, name: str, message: bytes) -> None: ...
    def notifications(self) -> list[tuple[str, bytes]]:
        """Return what remote agents sent since the last call: (name, message)."""

    def close(self) -> None: ...


@dataclass(slots=True)
class TransferInFlight:
    """A READ or WRITE until NIXL has ended it.

    Nothing stops a transfer that NIXL has begun: after its handle is freed, its peer removed, or
    polling stopped, the data still arrives. So the owner polls it until NIXL reports the end,
    however late. Only then may anything else use its blocks.
    """

    transfer: Transfer
    deadline: float
    problem: str | None = None
    """Why it counts as failed, whatever NIXL reports later."""
    ended: bool = False

    def is_late(self, now: float) -> bool:
        return now >= self.deadline

    def has_ended(self, agent: Agent, now: float) -> bool:
        """Return whether NIXL has ended it; `problem` is None then if it succeeded.

        While NIXL reports that the transfer runs, or cannot be polled, it has not ended, whatever
        the time.
        """
        if self.ended:
            return True
        if self.is_late(now):
            self.problem = self.problem or "it took too long"
        try:
            state = agent.poll(self.transfer)
        except AgentError as error:
            logger.debug("%s", error)
            return False
        if state is TransferState.RUNNING:
            return False
        if state is TransferState.FAILED:
            self.problem = self.problem or "it failed"
        self.ended = True
        self._discard(agent)
        return True

    def _discard(self, agent: Agent) -> None:
        try:
            agent.discard(self.transfer)
        except AgentError as error:
            logger.warning("NIXL keeps the handle of a transfer that has ended: %s", error)


@dataclass(frozen=True, slots=True)
class Prepared:
    """NIXL's handles of both sides' descriptors."""

    local: Any
    remote: Any


SHARED_DESCRIPTORS = 1024
"""NIXL splits a transfer of so many among its worker threads, where it has any."""

_ENDED = (
    nixlBind.nixlBackendError,
    nixlBind.nixlCancelledError,
    nixlBind.nixlNotFoundError,
    nixlBind.nixlNotPostedError,
    nixlBind.nixlRemoteDisconnectError,
)
"""What a poll raises for a transfer that has failed. Not found: the connection has failed, and
another transfer was polled first. A remote with which a transfer runs is never removed."""


@dataclass(slots=True)
class NixlTransfer:
    handle: Any
    is_shared: bool
    """Several worker threads carry it: an error of one does not mean that the others have ended."""
    has_failed: bool = False
    """It could not be started, or not all of it."""


class NixlAgent:
    """`Agent` over the real library. Raises AgentError when the memory cannot be registered.

    `stats` gets NIXL's telemetry of each transfer that ended well.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        backends: Sequence[str],
        threads: int,
        stats: ConnectorStats | None = None,
    ) -> None:
        self._stats = stats or ConnectorStats()
        self._regions = tuple(regions)
        self._mem_type = self._only_mem_type()
        self._prepared: dict[bytes, Any] = {}
        self._remotes: dict[str, bytes] = {}
        """By name, a digest of the metadata that was loaded."""
        self._has_threads = threads > 0
        self.name = str(uuid.uuid4())
        skip_library_exit_handlers()
        with _errors("create the NIXL agent", _transport_hint(backends)):
            self._nixl = nixl_agent(
                self.name,
                nixl_agent_config(
                    enable_prog_thread=False,
                    num_threads=threads,
                    backends=list(backends),
                    capture_telemetry=True,
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
            self._prepare_local(strided_descriptors(self._regions))
        self._warm_up(list(backends))

    def metadata(self) -> bytes:
        with _errors("read the agent's metadata"):
            return bytes(self._nixl.get_agent_metadata())

    def add_remote(self, metadata: bytes) -> str:
        # Anybody may send metadata in another agent's name. If NIXL fails to load it, NIXL forgets
        # the agent that it knew, and refuses the name from then on.
        digest = blake2b(metadata, digest_size=16).digest()
        if self._remotes.get(agent_name(metadata) or "", digest) != digest:
            raise AgentError(f"agent {agent_name(metadata)} is known by other metadata")
        with _errors("add a remote agent"):
            name = _add(self._nixl, metadata)
        self._remotes[name] = digest
        return name

    def remove_remote(self, name: str) -> None:
        self._remotes.pop(name, None)
        with _errors("remove a remote agent"):
            self._nixl.remove_remote_agent(name)

    def prepare(self, name: str, layout: PeerLayout) -> Any:
        mem_types = {region.mem_type for region in layout.regions}
        if not mem_types:
            return None  # Another stage's layers.
        if len(mem_types) != 1:
            raise AgentError(f"the peer's regions mix memory types {sorted(mem_types)}")
        with _errors("prepare the remote agent's blocks"):
            local = self._prepare_local(layout.local.rows)
            remote = self._nixl.prep_xfer_dlist(name, layout.remote.rows, mem_types.pop())
        return Prepared(local, remote)

    def unprepare(self, peer: PeerHandle) -> None:
        if peer.descriptors is None:
            return
        with _errors("drop the remote agent's blocks"):
            self._nixl.release_dlist_handle(peer.descriptors.remote)

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        return self._start("READ", peer, local, remote, notification)

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        return self._start("WRITE", peer, local, remote, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        """See docs/engine-half.md, "End of a transfer", for what is an end."""
        with _errors("poll a transfer"):
            try:
                state = self._nixl.check_xfer_state(transfer.handle)
            except _ENDED:
                if transfer.is_shared:
                    raise
                return TransferState.FAILED
        if state == "PROC":
            return TransferState.RUNNING
        if state != "DONE" or transfer.has_failed:
            return TransferState.FAILED
        self._record(transfer)
        return TransferState.DONE

    def discard(self, transfer: Transfer) -> None:
        with _errors("release a transfer"):
            self._nixl.release_xfer_handle(transfer.handle)

    def notify(self, name: str, message: bytes) -> None:
        try:
            with _errors("send a notification"):
                self._nixl.send_notif(name, message)
        except AgentError:
            self._stats.notifications_failed += 1
            raise

    def notifications(self) -> list[tuple[str, bytes]]:
        try:  # Without `_errors`: a waiting engine does hardly anything else.
            received = self._nixl.get_new_notifs()
        except Exception as error:
            raise AgentError(f"could not read notifications: {error}") from error
        return [(name, message) for name, messages in received.items() for message in messages]

    def close(self) -> None:
        with _errors("close the agent"):
            for descriptors in self._prepared.values():
                self._nixl.release_dlist_handle(descriptors)
            self._nixl.deregister_memory(self._registered)

    def _start(
        self,
        operation: str,
        peer: PeerHandle,
        local: Indices,
        remote: Indices,
        notification: bytes,
    ) -> Transfer:
        ours, theirs = peer.descriptors.local, peer.descriptors.remote
        with _errors(f"start a {operation}"):
            handle = self._nixl.make_prepped_xfer(
                operation, ours, local, theirs, remote, notification
            )
        is_shared = self._has_threads and len(local) >= SHARED_DESCRIPTORS
        transfer = NixlTransfer(handle, is_shared)
        try:
            self._nixl.transfer(handle)
        except Exception as error:
            # Part of it may be under way: only polling shows when that has ended.
            logger.warning("could not start a %s: %s", operation, error)
            transfer.has_failed = True
        return transfer

    def _record(self, transfer: Transfer) -> None:
        try:
            telemetry = self._nixl.get_xfer_telemetry(transfer.handle)
        except Exception as error:
            logger.debug("no telemetry of a transfer: %s", error)
            return
        self._stats.transfer_seconds.observe(telemetry.xferDuration / 1e6)
        self._stats.post_seconds.observe(telemetry.postDuration / 1e6)
        self._stats.bytes_per_transfer.observe(telemetry.totalBytes)
        self._stats.descriptors_per_transfer.observe(telemetry.descCount)

    def _prepare_local(self, rows: Rows) -> Any:
        """Peers that are alike share ours; kept until the agent is closed."""
        key = rows.tobytes()
        if key not in self._prepared:
            self._prepared[key] = self._nixl.prep_xfer_dlist(
                "NIXL_INIT_AGENT", rows, self._mem_type
            )
        return self._prepared[key]

    def _warm_up(self, backends: list[str]) -> None:
        """Exchange a notification with a temporary agent, in both directions.

        At the first connection in each direction UCX selects its protocols, which takes some twenty
        milliseconds in which nothing else moves. Later peers on the same kind of path find that
        done.
        """
        config = nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=backends)
        try:
            for is_caller in (True, False):
                other = nixl_agent(str(uuid.uuid4()), config)
                pair = (self._nixl, other) if is_caller else (other, self._nixl)
                _exchange_notification(*pair)
        except Exception as error:
            logger.info("no warm-up, the first handshake takes longer: %s", error)

    def _only_mem_type(self) -> str:
        mem_types = {region.mem_type for region in self._regions}
        if len(mem_types) != 1:
            raise AgentError(f"KV regions of one memory type are needed, not {sorted(mem_types)}")
        return mem_types.pop()

    @staticmethod
    def _extent(region: Region) -> int:
        return region.block_stride * (region.num_blocks - 1) + region.block_len


def _add(agent: nixl_agent, metadata: bytes) -> str:
    name = agent.add_remote_agent(metadata)
    return name.decode() if isinstance(name, bytes) else str(name)


def _exchange_notification(caller: nixl_agent, callee: nixl_agent) -> None:
    """Return when it has arrived, or after a second."""
    name = _add(caller, callee.get_agent_metadata())
    caller.send_notif(name, b"rehearsal")
    deadline = time.monotonic() + WARM_UP_SECONDS
    while not callee.get_new_notifs() and time.monotonic() < deadline:
        caller.get_new_notifs()
    caller.remove_remote_agent(name)


def _transport_hint(backends: Sequence[str]) -> str:
    """Return what to do if the agent cannot be created because of `UCX_TLS`. NIXL asks UCX for
    transports that report the failure of a peer, and shared memory does not."""
    chosen = os.environ.get("UCX_TLS")
    if chosen is None or "UCX" not in backends:
        return ""
    return (
        f"; UCX_TLS={chosen} may leave no transport that reports the failure of a peer: unset it, "
        f"or add tcp (UCX_TLS={chosen},tcp)"
    )


class _errors:  # noqa: N801 - reads as a statement
    """Turns the exceptions of NIXL's bindings into AgentError."""

    def __init__(self, action: str, hint: str = "") -> None:
        self._action = action
        self._hint = hint

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise AgentError(f"could not {self._action}: {error}{self._hint}") from error
