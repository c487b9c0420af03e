"""What is said of each transfer that ended well: one line in the log, and to who asks what moved
lately and how much there was in all, by engine. What failed has a warning of its own."""

import logging
from collections import OrderedDict, deque
from typing import Literal

from engine_ext.common.inspection import MovedSeen, TransferSeen
from engine_ext.common.latest import keep_latest
from engine_ext.common.types import Clock

logger = logging.getLogger(__name__)

What = Literal["READ", "WRITE"]

MOST_TRANSFERS = 128
MOST_ENGINES = 256


class TransferReport:
    """The owner thread's alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transfers: deque[tuple[float, TransferSeen]] = deque(maxlen=MOST_TRANSFERS)
        self._moved: OrderedDict[tuple[What, str], MovedSeen] = OrderedDict()

    def note(
        self,
        what: What,
        request_id: str,
        engine_id: str,
        *,
        num_blocks: int,
        num_bytes: int,
        began: float,
        num_proven: int,
    ) -> None:
        """`num_proven`: leading tokens of the prompt that are known to be the same on both sides, 0
        where the peer proves nothing."""
        now = self._clock()
        seconds = now - began
        logger.info(
            "request %s: %s peer=%s blocks=%d bytes=%d ms=%.1f proven_tokens=%d",
            request_id,
            what,
            engine_id,
            num_blocks,
            num_bytes,
            seconds * 1000,
            num_proven,
        )
        seen = TransferSeen(what, request_id, engine_id, num_blocks, num_bytes, seconds, 0.0)
        self._transfers.append((now, seen))
        before = self._moved.get((what, engine_id), MovedSeen(what, engine_id, 0, 0))
        moved = MovedSeen(what, engine_id, before.num_transfers + 1, before.num_bytes + num_bytes)
        keep_latest(self._moved, (what, engine_id), moved, MOST_ENGINES)

    def transfers(self, now: float) -> tuple[TransferSeen, ...]:
        """The latest, oldest first."""
        return tuple(seen._replace(age=max(0.0, now - at)) for at, seen in self._transfers)

    def moved(self) -> tuple[MovedSeen, ...]:
        return tuple(self._moved.values())
