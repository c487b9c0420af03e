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
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from engine_ext.agent import Agent, AgentError, PeerHandle, Transfer, TransferState
from engine_ext.config import ConnectorConfig
from engine_ext.lease import LeaseTable
from engine_ext.peer import PeerError, Peers
from engine_ext.plan import Batch, PlanError
from engine_ext.ranks import RankError, TensorRank
from engine_ext.readers import Readers
from engine_ext.results import Results
from engine_ext.transfer_name import base_id
from engine_ext.types import ConnectorStats, PeerAddress, PushOffer
from engine_ext.wire import (
    PushDone,
    PushFailed,
    PushRegistered,
    Withdraw,
    encode_extension,
    encode_read_done,
)

logger = logging.getLogger(__name__)


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


def names_of(
    request_id: str, transfer_id: str | None, remote_request_id: str | None = None
) -> tuple[str, ...]:
    transfer = None if transfer_id is None else f"transfer {transfer_id}"
    names = (transfer, remote_request_id, request_id, base_id(request_id))
    return tuple(dict.fromkeys(name for name in names if name is not None))


@dataclass(slots=True)
class Held:
    """An offer. From its first match on, its blocks are ours alone until the end is reported."""

    offer: PushOffer
    is_matched: bool = False
    senders: set[str] = field(default_factory=set)
    """Agents of D that have registered, or left."""
    num_readers: int = 1
    num_writing: int = 0
    deadline: float = 0.0
    """Until when the other ranks may register."""

    @property
    def is_complete(self) -> bool:
        """Nobody else will register."""
        return self.is_matched and len(self.senders) >= self.num_readers


@dataclass(slots=True)
class Writing:
    held: Held
    registered: Registered
    deadline: float
    transfer: Transfer = None

    def is_of(self, request_id: str, sender: str) -> bool:
        return self.registered.message.request_id == request_id and self.registered.sender == sender


class NameTable:
    """Things to be found by any of several names; the last one to claim a name has it."""

    def __init__(self) -> None:
        self._key_of: dict[str, str] = {}
        self._names: dict[str, tuple[str, ...]] = {}

    def add(self, key: str, names: tuple[str, ...]) -> None:
        self._names[key] = names
        for name in names:
            self._key_of[name] = key

    def find(self, names: tuple[str, ...]) -> str | None:
        return next((self._key_of[name] for name in names if name in self._key_of), None)

    def remove(self, key: str) -> None:
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
        self._offer_names = NameTable()
        self._registrations: dict[str, dict[str, Registered]] = {}
        """By request id, then by sender."""
        self._registration_names = NameTable()
        self._failed = Tombstones(config.push_deadline)
        self._unwanted = Tombstones(config.push_deadline)
        self._writing: list[Writing] = []

    @property
    def is_busy(self) -> bool:
        return any(writing.transfer is not None for writing in self._writing)

    @property
    def num_active(self) -> int:
        return len(self._writing)

    @property
    def num_waiting(self) -> int:
        """Offers and registrations without their counterpart."""
        return len(self._offers) + len(self._registrations)

    def offer(self, offer: PushOffer, now: float) -> None:
        """P's request has finished; its lease has just been granted."""
        names = names_of(offer.request_id, offer.transfer_id)
        if self._unwanted.take(names, now):
            self._release(offer.request_id)
            return
        held = self._offers[offer.request_id] = Held(offer)
        self._offer_names.add(offer.request_id, names)
        for registered in self._pop_registrations(self._registration_names.find(names)):
            self._match(held, registered, now)

    def registered(self, message: PushRegistered, sender: str, now: float) -> None:
        registered = Registered(message, sender, now + self._config.push_deadline)
        if self._failed.take(registered.names, now):
            self._refuse(registered, "P gave this request up")
            return
        key = self._offer_names.find(registered.names)
        if key is not None:
            self._match(self._offers[key], registered, now)
            return
        self._registrations.setdefault(message.request_id, {})[sender] = registered
        self._registration_names.add(message.request_id, registered.names)

    def withdrawn(self, message: Withdraw, sender: str, now: float) -> None:
        """D does not want it: nothing more is written, and P's blocks are freed."""
        if any(w.is_of(message.request_id, sender) for w in self._writing):
            return  # The WRITE's own end answers.
        registered = self._registrations.get(message.request_id, {}).get(sender)
        if registered is not None and registered.generation == message.generation:
            self._forget_registration(message.request_id, sender)
        names = names_of(message.request_id, message.transfer_id, message.remote_request_id)
        key = self._offer_names.find(names)
        if key is None:
            self._unwanted.add(names, now)
        elif self._offers[key].is_matched:
            self._leave(self._offers[key], sender)
        else:
            self._release(key)
        if message.generation:
            answer = PushFailed(message.request_id, message.generation, "withdrawn")
            self._readers.answer(sender, answer)

    def given_up(self, request_id: str, now: float, transfer_id: str | None = None) -> None:
        """P's request was aborted, or its lease ended: whoever registers for it must hear."""
        held = self._offers.get(request_id)
        if held is not None:
            transfer_id = held.offer.transfer_id
        self._forget_offer(request_id)
        names = names_of(request_id, transfer_id)
        registrations = self._pop_registrations(self._registration_names.find(names))
        for registered in registrations:
            self._refuse(registered, "P gave this request up")
        if not registrations:
            self._failed.add(names, now)

    def request_of(self, name: str) -> str:
        """P's own id of what a decode engine calls `name`, for heartbeats; else `name`."""
        return self._offer_names.find((f"transfer {name}", name, base_id(name))) or name

    def step(self, now: float) -> None:
        self._expire(now)
        writing, self._writing = self._writing, []
        for one in writing:
            try:
                self._advance(one, now)
            except (PeerError, PlanError, RankError, AgentError) as error:
                self._fail(one, str(error))
            except Exception as error:
                logger.exception("push of %s", one.held.offer.request_id)
                self._fail(one, repr(error))

    def _expire(self, now: float) -> None:
        for registered in [r for by in self._registrations.values() for r in by.values()]:
            if registered.deadline <= now:
                self._forget_registration(registered.message.request_id, registered.sender)
                self._refuse(registered, "timed out")
        for held in [held for held in self._offers.values() if held.is_matched]:
            if held.deadline <= now:
                self._close(held, now)

    def _match(self, held: Held, registered: Registered, now: float) -> None:
        deadline = now + self._config.transfer_timeout
        if not held.is_matched and not self._begin(held, registered, deadline):
            return
        if registered.sender in held.senders:
            return
        held.senders.add(registered.sender)
        held.num_writing += 1
        if held.is_complete:
            self._forget_offer(held.offer.request_id)
        self._writing.append(Writing(held, registered, deadline))

    def _begin(self, held: Held, registered: Registered, deadline: float) -> bool:
        if not self._leases.take(held.offer.request_id):
            self._forget_offer(held.offer.request_id)
            self._refuse(registered, "P's lease has ended")
            return False
        held.is_matched = True
        held.num_readers = max(1, registered.message.decode_tp_size // self._us.size)
        held.deadline = deadline
        return True

    def _leave(self, held: Held, sender: str) -> None:
        """A rank of D withdraws where others of it have registered."""
        held.senders.add(sender)
        if held.is_complete:
            self._forget_offer(held.offer.request_id)
        self._end_if_last(held)

    def _close(self, held: Held, now: float) -> None:
        """Ranks of D are missing: from now on their registrations come too late."""
        self._failed.add(names_of(held.offer.request_id, held.offer.transfer_id), now)
        held.num_readers = 0
        self._forget_offer(held.offer.request_id)
        self._end_if_last(held)

    def _advance(self, writing: Writing, now: float) -> None:
        if writing.transfer is None:
            self._connect(writing, now)
            return
        state = self._agent.poll(writing.transfer)
        if state is TransferState.DONE:
            self._agent.release(writing.transfer)
            self._succeed(writing)
        elif state is TransferState.FAILED:
            raise AgentError("WRITE failed")
        elif now >= writing.deadline:
            raise AgentError(f"no end of WRITE within {self._config.transfer_timeout:g} s")
        else:
            self._writing.append(writing)

    def _connect(self, writing: Writing, now: float) -> None:
        message = writing.registered.message
        peer = self._peers.connect(_address(message), now, self._rank(message))
        if peer is None:
            self._writing.append(writing)
            return
        batch = self._plan(peer, writing.held.offer, message)
        done = _done(writing.registered, self._us.size)
        if peer.layout.skips_write or not len(batch.local):
            self._agent.notify(peer.name, done)
            self._succeed(writing)
            return
        writing.transfer = self._agent.start_write(peer, batch.local, batch.remote, done)
        self._writing.append(writing)

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

    def _fail(self, writing: Writing, problem: str) -> None:
        if writing.transfer is not None and not self._let_go(writing):
            self._writing.append(writing)
            return
        self._refuse(writing.registered, problem)
        self._end(writing)

    def _let_go(self, writing: Writing) -> bool:
        """False while NIXL may still read the blocks: they cannot be freed yet."""
        try:
            self._agent.release(writing.transfer)
        except AgentError:
            return False
        return True

    def _succeed(self, writing: Writing) -> None:
        self._stats.pushes_ok += 1
        self._end(writing)

    def _end(self, writing: Writing) -> None:
        writing.held.num_writing -= 1
        self._end_if_last(writing.held)

    def _end_if_last(self, held: Held) -> None:
        if held.is_complete and not held.num_writing:
            self._stats.leases_released += 1
            self._results.sent(held.offer.request_id)

    def _release(self, request_id: str) -> None:
        self._forget_offer(request_id)
        if self._leases.take(request_id):
            self._stats.leases_released += 1
            self._results.sent(request_id)

    def _refuse(self, registered: Registered, reason: str) -> None:
        logger.warning("push to request %s: %s", registered.message.request_id, reason)
        self._stats.pushes_failed += 1
        if registered.message.disagg is not None:
            answer = PushFailed(registered.message.request_id, registered.generation, reason)
            self._readers.answer(registered.sender, answer)

    def _forget_offer(self, request_id: str) -> None:
        self._offers.pop(request_id, None)
        self._offer_names.remove(request_id)

    def _pop_registrations(self, key: str | None) -> list[Registered]:
        """Of all ranks that registered this request."""
        if key is None:
            return []
        self._registration_names.remove(key)
        return list(self._registrations.pop(key).values())

    def _forget_registration(self, key: str, sender: str) -> None:
        by_sender = self._registrations[key]
        del by_sender[sender]
        if not by_sender:
            self._pop_registrations(key)


def _address(message: PushRegistered) -> PeerAddress:
    return PeerAddress(
        message.decode_engine_id,
        message.decode_host,
        message.decode_port,
        message.decode_tp_size,
    )


def _done(registered: Registered, world_size: int) -> bytes:
    """A stock decoder gets stock bytes."""
    if registered.message.disagg is None:
        return encode_read_done(registered.message.request_id, world_size)
    return encode_extension(PushDone(registered.message.request_id, registered.generation))
