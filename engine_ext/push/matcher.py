"""Push mode on P: a prompt's KV meets the registration of the engine that wants it, and is written.

    offer (KV is complete) -----+
                                +--> connecting --> writing --> P's blocks freed, the WRITE's own
    registration (D has blocks) +         |            |        notification reports it to D
                                          +------------+------> P's blocks freed, PushFailed to D

Matching
    P and D work on the request at the same time, so either side may come first. It waits in a table
    with a deadline. An offer and a registration match if they share a name (request_names.py), if
    the router's transfer ids do not differ, and if the prompt's digest is the same. Where
    several requests have one name, the registration waits in *doubt* for `DOUBT_SECONDS`, because
    its own offer may come yet.

When one side gives up
    It leaves a tombstone under its names, so that the other side is refused instead of waiting:
    `failed` (P has no KV), `unwanted` (D does not want it), `missed` (the offer is gone, perhaps
    another attempt's). A D whose request never comes to P is refused after `UNKNOWN_SECONDS`.

Partial offers
    While P computes a prompt, it offers the part that it has, and writes part by part. Only the
    last part's notification reports the push to D. If D does not repeat its registration in time,
    or P preempts the request, the whole prompt is written again.

Ranks
    Where D has more ranks than P, several of them register for one offer, each for its own blocks.
    Each is written as soon as it has registered, and P's blocks are freed after the last.

Repetition
    Messages may come twice, late or in another order. The outcome of each registration is kept by
    its generation (decode_engines.py), so that a repeated message is answered again and nothing is
    written twice.

D may ask for the blocks of a registration back (`ReturnBlocks`), and may wait to register until P
holds the prompt (`AwaitPrompt`); engine_ext/scheduler/block_pressure.py explains why. All of this
runs in the owner thread. writes.py carries out the matches.
"""

import logging
from itertools import chain

from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.orders import PushOffer
from engine_ext.common.request_names import names_of, whole_id
from engine_ext.push.decode_engines import (
    DIFFERENT,
    GIVEN_UP,
    LEASE_ENDED,
    LEAVING,
    TOO_MANY,
    UNKNOWN,
    WITHDRAWN,
    IncomingInquiries,
    Inquiry,
    Replies,
    SenderChecks,
)
from engine_ext.push.matching_state import (
    Doubt,
    HeldOffer,
    NameTable,
    Registered,
    RegistrationKey,
    RegistrationTable,
    Tombstones,
    lasting,
)
from engine_ext.push.writes import ActiveWrite, Writes
from engine_ext.wire.notifications import (
    AwaitPrompt,
    PushFailed,
    PushRegistered,
    ReturnBlocks,
    Withdraw,
)
from engine_ext.worker.push_component import LoopParts

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

UNKNOWN_SECONDS = 45.0
"""D is refused when P has had no request of that name for so long. Both legs are sent at once, but
a prefill leg may wait for its connection, its media, or a long step of P's."""
DOUBT_SECONDS = 5.0
"""A registration in doubt is refused after so long, unless P prefills a request of its name."""
LATE_SECONDS = 5.0
"""D withdrew a request that P did not know yet. An offer of its name within so long is
that request's; a later one is another attempt's."""


class PushMatcher:
    """Pairs offers and registrations, and answers for those that find no counterpart."""

    def __init__(self, parts: LoopParts) -> None:
        context, peers, channels = parts.context, parts.peers, parts.channels
        self._config, self._us, self._clock = context.config, context.rank, context.clock
        self._leases, self._free = parts.leases, parts.free
        self._prefilling: NameTable[str] = NameTable()
        """Requests that will be offered, or cancelled."""
        self._offers: dict[str, HeldOffer] = {}
        self._offer_names: NameTable[str] = NameTable()
        self._partial_offers: dict[str, HeldOffer] = {}
        """The requests that still run. P will offer or cancel their blocks."""
        self._partial_offer_names: NameTable[str] = NameTable()
        self._registrations = RegistrationTable()
        self._failed = Tombstones(context.config.push_deadline)
        self._unwanted = Tombstones(context.config.push_deadline)
        self._missed = Tombstones(context.config.push_deadline)
        """A registration of such a name may have come for an offer that is gone."""
        self._withdrawn = Tombstones(context.config.push_deadline)
        """D's request ids. The first rank's withdrawal frees our blocks."""
        self._hopeless = Tombstones(context.config.push_deadline)
        """Requests of D that were notified that their prompts never come."""
        self._inquiries = IncomingInquiries(channels)
        self._replies = Replies(channels, context.stats)
        self._checks = SenderChecks(context, peers, self._replies, accept=self._welcome)
        self.writes = Writes(
            context,
            peers,
            on_end=self._ended,
            on_lapse=self._lapsed,
            on_release=self._release,
        )

    @property
    def num_waiting(self) -> int:
        """Offers and registrations without their counterpart, partial offers, and inquiries."""
        num_registrations = len(self._registrations) + len(self._checks)
        num_prompts = len(self._offers) + len(self._partial_offers)
        return num_prompts + num_registrations + len(self._inquiries)

    def expect(self, request_id: str, transfer_id: str | None) -> None:
        self._prefilling.add(request_id, names_of(request_id, transfer_id))

    def offer_partially(self, offer: PushOffer, now: float) -> None:
        """P has computed a part of a prompt: write it to a D that waits for the prompt."""
        names = names_of(offer.request_id, offer.transfer_id)
        held = self._partial_offers.get(offer.request_id)
        if held is None:
            held = self._partial_offers[offer.request_id] = HeldOffer(offer, is_partial=True)
            self._partial_offer_names.add(offer.request_id, names)
        held.offer = offer
        if held.request is not None:
            return
        waiting = self._registrations.named(names, offer.transfer_id)
        fitting = next((one for one in waiting if all(map(held.may_serve, one))), [])
        for registered in self._registrations.pop_all(fitting):
            self._match(held, registered, now)

    def offer(self, offer: PushOffer, now: float) -> None:
        """P's request has finished; its lease has just been granted."""
        self._prefilling.remove(offer.request_id)
        names = names_of(offer.request_id, offer.transfer_id)
        if not self._leases.is_held(offer.request_id):
            self.cancel(offer.request_id, now, offer.transfer_id)
            return
        for inquiry in self._inquiries.named(names):
            if _is_answer(offer, inquiry):
                self._inquiries.answer(inquiry)
        if self._complete_partial_offer(offer, now):
            return
        waiting = self._registrations.named(names, offer.transfer_id)
        fitting = next((one for one in waiting if all(rank.fits(offer) for rank in one)), [])
        if not fitting:
            self._doubt(waiting, DIFFERENT, now)
        if not fitting and self._unwanted.take(names, now):
            self._free_unwanted(offer, now)
            return
        held = self._offers[offer.request_id] = HeldOffer(offer)
        self._offer_names.add(offer.request_id, names)
        for registered in self._registrations.pop_all(fitting):
            self._match(held, registered, now)

    def _complete_partial_offer(self, offer: PushOffer, now: float) -> bool:
        """Return whether its partial offer is being written, and this completes it."""
        held = self._pop_partial_offer(offer.request_id)
        if held is None or held.request is None:
            return False
        if held.offer.digest != offer.digest or not self._leases.take(offer.request_id):
            self._abandon(held, DIFFERENT, now)
            return False
        held.offer, held.is_partial = offer, False
        held.deadline = now + self._config.transfer_timeout
        if not held.is_complete:
            self._offers[offer.request_id] = held
            self._offer_names.add(offer.request_id, names_of(offer.request_id, offer.transfer_id))
        return True

    def _pop_partial_offer(self, request_id: str) -> HeldOffer | None:
        self._partial_offer_names.remove(request_id)
        return self._partial_offers.pop(request_id, None)

    def _abandon(self, held: HeldOffer, reason: str, now: float) -> None:
        self._fail_missing(held, now)
        self.writes.give_up(held, reason)

    def registered(self, message: PushRegistered, sender: str, now: float) -> None:
        deadline = self._deadline(message, now)
        trusts = self._config.trust_request_ids
        registered = Registered(message, sender, deadline, now, trusts_request_ids=trusts)
        if registered.deadline <= now:
            return
        for known in (self._registrations, self._checks, self.writes):
            if known.refresh(registered):
                return
        if message.disagg is None or not self._replies.repeat(registered.key):
            self._checks.begin(registered, now)

    def _welcome(self, registered: Registered, now: float) -> None:
        offers = self._offers_named(registered.names)
        named = self._partial_offer_names.find(registered.names)
        partial = [self._partial_offers[request_id] for request_id in named]
        held = next((one for one in (*offers, *partial) if one.may_serve(registered)), None)
        if self._failed.take((whole_id(registered.message.request_id),), now):
            self._refuse_ranks([registered], GIVEN_UP, now)
        elif self._hopeless.has((_of_sender(registered.sender, registered.message),), now):
            self._refuse_ranks([registered], UNKNOWN, now)
        elif held is not None:
            self._match(held, registered, now)
        elif self._failed.take(registered.names, now):
            self._refuse_ranks([registered], GIVEN_UP, now)
        elif not self._registrations.has_room_for(registered):
            self._replies.refuse(registered, TOO_MANY)
        else:
            self._registrations.add(registered)
            if any(one.may_be_meant(registered) for one in offers):
                self._doubt([[registered]], DIFFERENT, now)
            elif self._missed.has(registered.names, now):
                self._doubt([[registered]], GIVEN_UP, now)
            elif registered.message.disagg is not None and not self._knows(registered.names):
                registered.doubt = Doubt(UNKNOWN, now + UNKNOWN_SECONDS)

    def _deadline(self, message: PushRegistered, now: float) -> float:
        longest = now + self._config.push_deadline
        return longest if message.disagg is None else min(longest, message.disagg.begin_by)

    def withdrawn(self, message: Withdraw, sender: str, now: float) -> None:
        """D does not want the push: P writes nothing more and frees its blocks."""
        key = RegistrationKey(sender, message.request_id, message.generation, message.transfer_id)
        if self.writes.withdraw(key):
            return  # Answered when the WRITE ends.
        if message.generation:
            answer = self._replies.repeat(key)
            if answer is None:
                self._forget_registration(key)
                self._replies.fail(key, WITHDRAWN)
            elif not (isinstance(answer, PushFailed) and answer.blocks_returned):
                return
        self._withdraw_offer(message, sender, now)

    def _forget_registration(self, key: RegistrationKey) -> None:
        self._checks.discard(key)
        self._registrations.discard(key)

    def reclaimed(self, message: ReturnBlocks, sender: str) -> None:
        key = RegistrationKey(sender, message.request_id, message.generation, message.transfer_id)
        if self.writes.return_blocks(key) or self._replies.repeat(key):
            return
        self._forget_registration(key)
        self._replies.return_blocks(key)

    def awaited(self, message: AwaitPrompt, sender: str, now: float) -> None:
        """D registers when P holds this prompt."""
        inquiry = self._inquiries.receive(message, sender, now)
        offers = [held.offer for held in self._offers_named(inquiry.names)]
        if any(_is_answer(offer, inquiry) for offer in offers):
            self._inquiries.answer(inquiry)
        elif self._failed.has(inquiry.names, now):
            self._answer_hopeless(inquiry, now)

    def _answer_hopeless(self, inquiry: Inquiry, now: float) -> None:
        """Its prompt never comes: D registers then, and is refused at once."""
        self._hopeless.add((_of_sender(inquiry.sender, inquiry.message),), now)
        self._inquiries.answer(inquiry)

    def _review_inquiries(self, now: float) -> None:
        self._inquiries.forget_old(now)
        for inquiry in self._inquiries:
            if self._knows(inquiry.names):
                inquiry.unknown_since = now
            elif now - inquiry.unknown_since >= UNKNOWN_SECONDS:
                self._answer_hopeless(inquiry, now)

    def _knows(self, names: tuple[str, ...]) -> bool:
        return self._prefilling.has(names) or self._partial_offer_names.has(names)

    def leave(self, now: float) -> None:
        for registered in self._registrations.pop_everything():
            self._replies.refuse(registered, LEAVING)
        for inquiry in self._inquiries:
            self._answer_hopeless(inquiry, now)

    def _withdraw_offer(self, message: Withdraw, sender: str, now: float) -> None:
        names = names_of(message.request_id, message.transfer_id, message.remote_request_id)
        held = next((one for one in self._offers_named(names) if one.is_for(message)), None)
        if held is not None and held.request is not None:
            held.senders.add(sender)
            if held.is_complete:
                self.forget(held.offer.request_id)
            self._end_if_last(held)
            return
        if self._withdrawn.has((message.request_id,), now):
            return
        self._withdrawn.add((message.request_id,), now)
        if held is not None:
            self._free_unwanted(held.offer, now, sender)
        elif not self._failed.take(names, now):
            self._will_be_unwanted(names, message.transfer_id, now)

    def _free_unwanted(self, offer: PushOffer, now: float, sender: str = "") -> None:
        """D may have meant another attempt, and this one's D may come yet: `missed` is for it."""
        names = names_of(offer.request_id, offer.transfer_id)
        self._missed.add(lasting(names, offer.transfer_id), now)
        self._confirm(offer.request_id, now, sender)

    def _will_be_unwanted(
        self, names: tuple[str, ...], transfer_id: str | None, now: float
    ) -> None:
        """D has withdrawn a request before P offered it, or before it came to P."""
        prefilling = self._prefilling.oldest(names)
        if transfer_id is not None:
            self._unwanted.add(lasting(names, transfer_id), now)
        elif prefilling is not None:
            self._unwanted.add((whole_id(prefilling),), now)
        else:
            self._unwanted.add(names, now, LATE_SECONDS)

    def cancel(self, request_id: str, now: float, transfer_id: str | None = None) -> None:
        """P has no KV of this request, or its lease has ended: refuse its registrations."""
        partial, held = self._pop_partial_offer(request_id), self._offers.get(request_id)
        if partial is not None and partial.request is not None:
            self._abandon(partial, GIVEN_UP, now)
            self.forget(request_id)
            return
        if held is not None:
            transfer_id = held.offer.transfer_id
        self.forget(request_id)
        names = names_of(request_id, transfer_id)
        for inquiry in self._inquiries.named(names):
            if inquiry.may_mean(transfer_id) and not self._knows(inquiry.names):
                self._answer_hopeless(inquiry, now)
        waiting = self._registrations.named(names, transfer_id)
        is_unwanted, others = self._unwanted.take(names, now), self._prefilling.has(names)
        if len(waiting) == 1 and not (held or others or is_unwanted):
            self._refuse_ranks(self._registrations.pop_all(waiting[0]), GIVEN_UP, now)
        elif waiting or others:
            self._doubt(waiting, GIVEN_UP, now)
            self._missed.add(lasting(names, transfer_id), now)
        elif not is_unwanted:
            self._failed.add(lasting(names, transfer_id), now)

    def forget(self, request_id: str) -> None:
        self._prefilling.remove(request_id)
        self._offers.pop(request_id, None)
        self._offer_names.remove(request_id)

    def own_id(self, name: str) -> str:
        return next(iter(self._offer_names.find(names_of(name, transfer_id=name))), name)

    def step(self, now: float) -> None:
        # Mostly there is nothing in these tables.
        if len(self._checks):
            self._checks.step(now)
        if len(self._inquiries):
            self._review_inquiries(now)
        if self._offers or len(self._registrations):
            self._expire(now)
        if len(self.writes):
            self.writes.step(now)

    def _expire(self, now: float) -> None:
        for registered in self._registrations.pop_due(now):
            # D asks again if it still waits, and then gets a new time.
            logger.debug("push to %s: timed out", registered.message.request_id)
        for registered, doubt in self._registrations.doubtful(now):
            self._resolve(registered, doubt, now)
        for held in [held for held in self._offers.values() if held.request is not None]:
            if held.deadline <= now:
                self._close(held, now)

    def _doubt(self, waiting: list[list[Registered]], reason: str, now: float) -> None:
        for registered in chain.from_iterable(waiting):
            registered.doubt = registered.doubt or Doubt(reason, now + DOUBT_SECONDS)

    def _resolve(self, registered: Registered, doubt: Doubt, now: float) -> None:
        if registered.key not in self._registrations:
            return  # Refused with another rank's.
        if self._prefilling.has(registered.names):
            is_known = doubt.reason == UNKNOWN
            registered.doubt = None if is_known else doubt._replace(until=now + DOUBT_SECONDS)
        else:
            ranks = self._registrations.pop_ranks(registered)
            self._refuse_ranks(ranks, doubt.reason, now)

    def _offers_named(self, names: tuple[str, ...]) -> list[HeldOffer]:
        """Offers that are being written come first: other ranks of D may join them."""
        offers = [self._offers[request_id] for request_id in self._offer_names.find(names)]
        return sorted(offers, key=lambda held: held.request is None)

    def _match(self, held: HeldOffer, registered: Registered, now: float) -> None:
        if held.request is None and not self._begin(held, registered, now):
            return
        held.senders.add(registered.sender)
        held.num_writing += 1
        if held.is_complete and not held.is_partial:
            self.forget(held.offer.request_id)
        self.writes.begin(held, registered)

    def _begin(self, held: HeldOffer, registered: Registered, now: float) -> bool:
        if not held.is_partial and not self._leases.take(held.offer.request_id):
            self.forget(held.offer.request_id)
            self._replies.refuse(registered, LEASE_ENDED)
            return False
        held.request = registered.request
        held.num_readers = self._num_readers(registered)
        held.deadline = now + self._config.transfer_timeout
        return True

    def _num_readers(self, registered: Registered) -> int:
        of_stage = max(1, registered.message.decode_tp_size // self._us.size)
        return of_stage * registered.address.pp_size

    def _close(self, held: HeldOffer, now: float) -> None:
        """Stop waiting for ranks of D that have not registered."""
        self._fail_missing(held, now)
        held.num_readers = 0
        self.forget(held.offer.request_id)
        self._end_if_last(held)

    def _ended(self, writing: ActiveWrite) -> None:
        registered = writing.registered
        try:
            if writing.problem is None:
                self._replies.written(registered)
            else:
                landing = 0.0 if writing.in_flight is None else self._config.landing_seconds
                self._replies.refuse(registered, writing.problem, landing)
        finally:
            self._release(writing)

    def _release(self, writing: ActiveWrite) -> None:
        """Stop keeping P's blocks for this write. A second call changes nothing."""
        if writing.is_released:
            return
        writing.is_released = True
        held = writing.held
        held.num_writing -= 1
        if not held.is_partial:
            self._end_if_last(held)
        elif self._partial_offers.get(held.offer.request_id) is held:
            self._unmatch_if_last(held)

    def _lapsed(self, writing: ActiveWrite) -> None:
        held = writing.held
        held.num_writing -= 1
        held.senders.discard(writing.registered.sender)
        if not held.senders:
            held.request = None
        if writing.is_reclaimed:
            self._replies.return_blocks(writing.registered.key)

    def _unmatch_if_last(self, held: HeldOffer) -> None:
        """Unless another D registers in time, the prompt is freed as soon as it is complete."""
        if held.num_writing or held.request is None:
            return
        now = self._clock()
        self._fail_missing(held, now)
        self._unwanted.add((whole_id(held.offer.request_id),), now)
        held.request = None
        held.senders.clear()

    def _fail_missing(self, held: HeldOffer, now: float) -> None:
        if held.request is not None and not held.is_complete:
            self._failed.add((whole_id(held.request.request_id),), now)

    def _end_if_last(self, held: HeldOffer) -> None:
        """D's ranks are done with it; other readers may still have a horizon."""
        if not held.is_complete or held.num_writing:
            return
        self._leases.put_back(held.offer.request_id)
        for sender in held.senders:
            self._confirm(held.offer.request_id, self._clock(), sender)

    def _confirm(self, request_id: str, now: float, reader: str = "") -> None:
        self.forget(request_id)
        if self._leases.confirm(request_id, now, reader=reader):
            self._free(request_id)

    def _refuse_ranks(self, registrations: list[Registered], reason: str, now: float) -> None:
        """Refuse these, and the registrations of the request's other ranks when they come."""
        for registered in registrations:
            self._replies.refuse(registered, reason)
        if self._num_readers(registrations[0]) > 1:
            self._failed.add((whole_id(registrations[0].message.request_id),), now)


def _is_answer(offer: PushOffer, inquiry: Inquiry) -> bool:
    return inquiry.may_mean(offer.transfer_id) and inquiry.message.digest == offer.digest


def _of_sender(sender: str, message: AwaitPrompt | PushRegistered) -> str:
    """A name that no other agent can use."""
    return f"{sender} {message.request_id}"
