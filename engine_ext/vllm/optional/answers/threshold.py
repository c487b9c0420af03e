"""`cache_hit_threshold`: a request is rejected if too little of its prompt is at hand.

vLLM's scheduler calls `_handle_blocked_waiting_request` for every request whose turn has come,
wherever it waited and whatever for, before anything is allocated; a request for which it is false
is passed over in this step. We count the cached and the announced tokens there, once, and end the
request if they are too few (see engine_ext.scheduler.admission).

If vLLM does not call this method for a request, the request is computed, and never rejected. If it
calls the method after it has allocated blocks, these go back when the request ends.
"""

import logging

from vllm.v1.request import Request, RequestStatus

from engine_ext.scheduler.admission import (
    FIELD,
    AdmissionVerdict,
    judge,
    parse_threshold,
    prefills,
)
from engine_ext.vllm.compat import support
from engine_ext.vllm.optional.answers import THRESHOLD
from engine_ext.vllm.optional.answers.early_ends import EarlyEnds, end_of

logger = logging.getLogger(__name__)


class ThresholdPart(EarlyEnds):
    default_threshold: float

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        try:
            verdict = self._judge(request)
        except Exception:
            logger.exception("request %s: its cache hits were not judged", request.request_id)
            return True
        if verdict is None or not verdict.is_refused:
            return True
        rate = {"cache_hit_rate": verdict.rate, FIELD: verdict.threshold}
        self._ended.append((request, end_of(request, verdict.stop_reason, rate)))
        return False

    def _judge(self, request: Request) -> AdmissionVerdict | None:
        """None if there is nothing to judge: no threshold, or blocks already there."""
        threshold = self._threshold_of(request)
        if threshold <= 0 or request.num_computed_tokens > 0:
            return None
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return None
        is_prefill = prefills(request.kv_transfer_params)
        local, external = self._tokens_at_hand(request)
        if external is None:  # it is not known yet, and asked again
            return None
        return judge(threshold, local, external, request.num_tokens, prefills=is_prefill)

    def _threshold_of(self, request: Request) -> float:
        if request.num_output_tokens and not request.num_preemptions:
            return 0.0  # A resumed answer, the beginning of which the client has.
        extra_args = getattr(request.sampling_params, "extra_args", None) or {}
        try:
            threshold = parse_threshold(extra_args.get(FIELD))
        except ValueError as error:
            logger.warning("request %s: %s", request.request_id, error)
            return 0.0
        if threshold and not support.is_installed(THRESHOLD):
            logger.warning("request %s: %s: %s", request.request_id, FIELD, support.NO_PLUGIN)
            return 0.0
        return self.default_threshold if threshold is None else threshold

    def _tokens_at_hand(self, request: Request) -> tuple[int, int | None]:
        """Return how many tokens are cached here, and how many can be loaded (None: not known
        yet)."""
        manager = self.kv_cache_manager
        counts, manager.log_stats = manager.log_stats, False
        try:
            _, local, _, lacks_state = self._get_local_prefix_cache_hit(request)
            alone = manager.get_computed_blocks(request)[1] if lacks_state else local
        finally:
            manager.log_stats = counts
        if self.connector is None:
            return alone, 0
        aligned = local - local % self.block_size
        external, _ = self.connector.get_num_new_matched_tokens(request, aligned)
        return aligned if external else alone, external
