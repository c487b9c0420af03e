"""A scheduler class for `--scheduler-cls engine_ext.vllm.scheduler.DisaggScheduler`.

vLLM's own scheduler, and before it in the order of methods the parts of those features that are on.
Each part overrides only methods that vLLM's scheduler has. Where a feature is off, its part is not
there, and vLLM's own methods are.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from engine_ext.common.load_failure import KEY as LOAD_FAILURE
from engine_ext.common.load_failure import LoadFailures
from engine_ext.common.resume_payload import HAND_BACK
from engine_ext.scheduler.admission import parse_threshold
from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.patching import Host
from engine_ext.vllm.compat.probe import Feature
from engine_ext.vllm.connector_calls import find_our_connector
from engine_ext.vllm.describe import transfer_config
from engine_ext.vllm.optional.answers import PREEMPTION_RETURN, RESUME, THRESHOLD
from engine_ext.vllm.optional.engine_loop import IDLE_REST
from engine_ext.vllm.optional.load_failures import LOAD_FAILURES
from engine_ext.vllm.optional.loans import LENDING
from engine_ext.vllm.optional.steps import STEP_BUDGET
from engine_ext.vllm.optional.without_patch import FAILURE_POLICY, LAST_WINDOW, SCHEDULER
from engine_ext.vllm.request_view import is_streamed

logger = logging.getLogger(__name__)


class DisaggSchedulerBase(Host):
    """What is there whatever else is off.

    Raises ValueError, at the start, for a threshold that this engine cannot keep; RuntimeError
    where the class does not fit at all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        support.require(SCHEDULER)
        super().__init__(*args, **kwargs)
        if self.connector is not None and self.vllm_config.max_concurrent_batches > 1:
            # Whatever kv_role is, and MultiConnector's own: see describe.may_load.
            self.defer_block_free = True
        config = transfer_config(self.vllm_config)
        extra = {} if config is None else config.kv_connector_extra_config
        self.default_threshold = parse_threshold(extra.get("global_cache_hit_threshold")) or 0.0
        if self.default_threshold:
            _require(THRESHOLD, "global_cache_hit_threshold")
        self.returns_all = extra.get(HAND_BACK, False)
        if not isinstance(self.returns_all, bool):
            raise ValueError(f"{HAND_BACK} must be true or false")
        if self.returns_all:
            _require(PREEMPTION_RETURN, HAND_BACK)
        if "target_itl_ms" in extra and find_our_connector(self.connector) is None:
            raise ValueError("target_itl_ms: needs DisaggConnector, which measures steps")
        self.woken = threading.Event()
        """A worker has woken the engine since the last step; see idle_rest.py."""
        self.on_scheduled: list[Callable[[SchedulerOutput], None]] = []
        self.on_outputs: list[Callable[[dict[int, EngineCoreOutputs]], None]] = []
        """The callbacks of parts for each scheduled step, and for the outputs of each step."""


class SchedulePart(Host):
    """The one `schedule` of all parts: a chain of overrides costs more in each step than all that
    they do."""

    woken: threading.Event
    on_scheduled: list[Callable[[SchedulerOutput], None]]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.woken.is_set():
            self.woken.clear()
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        for look_at in self.on_scheduled:
            look_at(output)
        return output


class OutputsPart(Host):
    """The one `update_from_output` of all parts."""

    on_outputs: list[Callable[[dict[int, EngineCoreOutputs]], None]]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        for add_to in self.on_outputs:
            add_to(outputs)
        return outputs


def _require(feature: Feature, asked: str) -> None:
    """Raise ValueError if what is asked for cannot be kept."""
    why = support.reason(feature)
    if why is not None:
        raise ValueError(f"{asked}: {feature.name} is off: {why}")
    if not support.is_installed(feature):
        raise ValueError(f"{asked}: {support.NO_PLUGIN}")


class LastWindowPart(Host):
    """When a request ends, vLLM gives up what the window of the *next* token does not reach, before
    the connector is asked. A decode engine computes the last prompt token again, whose window
    begins one token earlier: that may be a block earlier. If vLLM freed these blocks elsewhere, D
    would compute some prompts again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        give_up = manager.remove_skipped_blocks

        def keep_one_more(
            request_id: str, processed_computed_tokens: int, num_prompt_tokens: int
        ) -> None:
            give_up(request_id, max(0, processed_computed_tokens - 1), num_prompt_tokens)

        manager.remove_skipped_blocks = keep_one_more


class FailurePolicyPart(Host):
    """vLLM has one load-failure policy for all requests. A turn that cannot be loaded is computed
    whatever the policy, unless a READ may still write into its blocks; a load whose blocks were
    given back waits again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = find_our_connector(self.connector)
        if ours is not None:
            ours.take_back()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        transfers = model_runner_output.kv_connector_output
        if transfers is not None and transfers.failed_recving:
            ours = find_our_connector(self.connector)
            if ours is not None:
                ours.note_problems(transfers)
        default = self.recompute_kv_load_failures  # type: ignore[has-type]
        try:
            outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
                scheduler_output, model_runner_output
            )
        finally:
            self.recompute_kv_load_failures = default
        return outputs

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        """Return the requests that end. Then vLLM's policy stays `fail` for the rest of
        `update_from_output`, which ends them by it."""
        default = self.recompute_kv_load_failures
        recomputed = {name for name in failed_req_ids if self._recomputes(name, default)}
        affected: set[str] = set()
        for recompute, ids in ((True, recomputed), (False, failed_req_ids - recomputed)):
            self.recompute_kv_load_failures = recompute
            affected |= super()._handle_failed_recving(ids)
        self.recompute_kv_load_failures = default and not affected
        return affected

    def _recomputes(self, request_id: str, default: bool) -> bool:
        request = self.requests.get(request_id)
        connector = find_our_connector(self.connector)
        if request is None or connector is None:
            return default
        if connector.is_given_back(request):
            # It waits for blocks as a new request does: none are reserved for it.
            self._inflight_prefills.discard(request)
        policy = connector.load_failure_policy(request)
        return default if policy is None else policy == "recompute"


class LoadFailuresPart(Host):
    """The first output of a stream, or the last one of another request, says from which engine its
    prompt's KV could not be loaded; see patch_load_errors."""

    on_outputs: list[Callable[[dict[int, EngineCoreOutputs]], None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = find_our_connector(self.connector)
        self._load_failures = LoadFailures() if ours is None else ours.scheduler.load_failures
        self.on_outputs.append(self._add_load_failures)

    def _add_load_failures(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        if self._load_failures.by_request:
            try:
                self._name_load_failures(outputs)
            except Exception:
                logger.exception("the reports of failed loads could not be made")

    def _name_load_failures(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for each in (each for of_client in outputs.values() for each in of_client.outputs):
            request = self.requests.get(each.request_id)
            if each.finish_reason is None and not (request is not None and is_streamed(request)):
                continue
            failure = self._load_failures.take(each.request_id)
            if failure is not None:
                each.kv_transfer_params = {**(each.kv_transfer_params or {}), LOAD_FAILURE: failure}


def _parts() -> Iterator[Any]:
    """Yield the parts that are on."""
    for feature, module, part in (
        (THRESHOLD, "answers.threshold", "ThresholdPart"),
        (PREEMPTION_RETURN, "answers.preemption_return", "PreemptionReturnPart"),
        (LENDING, "loans.lending", "LendingPart"),
        (IDLE_REST, "engine_loop.idle_rest", "IdleRestPart"),
        (RESUME, "answers.resume", "ResumePart"),
        (STEP_BUDGET, "steps.step_budget", "StepBudgetPart"),
    ):
        if support.is_on(feature):
            yield getattr(importlib.import_module(f"engine_ext.vllm.optional.{module}"), part)
    if any(map(support.is_on, (THRESHOLD, PREEMPTION_RETURN, IDLE_REST, RESUME, STEP_BUDGET))):
        yield SchedulePart
    if any(map(support.is_on, (THRESHOLD, PREEMPTION_RETURN, LOAD_FAILURES, LENDING))):
        yield OutputsPart
    for feature, own in (
        (LOAD_FAILURES, LoadFailuresPart),
        (FAILURE_POLICY, FailurePolicyPart),
        (LAST_WINDOW, LastWindowPart),
    ):
        if support.is_on(feature):
            yield own


PARTS: Any = (*_parts(), DisaggSchedulerBase)


class DisaggScheduler(*PARTS, Scheduler):  # type: ignore[misc] # parts are known when it is started
    pass


class DisaggAsyncScheduler(*PARTS, AsyncScheduler):  # type: ignore[misc]
    """For platforms where vLLM schedules ahead of the model (GPUs)."""
