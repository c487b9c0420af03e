"""Moves the running streams of engines that drain to other engines.

An engine drains in seconds if its streams do not run to their end there. The router ends the leg of
a stream, and another decode engine continues the stream (`resume`). The drained engine still has
the KV of the prompt and of the answer so far, so the other engine borrows these blocks
(`loans.find_stream_loan`) and computes only what the last, incomplete block had. If it cannot
borrow them, a prefill engine computes prompt and answer, as for a stream whose engine has crashed.

Only streams that our connector reports token ids for are moved, and only while another engine can
take them: all others run to their end. An engine refuses loans beyond an eighth of its cache, and a
stream without its loan is computed again. So only as many streams move at once as an eighth of the
cache holds. The first one moves alone: the engines may have to connect.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from router.fleet.engine import DECODE, Engine, Intent
from router.http_client.engine_answer import Resumable
from router.http_client.errors import MigratedError
from router.proxy.gateway import Gateway
from router.proxy.resume import can_continue
from router.proxy.resume_buffer import ResumeBuffer
from router.routing.chunk_index import DEFAULT_CACHE_TOKENS
from router.routing.policy import is_full

logger = logging.getLogger("disagg_router.fleet")
# Seconds between two looks for streams that can move.
SCAN_INTERVAL_S = 0.05
# A quarter of the loans that an engine gives at a time.
MAX_CONCURRENT_MOVES = 16
LENT_SHARE = 1 / 8


class Move(NamedTuple):
    """A stream that leaves an engine. `num_resumes`: how often it had been resumed before."""

    buffer: ResumeBuffer
    num_resumes: int
    num_tokens: int

    @property
    def is_over(self) -> bool:
        """The other engine answers, or the request has ended."""
        buffer = self.buffer
        return buffer.is_full or (buffer.num_resumes > self.num_resumes and not buffer.resume_cause)


class StreamMigrator:
    """Moves streams in the background: those of all engines that drain, if `--migrate-on-drain` is
    set, or else those of the engines that an operator drains in this way."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._moves: dict[Engine, list[Move]] = {}
        self._has_moved: set[Engine] = set()
        """Engines from which a stream has moved, so that others are connected to them."""

    async def run(self) -> None:
        """Move streams until the task is cancelled."""
        while True:
            await asyncio.sleep(SCAN_INTERVAL_S)
            try:
                self.step()
            except Exception:
                logger.exception("the streams of a draining engine could not be moved")

    def step(self) -> None:
        """Begin to move some streams of each engine that drains."""
        gateway, moves_all = self._gateway, self._gateway.settings.migrate_on_drain
        leaving = [
            engine
            for engine in (gateway.fleet.engines if moves_all or gateway.migrating else ())
            if engine.intent is Intent.DRAINING
            and engine.in_flight
            and (moves_all or engine.name in gateway.migrating)
        ]
        self._has_moved.intersection_update(leaving)
        self._moves = {engine: self._begin_moves(engine) for engine in leaving}

    def _begin_moves(self, engine: Engine) -> list[Move]:
        """Return the moves that run."""
        before = self._moves.get(engine, [])
        moves = [move for move in before if not move.is_over]
        if len(moves) < len(before):
            self._has_moved.add(engine)
        most = MAX_CONCURRENT_MOVES if engine in self._has_moved else 1
        lendable = LENT_SHARE * (engine.cache_tokens or DEFAULT_CACHE_TOKENS)
        takers = [one for one in self._gateway.fleet.engines if _takes_streams(one, engine)]

        def may_move(buffer: Resumable) -> bool:
            if len(moves) >= most or not isinstance(buffer, ResumeBuffer) or buffer.by_request:
                return False
            if buffer.left is engine:  # no other engine took it
                return False
            tokens = buffer.num_all_tokens
            moving = tokens + sum(move.num_tokens for move in moves)
            if moves and moving > lendable:
                return False
            # Their legs may not have begun, so they are not in the takers' load yet.
            if not any(
                can_continue(one, DECODE, buffer) and not is_full(one, moving) for one in takers
            ):
                return False
            moves.append(Move(buffer, buffer.num_resumes, tokens))
            return True

        engine.pool.fail_resumable(MigratedError(f"{engine.name} is being drained"), may_move)
        return moves


def _takes_streams(engine: Engine, leaving: Engine) -> bool:
    """Return True if the engine may continue streams of the one that leaves."""
    serves = engine.models is None or (
        leaving.models is not None and leaving.models <= engine.models
    )
    is_near = engine.group == leaving.group and engine.role.plays(DECODE)
    return serves and is_near and engine.is_available
