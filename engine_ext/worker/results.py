"""Results of transfers: for the engine's thread, for the log and for `/disagg/inspect`."""

import logging
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Literal

from engine_ext.common.inspection import MovedSeen, TransferSeen
from engine_ext.common.latest import keep_latest
from engine_ext.common.types import (
    NO_RESULTS,
    Clock,
    LoadProblem,
    LoanReport,
    LoanRequest,
    ReportCheck,
    TransferResults,
)

logger = logging.getLogger(__name__)

What = Literal["READ", "LOAN", "WRITE"]

MOST_TRANSFERS = 128
MOST_ENGINES = 256
MOST_BUSY_TIMES = 16
"""For each engine, the log keeps this many of the latest intervals in which transfers ran."""
MAX_LOAN_REQUESTS = 64
"""The most requests for loans that may wait for the engine's steps."""
MAX_LOAN_KEYS = 2048
"""The most keys of several requests for loans that one step of the engine looks up, which delays
its answers: docs/engine-half.md has the time."""


class PendingResults:
    """Results on their way from the owner thread to the engine's. Thread-safe.

    `wake` is called after each report, so that a sleeping engine looks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._ids: defaultdict[str, set[Any]] = defaultdict(set)
        """By field of `TransferResults`."""
        self._problems: dict[str, LoadProblem] = {}
        self._loan_requests: list[LoanRequest] = []
        self._loan_reports: list[LoanReport] = []

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def sent(self, request_id: str) -> None:
        self._report(request_id, "finished_sending")

    def received(self, request_id: str, *, ok: bool, problem: LoadProblem | None = None) -> None:
        """`problem`: why the load has failed, if the request still runs."""
        failed = () if ok else ("failed_recving",)
        self._report(request_id, "finished_recving", *failed, problem=problem)

    def returned(self, request_id: str) -> None:
        self._report(request_id, "returned")

    def ready(self, request_id: str) -> None:
        self._report(request_id, "ready")

    def lost(self, check: ReportCheck) -> None:
        """Nothing is open that would be reported of this request."""
        with self._lock:
            self._ids["lost"].add(check)
        self._wake()

    def loan_requested(self, request: LoanRequest) -> bool:
        """Return False if too many requests wait already."""
        with self._lock:
            if len(self._loan_requests) >= MAX_LOAN_REQUESTS:
                return False
            self._loan_requests.append(request)
        self._wake()
        return True

    def loan_ended(self, report: LoanReport) -> None:
        with self._lock:
            self._loan_reports.append(report)
        self._wake()

    def __bool__(self) -> bool:
        # Without the lock: a report that this misses wakes the engine afterwards.
        return bool(self._ids or self._loan_requests or self._loan_reports)

    def take(self) -> TransferResults:
        if not self:
            return NO_RESULTS
        with self._lock:
            requests = self._take_loan_requests()
            reports, self._loan_reports = tuple(self._loan_reports), []
            reported, self._ids = self._ids, defaultdict(set)
            problems, self._problems = self._problems, {}
        if self._loan_requests:  # These need one more step.
            self._wake()
        ids: dict[str, Any] = {name: frozenset(names) for name, names in reported.items()}
        loans: dict[str, Any] = {"loan_requests": requests, "loan_reports": reports}
        return TransferResults(**ids, problems=problems, **loans)

    def _take_loan_requests(self) -> tuple[LoanRequest, ...]:
        """Take the requests for the next step: the first one, and those after it that together have
        at most MAX_LOAN_KEYS keys with it."""
        waiting, num_keys = self._loan_requests, 0
        for count, request in enumerate(waiting):
            num_keys += len(request.keys)
            if count and num_keys > MAX_LOAN_KEYS:
                self._loan_requests = waiting[count:]
                return tuple(waiting[:count])
        self._loan_requests = []
        return tuple(waiting)

    def _report(self, request_id: str, *fields: str, problem: LoadProblem | None = None) -> None:
        with self._lock:
            for name in fields:
                self._ids[name].add(request_id)
            if problem is not None:
                self._problems[request_id] = problem
        self._wake()


class EngineTotals:
    """The totals of the transfers to or from one engine since the first one in the log."""

    def __init__(self) -> None:
        self.transfers = self.bytes = 0
        self.seconds = self.busy_seconds = 0.0
        self._busy: deque[tuple[float, float]] = deque(maxlen=MOST_BUSY_TIMES)
        """Times without overlap, from and to, oldest first."""

    def add(self, num_bytes: int, began: float, ended: float) -> None:
        """Count a transfer that has just ended. Transfers that run together share the link, so
        their time counts once for `busy_seconds`."""
        self.transfers += 1
        self.bytes += num_bytes
        self.seconds += ended - began
        start, counted = began, 0.0
        while self._busy and self._busy[-1][1] >= began:
            earliest, latest = self._busy.pop()
            start, counted = min(start, earliest), counted + latest - earliest
        self._busy.append((start, ended))
        self.busy_seconds += ended - start - counted


class TransferLog:
    """One log line for each transfer that ended well, and what moved lately and in all, by engine.
    A transfer that failed has a warning of its own. Only the owner thread uses it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transfers: deque[tuple[float, TransferSeen]] = deque(maxlen=MOST_TRANSFERS)
        self._moved: OrderedDict[tuple[What, str], EngineTotals] = OrderedDict()

    def record(
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
        """`num_proven`: leading tokens that are known to be the same on both sides."""
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
        totals = self._moved.get((what, engine_id)) or EngineTotals()
        totals.add(num_bytes, began, now)
        keep_latest(self._moved, (what, engine_id), totals, MOST_ENGINES)

    def transfers(self, now: float) -> tuple[TransferSeen, ...]:
        return tuple(seen._replace(age_seconds=max(0.0, now - at)) for at, seen in self._transfers)

    def moved(self) -> tuple[MovedSeen, ...]:
        return tuple(
            MovedSeen(*key, one.transfers, one.bytes, one.seconds, one.busy_seconds)
            for key, one in self._moved.items()
        )
