"""What ended, on its way from the owner thread to the engine's."""

import threading
from collections.abc import Callable

from engine_ext.common.types import NO_RESULTS, LoadProblem, TransferResults


class Results:
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

    def given_back(self, request_id: str) -> None:
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
