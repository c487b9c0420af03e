"""Reports from vLLM's workers to its scheduler for which vLLM has no field.

The reasons of failed loads, and messages about loans, are metadata of a step's output. All other
reports count when every rank has made them. vLLM counts names in `finished_sending` like this, so
these reports travel there, as names with a mark. No request has such a name, and the marked names
are taken out before vLLM looks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from engine_ext.common.types import (
    LoadProblem,
    LoanReport,
    LoanRequest,
    ReportCheck,
    TransferResults,
)

READY, RETURNED, LOST = "\0ready ", "\0given back ", "\0lost "


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From vLLM's workers to its scheduler, with a step's output."""

    problems: Mapping[str, LoadProblem]
    """Why loads have failed."""
    loan_requests: tuple[LoanRequest, ...] = ()
    loan_reports: tuple[LoanReport, ...] = ()
    """Only an engine of one rank lends and borrows."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Merge the reports of several ranks: a request may have a problem at each."""
        others = other.problems if isinstance(other, WorkerReport) else {}
        return WorkerReport(merged(others, self.problems))


def merged(
    problems: Mapping[str, LoadProblem], more: Mapping[str, LoadProblem]
) -> dict[str, LoadProblem]:
    """Return one problem for each request: of several ranks, one whose READ has not ended."""
    kept = {name: each for name, each in problems.items() if each.in_quarantine}
    return {**problems, **more, **kept}


def with_marked(results: TransferResults) -> set[str]:
    """Return `finished_sending` as vLLM gets it: with the reports that it has no place for."""
    return {
        *results.finished_sending,
        *(READY + name for name in results.ready),
        *(RETURNED + name for name in results.returned),
        *(f"{LOST}{one.number} {one.is_load:d} {one.request_id}" for one in results.lost),
    }


def marked(mark: str, names: set[str]) -> frozenset[str]:
    """Return the names with this mark, without it."""
    return frozenset(name.removeprefix(mark) for name in names if name.startswith(mark))


def unmarked(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("\0")}


def lost_checks(names: set[str]) -> frozenset[ReportCheck]:
    checks = (name.split(" ", 2) for name in marked(LOST, names))
    return frozenset(
        ReportCheck(request_id, int(number), is_load == "1")
        for number, is_load, request_id in checks
    )
