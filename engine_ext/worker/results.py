"""Results of transfers: for the engine's thread, for the log and for `/disagg/inspect`."""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal

from engine_ext.common.inspection import MovedSeen, TransferSeen
from engine_ext.common.latest import keep_latest
from engine_ext.common.types import NO_RESULTS, Clock, LoadProblem, TransferResults

logger = logging.getLogger(__name__)

What = Literal["READ", "WRITE"]

MOST_TRANSFERS = 128
MOST_ENGINES = 256


class PendingResults:
    """Thread-safe. `wake` is called after each report, so that a sleeping engine looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._problems: dict[str, LoadProblem] = {}
        self._clear()

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def sent(self, request_id: str) -> None:
        with self._lock:
            self._sent.add(request_id)
        self._wake()

    def explain(self, request_id: str, problem: LoadProblem) -> None:
        """Why a load has failed that is reported next."""
        with self._lock:
            self._problems[request_id] = problem

    def received(self, request_id: str, *, ok: bool) -> None:
        with self._lock:
            self._received.add(request_id)
            if not ok:
                self._failed.add(request_id)
        self._wake()

    def returned(self, request_id: str) -> None:
        with self._lock:
            self._given_back.add(request_id)
        self._wake()

    def ready(self, request_id: str) -> None:
        with self._lock:
            self._ready.add(request_id)
        self._wake()

    def take(self) -> TransferResults:
        if not (self._sent or self._received or self._ready or self._given_back):
            return NO_RESULTS
        with self._lock:
            results = TransferResults(
                frozenset(self._sent),
                frozenset(self._received),
                frozenset(self._failed),
                {name: self._problems.pop(name) for name in self._failed & self._problems.keys()},
                frozenset(self._ready),
                frozenset(self._given_back),
            )
            self._clear()
        return results

    def _clear(self) -> None:
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._ready: set[str] = set()
        self._given_back: set[str] = set()


class TransferLog:
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
