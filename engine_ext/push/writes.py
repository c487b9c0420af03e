"""The WRITEs of push mode, from the match of an offer and a registration to NIXL's end.

    begin --> connecting --> in flight --> (ended)
                  |  ^ a part  |
                  |  +---------+
                  +--------------------> (ended, with a problem)

A partial offer is written part by part while P computes the rest; only the last part's notification
reports the push to D. If P's request loses its blocks (preemption), its prompt is written again
from the start, after NIXL has ended the part that was read from the old blocks.

Deadlines: D keeps its blocks for as long as P may write. P begins no WRITE after the time, by P's
clock, that D gave with the registration. A WRITE that has begun is polled until NIXL has ended it.
Past `transfer_timeout` its blocks are in quarantine, and nothing else is written to that engine.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine_ext.common.inspection import QuarantineSeen
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import num_blocks_in
from engine_ext.layout.plan import WHOLE, Batch, PlanError, TokenRange
from engine_ext.layout.ranks import RankError
from engine_ext.push.decode_engines import DIFFERENT, TOO_LATE, WITHDRAWN, rank_of
from engine_ext.push.matching_state import HeldOffer, Registered, RegistrationKey
from engine_ext.wire.notifications import PushDone, encode_extension, encode_read_done
from engine_ext.worker.agent import AgentError, PeerHandle, TransferInFlight
from engine_ext.worker.context import WorkerContext
from engine_ext.worker.peers import PeerError, Peers

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())


@dataclass(slots=True)
class ActiveWrite:
    held: HeldOffer
    registered: Registered
    connect_by: float | None = None
    """Set while a handshake runs."""
    peer: PeerHandle | None = None
    in_flight: TransferInFlight | None = None
    part: TokenRange = WHOLE
    """The part in flight, or the next one."""
    attempt: int = 0
    """P's attempt (`PushOffer.attempt`) whose blocks were written so far."""
    stopped: str | None = None
    """Why no further part is written."""
    is_reclaimed: bool = False
    """D needs its blocks for another request, and registers again when P holds the prompt."""
    is_released: bool = False
    """P's blocks are not kept for it any more."""
    problem: str | None = None
    """Why nothing was, or will be, written."""
    began: float = 0.0
    num_blocks: int = 0
    num_bytes: int = 0

    @property
    def is_early(self) -> bool:
        return self.part.until is not None

    @property
    def is_void(self) -> bool:
        """The part in flight is read from blocks that P's request has lost."""
        return self.attempt != self.held.offer.attempt

    def is_late(self, now: float) -> bool:
        return self.in_flight is not None and self.in_flight.is_late(now)


class Writes:
    """Each write ends in one call: `on_end` when NIXL does not touch our blocks any more, or
    `on_lapse` where D must register again, because it did not repeat its registration in time or
    asked for its blocks back. `on_release` may come before: nothing is read from the request's
    blocks any more, though a void part is still in flight."""

    def __init__(
        self,
        context: WorkerContext,
        peers: Peers,
        *,
        on_end: Callable[[ActiveWrite], None],
        on_lapse: Callable[[ActiveWrite], None],
        on_release: Callable[[ActiveWrite], None],
    ) -> None:
        self._agent, self._config, self._us = context.agent, context.config, context.rank
        self._clock, self._stats, self._log = context.clock, context.stats, context.log
        self._peers = peers
        self._on_end = on_end
        self._on_lapse = on_lapse
        self._on_release = on_release
        self._writing: dict[RegistrationKey, ActiveWrite] = {}

    def __len__(self) -> int:
        return len(self._writing)

    @property
    def youngest_began(self) -> float | None:
        """No request waits for a part while P computes the rest."""
        return max(
            (
                one.began
                for one in self._writing.values()
                if one.in_flight is not None
                and one.in_flight.problem is None
                and not one.held.is_partial
            ),
            default=None,
        )

    def quarantined(self, now: float) -> Iterator[QuarantineSeen]:
        for writing in [*self._writing.values()]:
            if writing.is_void or not writing.is_late(now):
                continue
            assert writing.in_flight is not None
            yield QuarantineSeen(
                writing.held.offer.request_id,
                writing.registered.message.decode_engine_id,
                num_blocks_in(writing.held.offer.block_ids),
                now - writing.in_flight.deadline,
            )

    def uses(self, peer: PeerHandle) -> bool:
        return any(writing.peer is peer for writing in self._writing.values())

    def begin(self, held: HeldOffer, registered: Registered) -> None:
        self._writing[registered.key] = ActiveWrite(held, registered)

    def refresh(self, registered: Registered) -> bool:
        """Return whether it is among these; then it may begin for longer."""
        writing = self._writing.get(registered.key)
        if writing is None:
            return False
        writing.registered.deadline = max(writing.registered.deadline, registered.deadline)
        return True

    def touches(self, request_id: str) -> bool:
        return any(
            one.in_flight is not None
            and not one.is_void
            and one.held.offer.request_id == request_id
            for one in self._writing.values()
        )

    def withdraw(self, key: RegistrationKey) -> bool:
        """Return whether it is among these; then it does not begin any more."""
        writing = self._writing.get(key)
        if writing is not None:
            self._stop(writing, WITHDRAWN)
        return writing is not None

    def return_blocks(self, key: RegistrationKey) -> bool:
        """Return whether it is among these; then it is answered when it ends. A partial offer ends
        with the part in flight. A whole prompt is written: that takes no longer, and frees our
        blocks."""
        writing = self._writing.get(key)
        if writing is not None and writing.held.is_partial:
            writing.is_reclaimed = True
            if writing.in_flight is None:
                self._lapse(writing)
        return writing is not None

    def give_up(self, held: HeldOffer, reason: str) -> None:
        for writing in [one for one in self._writing.values() if one.held is held]:
            self._stop(writing, reason)

    def _stop(self, writing: ActiveWrite, reason: str) -> None:
        """A part in flight is not stopped; the last part may still end well."""
        if writing.in_flight is None:
            self._end(writing, reason)
        else:
            writing.stopped = writing.stopped or reason
            if writing.is_void:
                self._on_release(writing)

    def step(self, now: float) -> None:
        for writing in list(self._writing.values()):
            try:
                self._advance(writing, now)
            except (PeerError, PlanError, RankError, AgentError) as error:
                self._end(writing, str(error))
            except Exception as error:
                logger.exception("push of %s", writing.held.offer.request_id)
                self._stumble(writing, repr(error))

    def _advance(self, writing: ActiveWrite, now: float) -> None:
        if writing.in_flight is None:
            self._write_next_part(writing, now)
        elif writing.in_flight.has_ended(self._agent, now):
            self._part_ended(writing, writing.in_flight)
        elif (reason := writing.stopped or writing.in_flight.problem) is not None:
            self._stop(writing, reason)

    def _part_ended(self, writing: ActiveWrite, moved: TransferInFlight) -> None:
        if moved.problem is not None:
            self._end(writing, f"WRITE: {moved.problem}")
        elif writing.part.until is None:
            self._end(writing)
        else:
            writing.part = TokenRange(since=writing.part.until)
            writing.in_flight = writing.peer = None
            if writing.stopped is not None:
                self._end(writing, writing.stopped)
            elif writing.is_reclaimed and writing.held.is_partial:
                self._lapse(writing)

    def _write_next_part(self, writing: ActiveWrite, now: float) -> None:
        held, registered = writing.held, writing.registered
        if held.is_partial and registered.deadline <= now:
            self._lapse(writing)
            return
        if writing.attempt != held.offer.attempt:
            writing.attempt, writing.part = held.offer.attempt, WHOLE
        until = held.offer.num_tokens if held.is_partial else None
        if until is not None and until <= writing.part.since:
            return
        peer = self._connect(writing, now)
        if peer is None:
            return
        writing.part = writing.part._replace(until=until)
        batch = self._plan(peer, writing)
        begins = self._clock()
        writing.began = writing.began or begins
        if peer.layout.skips_write or not len(batch.local):
            self._pass_over(writing, peer)
            return
        # D frees its blocks by this promise, so the clock is read after the handshake and the plan.
        if begins > registered.deadline:
            raise PeerError(TOO_LATE)
        writing.peer = peer
        writing.num_blocks += batch.num_blocks
        writing.num_bytes += batch.num_bytes
        self._stats.early_writes += writing.is_early
        self._stats.early_blocks += batch.num_blocks if writing.is_early else 0
        notification = b"" if writing.is_early else _done(registered, self._us.size)
        transfer = self._agent.start_write(peer, batch.local, batch.remote, notification)
        writing.in_flight = TransferInFlight(transfer, begins + self._config.transfer_timeout)

    def _connect(self, writing: ActiveWrite, now: float) -> PeerHandle | None:
        """Return None while a handshake runs."""
        registered = writing.registered
        peer = self._peers.connect(registered.address, now, *rank_of(registered.message, self._us))
        if peer is None:
            writing.connect_by = writing.connect_by or now + self._config.handshake_timeout
            if now >= writing.connect_by:
                raise PeerError(f"no handshake within {self._config.handshake_timeout:g} s")
            return None
        # Another process at D's address would have its own KV overwritten.
        if peer.name != registered.sender:
            raise PeerError("the agent that registered has gone")
        if any(one.is_late(now) for one in self._writing.values() if one.peer is peer):
            raise PeerError("an earlier WRITE to this engine has not ended")
        writing.connect_by = None
        return peer

    def _pass_over(self, writing: ActiveWrite, peer: PeerHandle) -> None:
        """Another rank writes this part, or D did not ask for it."""
        if writing.part.until is not None:
            writing.part = TokenRange(since=writing.part.until)
            return
        self._agent.notify(peer.name, _done(writing.registered, self._us.size))
        self._end(writing)

    @staticmethod
    def _plan(peer: PeerHandle, writing: ActiveWrite) -> Batch:
        offer, message = writing.held.offer, writing.registered.message
        first_token, last_token = None, offer.num_tokens
        if message.disagg is not None:
            if message.disagg.digest != offer.digest:
                raise PlanError(DIFFERENT)
            first_token, last_token = message.disagg.first_token, message.disagg.last_token
        return peer.layout.to_write(
            offer.block_ids, message.local_block_ids, first_token, last_token, writing.part
        )

    def _lapse(self, writing: ActiveWrite) -> None:
        del self._writing[writing.registered.key]
        self._on_lapse(writing)

    def _stumble(self, writing: ActiveWrite, problem: str) -> None:
        """After a fault of ours, keep blocks that NIXL may still read."""
        if writing.in_flight is None or writing.in_flight.ended:
            self._end(writing, problem)
        else:
            writing.in_flight.problem = writing.in_flight.problem or problem

    def _end(self, writing: ActiveWrite, problem: str | None = None) -> None:
        if self._writing.pop(writing.registered.key, None) is None:
            return
        writing.problem = problem
        if problem is None:
            self._note(writing)
        self._on_end(writing)
        if problem is not None and writing.peer is not None:
            self._peers.forget(writing.registered.address)

    def _note(self, writing: ActiveWrite) -> None:
        message = writing.registered.message
        self._log.record(
            "WRITE",
            writing.held.offer.request_id,
            message.decode_engine_id,
            num_blocks=writing.num_blocks,
            num_bytes=writing.num_bytes,
            began=writing.began,
            num_proven=0 if message.disagg is None else message.disagg.last_token,
        )


def _done(registered: Registered, world_size: int) -> bytes:
    """A stock decoder gets stock bytes."""
    if registered.message.disagg is None:
        return encode_read_done(registered.message.request_id, world_size)
    return encode_extension(PushDone(registered.message.request_id, registered.generation))
