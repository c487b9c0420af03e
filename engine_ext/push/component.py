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

from collections.abc import Iterator
from itertools import chain
from typing import assert_never

from engine_ext.common import orders
from engine_ext.common.inspection import QuarantineSeen
from engine_ext.push.matcher import PushMatcher
from engine_ext.push.prefill_engines import OutgoingInquiries, RemoteClocks
from engine_ext.push.registrations import Registrations
from engine_ext.wire import notifications as wire
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

    def carry_out(self, order: orders.PushOrder, now: float) -> None:
        match order:
            case orders.PartialOffer():  # Before `PushOffer`, which it is, too.
                self._matcher.offer_partially(order, now)
            case orders.PushOffer():
                self._matcher.offer(order, now)
            case orders.PushInquiry():
                self._inquiries.ask(order, now)
            case orders.PushRegistration():
                self._registrations.register(order, now)
            case orders.PushWithdrawal():
                self._registrations.withdraw(order, now)
            case orders.Reclaim(request_id):
                self._registrations.reclaim(request_id, now)
            case orders.ConfirmReturn(request_id):
                self._registrations.confirm_returned(request_id, now)
            case _:
                assert_never(order)

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

    def receive(self, message: wire.Notification, sender: str, now: float) -> None:
        match message:
            case wire.PushRegistered():
                self._matcher.registered(message, sender, now)
            case wire.Withdraw():
                self._matcher.withdrawn(message, sender, now)
            case wire.ReturnBlocks():
                self._matcher.reclaimed(message, sender)
            case wire.AwaitPrompt():
                self._matcher.awaited(message, sender, now)
            case wire.PushDone():
                self._registrations.written(message, sender, now)
            case wire.PushFailed():
                self._registrations.failed(message, sender, now)
            case wire.PromptReady(request_id):
                self._inquiries.answered(request_id, sender)

    def touches(self, request_id: str) -> bool:
        return self._registrations.touches(request_id) or self._writes.touches(request_id)

    def quarantined(self, now: float) -> Iterator[QuarantineSeen]:
        return chain(self._writes.quarantined(now), self._registrations.quarantined(now))

    def _count(self, now: float) -> None:
        self._stats.pushes_active = len(self._writes) + self._registrations.num_active
