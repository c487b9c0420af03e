"""Why a request ended, for its caller and for the connector."""

from dataclasses import dataclass

from engine_ext.common.resume_payload import PREEMPTED
from engine_ext.common.types import FinishStatus
from engine_ext.reference.messages import FinishReason
from engine_ext.scheduler import admission


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    status: FinishStatus
    stop_reason: str | int | None = None
    error: str | None = None


ABORTED = Finish("abort", FinishStatus.ABORTED)
LENGTH = Finish("length", FinishStatus.LENGTH_CAPPED)


HANDED_BACK = Finish(admission.FINISH_REASON, FinishStatus.ABORTED, PREEMPTED)
"""Another engine is to go on with it: nothing is kept of it here."""


def stopped(stop_reason: str | int | None = None) -> Finish:
    return Finish("stop", FinishStatus.STOPPED, stop_reason)


def failed(error: str) -> Finish:
    return Finish("error", FinishStatus.ERROR, error=error)


def refused(stop_reason: str) -> Finish:
    """Too little of its KV is at hand: the connector takes it for aborted."""
    return Finish(admission.FINISH_REASON, FinishStatus.ABORTED, stop_reason)
