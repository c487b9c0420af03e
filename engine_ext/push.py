"""Push mode on P: finished KV meets the registration of the engine that wants it, and is written.

    offer (KV is ready) ----+
                            +--> connecting --> writing --> P's blocks freed, D told by the WRITE
    registration (from D) --+         |            |
                                      +------------+------> P's blocks freed, D told that it failed

Either may come first: P and D work on the request at the same time, and each waits for the other in
a table with a deadline. A side that gives up leaves a tombstone, so that the other hears of it
instead of waiting. Everything runs in the owner thread, never in the engine's step.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

from engine_ext.agent import Agent, AgentError, Transfer, TransferState
from engine_ext.config import ConnectorConfig
from engine_ext.lease import LeaseTable
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
class Writing:
    """Matched: `offer`'s blocks are ours alone until the end is reported."""

    offer: PushOffer
    registered: Registered
    deadline: float
    transfer: Transfer = None


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
        self._offer_names = NameTable()
        self._registrations: dict[str, Registered] = {}
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
        self._offers[offer.request_id] = offer
        self._offer_names.add(offer.request_id, names)
        key = self._registration_names.find(names)
        if key is not None:
            self._match(offer, self._pop_registration(key), now)

    def registered(self, message: PushRegistered, sender: str, now: float) -> None:
        registered = Registered(message, sender, now + self._config.push_deadline)
        if self._failed.take(registered.names, now):
            self._refuse(registered, "P gave this request up")
            return
        key = self._offer_names.find(registered.names)
        if key is not None:
            self._match(self._offers[key], registered, now)
            return
        self._registrations[message.request_id] = registered
        self._registration_names.add(message.request_id, registered.names)

    def withdrawn(self, message: Withdraw, sender: str, now: float) -> None:
        """D does not want it: nothing more is written, and P's blocks are freed."""
        if any(w.registered.message.request_id == message.request_id for w in self._writing):
            return  # The WRITE's own end answers.
        registered = self._registrations.get(message.request_id)
        if registered is not None and registered.generation == message.generation:
            self._pop_registration(message.request_id)
        names = names_of(message.request_id, message.transfer_id, message.remote_request_id)
        key = self._offer_names.find(names)
        if key is not None:
            self._release(key)
        else:
            self._unwanted.add(names, now)
        if message.generation:
            answer = PushFailed(message.request_id, message.generation, "withdrawn")
            self._readers.answer(sender, answer)

    def given_up(self, request_id: str, now: float, transfer_id: str | None = None) -> None:
        """P's request was aborted, or its lease ended: whoever registers for it must hear."""
        offer = self._offers.get(request_id)
        if offer is not None:
            transfer_id = offer.transfer_id
        self._forget_offer(request_id)
        names = names_of(request_id, transfer_id)
        key = self._registration_names.find(names)
        if key is not None:
            self._refuse(self._pop_registration(key), "P gave this request up")
        else:
            self._failed.add(names, now)

    def request_of(self, name: str) -> str:
        """P's own id of what a decode engine calls `name`, for heartbeats; else `name`."""
        return self._offer_names.find((f"transfer {name}", name, base_id(name))) or name

    def step(self, now: float) -> None:
        for registered in list(self._registrations.values()):
            if registered.deadline <= now:
                self._refuse(self._pop_registration(registered.message.request_id), "timed out")
        writing, self._writing = self._writing, []
        for one in writing:
            try:
                self._advance(one, now)
            except (PeerError, PlanError, AgentError) as error:
                self._fail(one, str(error))
            except Exception as error:
                logger.exception("push of %s", one.offer.request_id)
                self._fail(one, repr(error))

    def _match(self, offer: PushOffer, registered: Registered, now: float) -> None:
        self._forget_offer(offer.request_id)
        if not self._leases.take(offer.request_id):
            self._refuse(registered, "P's lease has ended")
            return
        deadline = now + self._config.transfer_timeout
        self._writing.append(Writing(offer, registered, deadline))

    def _advance(self, writing: Writing, now: float) -> None:
        if writing.transfer is None:
            self._connect(writing, now)
            return
        state = self._agent.poll(writing.transfer)
        if state is TransferState.DONE:
            self._agent.release(writing.transfer)
            self._end(writing)
            self._stats.pushes_ok += 1
        elif state is TransferState.FAILED:
            raise AgentError("WRITE failed")
        elif now >= writing.deadline:
            raise AgentError(f"no end of WRITE within {self._config.transfer_timeout:g} s")
        else:
            self._writing.append(writing)

    def _connect(self, writing: Writing, now: float) -> None:
        message = writing.registered.message
        address = PeerAddress(message.decode_engine_id, message.decode_host, message.decode_port)
        peer = self._peers.connect(address, now)
        if peer is not None:
            pairs = self._plan(writing.offer, message)
            writing.transfer = self._agent.start_write(
                peer, pairs.local, pairs.remote, _done(writing.registered)
            )
        self._writing.append(writing)

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

    def _end(self, writing: Writing) -> None:
        self._stats.leases_released += 1
        self._results.sent(writing.offer.request_id)

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

    def _pop_registration(self, key: str) -> Registered:
        self._registration_names.remove(key)
        return self._registrations.pop(key)


def _done(registered: Registered) -> bytes:
    """A stock decoder gets stock bytes."""
    if registered.message.disagg is None:
        return encode_read_done(registered.message.request_id)
    return encode_extension(PushDone(registered.message.request_id, registered.generation))
