"""What ended, on its way from the owner thread to the engine's, and from several ranks to one."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from engine_ext.base.types import NO_RESULTS, TransferResults


class Results:
    """Thread-safe. `wake` is called after each report, so that a sleeping engine looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._clear()

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def sent(self, request_id: str) -> None:
        with self._lock:
            self._sent.add(request_id)
        self._wake()

    def received(self, request_id: str, *, ok: bool) -> None:
        with self._lock:
            self._received.add(request_id)
            if not ok:
                self._failed.add(request_id)
        self._wake()

    def take(self) -> TransferResults:
        if not (self._sent or self._received):
            return NO_RESULTS
        with self._lock:
            results = TransferResults(
                frozenset(self._sent), frozenset(self._received), frozenset(self._failed)
            )
            self._clear()
        return results

    def _clear(self) -> None:
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()


class Aggregate:
    """The results of all ranks of an engine as one: an id is reported once every rank has reported
    it, as failed if it failed on any."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()

    def aggregate(self, by_rank: Sequence[TransferResults]) -> TransferResults:
        """`by_rank`: what each rank reported since the last call."""
        for results in by_rank:
            self._sent.update(results.finished_sending)
            self._received.update(results.finished_recving)
            self._failed |= results.failed_recving
        received = self._take(self._received)
        failed = received & self._failed
        self._failed -= failed
        return TransferResults(self._take(self._sent), received, failed)

    def _take(self, counts: Counter[str]) -> frozenset[str]:
        complete = frozenset(name for name, count in counts.items() if count >= self._num_ranks)
        for name in complete:
            del counts[name]
        return complete
