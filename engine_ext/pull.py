"""READs from remote engines. Each order ends in exactly one report, well or badly.

    order --> connecting --> reading --> (proven) --> reported ok
                  |             |  \\---> confirming --> reported ok
                  +-------------+-------------+------> reported failed

The holder may have taken its blocks back while we read them: then the bytes are wrong and nothing
else tells. Where it runs our extension, a READ counts only if its lease is known to have been valid
when it ended: by an answered heartbeat, or else by the holder's answer to the READ itself.
A READ that outlives its deadline is reported only once NIXL has let go of it: until then it may
still write into our blocks.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from engine_ext.agent import Agent, AgentError, PeerHandle, Transfer, TransferState
from engine_ext.config import ConnectorConfig
from engine_ext.lease import HeartbeatTracker
from engine_ext.peer import PeerError, Peers
from engine_ext.plan import PlanError, pair_blocks
from engine_ext.results import Results
from engine_ext.types import CacheGeometry, ConnectorStats, PullOrder, Region
from engine_ext.wire import Read, encode_extension, encode_read_done

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reading:
    order: PullOrder
    peer: PeerHandle
    transfer: Transfer
    deadline: float
    num_blocks: int
    sequence: int
    answer: bool | None = None
    """The holder's, once it has come."""
    overdue: bool = False


class Pulls:
    def __init__(
        self,
        agent: Agent,
        peers: Peers,
        beats: HeartbeatTracker,
        sequence: Iterator[int],
        results: Results,
        config: ConnectorConfig,
        geometry: CacheGeometry,
        regions: tuple[Region, ...],
        stats: ConnectorStats,
    ) -> None:
        self._agent = agent
        self._peers = peers
        self._beats = beats
        self._sequence = sequence
        self._results = results
        self._config = config
        self._geometry = geometry
        self._bytes_per_block = sum(region.block_len for region in regions)
        self._stats = stats
        self._connecting: list[PullOrder] = []
        self._reading: list[Reading] = []
        self._confirming: dict[int, Reading] = {}

    @property
    def is_busy(self) -> bool:
        """A READ runs, or its confirmation is awaited."""
        return bool(self._reading or self._confirming)

    @property
    def num_active(self) -> int:
        return len(self._reading) + len(self._confirming) + len(self._connecting)

    def start(self, order: PullOrder) -> None:
        self._connecting.append(order)

    def step(self, now: float) -> None:
        """New READs come last: in shared memory they are over when they are posted, seconds after
        `now`, and whether their lease lasted is judged by the next step's clock."""
        readings, self._reading = self._reading, []
        for reading in readings:
            self._guard(reading.order, partial(self._poll, reading, now))
        for reading in list(self._confirming.values()):
            self._guard(reading.order, partial(self._confirm, reading, now))
        orders, self._connecting = self._connecting, []
        for order in orders:
            self._guard(order, partial(self._try_to_read, order, now))
        self._stats.pulls_active = self.num_active

    def answered(self, peer_name: str, sequence: int, valid: bool) -> None:
        """The holder says whether what a READ found was still the request's."""
        for reading in (*self._reading, *self._confirming.values()):
            if reading.sequence == sequence and reading.peer.name == peer_name:
                reading.answer = valid

    def _guard(self, order: PullOrder, action: Callable[[], None]) -> None:
        """A fault of ours must not park a request for ever."""
        try:
            action()
        except Exception as error:
            logger.exception("request %s", order.request_id)
            self._fail(order, repr(error))

    def _try_to_read(self, order: PullOrder, now: float) -> None:
        if self._beats.is_gone(order.request_id):
            self._fail(order, "its lease has ended")
            return
        try:
            peer = self._peers.connect(order.source.address, now)
        except PeerError as error:
            self._fail(order, str(error))
            return
        if peer is None:
            self._connecting.append(order)
            return
        try:
            self._read(order, peer, now)
        except (PlanError, AgentError) as error:
            self._fail(order, str(error))
            self._tell_done(order, peer)

    def _read(self, order: PullOrder, peer: PeerHandle, now: float) -> None:
        if len(order.local_block_ids) != 1 or len(order.source.block_ids) != 1:
            raise PlanError("several KV-cache groups are not supported")
        if order.source.tp_size != 1:
            raise PlanError(f"tensor parallel size differs: 1 here, {order.source.tp_size} there")
        pairs = pair_blocks(
            order.local_block_ids[0],
            order.source.block_ids[0],
            order.first_token,
            order.last_token,
            self._geometry.block_size,
        )
        sequence = next(self._sequence)
        read_done = _read_done(order, peer, sequence)
        transfer = self._agent.start_read(peer, pairs.local, pairs.remote, read_done)
        deadline = now + self._config.transfer_timeout
        self._reading.append(Reading(order, peer, transfer, deadline, len(pairs.local), sequence))

    def _poll(self, reading: Reading, now: float) -> None:
        try:
            state = self._agent.poll(reading.transfer)
        except AgentError as error:
            self._give_up(reading, str(error))
            return
        if state is TransferState.DONE and not reading.overdue:
            self._arrive(reading, now)
        elif state is not TransferState.RUNNING:
            self._give_up(reading, "READ failed" if not reading.overdue else "READ came too late")
        elif now >= reading.deadline:
            reading.overdue = True
            self._give_up(reading, f"no end of READ within {self._config.transfer_timeout:g} s")
        else:
            self._reading.append(reading)

    def _arrive(self, reading: Reading, now: float) -> None:
        self._release(reading)
        if (
            not reading.peer.has_extension
            or self._beats.valid_until(reading.order.request_id) > now
        ):
            self._succeed(reading)
            return
        reading.deadline = now + self._config.confirm_timeout
        self._confirming[reading.sequence] = reading

    def _confirm(self, reading: Reading, now: float) -> None:
        if reading.answer is None and now < reading.deadline:
            return
        del self._confirming[reading.sequence]
        if reading.answer:
            self._succeed(reading)
            return
        self._stats.reads_unproven += 1
        silent = reading.answer is None
        self._fail(
            reading.order, "no answer to the READ" if silent else "its lease ended meanwhile"
        )
        if silent:
            self._forget(reading)

    def _succeed(self, reading: Reading) -> None:
        self._stats.pulls_ok += 1
        self._stats.blocks_received += reading.num_blocks
        self._stats.bytes_received += reading.num_blocks * self._bytes_per_block
        self._results.received(reading.order.request_id, ok=True)

    def _give_up(self, reading: Reading, problem: str) -> None:
        if not self._release(reading):
            self._reading.append(reading)
            return
        self._fail(reading.order, problem)
        self._tell_done(reading.order, reading.peer)
        self._forget(reading)

    def _forget(self, reading: Reading) -> None:
        """The peer is suspect, unless others still read from it and will find out themselves."""
        if all(other.peer is not reading.peer for other in self._reading):
            self._peers.forget(reading.order.source.address)

    def _release(self, reading: Reading) -> bool:
        try:
            self._agent.release(reading.transfer)
        except AgentError as error:
            if not reading.overdue:
                logger.warning("request %s: %s", reading.order.request_id, error)
            return not reading.overdue
        return True

    def _tell_done(self, order: PullOrder, peer: PeerHandle) -> None:
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


def _read_done(order: PullOrder, peer: PeerHandle, sequence: int) -> bytes:
    """A stock peer gets stock bytes."""
    if peer.has_extension:
        return encode_extension(Read(order.source.request_id, sequence=sequence))
    return encode_read_done(order.source.request_id)
