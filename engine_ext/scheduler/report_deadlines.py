"""Reports of the worker half that the scheduler half waits for, and what to do if one is lost.

    awaited --(reported)--> over
       |  ^
       |  +--(something is open: no answer, and another check after REPORT_SECONDS)
       +--(REPORT_SECONDS without it)--> checked --(nothing is open)--> lost: a load counts as
                                                                        failed, blocks as free

A request that loads is parked until its load is reported, and kept blocks stay until they are
reported. Time alone ends neither: a transfer may still touch the blocks. So the scheduler half asks
the worker half, which knows what is open. A check has a number, and only the answer to a request's
latest check counts: with several ranks, the host counts an answer when all ranks have given it.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from engine_ext.common.types import Clock, LoadProblem, ReportCheck, TransferResults
from engine_ext.scheduler.orders import Orders

REPORT_SECONDS = 60.0
LOST = LoadProblem("the report of the load's end was lost", is_of_pair=False, in_quarantine=True)
"""The lost report may have been of a READ in quarantine."""


@dataclass(slots=True)
class _Awaited:
    since: float
    is_load: bool
    number: int = 0
    """That of its latest check."""


class AwaitedReports:
    """One per engine. It writes the checks for the worker half into `orders`."""

    def __init__(self, orders: Orders, clock: Clock) -> None:
        self._orders = orders
        self._clock = clock
        self._awaited: OrderedDict[str, _Awaited] = OrderedDict()
        """By request, or loan; the one whose check is due next is first."""
        self._count = 0

    def load(self, request_id: str) -> None:
        """Note that the end of the request's load will be reported."""
        self._await(request_id, is_load=True)

    def keep(self, request_id: str) -> None:
        """Note that the host keeps the request's blocks until they are reported free, whatever was
        to be reported of it before."""
        self._await(request_id, is_load=False)

    def reported(self, request_id: str, *, is_load: bool) -> None:
        awaited = self._awaited.get(request_id)
        if awaited is not None and awaited.is_load == is_load:
            del self._awaited[request_id]

    def step(self) -> None:
        """Order checks of the reports that are overdue."""
        if not self._awaited:
            return
        now = self._clock()
        while self._awaited:
            request_id, awaited = next(iter(self._awaited.items()))
            if now - awaited.since < REPORT_SECONDS:
                return
            self._count += 1
            awaited.since, awaited.number = now, self._count
            self._awaited.move_to_end(request_id)
            self._orders.append(ReportCheck(request_id, self._count, awaited.is_load))

    def recover(self, results: TransferResults) -> TransferResults:
        """Return the results with the reports that were lost."""
        lost = [check for check in results.lost if self._is_lost(check, results)]
        loads = frozenset(check.request_id for check in lost if check.is_load)
        kept = frozenset(check.request_id for check in lost if not check.is_load)
        return replace(
            results,
            finished_recving=results.finished_recving | loads,
            failed_recving=results.failed_recving | loads,
            finished_sending=results.finished_sending | kept,
            problems={**results.problems, **dict.fromkeys(loads, LOST)},
            lost=frozenset(),
        )

    def _is_lost(self, check: ReportCheck, results: TransferResults) -> bool:
        awaited = self._awaited.get(check.request_id)
        came = results.finished_recving if check.is_load else results.finished_sending
        is_awaited = awaited is not None and awaited.number == check.number
        return is_awaited and check.request_id not in came

    def _await(self, request_id: str, *, is_load: bool) -> None:
        self._awaited[request_id] = _Awaited(self._clock(), is_load)
        self._awaited.move_to_end(request_id)
