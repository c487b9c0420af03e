"""READs from source engines. Each order ends in exactly one report, well or badly.

    order --> connecting --> reading --> (proven) --> reported ok
                  |          |   |  \\---> confirming --> reported ok
                  |          |   |             |
                  +----------|---+-------------+------> reported failed
                             +--(late)----------------> reported failed, in quarantine --> (ended)

Proof that a READ counts
    The source may free its blocks while we read them. The bytes are wrong then, and nothing in NIXL
    shows it. So where the source runs our extension, a READ counts only if its lease was valid when
    the READ had ended. One of two things proves that: the horizon of an answered heartbeat
    (heartbeats.py), or the source's answer to the READ's own notification (`ReadAck`).

Checksums
    With `kv_checksum`, the source's answer also brings its checksums, and the READ counts only if
    the blocks here have the same ones (checksums.py). A source without checksums is trusted.

Quarantine
    A READ that outlives its deadline may write into our blocks until NIXL has ended it. It is
    reported as failed at once (`LoadProblem.in_quarantine`), and the host frees its blocks after a
    fence (loop.py). Only if the host would compute into the same blocks does the report wait. No
    READ from the same engine begins before the late one has ended, and none at all while too many
    blocks are in quarantine.

Ranks
    Where the source has more ranks than we do, an order is read in parts, one from each rank, all
    at once. It has ended well when all parts have. It has ended badly when one part has failed and
    the others have ended too.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine_ext.common.inspection import QuarantineSeen
from engine_ext.common.orders import PullOrder
from engine_ext.common.types import LoadProblem, PeerAddress, RemoteSource, num_blocks_in
from engine_ext.layout.plan import PlanError
from engine_ext.wire.notifications import Read, encode_extension, encode_read_done
from engine_ext.worker.agent import AgentError, PeerHandle, TransferInFlight
from engine_ext.worker.checksums import SLOWEST_BYTES_PER_SECOND, ChecksumComparison, Checksums
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.heartbeats import HeartbeatTracker
from engine_ext.worker.leases import FOREVER
from engine_ext.worker.peers import PeerError, Peers, RefusedPeerError

logger = logging.getLogger(__name__)

REQUEST_ENDED = "its request has ended"
"""The only reason for a missing load that is not a fault."""
SLOWEST_READ = 1e9
"""Bytes per second. An order with a timeout expects no slower READ."""
UNENDED = "an earlier READ from this engine has not ended"


@dataclass(slots=True)
class RankRead:
    """One READ, from one rank."""

    peer: PeerHandle
    in_flight: TransferInFlight
    sequence: int
    is_running: bool = True
    answer: bool | None = None
    """The source's, once it has come."""
    wants_sums: bool = False
    sums: tuple[bytes, ...] | None = None
    """The source's checksums, if its answer had any."""
    check: ChecksumComparison | None = None

    @property
    def is_verified(self) -> bool:
        """Its blocks are compared with the source's; `corruption` has the result."""
        return self.check is not None and self.sums is not None

    @property
    def is_compared(self) -> bool:
        return self.check is None or self.sums is None or self.check.is_done

    @property
    def corruption(self) -> str | None:
        if self.check is None or self.sums is None:
            return None
        return self.check.problem(self.sums)


@dataclass(slots=True, eq=False)
class ActivePull:
    order: PullOrder
    deadline: float = FOREVER
    """The time at which an order with a timeout fails, without the time that its bytes take."""
    peers: list[PeerHandle] = field(default_factory=list)
    """Every rank of the source that has blocks of the request, read from or not."""
    parts: list[RankRead] = field(default_factory=list)
    began: float = 0.0
    num_blocks: int = 0
    num_bytes: int = 0
    problem: str | None = None
    """Why it will fail, once no part runs."""
    has_begun: bool = False
    """It could be planned: a failure from here on is one of the engine or the network."""
    answer_by: float = 0.0

    @property
    def lease(self) -> tuple[str, str]:
        return self.order.source.address.engine_id, self.order.source.request_id

    @property
    def running(self) -> list[RankRead]:
        return [part for part in self.parts if part.is_running]


class Pulls:
    """`decline` notifies a source that we will not read."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        peers: Peers,
        beats: HeartbeatTracker,
        decline: Callable[[RemoteSource], None],
        checksums: Checksums | None = None,
    ) -> None:
        self._context = context
        self._agent, self._config = context.agent, context.config
        self._results, self._stats = context.results, context.stats
        self._peers = peers
        self._beats = beats
        self._decline = decline
        self._checksums = checksums
        self._connecting: list[ActivePull] = []
        self._reading: list[ActivePull] = []
        self._confirming: list[ActivePull] = []
        self._quarantine: list[ActivePull] = []
        """Late, and not ended by NIXL."""

    @property
    def youngest_began(self) -> float | None:
        """Confirmation included."""
        return max((one.began for one in (*self._reading, *self._confirming)), default=None)

    @property
    def num_open(self) -> int:
        return self._num_active + len(self._quarantine)

    def needs_steps(self, now: float) -> bool:
        """A READ that is not in quarantine is polled more often anyway."""
        return bool(self._quarantine)

    @property
    def awaits_message(self) -> bool:
        return False

    @property
    def _num_active(self) -> int:
        return len(self._reading) + len(self._confirming) + len(self._connecting)

    def quarantined(self, now: float) -> Iterator[QuarantineSeen]:
        for reading in self._quarantine:
            deadline = max(part.in_flight.deadline for part in reading.parts)
            yield QuarantineSeen(
                reading.order.request_id,
                reading.order.source.address.engine_id,
                num_blocks_in(reading.order.local_block_ids),
                max(0.0, now - deadline),
            )

    def uses(self, peer: PeerHandle) -> bool:
        return any(peer is one for reading in self._under_way() for one in reading.peers)

    def touches(self, request_id: str) -> bool:
        readings = (*self._under_way(), *self._connecting)
        return any(request_id == one.order.request_id for one in readings)

    def reads(self, request_id: str) -> bool:
        """Its READ is under way, and ends with a message to the source."""
        readings = (*self._under_way(), *self._confirming)
        return any(request_id == one.order.request_id for one in readings)

    def loads(self, request_id: str) -> bool:
        """Its end is reported later: unlike most READs in quarantine, whose failure is reported at
        once."""
        late = (one for one in self._quarantine if one.order.recomputes)
        readings = (*self._reading, *self._connecting, *self._confirming, *late)
        return any(request_id == one.order.request_id for one in readings)

    def start(self, order: PullOrder, now: float) -> None:
        deadline = FOREVER if order.timeout is None else now + order.timeout
        self._connecting.append(ActivePull(order, deadline))

    def give_up(self, request_id: str) -> None:
        for reading in [one for one in self._connecting if one.order.request_id == request_id]:
            self._connecting.remove(reading)
            self._fail(reading.order, REQUEST_ENDED)
            self._decline(reading.order.source)
        for reading in self._reading:
            if reading.order.request_id == request_id:
                reading.problem = reading.problem or REQUEST_ENDED
        for reading in [one for one in self._confirming if one.order.request_id == request_id]:
            self._confirming.remove(reading)
            self._stop_checks(reading)
            self._give_up(reading, REQUEST_ENDED)

    def step(self, now: float) -> None:
        for reading in list(self._reading):
            self._guard(reading, partial(self._poll, reading, now))
        for reading in list(self._confirming):
            self._guard(reading, partial(self._confirm, reading, now))
        for reading in list(self._quarantine):
            self._guard(reading, partial(self._poll_quarantined, reading, now))
        connecting, self._connecting = self._connecting, []
        for reading in connecting:
            self._guard(reading, partial(self._try_to_read, reading, now))
        self._stats.pulls_active = self._num_active

    def answered(
        self, peer_name: str, sequence: int, valid: bool, sums: tuple[bytes, ...] | None = None
    ) -> None:
        """The source answers whether the lease was valid when a READ had ended, and its blocks'
        checksums."""
        for reading in (*self._reading, *self._confirming):
            for part in reading.parts:
                is_asked = part.sequence == sequence and part.peer.name == peer_name
                if is_asked and part.answer is None:
                    part.answer, part.sums = valid, sums

    def _under_way(self) -> tuple[ActivePull, ...]:
        return (*self._reading, *self._quarantine)

    def _guard(self, reading: ActivePull, action: Callable[[], None]) -> None:
        """Catch a programming error: no request may wait for it, nor lose blocks under a READ."""
        try:
            action()
        except Exception as error:
            logger.exception("request %s", reading.order.request_id)
            if reading in self._quarantine:
                return
            if reading in self._reading:
                reading.problem = reading.problem or repr(error)
                self._move_to_quarantine(reading)
                return
            self._confirming = [one for one in self._confirming if one is not reading]
            self._stop_checks(reading)
            self._fail(reading.order, repr(error))

    def _try_to_read(self, reading: ActivePull, now: float) -> None:
        order = reading.order
        if self._beats.is_gone(order.request_id):
            self._fail(order, "its lease has ended")
            return
        if (problem := self._quarantine_problem(order.source.address)) is not None:
            self._do_without(order, problem, is_of_pair=problem == UNENDED)
            return
        try:
            peers = self._peers.connect_all(order.source.address, now)
        except RefusedPeerError as error:
            self._stats.pulls_refused += 1
            self._do_without(order, str(error), is_of_pair=True)
            return
        except PeerError as error:
            self._fail(order, str(error), is_of_pair=True)
            return
        if peers is None and now >= reading.deadline:
            self._do_without(order, "no handshake in time", is_of_pair=True)
            return
        if peers is None:
            self._connecting.append(reading)
            return
        reading.peers, reading.began = peers, now
        if (problem := refusal_of(order, peers)) is not None:
            self._stats.pulls_refused += 1
            self._give_up(reading, problem)
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
            self._finish(reading, now)

    def _do_without(self, order: PullOrder, problem: str, *, is_of_pair: bool) -> None:
        """Fail a load before any READ begins, and notify the source."""
        self._fail(order, problem, is_of_pair=is_of_pair)
        # Nothing waits for that lease any more, so its heartbeats stop now.
        self._beats.untrack(order.request_id)
        self._decline(order.source)

    def may_read(self, address: PeerAddress) -> bool:
        """Return False while blocks in quarantine forbid READs from that engine."""
        return self._quarantine_problem(address) is None

    def _quarantine_problem(self, address: PeerAddress) -> str | None:
        if any(reading.order.source.address == address for reading in self._quarantine):
            return UNENDED
        num_blocks = sum(num_blocks_in(one.order.local_block_ids) for one in self._quarantine)
        if num_blocks > self._context.max_quarantined:
            return f"{num_blocks} blocks are in quarantine"
        return None

    def _read(self, reading: ActivePull, now: float) -> None:
        order, source = reading.order, reading.order.source
        # A plan that fails must fail before any part starts: nothing stops a READ.
        batches = [
            (
                peer,
                peer.layout.to_read(
                    order.local_block_ids,
                    source.block_ids,
                    order.first_token,
                    order.last_token,
                    source.num_tokens,
                ),
            )
            for peer in reading.peers
            if not peer.layout.skips_read
        ]
        reading.has_begun = True
        reading.num_bytes = sum(batch.num_bytes for _, batch in batches)
        # An order with a timeout has it for the connection and the READ together, beside the time
        # that its bytes take; then once more for the source's answer.
        latest = min(
            now + self._config.transfer_timeout, reading.deadline + reading.num_bytes / SLOWEST_READ
        )
        for peer, batch in batches:
            if not len(batch.local):
                continue
            sequence = next(self._context.sequence)
            wants_sums = self._checksums is not None and peer.has_extension and peer.layout.is_alike
            read_done = encode_read(source, peer, sequence, wants_sums)
            transfer = self._agent.start_read(peer, batch.local, batch.remote, read_done)
            in_flight = TransferInFlight(transfer, latest)
            reading.parts.append(RankRead(peer, in_flight, sequence, wants_sums=wants_sums))
            reading.num_blocks = max(reading.num_blocks, batch.num_blocks)

    def _poll(self, reading: ActivePull, now: float) -> None:
        self._ask_nixl(reading, now)
        if not reading.running:
            self._reading.remove(reading)
            # Not `now`: this process may have stood still, and the lease must have held until NIXL
            # has reported the end.
            self._finish(reading, self._context.clock())
        elif all(part.in_flight.is_late(now) for part in reading.running):
            self._move_to_quarantine(reading)

    def _poll_quarantined(self, reading: ActivePull, now: float) -> None:
        self._ask_nixl(reading, now)
        if reading.running:
            return
        self._quarantine.remove(reading)
        logger.info("request %s: its late READ has ended", reading.order.request_id)
        if reading.order.recomputes:
            self._fail(reading.order, reading.problem or "it took too long", is_of_pair=True)
        self._end_badly(reading)

    def _ask_nixl(self, reading: ActivePull, now: float) -> None:
        for part in reading.running:
            in_flight = part.in_flight
            in_flight.problem = in_flight.problem or reading.problem
            part.is_running = not in_flight.has_ended(self._agent, now)
            if in_flight.problem is not None:
                reading.problem = reading.problem or f"READ: {in_flight.problem}"

    def _move_to_quarantine(self, reading: ActivePull) -> None:
        """Stop waiting for it and renewing its lease; its blocks are in quarantine. If the host
        would compute into these blocks, the report waits."""
        self._reading.remove(reading)
        self._quarantine.append(reading)
        # The source may free its blocks: whatever still arrives here is never used.
        self._beats.untrack(reading.order.request_id)
        if not reading.order.recomputes:
            problem = LoadProblem(reading.problem or "it took too long", True, in_quarantine=True)
            self._report(reading.order, problem)

    def _finish(self, reading: ActivePull, now: float) -> None:
        """`now` was read after NIXL had ended the last part."""
        if reading.problem is None:
            self._arrive(reading, now)
        else:
            self._give_up(reading, reading.problem)

    def _arrive(self, reading: ActivePull, now: float) -> None:
        """With several ranks, an answered heartbeat of one proves nothing about the others."""
        # Before `confirm`, which forgets the horizons: from then on the source may end the lease.
        is_proven = len(reading.peers) == 1 and (
            self._beats.valid_until(reading.order.request_id, reading.peers[0].name) > now
        )
        self._beats.confirm(*reading.lease)
        awaited = [
            part
            for part in reading.parts
            if part.peer.has_extension and (part.wants_sums or not is_proven)
        ]
        if not awaited:
            self._succeed(reading)
            return
        timeout = self._config.confirm_timeout
        reading.answer_by = now + min(timeout, reading.order.timeout or timeout)
        for part in reading.parts:
            if self._checksums is not None and part.wants_sums:
                part.check = self._checksums.check(reading.order)
                reading.answer_by += reading.num_bytes / SLOWEST_BYTES_PER_SECOND
        self._confirming.append(reading)

    def _confirm(self, reading: ActivePull, now: float) -> None:
        answers = [part.answer for part in reading.parts if part.peer.has_extension]
        if None in answers and False not in answers and now < reading.answer_by:
            return
        if all(answers) and not all(part.is_compared for part in reading.parts):
            return
        self._confirming.remove(reading)
        self._stop_checks(reading)
        if all(answers):
            corruptions = (part.corruption for part in reading.parts)
            problem = next((one for one in corruptions if one is not None), None)
            if problem is None:
                self._succeed(reading)
                return
            self._stats.loads_corrupted += 1
            self._fail(reading.order, problem)
            self._confirm_to_source(reading)
            return
        self._stats.reads_unproven += 1
        silent = False not in answers
        problem = "no answer to the READ" if silent else "its lease ended meanwhile"
        self._fail(reading.order, problem, is_of_pair=silent)
        self._confirm_to_source(reading)
        if silent:
            self._peers.forget(reading.order.source.address)

    def _stop_checks(self, reading: ActivePull) -> None:
        for part in reading.parts:
            if self._checksums is not None and part.check is not None:
                self._checksums.cancel(part.check.ours)

    def _succeed(self, reading: ActivePull) -> None:
        self._stats.pulls_ok += 1
        self._stats.blocks_received += reading.num_blocks
        self._stats.bytes_received += reading.num_bytes
        self._stats.loan_bytes_received += reading.num_bytes * reading.order.source.is_loan
        if self._checksums is not None:
            is_verified = all(part.is_verified for part in reading.parts)
            self._stats.loads_verified += is_verified
            self._stats.loads_unverified += not is_verified
        self._note(reading)
        self._results.received(reading.order.request_id, ok=True)
        self._confirm_to_source(reading)

    def _note(self, reading: ActivePull) -> None:
        order = reading.order
        self._context.log.record(
            "LOAN" if order.source.is_loan else "READ",
            order.request_id,
            order.source.address.engine_id,
            num_blocks=reading.num_blocks,
            num_bytes=reading.num_bytes,
            began=reading.began,
            num_proven=order.last_token if order.is_proven else 0,
        )

    def _give_up(self, reading: ActivePull, problem: str) -> None:
        self._fail(reading.order, problem, is_of_pair=reading.has_begun)
        self._end_badly(reading)

    def _end_badly(self, reading: ActivePull) -> None:
        self._beats.confirm(*reading.lease)
        self._confirm_to_source(reading, even_if_read=True)
        if reading.has_begun and reading.problem != REQUEST_ENDED:
            self._peers.forget(reading.order.source.address)

    def _confirm_to_source(self, reading: ActivePull, *, even_if_read: bool = False) -> None:
        """Notify the ranks that a READ has not notified: they may free their blocks."""
        notified = set() if even_if_read else {part.peer.name for part in reading.parts}
        order = reading.order
        for peer in reading.peers:
            if peer.name in notified:
                continue
            try:
                self._agent.notify(peer.name, encode_read(order.source, peer))
            except AgentError as error:
                logger.debug("engine %s: %s", order.source.address.engine_id, error)

    def _fail(self, order: PullOrder, problem: str, *, is_of_pair: bool = False) -> None:
        self._report(order, LoadProblem(problem, is_of_pair))

    def _report(self, order: PullOrder, problem: LoadProblem) -> None:
        is_abort = problem.reason == REQUEST_ENDED
        logger.log(
            logging.DEBUG if is_abort else logging.WARNING,
            "request %s: KV of %s on engine %s was not loaded: %s",
            order.request_id,
            order.source.request_id,
            order.source.address.engine_id,
            problem.reason,
        )
        self._stats.pulls_aborted += is_abort
        self._stats.pulls_failed += not is_abort
        shown = None if is_abort else problem
        self._results.received(order.request_id, ok=False, problem=shown)


def refusal_of(order: PullOrder, peers: Sequence[PeerHandle]) -> str | None:
    """Return why these ranks may not be read from, now that their handshakes are known.

    A stock engine gives no proof of its blocks' content and is trusted, as stock does. An engine
    with our extension always gives a proof: without one, it got lost on the way. A turn that its
    source may end at any time is read only from a source that answers whether it has. An engine
    that takes us for stock does not, nor one that we take for stock because one of us lacks the
    secret.
    """
    if not order.is_proven and any(peer.has_extension for peer in peers):
        return "the source sends prefix hashes, but none came with this KV"
    if order.source.is_revocable and not all(peer.has_extension for peer in peers):
        return "a revocable turn of an engine that cannot report whether the turn has ended"
    return None


def encode_read(
    source: RemoteSource, peer: PeerHandle, sequence: int = 0, wants_sums: bool = False
) -> bytes:
    """Encode a reader's notification that it is done. A stock peer gets stock bytes."""
    if peer.has_extension:
        return encode_extension(Read(source.request_id, peer.readers, sequence, wants_sums))
    return encode_read_done(source.request_id, peer.readers)
