"""Push mode: P writes the KV of a prompt into blocks that D has registered.

    D: registrations.py    blocks that wait for P's WRITE; each ends in one report
       prefill_engines.py  inquiries whether P holds a prompt; lower bounds of P's clock
    P: matcher.py          pairs registrations and finished prompts
       writes.py           the WRITEs
       decode_engines.py   checks and answers what decode engines send
       matching_state.py   the bounded tables of all these

One engine may be both. engine_ext/connector.py builds this component where the transfer mode is
push, and `engine_ext.worker.loop` steps it.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from engine_ext.common.inspection import QuarantineSeen
from engine_ext.push.matcher import PushMatcher
from engine_ext.push.prefill_engines import OutgoingInquiries, RemoteClocks
from engine_ext.push.registrations import Registrations
from engine_ext.wire.notifications import (
    AwaitPrompt,
    Notification,
    PromptReady,
    PushDone,
    PushFailed,
    PushRegistered,
    ReturnBlocks,
    Withdraw,
)
from engine_ext.worker.push_component import LoopParts


class Push:
    """`engine_ext.worker.push_component.PushComponent`."""

    def __init__(self, parts: LoopParts) -> None:
        self._stats = parts.context.stats
        self._matcher = PushMatcher(parts)
        self._writes = self._matcher.writes
        self._clocks = RemoteClocks()
        self._registrations = Registrations(parts, self._clocks)
        self._inquiries = OutgoingInquiries(parts)
        self.steps = (
            self._matcher.step,
            self._registrations.step,
            self._inquiries.step,
            self._count,
        )
        self.expect = self._matcher.expect
        self.cancel = self._matcher.cancel
        self.forget = self._matcher.forget
        self.own_id = self._matcher.own_id
        self.leave = self._matcher.leave
        self.end_inquiry = self._inquiries.end
        self.clock_reported = self._clocks.reported
        self.uses = self._writes.uses
        self.loads = self._registrations.loads

    @property
    def orders(self) -> Mapping[str, Callable[[Any, float], object]]:
        return {
            "transfer_names": lambda named, now: self._matcher.name(*named),
            "partial_offers": self._matcher.offer_partially,
            "inquiries": self._inquiries.ask,
            "offers": self._matcher.offer,
            "registrations": self._registrations.register,
            "withdrawals": self._registrations.withdraw,
            "reclaims": self._registrations.reclaim,
            "confirmed_returns": self._registrations.confirm_returned,
        }

    @property
    def num_open(self) -> int:
        waiting = self._matcher.num_waiting + len(self._inquiries)
        return len(self._writes) + waiting + self._registrations.num_active

    @property
    def youngest_began(self) -> float | None:
        return self._writes.youngest_began

    def needs_steps(self, now: float) -> bool:
        return len(self._writes) > 0 or self._registrations.needs_steps(now)

    @property
    def awaits_message(self) -> bool:
        return self._registrations.num_active > 0 or len(self._inquiries) > 0

    @property
    def has_unsent(self) -> bool:
        return self._registrations.has_unsent

    def receive(self, message: Notification, sender: str, now: float) -> None:
        match message:
            case PushRegistered():
                self._matcher.registered(message, sender, now)
            case Withdraw():
                self._matcher.withdrawn(message, sender, now)
            case ReturnBlocks():
                self._matcher.reclaimed(message, sender)
            case AwaitPrompt():
                self._matcher.awaited(message, sender, now)
            case PushDone():
                self._registrations.written(message, sender, now)
            case PushFailed():
                self._registrations.failed(message, sender, now)
            case PromptReady(request_id):
                self._inquiries.answered(request_id, sender)

    def touches(self, request_id: str) -> bool:
        return self._registrations.touches(request_id) or self._writes.touches(request_id)

    def quarantined(self, now: float) -> Iterator[QuarantineSeen]:
        return chain(self._writes.quarantined(now), self._registrations.quarantined(now))

    def _count(self, now: float) -> None:
        self._stats.pushes_active = len(self._writes) + self._registrations.num_active
