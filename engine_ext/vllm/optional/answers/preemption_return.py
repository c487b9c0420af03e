"""Preemption return: a request that would be preempted is ended, for another engine to resume.

If blocks run out, vLLM's scheduler preempts the request that came last: it frees the blocks and
computes prompt and answer again when there is room. `SchedulerOutput.preempted_req_ids` names those
of a step. We end such a request in the same step, if it was asked for and another engine can
resume it. The client's tokens are those reported so far: what a step that was scheduled ahead still
brings is dropped, and computed where the answer goes on.

If vLLM stops naming preempted requests, or names them later, they are computed again here.
"""

import logging
from collections.abc import Iterable, Iterator

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from engine_ext.common.resume_payload import KEY, PREEMPTED, ResumePayload, logprobs_fit
from engine_ext.scheduler.admission import hands_back
from engine_ext.vllm.compat import support
from engine_ext.vllm.optional.answers import PREEMPTION_RETURN
from engine_ext.vllm.optional.answers.early_ends import EarlyEnds, end_of
from engine_ext.vllm.optional.answers.resumed_request import cannot_resume
from engine_ext.vllm.request_view import is_streamed

logger = logging.getLogger(__name__)


class PreemptionReturnPart(EarlyEnds):
    returns_all: bool

    def _end(self, output: SchedulerOutput) -> None:
        if output.preempted_req_ids:
            self._ended += self._returned(output.preempted_req_ids)
        if self._ended:
            super()._end(output)

    def _returned(self, preempted: Iterable[str]) -> Iterator[tuple[Request, EngineCoreOutput]]:
        for name in preempted:
            request = self.requests.get(name)
            if request is None or request.status is not RequestStatus.PREEMPTED:
                continue
            try:
                if support.is_installed(PREEMPTION_RETURN) and self._is_returned(request):
                    yield request, _return(request)
            except Exception:
                logger.exception(
                    "request %s could not be returned to the router", request.request_id
                )

    def _is_returned(self, request: Request) -> bool:
        params = request.sampling_params
        is_asked = hands_back(request.kv_transfer_params, self.returns_all)
        if not is_asked or params is None or cannot_resume(params) or request.resumable:
            return False
        if request.mm_features or not request.prompt_token_ids:
            return False  # Its prompt is more than its tokens.
        return is_streamed(request) or logprobs_fit(request.num_output_tokens, params.logprobs)


def _return(request: Request) -> EngineCoreOutput:
    """A stream has reported its tokens; the HTTP server adds log-probabilities."""
    if is_streamed(request):
        return end_of(request, PREEMPTED, None)
    payload = ResumePayload(tuple(request.prompt_token_ids or ()), tuple(request.output_token_ids))
    return end_of(request, PREEMPTED, {KEY: payload.to_wire()})
