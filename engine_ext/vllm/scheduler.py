"""A scheduler class for `--scheduler-cls engine_ext.vllm.scheduler.DisaggScheduler`.

What vLLM's own lacks: a load-failure policy per request, `cache_hit_threshold`, answers that begin
in the middle and that are handed back rather than preempted, and rest while nothing but remote
readers is waited for.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from engine_ext.common.load_failure import KEY as LOAD_FAILURE
from engine_ext.common.resume_payload import HAND_BACK, KEY, PREEMPTED, ResumePayload, logprobs_fit
from engine_ext.scheduler.admission import (
    FIELD,
    AdmissionVerdict,
    hands_back,
    judge,
    parse_threshold,
    prefills,
)
from engine_ext.vllm.compat import features, finish_reason, grammar, support
from engine_ext.vllm.compat.parts import fitted, part_of
from engine_ext.vllm.connector import ours_in
from engine_ext.vllm.describe import transfer_config
from engine_ext.vllm.given import stays, token_ids_in
from engine_ext.vllm.prefill_stats import BegunPrefillStats

logger = logging.getLogger(__name__)

REST_SECONDS = 0.02
"""Longest pause between two steps that can only free blocks, where the engine must not sleep."""


TOLD_SECONDS = 0.1
"""For which steps go on where they can only hear what workers have begun: /metrics tells it."""

NO_PLUGIN = (
    "VLLM_PLUGINS leaves out the plugin disagg, without which vLLM cannot say cache_threshold"
)


@fitted
class DisaggMixin:
    """Over vLLM's Scheduler. Only names that exist there are overridden.

    Raises ValueError, at the start, for a threshold that this engine cannot keep; RuntimeError
    where it does not fit at all.
    """

    disagg_is_leaving = False
    """Set by compat/engine_loop.py."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        support.require(features.SCHEDULER)
        super().__init__(*args, **kwargs)
        self._ended: list[tuple[Request, EngineCoreOutput]] = []
        """Refused, or handed back: not told yet."""
        self._wake: Callable[[], None] | None = None
        self._hears_of_all = False
        """Whatever is waited for is told by news."""
        self._awaits_kv_since = 0.0
        """Since when there is nothing else, or 0."""
        self._news = threading.Event()
        if self.connector is not None and self.vllm_config.max_concurrent_batches > 1:  # type: ignore[attr-defined] # vLLM's
            # Whatever kv_role is, and MultiConnector's own: see describe.may_load.
            self.defer_block_free = True
        ours = ours_in(self.connector)  # type: ignore[attr-defined] # vLLM's
        if ours is not None and support.is_on(features.FAILURE_POLICY):
            ours.take_back()
        config = transfer_config(self.vllm_config)  # type: ignore[attr-defined] # vLLM's
        extra = {} if config is None else config.kv_connector_extra_config
        if support.is_on(features.LAST_WINDOW):
            self._keep_window_of_last_token()
        self._default_threshold = parse_threshold(extra.get("global_cache_hit_threshold")) or 0.0
        if self._default_threshold:
            _refuse_without(features.THRESHOLD, "global_cache_hit_threshold")
        self._hands_back_all = extra.get(HAND_BACK, False)
        if not isinstance(self._hands_back_all, bool):
            raise ValueError(f"{HAND_BACK} must be true or false")
        if self._hands_back_all:
            _refuse_without(features.BEGUN, HAND_BACK)

    def _keep_window_of_last_token(self) -> None:
        """When a request ends, vLLM gives up what the window of the *next* token does not reach,
        before the connector is asked. A decode engine computes the last prompt token again, whose
        window begins one token earlier: that may be a block earlier."""
        manager = self.kv_cache_manager  # type: ignore[attr-defined] # vLLM's
        give_up = manager.remove_skipped_blocks

        def keep_one_more(
            request_id: str, processed_computed_tokens: int, num_prompt_tokens: int
        ) -> None:
            give_up(request_id, max(0, processed_computed_tokens - 1), num_prompt_tokens)

        manager.remove_skipped_blocks = keep_one_more

    def set_wake(self, wake: Callable[[], None]) -> None:
        """`wake` ends the sleep of the engine's loop; see compat/engine_loop.py."""
        connector = ours_in(self.connector)  # type: ignore[attr-defined] # vLLM's
        if connector is not None and connector.listen_for_news(self._on_news):
            self._wake = wake
            self._hears_of_all = support.is_on(features.REST) and self._is_heard_alone(connector)

    def _is_heard_alone(self, connector: object) -> bool:
        """Another of MultiConnector's, one for encoders, workers elsewhere: these need steps."""
        is_alone = connector is self.connector and self.ec_connector is None  # type: ignore[attr-defined] # vLLM's
        return is_alone and _are_near(self.vllm_config.parallel_config)  # type: ignore[attr-defined] # vLLM's

    def _on_news(self) -> None:
        self._news.set()
        if self._wake is not None:
            self._wake()

    @part_of(features.BEGUN)
    def add_request(self, request: Request) -> None:
        self._begin(request)
        super().add_request(request)  # type: ignore[misc] # vLLM's

    def _begin(self, request: Request) -> None:
        """What was given counts as generated from here on, as of a request that was preempted."""
        given = token_ids_in(request.sampling_params)
        if not given or request.resumable or request.num_output_tokens:
            return
        fits = len(given) < request.max_tokens
        in_context = request.num_tokens + len(given) < self.max_model_len  # type: ignore[attr-defined] # vLLM's
        if not (fits and in_context) and not request.abort_immediately:
            # Our HTTP server does not let this through: it has ended the answer.
            logger.warning("request %s: more is given than it may have", request.request_id)
            return
        request.append_output_token_ids(given)
        request.prefill_stats = BegunPrefillStats()

    @part_of(features.REST, features.THRESHOLD, features.BEGUN)
    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._news.clear()
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc] # vLLM's
        if support.is_on(features.BEGUN):
            for new in output.scheduled_new_reqs:
                BegunPrefillStats.note_scheduled(self.requests[new.req_id], new.num_computed_tokens)  # type: ignore[attr-defined] # vLLM's
            self._ended += self._handed_back(output)
        for request, _ in self._ended:
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)  # type: ignore[attr-defined] # vLLM's
        return output

    def _handed_back(self, output: SchedulerOutput) -> Iterator[tuple[Request, EngineCoreOutput]]:
        """Of those that were preempted, and would be computed again. What a step under way still
        brings of them is nobody's: who goes on computes it."""
        for name in output.preempted_req_ids or ():
            request = self.requests.get(name)  # type: ignore[attr-defined] # vLLM's
            if request is None or request.status is not RequestStatus.PREEMPTED:
                continue
            said = self._try_to_hand_back(request)
            if said is not None:
                yield request, said

    def _try_to_hand_back(self, request: Request) -> EngineCoreOutput | None:
        try:
            if finish_reason.is_installed() and self._is_handed_back(request):
                return _handed_back(request)
        except Exception:
            logger.exception("request %s was not handed back", request.request_id)
        return None

    def _is_handed_back(self, request: Request) -> bool:
        params = request.sampling_params
        is_asked = hands_back(request.kv_transfer_params, self._hands_back_all)
        if not is_asked or params is None or stays(params) or request.resumable:
            return False
        if request.mm_features or not request.prompt_token_ids:
            return False  # Its prompt is more than its tokens.
        return _is_streamed(request) or logprobs_fit(request.num_output_tokens, params.logprobs)

    @part_of(features.THRESHOLD, features.BEGUN, features.LOAD_FAILURES)
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc] # vLLM's
        if support.is_on(features.LOAD_FAILURES):
            try:
                self._name_load_failures(outputs)
            except Exception:
                logger.exception("loads that failed are not named")
        ended, self._ended = self._ended, []
        for request, said in ended:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(said)
        return outputs

    def _name_load_failures(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """In the first output of a request that is streamed, else in its last one."""
        connector = ours_in(self.connector)  # type: ignore[attr-defined] # vLLM's
        if connector is None or not connector.has_load_failures:
            return
        for each in (each for of_client in outputs.values() for each in of_client.outputs):
            request = self.requests.get(each.request_id)  # type: ignore[attr-defined] # vLLM's
            is_streamed = request is not None and _is_streamed(request)
            if each.finish_reason is None and not is_streamed:
                continue
            failure = connector.take_load_failure(each.request_id)
            if failure is not None:
                each.kv_transfer_params = {**(each.kv_transfer_params or {}), LOAD_FAILURE: failure}

    @part_of(features.REST, features.THRESHOLD, features.BEGUN)
    def has_requests(self) -> bool:
        if self._ended:
            return True
        if self._awaits_kv_alone():
            now = time.monotonic()
            self._awaits_kv_since = self._awaits_kv_since or now
            if now - self._awaits_kv_since > TOLD_SECONDS:
                return self._news.is_set()
        else:
            self._awaits_kv_since = 0.0
        return bool(super().has_requests())  # type: ignore[misc] # vLLM's

    def _awaits_kv_alone(self) -> bool:
        """vLLM steps every millisecond while KV is on its way, for as long as a prompt takes to be
        pushed, and its workers spin."""
        if self.running or not self._hears_of_all:  # type: ignore[attr-defined] # vLLM's
            return False
        if self._is_waited_for() or self.finished_req_ids or self.connector.has_pending_push_work():  # type: ignore[attr-defined] # vLLM's
            return False
        if self.finished_recving_kv_req_ids or self.failed_recving_kv_req_ids:  # type: ignore[attr-defined] # vLLM's
            return False
        waiting = (*self.waiting, *self.kv_holding_waiting)  # type: ignore[attr-defined] # vLLM's
        return bool(waiting) and all(map(self._waits_for_news, waiting))

    def _waits_for_news(self, request: Request) -> bool:
        is_parked = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return is_parked or self.connector.awaits_prompt(request)  # type: ignore[attr-defined] # vLLM's

    @part_of(features.REST)
    def has_finished_requests(self) -> bool:
        """vLLM steps every millisecond while a finished request's blocks wait for a reader."""
        waiting = bool(super().has_finished_requests())  # type: ignore[misc] # vLLM's
        if not waiting or self.finished_req_ids or self._has_live_requests():  # type: ignore[attr-defined] # vLLM's
            return waiting
        if self._hears_of_all and not self._is_waited_for():
            return self._news.is_set()
        self._news.wait(REST_SECONDS)
        return True

    def _is_waited_for(self) -> bool:
        """vLLM leaves, pauses or sleeps once there are no requests, and what a remote may still
        read is one."""
        return self.disagg_is_leaving or self.pause_state is not PauseState.UNPAUSED  # type: ignore[attr-defined] # vLLM's

    def _has_live_requests(self) -> bool:
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined] # vLLM's
        return bool(running or waiting)

    @part_of(features.FAILURE_POLICY)
    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        default = self.recompute_kv_load_failures  # type: ignore[has-type]
        recomputed = {name for name in failed_req_ids if self._recomputes(name, default)}
        affected: set[str] = set()
        try:
            for recompute, ids in ((True, recomputed), (False, failed_req_ids - recomputed)):
                self.recompute_kv_load_failures = recompute
                affected |= super()._handle_failed_recving(ids)  # type: ignore[misc] # vLLM's
        finally:
            self.recompute_kv_load_failures = default
        return affected

    def _recomputes(self, request_id: str, default: bool) -> bool:
        request = self.requests.get(request_id)  # type: ignore[attr-defined] # vLLM's
        connector = ours_in(self.connector)  # type: ignore[attr-defined] # vLLM's
        if request is None or connector is None:
            return default
        if connector.is_given_back(request):
            # It waits for blocks as a new request does: none are reserved for it.
            self._inflight_prefills.discard(request)  # type: ignore[attr-defined] # vLLM's
        policy = connector.load_failure_policy(request)
        return default if policy is None else policy == "recompute"

    @part_of(features.THRESHOLD, features.BEGUN)
    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM asks this of every request whose turn has come, wherever it waited and whatever for,
        before anything is allocated; those that may not go on are passed over in this step."""
        waited_for = request.status
        if not super()._handle_blocked_waiting_request(request):  # type: ignore[misc] # vLLM's
            return False
        had_no_grammar = waited_for is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        begins = had_no_grammar and support.is_on(features.BEGUN)
        if begins and not self._try_to_follow(request):
            grammar.refuse(self, request.request_id)
            return False
        verdict = self._try_to_judge(request) if support.is_on(features.THRESHOLD) else None
        if verdict is None or not verdict.is_refused:
            return True
        self._ended.append((request, _refusal(request, verdict)))
        return False

    def _try_to_follow(self, request: Request) -> bool:
        """The grammar of guided decoding goes on from what was given. False: it does not allow
        that, and the request ends."""
        manager = self.structured_output_manager  # type: ignore[attr-defined] # vLLM's
        given = list(request.output_token_ids)
        try:
            if manager.accept_tokens(request, given):
                return True
        except Exception:
            logger.exception("request %s: its grammar", request.request_id)
        logger.error(
            "request %s: its grammar does not allow what it began with", request.request_id
        )
        return False

    def _try_to_judge(self, request: Request) -> AdmissionVerdict | None:
        try:
            return self._judge(request)
        except Exception:
            logger.exception("request %s: its cache hits were not judged", request.request_id)
            return None

    def _judge(self, request: Request) -> AdmissionVerdict | None:
        """None where there is nothing to judge: no threshold, or blocks already there."""
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
            return 0.0  # It has begun elsewhere, and been said.
        given = getattr(request.sampling_params, "extra_args", None) or {}
        try:
            threshold = parse_threshold(given.get(FIELD))
        except ValueError as error:
            logger.warning("request %s: %s", request.request_id, error)
            return 0.0
        if threshold and not finish_reason.is_installed():
            logger.warning("request %s: %s: %s", request.request_id, FIELD, NO_PLUGIN)
            return 0.0
        return self._default_threshold if threshold is None else threshold

    def _tokens_at_hand(self, request: Request) -> tuple[int, int | None]:
        manager = self.kv_cache_manager  # type: ignore[attr-defined] # vLLM's
        counted, manager.log_stats = manager.log_stats, False
        try:
            _, local, _, lacks_state = self._get_local_prefix_cache_hit(request)  # type: ignore[attr-defined] # vLLM's
            alone = manager.get_computed_blocks(request)[1] if lacks_state else local
        finally:
            manager.log_stats = counted
        if self.connector is None:  # type: ignore[attr-defined] # vLLM's
            return alone, 0
        aligned = local - local % self.block_size  # type: ignore[attr-defined] # vLLM's
        external, _ = self.connector.get_num_new_matched_tokens(request, aligned)  # type: ignore[attr-defined] # vLLM's
        return aligned if external else alone, external


def _are_near(parallel: Any) -> bool:
    """Its workers are on this machine, and Ray has put none elsewhere."""
    return parallel.nnodes == 1 and parallel.distributed_executor_backend in ("mp", "uni")


def _refuse_without(feature: features.Feature, asked: str) -> None:
    """Raises ValueError where what is asked for cannot be kept."""
    why = support.reason(feature)
    if why is not None:
        raise ValueError(f"{asked}: {feature.name} is off: {why}")
    if not finish_reason.is_installed():
        raise ValueError(f"{asked}: {NO_PLUGIN}")


def _refusal(request: Request, verdict: AdmissionVerdict) -> EngineCoreOutput:
    told = {"cache_hit_rate": verdict.rate, FIELD: verdict.threshold}
    return _end(request, verdict.stop_reason, told)


def _handed_back(request: Request) -> EngineCoreOutput:
    """A stream has told its tokens; log-probabilities are known to the HTTP server."""
    if _is_streamed(request):
        return _end(request, PREEMPTED, None)
    begun = ResumePayload(tuple(request.prompt_token_ids or ()), tuple(request.output_token_ids))
    return _end(request, PREEMPTED, {KEY: begun.to_wire()})


def _is_streamed(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and params.output_kind is RequestOutputKind.DELTA


def _end(request: Request, why: str, told: dict[str, Any] | None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=finish_reason.cache_threshold_reason(),
        stop_reason=why,
        events=request.take_events(),
        trace_headers=request.trace_headers,
        kv_transfer_params=told,
    )


class DisaggScheduler(DisaggMixin, Scheduler):
    pass


class DisaggAsyncScheduler(DisaggMixin, AsyncScheduler):
    """For platforms where vLLM schedules ahead of the model (GPUs)."""
