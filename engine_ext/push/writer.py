"""Push mode on P: finished KV meets the registration of the engine that wants it, and is written.

    offer (KV is ready) ----+
                            +--> connecting --> writing --> P's blocks freed, D told by the WRITE
    registration (from D) --+         |            |
                                      +------------+------> P's blocks freed, D told that it failed

Either may come first: P and D work on the request at the same time, and each waits for the other in
a table with a deadline. A side that gives up leaves a tombstone, so that the other hears of it
instead of waiting. Everything runs in the owner thread, never in the engine's step.

Where D has more ranks than we do, several of them register for one offer, each for blocks of its
own. Each is written as soon as it has registered, and P's blocks are freed after the last.

Messages may come twice, late or in another order. How a registration ended is remembered by its
generation, so that what comes again is answered again and never written again.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from engine_ext.base.config import ConnectorConfig
from engine_ext.base.types import ConnectorStats, PeerAddress, PushOffer
from engine_ext.layout.plan import Batch, PlanError
from engine_ext.layout.ranks import RankError, TensorRank
from engine_ext.push.names import base_id
from engine_ext.transfer.agent import Agent, AgentError, PeerHandle
from engine_ext.transfer.leases import LeaseTable
from engine_ext.transfer.moving import Moving
from engine_ext.transfer.peer import PeerError, Peers
from engine_ext.transfer.readers import Readers
from engine_ext.transfer.results import Results
from engine_ext.wire.notifications import (
    PushDone,
    PushFailed,
    PushRegistered,
    Withdraw,
    encode_extension,
    encode_read_done,
)

logger = logging.getLogger(__name__)


K = TypeVar("K")


class RequestKey(NamedTuple):
    """What the registrations of all ranks of D for one request have in common."""

    engine_id: str
    request_id: str
    transfer_id: str | None


class RegistrationKey(NamedTuple):
    """One registration among all that were ever made."""

    sender: str
    request_id: str
    generation: int
    transfer_id: str | None


@dataclass(slots=True)
class Registered:
    """A registration as it arrived: by which agent, and until when it is worth keeping."""

    message: PushRegistered
    sender: str
    deadline: float

    @property
    def names(self) -> tuple[str, ...]:
        """What P may know the request by, most certain first."""
        return names_of(
            self.message.request_id,
            self.message.transfer_id,
            self.message.disagg.remote_request_id if self.message.disagg else None,
        )

    @property
    def generation(self) -> int:
        return self.message.disagg.generation if self.message.disagg else 0

    @property
    def key(self) -> RegistrationKey:
        message = self.message
        return RegistrationKey(
            self.sender, message.request_id, self.generation, message.transfer_id
        )

    @property
    def request(self) -> RequestKey:
        message = self.message
        return RequestKey(message.decode_engine_id, message.request_id, message.transfer_id)

    @property
    def address(self) -> PeerAddress:
        message = self.message
        return PeerAddress(
            message.decode_engine_id,
            message.decode_host,
            message.decode_port,
            message.decode_tp_size,
        )


def names_of(
    request_id: str, transfer_id: str | None, remote_request_id: str | None = None
) -> tuple[str, ...]:
    transfer = None if transfer_id is None else f"transfer {transfer_id}"
    names = (transfer, remote_request_id, request_id, base_id(request_id))
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _lasting(names: tuple[str, ...], transfer_id: str | None) -> tuple[str, ...]:
    """What to remember of a request that ended: the router's name for the transfer is used once,
    all others come back when it tries again."""
    return names if transfer_id is None else names[:1]


def _are_different(transfer_id: str | None, other: str | None) -> bool:
    """Two attempts of one request share its id, not the transfer's."""
    return transfer_id is not None and other is not None and transfer_id != other


@dataclass(slots=True)
class Held:
    """An offer. From its first match on, its blocks are ours alone until the end is reported."""

    offer: PushOffer
    request: RequestKey | None = None
    """Whose ranks it is written to, once one of them has registered."""
    senders: set[str] = field(default_factory=set)
    """Agents of D that have registered, or left."""
    num_readers: int = 1
    num_writing: int = 0
    deadline: float = 0.0
    """Until when the other ranks may register."""

    @property
    def is_complete(self) -> bool:
        """Nobody else will register."""
        return self.request is not None and len(self.senders) >= self.num_readers

    def may_serve(self, registered: Registered) -> bool:
        if self.request is None:
            return not _are_different(self.offer.transfer_id, registered.key.transfer_id)
        return self.request == registered.request and registered.sender not in self.senders

    def is_for(self, message: Withdraw) -> bool:
        """Whether D's withdrawal means this offer."""
        if self.request is None:
            return not _are_different(self.offer.transfer_id, message.transfer_id)
        withdrawn = RequestKey(self.request.engine_id, message.request_id, message.transfer_id)
        return self.request == withdrawn


@dataclass(slots=True)
class Writing:
    held: Held
    registered: Registered
    deadline: float
    """For the handshake."""
    peer: PeerHandle | None = None
    moving: Moving | None = None


class NameTable(Generic[K]):
    """Things to be found by any of several names; the last one to claim a name has it."""

    def __init__(self) -> None:
        self._key_of: dict[str, K] = {}
        self._names: dict[K, tuple[str, ...]] = {}

    def add(self, key: K, names: tuple[str, ...]) -> None:
        self.remove(key)
        self._names[key] = names
        for name in names:
            self._key_of[name] = key

    def find(self, names: tuple[str, ...]) -> K | None:
        return next((self._key_of[name] for name in names if name in self._key_of), None)

    def remove(self, key: K) -> None:
        for name in self._names.pop(key, ()):
            if self._key_of.get(name) == key:
                del self._key_of[name]


class Tombstones:
    """Names of what ended without its counterpart. Bounded by age and number."""

    LIMIT = 8192

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, names: tuple[str, ...], now: float) -> None:
        for name in names:
            self._until[name] = now + self._seconds
            self._until.move_to_end(name)
        while len(self._until) > self.LIMIT:
            self._until.popitem(last=False)

    def take(self, names: tuple[str, ...], now: float) -> bool:
        """True: one of the names ended a short while ago; it is forgotten now."""
        found = [name for name in names if self._until.get(name, now) > now]
        for name in found:
            del self._until[name]
        return bool(found)

    def has(self, name: str, now: float) -> bool:
        return self._until.get(name, now) > now


class Outcomes:
    """How registrations ended, for those who ask again. Bounded by number."""

    LIMIT = 8192

    def __init__(self) -> None:
        self._answers: OrderedDict[RegistrationKey, PushDone | PushFailed] = OrderedDict()

    def add(self, key: RegistrationKey, answer: PushDone | PushFailed) -> None:
        self._answers[key] = answer
        while len(self._answers) > self.LIMIT:
            self._answers.popitem(last=False)

    def find(self, key: RegistrationKey) -> PushDone | PushFailed | None:
        return self._answers.get(key)


class RegistrationTable:
    """Registrations that wait for an offer. Those of one request's ranks are found together."""

    def __init__(self) -> None:
        self._registered: dict[RegistrationKey, Registered] = {}
        self._ranks: dict[RequestKey, dict[str, RegistrationKey]] = {}
        """By sender, the latest."""
        self._names: NameTable[RequestKey] = NameTable()

    def __len__(self) -> int:
        return len(self._registered)

    def __contains__(self, key: RegistrationKey) -> bool:
        return key in self._registered

    def add(self, registered: Registered) -> None:
        self._registered[registered.key] = registered
        self._ranks.setdefault(registered.request, {})[registered.sender] = registered.key
        self._names.add(registered.request, registered.names)

    def pop(self, key: RegistrationKey) -> Registered:
        registered = self._registered.pop(key)
        ranks = self._ranks.get(registered.request, {})
        if ranks.get(key.sender) == key:
            del ranks[key.sender]
            if not ranks:
                del self._ranks[registered.request]
                self._names.remove(registered.request)
        return registered

    def pop_all(self, names: tuple[str, ...], transfer_id: str | None) -> list[Registered]:
        """Of all ranks that registered the request of these names."""
        request = self._names.find(names)
        if request is None or _are_different(request.transfer_id, transfer_id):
            return []
        return [self.pop(key) for key in list(self._ranks[request].values())]

    def pop_due(self, now: float) -> list[Registered]:
        due = [key for key, one in self._registered.items() if one.deadline <= now]
        return [self.pop(key) for key in due]


class PushWriter:
    def __init__(
        self,
        agent: Agent,
        peers: Peers,
        readers: Readers,
        leases: LeaseTable,
        results: Results,
        config: ConnectorConfig,
        us: TensorRank,
        stats: ConnectorStats,
    ) -> None:
        self._agent = agent
        self._peers = peers
        self._readers = readers
        self._leases = leases
        self._results = results
        self._config = config
        self._us = us
        self._stats = stats
        self._offers: dict[str, Held] = {}
        self._offer_names: NameTable[str] = NameTable()
        self._registrations = RegistrationTable()
        self._failed = Tombstones(config.push_deadline)
        self._unwanted = Tombstones(config.push_deadline)
        self._withdrawn = Tombstones(config.push_deadline)
        """D's ids: of its ranks' withdrawals, one frees our blocks."""
        self._outcomes = Outcomes()
        self._writing: dict[RegistrationKey, Writing] = {}

    @property
    def is_busy(self) -> bool:
        return any(writing.moving is not None for writing in self._writing.values())

    @property
    def num_active(self) -> int:
        return len(self._writing)

    @property
    def num_waiting(self) -> int:
        """Offers and registrations without their counterpart."""
        return len(self._offers) + len(self._registrations)

    def uses(self, peer: PeerHandle) -> bool:
        """A WRITE to this peer is under way."""
        return any(writing.peer is peer for writing in self._writing.values())

    def offer(self, offer: PushOffer, now: float) -> None:
        """P's request has finished; its lease has just been granted."""
        names = names_of(offer.request_id, offer.transfer_id)
        if not self._leases.is_held(offer.request_id):
            self.given_up(offer.request_id, now, offer.transfer_id)
            return
        registrations = self._registrations.pop_all(names, offer.transfer_id)
        if not registrations and self._unwanted.take(names, now):
            self._release(offer.request_id)
            return
        held = self._offers[offer.request_id] = Held(offer)
        self._offer_names.add(offer.request_id, names)
        for registered in registrations:
            self._match(held, registered, now)

    def registered(self, message: PushRegistered, sender: str, now: float) -> None:
        registered = Registered(message, sender, now + self._config.push_deadline)
        key = registered.key
        if key in self._registrations or key in self._writing:
            return
        if message.disagg is not None and (answer := self._outcomes.find(key)) is not None:
            self._readers.answer(sender, answer)
            return
        if self._failed.take(registered.names, now):
            self._refuse_ranks([registered], "P gave this request up", now)
            return
        held = self._offer_named(registered.names)
        if held is not None and held.may_serve(registered):
            self._match(held, registered, now)
            return
        self._registrations.add(registered)

    def withdrawn(self, message: Withdraw, sender: str, now: float) -> None:
        """D does not want it: nothing more is written, and P's blocks are freed."""
        key = RegistrationKey(sender, message.request_id, message.generation, message.transfer_id)
        writing = self._writing.get(key)
        if writing is not None:
            if writing.moving is None:
                self._give_up(writing, "withdrawn")
            return  # The WRITE's own end answers.
        if message.generation:
            if (answer := self._outcomes.find(key)) is not None:
                self._readers.answer(sender, answer)
                return
            if key in self._registrations:
                self._registrations.pop(key)
            self._answer(key, PushFailed(message.request_id, message.generation, "withdrawn"))
        self._free_unwanted(message, sender, now)

    def _free_unwanted(self, message: Withdraw, sender: str, now: float) -> None:
        names = names_of(message.request_id, message.transfer_id, message.remote_request_id)
        held = self._offer_named(names)
        if held is not None and held.request is not None and held.is_for(message):
            self._leave(held, sender)
            return
        if self._withdrawn.has(message.request_id, now):
            return
        self._withdrawn.add((message.request_id,), now)
        if held is not None and held.request is None and held.is_for(message):
            self._release(held.offer.request_id)
        elif not self._failed.take(names, now):
            self._unwanted.add(_lasting(names, message.transfer_id), now)

    def given_up(self, request_id: str, now: float, transfer_id: str | None = None) -> None:
        """P's request was aborted, or its lease ended: whoever registers for it must hear."""
        held = self._offers.get(request_id)
        if held is not None:
            transfer_id = held.offer.transfer_id
        self.forget(request_id)
        names = names_of(request_id, transfer_id)
        registrations = self._registrations.pop_all(names, transfer_id)
        if registrations:
            self._refuse_ranks(registrations, "P gave this request up", now)
        elif not self._unwanted.take(names, now):
            self._failed.add(_lasting(names, transfer_id), now)

    def forget(self, request_id: str) -> None:
        """Its lease has ended: there is nothing to offer any more."""
        self._offers.pop(request_id, None)
        self._offer_names.remove(request_id)

    def request_of(self, name: str) -> str:
        """P's own id of what a decode engine calls `name`, for heartbeats; else `name`."""
        return self._offer_names.find((f"transfer {name}", name, base_id(name))) or name

    def step(self, now: float) -> None:
        self._expire(now)
        for writing in list(self._writing.values()):
            try:
                self._advance(writing, now)
            except (PeerError, PlanError, RankError, AgentError) as error:
                self._give_up(writing, str(error))
            except Exception as error:
                logger.exception("push of %s", writing.held.offer.request_id)
                self._give_up(writing, repr(error))

    def _expire(self, now: float) -> None:
        for registered in self._registrations.pop_due(now):
            self._refuse(registered, "timed out")
        for held in [held for held in self._offers.values() if held.request is not None]:
            if held.deadline <= now:
                self._close(held, now)

    def _offer_named(self, names: tuple[str, ...]) -> Held | None:
        request_id = self._offer_names.find(names)
        return None if request_id is None else self._offers[request_id]

    def _match(self, held: Held, registered: Registered, now: float) -> None:
        if held.request is None and not self._begin(held, registered, now):
            return
        held.senders.add(registered.sender)
        held.num_writing += 1
        if held.is_complete:
            self.forget(held.offer.request_id)
        deadline = now + self._config.handshake_timeout
        self._writing[registered.key] = Writing(held, registered, deadline)

    def _begin(self, held: Held, registered: Registered, now: float) -> bool:
        if not self._leases.take(held.offer.request_id):
            self.forget(held.offer.request_id)
            self._refuse(registered, "P's lease has ended")
            return False
        self._readers.ended(held.offer.request_id)
        held.request = registered.request
        held.num_readers = self._num_readers(registered)
        held.deadline = now + self._config.transfer_timeout
        return True

    def _num_readers(self, registered: Registered) -> int:
        """How many ranks of D register with us."""
        return max(1, registered.message.decode_tp_size // self._us.size)

    def _leave(self, held: Held, sender: str) -> None:
        """A rank of D withdraws where others of it have registered."""
        held.senders.add(sender)
        if held.is_complete:
            self.forget(held.offer.request_id)
        self._end_if_last(held)

    def _close(self, held: Held, now: float) -> None:
        """Ranks of D are missing: from now on their registrations come too late."""
        if held.request is not None:
            self._failed.add((held.request.request_id,), now)
        held.num_readers = 0
        self.forget(held.offer.request_id)
        self._end_if_last(held)

    def _advance(self, writing: Writing, now: float) -> None:
        if writing.moving is None:
            self._connect(writing, now)
        elif writing.moving.has_ended(self._agent, now):
            if writing.moving.problem is None:
                self._succeed(writing)
            else:
                self._give_up(writing, f"WRITE: {writing.moving.problem}")

    def _connect(self, writing: Writing, now: float) -> None:
        registered = writing.registered
        peer = self._peers.connect(registered.address, now, self._rank(registered.message))
        if peer is None and now >= writing.deadline:
            raise PeerError(f"no handshake within {self._config.handshake_timeout:g} s")
        if peer is None:
            return
        batch = self._plan(peer, writing.held.offer, registered.message)
        done = _done(registered, self._us.size)
        writing.peer = peer
        if peer.layout.skips_write or not len(batch.local):
            self._agent.notify(peer.name, done)
            self._succeed(writing)
            return
        transfer = self._agent.start_write(peer, batch.local, batch.remote, done)
        writing.moving = Moving(transfer, now + self._config.transfer_timeout)

    def _rank(self, message: PushRegistered) -> int:
        """Of D, the rank that registered. Stock does not say which."""
        faced = self._us.faces(message.decode_tp_size)
        rank = message.disagg.tp_rank if message.disagg else faced[0]
        if rank not in faced or (len(faced) > 1 and message.disagg is None):
            raise PlanError(f"rank {self._us} here does not know which rank of D registered")
        return rank

    @staticmethod
    def _plan(peer: PeerHandle, offer: PushOffer, message: PushRegistered) -> Batch:
        first_token, last_token = None, offer.num_tokens
        if message.disagg is not None:
            if message.disagg.digest != offer.digest:
                raise PlanError("the two engines' prompts differ")
            first_token, last_token = message.disagg.first_token, message.disagg.last_token
        return peer.layout.to_write(
            offer.block_ids, message.local_block_ids, first_token, last_token
        )

    def _succeed(self, writing: Writing) -> None:
        self._stats.pushes_ok += 1
        registered = writing.registered
        # The WRITE's own notification says so; this is for those who ask again.
        done = PushDone(registered.message.request_id, registered.generation)
        self._outcomes.add(registered.key, done)
        self._end(writing)

    def _give_up(self, writing: Writing, problem: str) -> None:
        self._refuse(writing.registered, problem)
        self._end(writing)
        if writing.peer is not None:
            self._peers.forget(writing.registered.address)

    def _end(self, writing: Writing) -> None:
        del self._writing[writing.registered.key]
        writing.held.num_writing -= 1
        self._end_if_last(writing.held)

    def _end_if_last(self, held: Held) -> None:
        if held.is_complete and not held.num_writing:
            self._stats.leases_released += 1
            self._results.sent(held.offer.request_id)

    def _release(self, request_id: str) -> None:
        self.forget(request_id)
        if self._leases.take(request_id):
            self._readers.ended(request_id)
            self._stats.leases_released += 1
            self._results.sent(request_id)

    def _refuse_ranks(self, registrations: list[Registered], reason: str, now: float) -> None:
        """These and, when they come, those of the same request's other ranks."""
        for registered in registrations:
            self._refuse(registered, reason)
        if self._num_readers(registrations[0]) > 1:
            self._failed.add((registrations[0].message.request_id,), now)

    def _refuse(self, registered: Registered, reason: str) -> None:
        logger.warning("push to request %s: %s", registered.message.request_id, reason)
        self._stats.pushes_failed += 1
        if registered.message.disagg is not None:
            self._answer(
                registered.key,
                PushFailed(registered.message.request_id, registered.generation, reason),
            )

    def _answer(self, key: RegistrationKey, answer: PushDone | PushFailed) -> None:
        self._outcomes.add(key, answer)
        self._readers.answer(key.sender, answer)


def _done(registered: Registered, world_size: int) -> bytes:
    """A stock decoder gets stock bytes."""
    if registered.message.disagg is None:
        return encode_read_done(registered.message.request_id, world_size)
    return encode_extension(PushDone(registered.message.request_id, registered.generation))
