"""The interface between the loop and push mode, and the answers of an engine without push mode.

engine_ext/push implements `PushComponent`, and engine_ext/connector.py builds it for engines whose
transfer mode is push. An engine in pull mode runs no code of push.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_ext.common.inspection import QuarantineSeen
from engine_ext.common.orders import PushOrder
from engine_ext.wire import notifications as wire
from engine_ext.worker.agent import PeerHandle
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.heartbeats import HeartbeatTracker
from engine_ext.worker.leases import LeaseTable
from engine_ext.worker.peers import Peers
from engine_ext.worker.reply_channels import ReplyChannels

NO_PUSH = "this engine's transfer mode is pull"


class KvTransfers(Protocol):
    """KV on its way into this engine's blocks or out of them."""

    @property
    def num_open(self) -> int:
        """Transfers, and messages about them, that have not come to an end."""

    @property
    def youngest_began(self) -> float | None:
        """When the youngest transfer began that a request waits for; None if there is none."""

    def needs_steps(self, now: float) -> bool:
        """It moves on soon without a message: a transfer in quarantine ends, for example."""

    @property
    def awaits_message(self) -> bool:
        """A request waits for a message of another engine."""

    def uses(self, peer: PeerHandle) -> bool:
        """Return True while a transfer with this peer is under way, so that NIXL must keep it."""

    def touches(self, request_id: str) -> bool:
        """A transfer may still read or write this request's blocks, or will."""

    def loads(self, request_id: str) -> bool:
        """The end of this request's load is reported later."""

    def quarantined(self, now: float) -> Iterator[QuarantineSeen]: ...


class PushComponent(KvTransfers, Protocol):
    """What push mode adds to the loop: P's WRITEs, and D's blocks that wait for them."""

    @property
    def steps(self) -> Sequence[Callable[[float], None]]:
        """Functions of the time that the loop calls in each step, in this order."""

    @property
    def has_unsent(self) -> bool:
        """A message waits for a handshake."""

    def carry_out(self, order: PushOrder, now: float) -> None:
        """Carry out an order that only push mode has."""

    def receive(self, message: wire.Notification, sender: str, now: float) -> None:
        """A notification of push mode came."""

    def clock_reported(self, agent: str, clock: float, now: float) -> None:
        """The clock of another engine's agent reads `clock`, in an answer that came just now."""

    def expect(self, request_id: str, transfer_id: str | None) -> None:
        """P has a request whose KV a decode engine may register for."""

    def cancel(self, request_id: str, now: float, transfer_id: str | None = None) -> None:
        """P has no KV of this request, or its lease has expired."""

    def forget(self, request_id: str) -> None:
        """The lease ended because its readers have confirmed."""

    def own_id(self, name: str) -> str:
        """This engine's id of the request that a decode engine calls `name`; else `name`."""

    def end_inquiry(self, request_id: str) -> None:
        """D does not wait any more until P holds the prompt."""

    def leave(self, now: float) -> None:
        """The engine shuts down: notify the engines that wait for its prompts."""


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What the loop shares with the push component."""

    context: WorkerContext
    peers: Peers
    beats: HeartbeatTracker
    leases: LeaseTable
    channels: ReplyChannels
    free: Callable[[str], None]
    """Called for each request whose lease the component ends."""


PushFactory = Callable[[LoopParts], PushComponent]


def refusal_of_push(message: wire.Notification) -> wire.ExtensionMessage | None:
    """Return what an engine without push answers, so that no decode engine waits for its deadline.
    Without push nothing was registered here, so nothing will be written. None: no answer is due."""
    match message:
        case wire.PushRegistered(request_id=request_id, disagg=extension) if extension is not None:
            return wire.PushFailed(request_id, extension.generation, NO_PUSH)
        case wire.Withdraw(request_id, generation) | wire.ReturnBlocks(request_id, generation) if (
            generation
        ):
            return wire.PushFailed(request_id, generation, NO_PUSH)
        case wire.AwaitPrompt(request_id):
            return wire.PromptReady(request_id)  # It registers then, and is refused.
    return None
