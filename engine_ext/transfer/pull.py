"""READs from remote engines. Each order ends in exactly one report, well or badly.

    order --> connecting --> reading --> (proven) --> reported ok
                  |             |  \\---> confirming --> reported ok
                  +-------------+-------------+------> reported failed

The holder may have taken its blocks back while we read them: then the bytes are wrong and nothing
else tells. Where it runs our extension, a READ counts only if its lease is known to have been valid
when it ended: by an answered heartbeat, or else by the holder's answer to the READ itself.
A READ that outlives its deadline is reported only once NIXL has let go of it: until then it may
still write into our blocks.

Where the holder has more ranks than we do, an order is read in parts, one from each rank, all at
once. It has ended well when all parts have, and badly when one has and the others were let go of.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine_ext.base.config import ConnectorConfig
from engine_ext.base.types import ConnectorStats, PullOrder
from engine_ext.layout.plan import Batch, PlanError
from engine_ext.transfer.agent import Agent, AgentError, PeerHandle
from engine_ext.transfer.heartbeats import HeartbeatTracker
from engine_ext.transfer.moving import Moving
from engine_ext.transfer.peer import PeerError, Peers
from engine_ext.transfer.results import Results
from engine_ext.wire.notifications import Read, encode_extension, encode_read_done

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Part:
    """One READ, from one rank."""

    peer: PeerHandle
    moving: Moving
    sequence: int
    is_running: bool = True
    answer: bool | None = None
    """The holder's, once it has come."""


@dataclass(slots=True, eq=False)
class Reading:
    order: PullOrder
    peers: list[PeerHandle]
    """Every rank that holds the request, read from or not."""
    parts: list[Part] = field(default_factory=list)
    num_blocks: int = 0
    num_bytes: int = 0
    problem: str | None = None
    """Why it will fail, once no part runs."""
    has_begun: bool = False
    """It could be planned: what fails from here on is the engine's fault, or the way's."""
    answer_by: float = 0.0

    @property
    def running(self) -> list[Part]:
        return [part for part in self.parts if part.is_running]


class Pulls:
    def __init__(
        self,
        agent: Agent,
        peers: Peers,
        beats: HeartbeatTracker,
        sequence: Iterator[int],
        results: Results,
        config: ConnectorConfig,
        stats: ConnectorStats,
    ) -> None:
        self._agent = agent
        self._peers = peers
        self._beats = beats
        self._sequence = sequence
        self._results = results
        self._config = config
        self._stats = stats
        self._connecting: list[PullOrder] = []
        self._reading: list[Reading] = []
        self._confirming: list[Reading] = []

    @property
    def is_busy(self) -> bool:
        """A READ runs, or its confirmation is awaited."""
        return bool(self._reading or self._confirming)

    @property
    def num_active(self) -> int:
        return len(self._reading) + len(self._confirming) + len(self._connecting)

    def uses(self, peer: PeerHandle) -> bool:
        """A READ is under way for which this peer is needed."""
        return any(peer is one for reading in self._reading for one in reading.peers)

    def start(self, order: PullOrder) -> None:
        self._connecting.append(order)

    def step(self, now: float) -> None:
        """New READs come last: in shared memory they are over when they are posted, seconds after
        `now`, and whether their lease lasted is judged by the next step's clock."""
        for reading in list(self._reading):
            self._guard(reading.order, partial(self._poll, reading, now))
        for reading in list(self._confirming):
            self._guard(reading.order, partial(self._confirm, reading, now))
        orders, self._connecting = self._connecting, []
        for order in orders:
            self._guard(order, partial(self._try_to_read, order, now))
        self._stats.pulls_active = self.num_active

    def answered(self, peer_name: str, sequence: int, valid: bool) -> None:
        """The holder says whether what a READ found was still the request's."""
        for reading in (*self._reading, *self._confirming):
            for part in reading.parts:
                if part.sequence == sequence and part.peer.name == peer_name:
                    part.answer = valid

    def _guard(self, order: PullOrder, action: Callable[[], None]) -> None:
        """A fault of ours must not park a request for ever."""
        try:
            action()
        except Exception as error:
            logger.exception("request %s", order.request_id)
            self._reading = [one for one in self._reading if one.order is not order]
            self._confirming = [one for one in self._confirming if one.order is not order]
            self._fail(order, repr(error))

    def _try_to_read(self, order: PullOrder, now: float) -> None:
        if self._beats.is_gone(order.request_id):
            self._fail(order, "its lease has ended")
            return
        try:
            peers = self._peers.connect_all(order.source.address, now)
        except PeerError as error:
            self._fail(order, str(error))
            return
        if peers is None:
            self._connecting.append(order)
            return
        reading = Reading(order, peers)
        if lacks_proof(order, peers):
            self._stats.pulls_refused += 1
            self._give_up(
                reading, "no proof that it is of this prompt, from an engine that gives one"
            )
            return
        try:
            self._read(reading, now)
        except (PlanError, AgentError) as error:
            reading.problem = str(error)
        except Exception as error:
            # Not for `_guard`: parts may be under way.
            logger.exception("request %s", order.request_id)
            reading.problem = repr(error)
        if reading.running:
            self._reading.append(reading)
        else:
            self._settle(reading, now)

    def _read(self, reading: Reading, now: float) -> None:
        """Plans all parts before the first starts."""
        order = reading.order
        batches = [
            (peer, self._plan(order, peer)) for peer in reading.peers if not peer.layout.skips_read
        ]
        reading.has_begun = True
        for peer, batch in batches:
            if not len(batch.local):
                continue
            sequence = next(self._sequence)
            read_done = _read_done(order, peer, sequence)
            transfer = self._agent.start_read(peer, batch.local, batch.remote, read_done)
            moving = Moving(transfer, now + self._config.transfer_timeout)
            reading.parts.append(Part(peer, moving, sequence))
            reading.num_bytes += batch.num_bytes
            reading.num_blocks = max(reading.num_blocks, batch.num_blocks)

    @staticmethod
    def _plan(order: PullOrder, peer: PeerHandle) -> Batch:
        source = order.source
        return peer.layout.to_read(
            order.local_block_ids,
            source.block_ids,
            order.first_token,
            order.last_token,
            source.num_tokens,
        )

    def _poll(self, reading: Reading, now: float) -> None:
        """What has failed is settled once NIXL has let go of every part."""
        for part in reading.running:
            moving = part.moving
            moving.problem = moving.problem or reading.problem
            part.is_running = not moving.has_ended(self._agent, now)
            if moving.problem is not None:
                reading.problem = reading.problem or f"READ: {moving.problem}"
        if not reading.running:
            self._reading.remove(reading)
            self._settle(reading, now)

    def _settle(self, reading: Reading, now: float) -> None:
        if reading.problem is None:
            self._arrive(reading, now)
        else:
            self._give_up(reading, reading.problem)

    def _arrive(self, reading: Reading, now: float) -> None:
        """With several holders, one's answered heartbeat proves nothing about the others."""
        is_proven = (
            len(reading.peers) == 1 and self._beats.valid_until(reading.order.request_id) > now
        )
        self._read_by_us(reading.order)
        unproven = [] if is_proven else [p for p in reading.parts if p.peer.has_extension]
        if not unproven:
            self._succeed(reading)
            return
        reading.answer_by = now + self._config.confirm_timeout
        self._confirming.append(reading)

    def _confirm(self, reading: Reading, now: float) -> None:
        answers = [part.answer for part in reading.parts if part.peer.has_extension]
        if None in answers and False not in answers and now < reading.answer_by:
            return
        self._confirming.remove(reading)
        if all(answers):
            self._succeed(reading)
            return
        self._stats.reads_unproven += 1
        silent = False not in answers
        self._fail(
            reading.order, "no answer to the READ" if silent else "its lease ended meanwhile"
        )
        self._tell_done(reading)
        if silent:
            self._peers.forget(reading.order.source.address)

    def _succeed(self, reading: Reading) -> None:
        self._stats.pulls_ok += 1
        self._stats.blocks_received += reading.num_blocks
        self._stats.bytes_received += reading.num_bytes
        self._results.received(reading.order.request_id, ok=True)
        self._tell_done(reading)

    def _give_up(self, reading: Reading, problem: str) -> None:
        self._fail(reading.order, problem)
        self._read_by_us(reading.order)
        self._tell_done(reading, even_if_read=True)
        if reading.has_begun:
            self._peers.forget(reading.order.source.address)

    def _read_by_us(self, order: PullOrder) -> None:
        self._beats.read(order.source.address, order.source.request_id)

    def _tell_done(self, reading: Reading, *, even_if_read: bool = False) -> None:
        """Those whose READ has not told them already may free their blocks."""
        told = set() if even_if_read else {part.peer.name for part in reading.parts}
        for peer in reading.peers:
            if peer.name not in told:
                self._say_done(reading.order, peer)

    def _say_done(self, order: PullOrder, peer: PeerHandle) -> None:
        try:
            self._agent.notify(peer.name, _read_done(order, peer, sequence=0))
        except AgentError as error:
            logger.debug("engine %s: %s", order.source.address.engine_id, error)

    def _fail(self, order: PullOrder, problem: str) -> None:
        logger.warning(
            "request %s: KV of %s on engine %s was not loaded: %s",
            order.request_id,
            order.source.request_id,
            order.source.address.engine_id,
            problem,
        )
        self._stats.pulls_failed += 1
        self._results.received(order.request_id, ok=False)


def lacks_proof(order: PullOrder, peers: Sequence[PeerHandle]) -> bool:
    """A stock engine says nothing of the content it holds and is trusted, as stock does. One that
    runs our extension always gives a proof; where there is none, it got lost on the way."""
    return not order.is_proven and any(peer.has_extension for peer in peers)


def _read_done(order: PullOrder, peer: PeerHandle, sequence: int) -> bytes:
    """A stock peer gets stock bytes."""
    if peer.has_extension:
        return encode_extension(Read(order.source.request_id, peer.readers, sequence))
    return encode_read_done(order.source.request_id, peer.readers)
