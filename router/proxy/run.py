"""The state of one request while its legs run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.conversations.conversations import RecallOutcome
from router.fleet.engine import Engine
from router.http_client.answer_memory import MemoryBudget, Reservation
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError
from router.proxy.leg_bodies import LegBodies
from router.proxy.plan import Plan
from router.proxy.prefill_answer import RETAIN, KvParams
from router.proxy.request import Request
from router.proxy.resume import ResumeState
from router.proxy.turn_reuse import SPENT_TURN, TurnOffer

if TYPE_CHECKING:
    from router.proxy.admission import EngineSlot
    from router.proxy.gateway import Gateway
    from router.proxy.load_failure import LoadFailure

NO_GROUPS: frozenset[str] = frozenset()


class Run:
    """The state of one request from its plan to its end.

    The strategies own the object and pass it to everything that works for the request. It holds
    state and no flow: `strategies` decides what happens next, `selection` chooses engines, `legs`
    sends the requests to engines, and `recovery` decides what follows from a failure.
    """

    __slots__ = (
        "answers_held", "bodies", "cannot_load", "failed", "failure", "gateway", "groups_left",
        "holder", "is_fresh", "is_read", "is_turn_spent", "load_failure", "loads_from",
        "may_return", "num_hedged_failures", "offer", "plan", "prefiller", "prompt_tokens",
        "request", "resume", "route", "slot", "suspects", "unread_turn",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        bodies: LegBodies,
        plan: Plan,
        gateway: Gateway,
        slot: EngineSlot | None = None,
    ) -> None:
        self.request = request
        self.bodies = bodies
        self.plan = plan
        self.gateway = gateway
        # The request's place at engines that have limits.
        self.slot = slot
        # The engines of the group where the request is now. It changes if the group runs out.
        self.route = plan.route
        self.groups_left = NO_GROUPS
        self.resume = ResumeState(request, gateway)
        # Memory of large answers, which is released when the request ends.
        self.answers_held = AnswersHeld(gateway.memory.answers)

        # Failures so far.
        self.failed: list[Engine] = []
        # Of `failed`, those that were hedged: the answer never depended on them.
        self.num_hedged_failures = 0
        # Decode engines that could not load KV, once for each failed load.
        self.cannot_load: list[Engine] = []
        # Engines that may have crashed, and the Unix time of each failure.
        self.suspects: dict[Engine, float] = {}
        self.failure: UpstreamError | EngineError | None = None
        # Legs open a new connection, because a kept one was closed by its engine.
        self.is_fresh = False

        # KV on its way from a prefill engine to a decode engine.
        # The prefill engine whose KV the decode engine is to load, if any.
        self.prefiller: Engine | None = None
        # The prefill engine where KV waits for a decode engine (counted in Engine.kv_leases).
        self.holder: Engine | None = None
        # A decode engine has answered, so it has loaded that KV.
        self.is_read = False
        # The name of the prefill engine that the running decode leg loads from, or "".
        self.loads_from = ""
        self.load_failure: LoadFailure | None = None
        self.prompt_tokens: int | None = None
        # The decode engine was allowed to return the answer instead of preempting it.
        self.may_return = False

        # The last turn of a conversation. A prefill engine can read its KV only once.
        self.unread_turn = None if plan.reuse is None else plan.reuse.turn.entry
        self.is_turn_spent = False
        self.offer = SPENT_TURN

    def with_retain_request(self, params: KvParams | None) -> KvParams | None:
        """Return the params with the request that the decode engine retains the answer's KV for
        the next turn, unless the next turn could not find it."""
        reuse = self.plan.reuse
        keeps = reuse is not None and reuse.turn.recalled is not RecallOutcome.STORE_FAILED
        if params is None:
            return RETAIN if keeps else None
        return params.with_retain() if keeps else params.without_retain()

    def hold(self, prefiller: Engine) -> None:
        """Count KV that waits at a prefill engine for a decode engine."""
        self.stop_holding()
        prefiller.kv_leases += 1
        self.holder = prefiller

    def stop_holding(self, is_read: bool = False) -> None:
        """Count that a decode engine has read the KV, or that none will."""
        holder, self.holder, self.is_read = self.holder, None, is_read
        if holder is not None:
            holder.kv_leases -= 1

    def count_turn(self, offer: TurnOffer) -> None:
        """Record, once per request, what the request reused of the last turn."""
        record, reuse = self.request.record, self.plan.reuse
        if reuse is None or record.conversation:
            return
        metrics = self.gateway.metrics
        record.conversation = offer.outcome
        if offer.params is not None and reuse.entry is not None:
            record.reused_from = reuse.entry.decoder
        metrics.conversation_turns.add((offer.outcome, offer.reason))
        metrics.conversation_tokens.add((), offer.tokens)

    def close(self) -> None:
        """Give back what the request still holds in the router."""
        if self.slot is not None:
            self.slot.release()
        self.resume.close()
        self.answers_held.release()
        if self.route.has_feedback:
            self.route.end_feedback()


class AnswersHeld:
    """The reservations of memory for answers that a request holds after their legs have ended."""

    __slots__ = ("_is_released", "_memory", "_reservations")

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._reservations: Sequence[Reservation] = ()
        self._is_released = False

    def keep(self, answer: EngineAnswer) -> None:
        """Keep the memory of an answer reserved until the request ends, not only its leg."""
        reservation, answer.reservation = answer.reservation, None
        if reservation is None:
            return
        if self._is_released:  # a decode engine may have answered before its prefill engine
            reservation.release()
        else:
            self._reservations = (*self._reservations, reservation)

    def reserve(self) -> Reservation:
        """Return a new reservation, which is released when the request ends."""
        reservation = Reservation(self._memory)
        self._reservations = (*self._reservations, reservation)
        return reservation

    def release(self) -> None:
        self._is_released = True
        for reservation in self._reservations:
            reservation.release()
