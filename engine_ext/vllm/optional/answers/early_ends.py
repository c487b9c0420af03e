"""Requests that our scheduler class ends itself, with the finish reason `cache_threshold`.

vLLM's scheduler ends a request when its model has sampled the last token, or when it is aborted,
which produces no output. We end some requests in the step in which they are looked at: those
that the cache-hit threshold rejects, and those that would be preempted. Their blocks are free as
after an abort; the output that reports them goes out with the step's own outputs.

If vLLM changes who calls `schedule` and `update_from_output`, these outputs are late or lost, and
the client waits. `finish_requests` must leave a request that has ended alone.

vLLM's FinishReason has no member for ours. The output has ABORT, and the stop reason begins with a
mark; `patch_outputs` translates both in the HTTP server.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from engine_ext.vllm.compat.patching import Host

MARK = "\0cache_threshold "
"""Before the stop reason of an early end, between vLLM's processes."""


class EarlyEnds(Host):
    on_scheduled: list[Callable[[SchedulerOutput], None]]
    on_outputs: list[Callable[[dict[int, EngineCoreOutputs]], None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ended: list[tuple[Request, EngineCoreOutput]] = []
        """Their end is not reported yet."""
        self.on_scheduled.append(self._end)
        self.on_outputs.append(self._report_ends)

    def _end(self, output: SchedulerOutput) -> None:
        """A part may add those that end because of what this step has done to them."""
        for request, _ in self._ended:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def _report_ends(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        if self._ended:
            ended, self._ended = self._ended, []
            for request, end in ended:
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(end)

    def has_requests(self) -> bool:
        # The outputs of these ends go out with one more step.
        return bool(self._ended) or bool(super().has_requests())


def end_of(request: Request, stop_reason: str, params: dict[str, Any] | None) -> EngineCoreOutput:
    """Return the output that ends the request. `params`: the answer's `kv_transfer_params`."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT,
        stop_reason=MARK + stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
        kv_transfer_params=params,
    )
