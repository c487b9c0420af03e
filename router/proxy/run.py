"""The state of one request while its legs run, and the choice of the engine for the next leg.

The plan's order of engines comes first. After a failure, or if something speaks against the first
engine by now, the other engines of the group are considered as they are at that moment, and last
the engines of another group. KV moves only within a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic as now
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from router.conversations.conversations import STORE_FAILED, Turn
from router.conversations.entry import Entry
from router.conversations.reuse import SPENT_TURN, TurnOffer
from router.fleet.engine import DECODE, PREFILL, Engine, EngineRole, Place
from router.fleet.kv_protocol import WITHOUT_VLLM_FIELDS, can_exchange
from router.fleet.readiness import describe_lack
from router.http_client.answer_limits import MemoryBudget, Reservation
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError, LoadFailedError, NoEngineError, UnknownModelError
from router.proxy.kv_params import KvParams
from router.proxy.kv_protocols import protocol_of
from router.proxy.messages import LegBodies
from router.proxy.plan import Plan
from router.proxy.request import Body, Request
from router.proxy.resume import DecodeParams, ResumeState, can_continue
from router.proxy.resume_buffer import RETURNED
from router.routing.route import Route

if TYPE_CHECKING:
    from router.proxy.admission import EngineSlot
    from router.proxy.canary import Canary
    from router.proxy.gateway import Gateway
    from router.proxy.load_failure import LoadFailure


class Suspicion(NamedTuple):
    """A leg of the request has failed, maybe because its engine crashed."""

    at: float
    """Unix time of the failure."""
    has_company: bool
    """The engine worked on other requests, too."""


class Run(Struct, eq=False):
    """The state of one request from its plan to its end.

    The strategies own the object and pass it to everything that works for the request. It holds
    state and no flow: `strategies` decides what happens next, the functions below choose engines,
    `legs` sends the requests to engines, and `recovery` decides what follows from a failure.
    """

    request: Request
    bodies: LegBodies
    plan: Plan
    gateway: Gateway
    # The engines of the group where the request is now. It changes if the group runs out.
    route: Route
    resume: ResumeState
    # Memory of large answers, which is released when the request ends.
    answers_held: AnswersHeld
    # The request's place at engines that have limits.
    slot: EngineSlot | None = None
    groups_left: frozenset[str] = frozenset()

    # Failures so far.
    failed: list[Engine] = []
    # Of `failed`, those that were hedged: the answer never depended on them.
    num_hedged_failures: int = 0
    # Decode engines that could not load KV, once for each failed load.
    cannot_load: list[Engine] = []
    # Engines that may have crashed.
    suspects: dict[Engine, Suspicion] = {}
    # The number of dead engines whose deaths have another explanation than this request.
    excused_deaths: int = 0
    failure: UpstreamError | EngineError | None = None
    # Legs open a new connection, because a kept one was closed by its engine.
    is_fresh: bool = False

    # KV on its way from a prefill engine to a decode engine.
    # The prefill engine whose KV the decode engine is to load, if any.
    prefiller: Engine | None = None
    # The prefill engine where KV waits for a decode engine (counted in Engine.kv_leases).
    holder: Engine | None = None
    # A decode engine has answered, so it has loaded that KV.
    is_read: bool = False
    # The name of the prefill engine that the running decode leg loads from, or "".
    loads_from: str = ""
    load_failure: LoadFailure | None = None
    # The drained engine that a stream has just left. It still has the stream's blocks.
    lender: Place | None = None
    # Compares the first tokens of both engines; None for a request that is not compared.
    canary: Canary | None = None
    prompt_tokens: int | None = None

    # The last turn of a conversation. A prefill engine can read its KV only once.
    unread_turn: Entry | None = None
    is_turn_spent: bool = False
    # The decode engine is to retain the answer's KV, because the next turn can find it.
    retains_turn: bool = False
    offer: TurnOffer = SPENT_TURN
    # The token ids of the prompt, if they decide what of the last turn may be read.
    prompt_ids: Sequence[int] | None = None
    # Those that the prefill engine has computed, if it was asked for them.
    prefilled_ids: Sequence[int] | None = None

    def take_turn(self, turn: Turn) -> None:
        """Take what the last turn of the conversation has left."""
        has_store = turn.recalled is not STORE_FAILED
        self.unread_turn, self.retains_turn = turn.entry, turn.retains and has_store

    def take_prompt_ids(self, ids: Sequence[int] | None) -> None:
        """Let these ids decide what may be read, if the prefill engine reports the same ones."""
        self.prompt_ids, self.bodies.checks_prompt = ids, ids is not None
        self.bodies.prompt_ids = b""

    def proven_ids(self, ids: Sequence[int] | None) -> Sequence[int] | None:
        """Return the ids of a turn as a decode engine reports them; None if its prefill engine
        has computed others, or may have: KV is loaded by position, and a date may change between
        two legs."""
        if ids is None or self.prefiller is None:
            return ids
        computed = self.prefilled_ids
        return ids if computed is not None and [*ids[: len(computed)]] == computed else None

    def hold(self, prefiller: Engine) -> None:
        """Count KV that waits at a prefill engine for a decode engine."""
        if self.holder is not None:
            self.stop_holding()
        prefiller.kv_leases += 1
        prefiller.kv_lease_tokens += self.request.tokens
        self.holder = prefiller

    def stop_holding(self, is_read: bool = False) -> None:
        """Count that a decode engine has read the KV, or that none will."""
        holder, self.holder, self.is_read = self.holder, None, is_read
        if holder is not None:
            holder.kv_leases -= 1
            holder.kv_lease_tokens -= self.request.tokens

    def release_unread(self, params: KvParams | None, cause: BaseException | None = None) -> None:
        """Release the prefill engine's KV, unless a decode engine has certainly read it.

        The first byte of an answer shows that. With a hand-over of the first token, the second
        token shows it, because the decode engine sends the first one before it has any KV. If the
        tokens are not counted, the prefill engine knows whether its blocks were read. `cause` is
        what ended the decode leg, if something has.
        """
        if params is None:
            return
        buffer = self.resume.buffer
        is_read = self.request.record.first_byte is not None and (
            not params.continues_tokens or (buffer is not None and buffer.num_tokens > 1)
        )
        if not is_read:
            self.gateway.releaser.release_prefill(self.request, params, cause)

    def leg_params(
        self, params: KvParams | None, decoder: Engine, is_hedged: bool = False
    ) -> DecodeParams:
        """Return the KV transfer params of one decode leg, and the buffer that the leg fills.

        A hedged leg may lose, so its engine may not return the answer for lack of blocks.
        """
        capabilities, resume = decoder.capabilities, self.resume
        if (
            capabilities.supports_resume
            or capabilities.takes_token_ids
            or capabilities.returns_preempted
            or resume.is_used
            or resume.buffer is not None
        ):
            return resume.params_for(params, decoder, self.prefiller, is_hedged)
        if capabilities.kv_peer.protocol in WITHOUT_VLLM_FIELDS:
            return DecodeParams(fields=b"")
        return DecodeParams(params)

    def offer_last_turn(self, prefiller: Engine) -> Body | None:
        """Return the params of the last turn's KV, if the prefill engine may read it."""
        if self.plan.reuse is None:
            return None
        self.offer = self.plan.reuse.offer(prefiller, self.prompt_ids)
        continued = self.resume.continued
        if self.is_turn_spent or (continued is not None and continued.by_request):
            self.offer = SPENT_TURN
        return self.offer.params

    def note_prefilled(self, prefiller: Engine, params: KvParams | None) -> None:
        """Record that a prefill engine has computed the prompt, and read what it was offered."""
        if self.plan.reuse is not None:
            self.count_turn(self.offer)
            if self.offer.params is None:
                self.release_unread_turn()
            self.unread_turn, self.is_turn_spent = None, True
        if params is not None and not self.is_read:
            self.hold(prefiller)
            self.request.record.without_transfer = ""

    def take_model(self, model: object) -> None:
        """Ask the other engines for the model of the prefill engine that has answered. The client
        named none, and the engines' models are unknown: another one may be of another model."""
        if isinstance(model, str) and model:
            self.request.model = model
            self.request.body = {**self.request.body, "model": model}
            self.bodies = self.bodies.of(self.request.body)

    def release_unread_turn(self) -> None:
        """Release the retained KV of the last turn if no prefill engine has read it."""
        if self.unread_turn is not None:
            entry, self.unread_turn = self.unread_turn, None
            self.gateway.releaser.release_turn(self.request, entry)

    def count_turn(self, offer: TurnOffer) -> None:
        """Record, once per request, what the request reused of the last turn."""
        record, reuse = self.request.record, self.plan.reuse
        if reuse is None or record.conversation:
            return
        if record.ended is not None:  # the prefill leg of a push may end after the answer
            metrics = self.gateway.metrics.requests
            metrics.conversation_turns.add((offer.outcome, offer.reason))
            metrics.conversation_tokens.add((), offer.tokens)
            return
        record.conversation, record.conversation_reason = offer.outcome, offer.reason
        record.offered_tokens, record.answer_change = offer.tokens, reuse.turn.answer_change
        if offer.params is not None and reuse.entry is not None:
            record.reused_from = reuse.entry.decoder

    def close(self) -> None:
        """Give back what the request still holds in the router."""
        if self.slot is not None:
            self.slot.release()
        self.answers_held.release()
        if self.resume.buffer is not None:
            self.resume.close()
        if self.route.prefill_feedback or self.route.decode_feedback:
            self.route.end_feedback()


class AnswersHeld(Struct, eq=False):
    """The reservations of memory for answers that a request holds after their legs have ended."""

    _memory: MemoryBudget
    _reservations: tuple[Reservation, ...] = ()
    _is_released: bool = False

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


# Failed KV loads after which a decode engine computes the prompt, if it may.
MAX_FAILED_LOADS = 3


def select_prefiller(run: Run) -> Engine | None:
    """Return the next prefill engine, or None if no engine of the group is left.

    Engines that the group's decode engines can load from come first. The decode engine of a
    conversation is kept, because it has a part of the prompt in its cache. A decode engine without
    a KV connector computes the prompt itself, so it has no prefill engine.
    """
    route = run.route
    if route.decoders and not route.decoders[0].capabilities.kv.has_connector:
        return None
    engine = _planned(run, route.prefillers)
    if engine is not None and not engine.capabilities.kv.has_connector:
        engine = None
    pairs = run.gateway.fleet.unreachable_pairs
    if (
        pairs.failing
        and engine is not None
        and route.decoders
        and _is_avoided(run, engine, route.decoders[0])
    ):
        pair = (engine.name, route.decoders[0].name)
        is_kept = run.plan.reuse is None and pairs.keeps_prefiller(*pair)
        others = _usable(run, DECODE) if is_kept else ()
        if not any(_can_pair(run, engine, decoder) for decoder in others):
            engine = None
    return engine or _next_best(run, PREFILL, None)


def select_decoder(run: Run, prefiller: Engine | None = None) -> Engine | None:
    """Return the next decode engine, or None if no engine of the group is left.

    With a `prefiller`, return an engine that can load KV from it, or the prefill engine itself if
    it plays both roles and no other engine is left.
    """
    return _planned(run, run.route.decoders, prefiller) or _next_best(run, DECODE, prefiller)


def another_decoder(run: Run, prefiller: Engine | None) -> Engine | None:
    """Return the next decode engine after a failure, as `select_decoder` would."""
    return _next_best(run, DECODE, prefiller)


def usable_decoders(run: Run) -> list[Engine]:
    """Return the group's decode engines that have not failed this request, best first."""
    return _usable(run, DECODE)


def change_group(run: Run) -> bool:
    """Move the request to another group. Return False if no other group has usable engines.

    What was prefilled stays behind. A group that was left is not entered again.
    """
    run.groups_left |= {run.route.group}
    try:
        found = run.gateway.routes.find(run.request, but=run.groups_left)
    except (NoEngineError, UnknownModelError):
        return False
    if not found.decoders:
        return False
    run.route.end_feedback()
    run.route = found
    if run.resume.continued is None or not run.resume.continued.by_request:
        run.take_prompt_ids(None)  # another group may have another tokenizer
    run.request.record.group = found.group
    return True


def lacks_pair(run: Run) -> bool:
    """Return True if a KV load has failed and a decode engine should compute the prompt.

    That is so when no other pair of engines of any group can exchange KV, and after
    MAX_FAILED_LOADS failed loads. Raises the failure if no decode engine may prefill a prompt of
    this length.
    """
    if not isinstance(run.failure, LoadFailedError):
        return False
    if len(run.cannot_load) < MAX_FAILED_LOADS or not may_prefill_on_decoder(run):
        decoders = _usable(run, DECODE)
        if any(_can_pair(run, p, d) for p in _usable(run, PREFILL) for d in decoders):
            return False
        if change_group(run):
            return False
    require_short_prompt(run)
    run.prefiller = None
    return True


def require_short_prompt(run: Run) -> None:
    """Raise the last failure, or NoEngineError, if no decode engine may prefill this prompt."""
    limits, routes, model = run.gateway.limits, run.gateway.routes, run.request.model
    if limits.without_prefiller == "refuse":
        raise run.failure or routes.lack_of(PREFILL, model)
    if run.request.prompt_tokens > limits.without_prefiller_tokens:
        addition = ", and the prompt is too long for a decode engine alone"
        raise run.failure or routes.lack_of(PREFILL, model, addition)


def require_lone_decoder(run: Run) -> None:
    """Raise the last failure, or NoEngineError, if the decode engines answer nothing alone."""
    if not run.route.decoders:
        return
    first = run.route.decoders[0]
    protocol = protocol_of(first)
    if protocol and not protocol.decoder_prefills and first.capabilities.kv_peer.moves_kv:
        raise run.failure or run.gateway.routes.lack_of(PREFILL, run.request.model)


def may_prefill_on_decoder(run: Run) -> bool:
    """Return True if a decode engine may compute this prompt for lack of a prefill engine."""
    limits = run.gateway.limits
    most = 0 if limits.without_prefiller == "refuse" else limits.without_prefiller_tokens
    return run.request.prompt_tokens <= most


# Why a request that could have had a prefill engine has none, by the reason's metric label. Other
# reasons follow from the request, and are not worth a word.
REASONS = {
    "same_engine": "one engine plays both roles",
    "cheapest": "prompt and answer on one engine cost least",
    "short": "its cache lacks only a short part of the prompt",
    "trial": "the decode engine measures the time of its steps with the prompt",
    "sooner": "it computes the prompt sooner than a prefill engine would",
    "prompt_embeds": "engines cannot share a prompt of embeddings",
    "tokens_differ": "the prefill engine computed other tokens than it had reported",
}


def describe_reason(run: Run, reason: str) -> str:
    """Say in words why a decode engine works alone; empty if that is what the client asked for."""
    if reason == "no_pair":
        return f"no KV loaded: {run.failure.phrase}" if run.failure else "no KV loaded"
    if reason != "no_prefiller":
        return REASONS.get(reason, "")
    fleet = run.gateway.fleet
    reasons = fleet.compare().reasons
    known = (reasons[one.name] for one in run.route.decoders if one.name in reasons)
    return next(known, "") or describe_lack(fleet, run.request.model, PREFILL, names_models=True)


def _planned(run: Run, order: Sequence[Engine], prefiller: Engine | None = None) -> Engine | None:
    """Return the first engine of the plan, unless a leg has ended without the answer's end, or the
    engine is not usable."""
    if not order or run.failed or run.cannot_load or run.resume.preempted or run.resume.continued:
        return None
    engine = order[0]
    if not engine.is_available:
        return None
    if prefiller is None:
        return engine
    return engine if _can_pair(run, prefiller, engine) else None


def _next_best(run: Run, role: EngineRole, prefiller: Engine | None) -> Engine | None:
    usable = _usable(run, role)
    if prefiller is not None:
        reading = [engine for engine in usable if _may_read(run, engine, prefiller)]
        usable = reading or [engine for engine in usable if engine is prefiller]
    if run.gateway.fleet.unreachable_pairs.failing and len(usable) > 1:
        usable = _paired(run, usable, prefiller)
    left = [engine for engine in usable if engine.is_available] or usable
    left = [engine for engine in left if engine not in run.resume.preempted] or left
    return next(iter(left), None) if run.slot is None else run.slot.first_with_room(left)


def _usable(run: Run, role: EngineRole) -> list[Engine]:
    """Return the group's engines of a role that have not failed this request, best first. If none
    can continue a stream that left a drained engine, the drained engine is returned."""
    route = run.route
    order = route.prefillers if role is PREFILL else route.decoders
    known = (*order, *run.gateway.routes.others(run.request, route, role))
    fit = [engine for engine in known if engine.is_usable and engine.role.plays(role)]
    if role is PREFILL:
        fit = [engine for engine in fit if engine.capabilities.kv.has_connector]
    usable = [engine for engine in fit if engine not in run.failed]
    buffer = run.resume.continued
    if buffer is not None:
        usable = [engine for engine in usable if can_continue(engine, role, buffer)]
        may_return = role is DECODE and (not usable or buffer.resume_cause == RETURNED)
        left = buffer.left if may_return else None
        if left is not None and left.is_draining and left not in run.failed:
            usable = [left]
    return sorted(usable, key=run.cannot_load.count) if run.cannot_load else usable


def _paired(run: Run, usable: list[Engine], prefiller: Engine | None) -> list[Engine]:
    """Return the decode engines that can load from `prefiller`. Without a `prefiller`, return the
    prefill engines from which the first decode engine can load, else those from which any can.
    Return `usable` if there is no such engine."""
    if prefiller is not None:
        return [engine for engine in usable if not _is_avoided(run, prefiller, engine)] or usable
    decoders = _usable(run, DECODE)
    for wanted in (decoders[:1], decoders):
        found = [p for p in usable if any(_can_pair(run, p, d) for d in wanted)]
        if found:
            return found
    return usable


def _can_pair(run: Run, prefiller: Engine, decoder: Engine) -> bool:
    """Return True if the decode engine may load KV from the prefill engine, and no such load has
    failed lately."""
    if not _may_read(run, decoder, prefiller):
        return False
    failing = run.gateway.fleet.unreachable_pairs.failing
    return not failing or not _is_avoided(run, prefiller, decoder)


def _may_read(run: Run, decoder: Engine, prefiller: Engine) -> bool:
    """Return True if the decode engine may load KV from the prefill engine, as both are now."""
    if run.request.is_several and not decoder.capabilities.shares_kv_loads:
        return False
    if decoder is prefiller or decoder.group != prefiller.group:
        return False
    return can_exchange(prefiller.kv_protocol, decoder.kv_protocol)


def _is_avoided(run: Run, prefiller: Engine, decoder: Engine) -> bool:
    pairs = run.gateway.fleet.unreachable_pairs
    return pairs.is_avoided(prefiller.name, decoder.name, now())
