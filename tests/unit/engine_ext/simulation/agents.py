"""A NIXL agent that is as unkind as the real one may be.

Giving a transfer up stops nothing, and forgetting a remote stops nothing: the blocks move when they
move. The other side is told only when the initiator polls. A process can be frozen inside any call,
before or after what the call does; the world goes on meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine_ext.layout.plan import Indices, PeerLayout
from engine_ext.worker.agent import AgentError, PeerHandle, TransferState
from tests.unit.engine_ext.simulation.memory import Memory

if TYPE_CHECKING:
    from tests.unit.engine_ext.simulation.network import Network

Kind = Literal["READ", "WRITE"]
Moment = Literal["before", "after"]


@dataclass(slots=True, eq=False)
class SimTransfer:
    """`state` is the truth; `poll` may not be told it."""

    number: int
    kind: Kind
    agent: "SimAgent"
    remote_name: str
    local: list[int]
    remote: list[int]
    notification: bytes
    owners: list[str | None]
    """Of the initiator's blocks when it began."""
    for_request: str
    """WRITE: the request in whose blocks it may land."""
    cut_at: float = float("inf")
    """World time after which nothing of it lands, see `Network.writes_are_bounded`."""
    state: TransferState = TransferState.RUNNING
    has_told: bool = False
    is_discarded: bool = False
    is_void: bool = False
    """A part of a prompt whose request has lost its blocks: whatever it carries is written anew."""
    is_unknowable: bool = False
    """Its remote was removed, and NIXL does not say any more how it goes."""
    to_land: set[int] = field(default_factory=set)
    """Indices of the blocks that will still move."""

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def is_running(self) -> bool:
        return self.state is TransferState.RUNNING

    def fail(self) -> None:
        """It has stopped, whatever of it has landed."""
        self.state = TransferState.FAILED
        self.to_land.clear()


@dataclass(frozen=True, slots=True)
class Freeze:
    """In the next call of `method`, for `seconds` of world time."""

    method: str
    seconds: float
    moment: Moment = "before"


@dataclass(eq=False)
class SimAgent:
    """`engine_ext.worker.agent.Agent`. Methods named in `failing` raise `fault`."""

    name: str
    network: "Network"
    memory: Memory = field(default_factory=Memory)
    known: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    fault: type[Exception] = AgentError
    """Another one is a programming error of the worker half."""
    inbox: list[tuple[str, bytes]] = field(default_factory=list)
    compares_checksums: bool = False
    """With peers that do; see `Network._spoil`."""
    is_alive: bool = True
    is_frozen: bool = False
    freeze: Freeze | None = None
    write_seconds: float = float("inf")
    """World seconds after the clock was read in which a WRITE lands if it lands at all."""
    landing_seconds: float = 0.0
    """World seconds for which what a failed WRITE had sent may land."""
    clock_read_at: float = 0.0
    """World time."""
    on_start: Callable[[SimTransfer], None] = lambda transfer: None
    on_wake: Callable[[], None] = lambda: None
    on_thaw: Callable[[], None] = lambda: None
    waiting_moves: list[Callable[[], None]] = field(default_factory=list)

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_remote(self, metadata: bytes) -> str:
        self._enter("add_remote")
        name = metadata.decode(errors="replace")
        if name not in self.network.agents:
            raise AgentError(f"no agent's metadata: {metadata[:40]!r}")
        self.known.add(name)
        self._leave("add_remote")
        return name

    def remove_remote(self, name: str) -> None:
        self._enter("remove_remote")
        self.known.discard(name)
        self.network.forgotten(self, name)
        self._leave("remove_remote")

    def prepare(self, name: str, layout: PeerLayout) -> str:
        self._enter("prepare")
        self._leave("prepare")
        return name

    def unprepare(self, peer: PeerHandle) -> None:
        self._enter("unprepare")
        self._leave("unprepare")

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> SimTransfer:
        return self._start("READ", peer.name, local.tolist(), remote.tolist(), notification)

    def start_write(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> SimTransfer:
        return self._start("WRITE", peer.name, local.tolist(), remote.tolist(), notification)

    def poll(self, transfer: SimTransfer) -> TransferState:
        self._enter("poll")
        if transfer.is_discarded:
            self.network.violate(self.name, f"{transfer} was polled after its handle was freed")
        if transfer.is_unknowable:
            raise AgentError(f"{transfer.remote_name} is not known any more")
        state = transfer.state
        if state is TransferState.DONE and not transfer.has_told:
            transfer.has_told = True
            if transfer.notification:
                self.network.send(self.name, transfer.remote_name, transfer.notification)
        self._leave("poll")
        return state

    def discard(self, transfer: SimTransfer) -> None:
        self._enter("discard")
        if transfer.is_discarded:
            self.network.violate(self.name, f"the handle of {transfer} was freed twice")
        self.network.discarded(transfer)
        self._leave("discard")

    def notify(self, name: str, message: bytes) -> None:
        self._enter("notify")
        if name not in self.known:
            raise AgentError(f"{self.name} does not know {name}")
        self.network.send(self.name, name, message)
        self._leave("notify")

    def notifications(self) -> list[tuple[str, bytes]]:
        self._enter("notifications")
        received, self.inbox = self.inbox, []
        self._leave("notifications")
        return received

    def close(self) -> None:
        self._enter("close")

    def hold(self, seconds: float) -> None:
        """The process stands still while the world goes on, and returns to where it was."""
        self.network.note(self.name, "freezes", f"for {seconds:.1f} s")
        self.is_frozen = True
        self.network.timeline.run_until(self.network.now + seconds)
        self.thaw()

    def thaw(self) -> None:
        """What waited for the process lands before it does anything else."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        self.network.note(self.name, "thaws")
        moves, self.waiting_moves = self.waiting_moves, []
        for move in moves:
            move()
        self.on_thaw()

    def _start(
        self, kind: Kind, name: str, local: Sequence[int], remote: Sequence[int], message: bytes
    ) -> SimTransfer:
        method = f"start_{kind.lower()}"
        self._enter(method)
        transfer = self.network.start(kind, self, name, local, remote, message)
        self._leave(method)
        return transfer

    def _enter(self, method: str) -> None:
        if method in self.failing:
            raise self.fault(f"injected: {method}")
        self._may_freeze(method, "before")

    def _leave(self, method: str) -> None:
        self._may_freeze(method, "after")

    def _may_freeze(self, method: str, moment: Moment) -> None:
        freeze = self.freeze
        if freeze is None or freeze.method != method or freeze.moment != moment:
            return
        self.freeze = None
        self.network.note(self.name, f"is frozen {moment} {method}")
        self.hold(freeze.seconds)
