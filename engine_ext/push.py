"""Push mode on P: finished KV meets the registration of the engine that wants it, and is written.

    offer (KV is ready) ----+
                            +--> connecting --> writing --> P's blocks freed, D told by the WRITE
    registration (from D) --+         |            |
                                      +------------+------> P's blocks freed, D told that it failed

Either may come first: P and D work on the request at the same time, and each waits for the other in
a table with a deadline. A side that gives up leaves a tombstone, so that the other hears of it
instead of waiting. Everything runs in the owner thread, never in the engine's step.

Messages may come twice, late or in another order. How a registration ended is remembered by its
generation, so that what comes again is answered again and never written again.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from engine_ext.agent import Agent, AgentError, PeerHandle
from engine_ext.config import ConnectorConfig
from engine_ext.lease import LeaseTable
from engine_ext.moving import Moving
from engine_ext.peer import PeerError, Peers
from engine_ext.plan import BlockPairs, PlanError, pair_tail
from engine_ext.readers import Readers
from engine_ext.results import Results
from engine_ext.transfer_name import base_id
from engine_ext.types import CacheGeometry, ConnectorStats, PeerAddress, PushOffer
from engine_ext.wire import (
    PushDone,
    PushFailed,
    PushRegistered,
    Withdraw,
    encode_extension,
    encode_read_done,
)

logger = logging.getLogger(__name__)

K = TypeVar("K")


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
    def address(self) -> PeerAddress:
        message = self.message
        return PeerAddress(message.decode_engine_id, message.decode_host, message.decode_port)


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
class Writing:
    """Matched: `offer`'s blocks are ours alone until the end is reported."""

    offer: PushOffer
    registered: Registered
    deadline: float
    peer: PeerHandle | None = None
    moving: Moving | None = None


class NameTable(Generic[K]):
    """Things to be found by any of several names; the last one to claim a name has it."""

    def __init__(self) -> None:
        self._key_of: dict[str, K] = {}
        self._names: dict[K, tuple[str, ...]] = {}

    def add(self, key: K, names: tuple[str, ...]) -> None:
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


class PushWriter:
    def __init__(
        self,
        agent: Agent,
        peers: Peers,
        readers: Readers,
        leases: LeaseTable,
        results: Results,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        stats: ConnectorStats,
    ) -> None:
        self._agent = agent
        self._peers = peers
        self._readers = readers
        self._leases = leases
        self._results = results
        self._config = config
        self._block_size = geometry.block_size
        self._stats = stats
        self._offers: dict[str, PushOffer] = {}
        self._offer_names: NameTable[str] = NameTable()
        self._registrations: dict[RegistrationKey, Registered] = {}
        self._registration_names: NameTable[RegistrationKey] = NameTable()
        self._failed = Tombstones(config.push_deadline)
        self._unwanted = Tombstones(config.push_deadline)
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
        key = self._registration_names.find(names)
        if key is not None and not _are_different(key.transfer_id, offer.transfer_id):
            self._match(offer, self._pop_registration(key), now)
        elif self._unwanted.take(names, now):
            self._release(offer.request_id)
        else:
            self._offers[offer.request_id] = offer
            self._offer_names.add(offer.request_id, names)

    def registered(self, message: PushRegistered, sender: str, now: float) -> None:
        registered = Registered(message, sender, now + self._config.push_deadline)
        key = registered.key
        if key in self._registrations or key in self._writing:
            return
        if message.disagg is not None and (answer := self._outcomes.find(key)) is not None:
            self._readers.answer(sender, answer)
            return
        if self._failed.take(registered.names, now):
            self._refuse(registered, "P gave this request up")
            return
        offer = self._offer_for(registered)
        if offer is not None:
            self._match(offer, registered, now)
            return
        self._registrations[key] = registered
        self._registration_names.add(key, registered.names)

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
                self._pop_registration(key)
            self._answer(key, PushFailed(message.request_id, message.generation, "withdrawn"))
        self._free_unwanted(message, now)

    def _free_unwanted(self, message: Withdraw, now: float) -> None:
        names = names_of(message.request_id, message.transfer_id, message.remote_request_id)
        request_id = self._offer_names.find(names)
        if request_id is not None and not _are_different(
            self._offers[request_id].transfer_id, message.transfer_id
        ):
            self._release(request_id)
        elif not self._failed.take(names, now):
            self._unwanted.add(_lasting(names, message.transfer_id), now)

    def given_up(self, request_id: str, now: float, transfer_id: str | None = None) -> None:
        """P's request was aborted, or its lease ended: whoever registers for it must hear."""
        offer = self._offers.get(request_id)
        if offer is not None:
            transfer_id = offer.transfer_id
        self.forget(request_id)
        names = names_of(request_id, transfer_id)
        key = self._registration_names.find(names)
        if key is not None and not _are_different(key.transfer_id, transfer_id):
            self._refuse(self._pop_registration(key), "P gave this request up")
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
        for registered in list(self._registrations.values()):
            if registered.deadline <= now:
                self._refuse(self._pop_registration(registered.key), "timed out")
        for writing in list(self._writing.values()):
            try:
                self._advance(writing, now)
            except (PeerError, PlanError, AgentError) as error:
                self._give_up(writing, str(error))
            except Exception as error:
                logger.exception("push of %s", writing.offer.request_id)
                self._give_up(writing, repr(error))

    def _offer_for(self, registered: Registered) -> PushOffer | None:
        request_id = self._offer_names.find(registered.names)
        if request_id is None:
            return None
        offer = self._offers[request_id]
        return None if _are_different(offer.transfer_id, registered.key.transfer_id) else offer

    def _match(self, offer: PushOffer, registered: Registered, now: float) -> None:
        self.forget(offer.request_id)
        if not self._leases.take(offer.request_id):
            self._refuse(registered, "P's lease has ended")
            return
        self._readers.ended(offer.request_id)
        deadline = now + self._config.handshake_timeout
        self._writing[registered.key] = Writing(offer, registered, deadline)

    def _advance(self, writing: Writing, now: float) -> None:
        if writing.moving is None:
            self._connect(writing, now)
        elif writing.moving.has_ended(self._agent, now):
            if writing.moving.problem is None:
                self._succeed(writing)
            else:
                self._give_up(writing, f"WRITE: {writing.moving.problem}")

    def _connect(self, writing: Writing, now: float) -> None:
        peer = self._peers.connect(writing.registered.address, now)
        if peer is None and now >= writing.deadline:
            raise PeerError(f"no handshake within {self._config.handshake_timeout:g} s")
        if peer is not None:
            pairs = self._plan(writing.offer, writing.registered.message)
            transfer = self._agent.start_write(
                peer, pairs.local, pairs.remote, _done(writing.registered)
            )
            writing.peer = peer
            writing.moving = Moving(transfer, now + self._config.transfer_timeout)

    def _plan(self, offer: PushOffer, message: PushRegistered) -> BlockPairs:
        if len(offer.block_ids) != 1 or len(message.local_block_ids) != 1:
            raise PlanError("several KV-cache groups are not supported")
        if message.decode_tp_size != 1:
            raise PlanError(f"tensor parallel size differs: 1 here, {message.decode_tp_size} there")
        last_token = offer.num_tokens
        if message.disagg is not None:
            if message.disagg.digest != offer.digest:
                raise PlanError("the two engines' prompts differ")
            last_token = message.disagg.last_token
        return pair_tail(
            offer.block_ids[0], message.local_block_ids[0], last_token, self._block_size
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
        self._stats.leases_released += 1
        self._results.sent(writing.offer.request_id)

    def _release(self, request_id: str) -> None:
        self.forget(request_id)
        if self._leases.take(request_id):
            self._readers.ended(request_id)
            self._stats.leases_released += 1
            self._results.sent(request_id)

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

    def _pop_registration(self, key: RegistrationKey) -> Registered:
        self._registration_names.remove(key)
        return self._registrations.pop(key)


def _done(registered: Registered) -> bytes:
    """A stock decoder gets stock bytes."""
    if registered.message.disagg is None:
        return encode_read_done(registered.message.request_id)
    return encode_extension(PushDone(registered.message.request_id, registered.generation))
