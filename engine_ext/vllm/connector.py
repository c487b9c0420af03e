"""vLLM's connector interface over the core's two halves: types in, types out.

vLLM makes two instances in two processes; each has one half. An exception out of a hook would end
the engine, so none gets out: a request whose hook fails is served locally or ends by policy. What
vLLM calls while it starts may raise: then it does not start.
"""

import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engine_ext.common.orders import EMPTY_STEP, StepMetadata
from engine_ext.common.step_budget import StepBudget
from engine_ext.common.step_costs import StepFit
from engine_ext.common.types import (
    NO_RESULTS,
    STATE,
    BlockIds,
    LoanReport,
    LoanRequest,
    TransferResults,
)
from engine_ext.connector import build_worker
from engine_ext.scheduler.scheduler import SchedulerConnector
from engine_ext.vllm import describe
from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.vllm_symbols import METRICS
from engine_ext.vllm.connector_calls import NO_SLEEP, ConnectorCalls
from engine_ext.vllm.guard import guarded, guarded_step, nothing
from engine_ext.vllm.optional.engine_loop import EARLY_EXIT, IDLE_REST
from engine_ext.vllm.optional.load_failures import LOAD_FAILURES
from engine_ext.vllm.optional.steps import STEP_MODEL
from engine_ext.vllm.optional.steps.step_times import StepTimes
from engine_ext.vllm.optional.without_patch import EARLY_WRITES, FAILURE_POLICY
from engine_ext.vllm.pending_reports import PendingReports
from engine_ext.vllm.prompt_progress import PromptProgress
from engine_ext.vllm.request_view import RequestView, back_off
from engine_ext.vllm.wakeup_socket import WakeupSender
from engine_ext.vllm.weights import Weights
from engine_ext.vllm.worker_reports import (
    READY,
    RETURNED,
    WorkerReport,
    marked,
    merged,
    unmarked,
    with_marked,
)

if TYPE_CHECKING:
    from engine_ext.vllm.metrics import MetricDeltas

logger = logging.getLogger(__name__)


@dataclass
class DisaggMetadata(KVConnectorMetadata):
    step: StepMetadata


NO_ORDERS = DisaggMetadata(EMPTY_STEP)


@dataclass
class DisaggHandshake(KVConnectorHandshakeMetadata):
    """The handshake payload of one worker, which the scheduler half's listener serves."""

    payload: bytes


Matched = tuple[int | None, bool]
Finished = tuple[bool, dict[str, Any] | None]

LOADS_NOTHING = (
    "with kv_role kv_producer vLLM reuses blocks into which running steps still write, so this "
    "engine loads no KV and computes turns. Use kv_role kv_both"
)

NOTHING: Matched = (0, False)
NOT_KEPT: Finished = (False, None)


class DisaggConnector(ConnectorCalls, KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        support.log_where_vllm_logs()
        support.log_what_is_off()
        describe.refuse_unsupported(vllm_config, kv_cache_config)
        self._config = describe.connector_config(vllm_config)
        target = describe.target_itl_ms(vllm_config, self._config)
        self._windows = describe.windows(kv_cache_config)
        self._guess_blocks = describe.guess_blocks(kv_cache_config)
        self._metric_deltas = _metric_deltas()
        self._step_times: StepTimes | None = None
        self._pending_reports = PendingReports()
        self._prompt_progress = PromptProgress()
        is_pushed = self._config.transfer_mode == "push"
        self._weights = Weights(get_adapter_absolute_path, is_pushed)
        self._problems = {}
        self._unprocessed = NO_RESULTS
        """Results during which our half has raised; it gets them once more."""
        self._loans = NO_RESULTS
        """The worker half's messages about loans, which are sent with the next step's output."""
        if role is KVConnectorRole.SCHEDULER:
            identity = describe.engine_identity(vllm_config, self._config, geometry=None)
            geometry = describe.scheduler_geometry(vllm_config, kv_cache_config)
            self._scheduler = SchedulerConnector(
                self._config, identity, geometry, host_takes_back=False
            )
            if not describe.may_load(vllm_config):
                logger.warning(LOADS_NOTHING)
            _install_engine_patches()
            if support.is_on(STEP_MODEL):
                most = vllm_config.scheduler_config.max_num_batched_tokens
                self.step_fit = StepFit(most)
                self._step_times = StepTimes(self.step_fit.add)
                if target is not None:
                    self.step_budget = StepBudget(target, self.step_fit, most)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        if not support.is_on(METRICS):
            return None
        from engine_ext.vllm.metrics import DisaggStats

        return DisaggStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        if not support.is_on(METRICS):
            return None
        from engine_ext.vllm.metrics import DisaggPromMetrics

        return DisaggPromMetrics(*args)

    @guarded(nothing)
    def get_kv_connector_stats(self) -> Any:
        """Return what this half has counted since the last call. vLLM's scheduler calls this once
        for each step, when the step has ended."""
        if self._step_times is not None:
            self._step_times.end()
        if self._metric_deltas is not None and self._scheduler is not None:
            return self._metric_deltas.of_scheduler(self._scheduler)
        if self._metric_deltas is not None and self._worker is not None:
            return self._metric_deltas.of_worker(self._worker.stats())
        return None

    # Scheduler side.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True lets vLLM count keys and values of more tokens than it has a state of as cached: a
        load brings the state, with however few tokens."""
        return describe.supports_divergent_hits(self._kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Any request may be a prefill leg, whatever kv_role is. Without this, the output of a step
        that was under way when the request was preempted would end it without KV."""
        return True

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        payloads = {
            rank: handshake.payload
            for rank, handshake in metadata.items()
            if isinstance(handshake, DisaggHandshake)
        }
        self.scheduler.set_handshake_metadata(payloads)

    @guarded(nothing)
    def on_new_request(self, request: Request) -> None:
        self._weights.label(request)
        view = RequestView(request)
        num_left = self.scheduler.backs_off(view)
        if num_left is not None:
            back_off(request, num_left)
        self.scheduler.on_new_request(view)
        if self.scheduler.wants_steps_of(view.request_id) and support.is_on(EARLY_WRITES):
            self._prompt_progress.follow(view)

    @guarded(lambda: NOTHING)
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Matched:
        view = RequestView(request)
        if request.lora_request is not None and view.content_keys is None:
            # Its adapter's files have changed while it waited.
            self.scheduler.change_weights([view.request_id])
        matched = self.scheduler.get_num_new_matched_tokens(view, num_computed_tokens)
        return matched.num_tokens, matched.is_async

    @guarded(tuple)
    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def _fail_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM parks the request even if the hook raises."""
        if num_external_tokens > 0:
            self.scheduler.fail_load(str(request.request_id))

    @guarded(nothing, otherwise=_fail_load)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids: BlockIds = ()
        if num_external_tokens > 0:
            self._pending_reports.load(str(request.request_id))
            _note_loading(request, num_external_tokens)
            block_ids = self._by_group(blocks.get_block_ids())
        self.scheduler.update_state_after_alloc(
            RequestView(request), block_ids, num_external_tokens
        )

    @guarded_step(lambda: NO_ORDERS)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """If this raises, the orders go with a later step."""
        if self._step_times is not None:
            self._step_times = _begun(self._step_times, scheduler_output)
        if self._prompt_progress.prompts or scheduler_output.preempted_req_ids:
            self._report_prompts(scheduler_output)
        assert self._scheduler is not None
        step = self._scheduler.build_connector_meta()
        return NO_ORDERS if step is EMPTY_STEP else DisaggMetadata(step)

    @guarded(nothing)
    def _report_prompts(self, scheduler_output: SchedulerOutput) -> None:
        """Tokens that cannot be reported now are written later."""
        self._prompt_progress.preempted(scheduler_output)
        for name in scheduler_output.preempted_req_ids or ():
            self.scheduler.on_preempted(name)
        for step in self._prompt_progress.computed(scheduler_output):
            self.scheduler.on_step(*step)

    @guarded_step(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """vLLM frees what it finds in `finished_recving` after this call, whatever
        `request_finished` has answered: what is kept is taken out, and comes in
        `finished_sending`."""
        report = connector_output.kv_connector_worker_meta
        asked: Sequence[LoanRequest] = ()
        reports: tuple[LoanReport, ...] = ()
        if isinstance(report, WorkerReport):
            # Kept until vLLM reports the load: a rank may report its own before the last is done.
            self._problems = merged(self._problems, report.problems)
            asked, reports = report.loan_requests, report.loan_reports
        failed = connector_output.failed_recving
        ended = connector_output.finished_sending or connector_output.finished_recving
        is_about_loans = asked or reports
        if not (ended or failed or is_about_loans) and self._unprocessed is NO_RESULTS:
            return
        sent = connector_output.finished_sending or set()
        ready, returned = marked(READY, sent), marked(RETURNED, sent)
        sent = unmarked(sent)
        of_requests = sent
        if self._lent is not None:
            asked, of_requests = self._lent.fence(asked), self._lent.unpin(sent)
        connector_output.finished_sending = of_requests
        results = TransferResults(
            frozenset(sent),
            frozenset(connector_output.finished_recving or ()),
            frozenset(failed),
            {name: self._problems.pop(name) for name in failed & self._problems.keys()},
            ready,
            returned,
            tuple(asked),
            reports,
        )
        # vLLM raises, and the engine ends, on a report that it does not expect.
        self._pending_reports.settle(connector_output)
        unprocessed, self._unprocessed = self._unprocessed, results
        self.scheduler.update_connector_output(unprocessed | results)
        self._unprocessed = NO_RESULTS

    @guarded(lambda: NOT_KEPT)
    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        return self.request_finished_all_groups(request, (block_ids,))

    def _fail_finish(self, request: Request, block_ids: tuple[list[int], ...]) -> Finished:
        name = str(request.request_id)
        return self._pending_reports.finish(name, self.scheduler.fail_finish(name))

    @guarded(lambda: NOT_KEPT, otherwise=_fail_finish)
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Finished:
        view = RequestView(request)
        self._prompt_progress.forget(view.request_id)
        decision = self.scheduler.request_finished(
            view, self._by_group(block_ids), view.finish_status
        )
        return self._pending_reports.finish(view.request_id, decision)

    @guarded(bool)
    def reset_cache(self) -> bool:
        """Give up all turns, for example because the weights have changed. Return False if some
        stay; see `end_turns`."""
        return self.scheduler.end_turns()

    @guarded(lambda: True)
    def has_pending_push_work(self) -> bool:
        """Return True if the engine must take a step to bring decisions to the workers."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        ConnectorCalls._of_this_worker = weakref.ref(self)
        config = self._kv_cache_config
        geometry = describe.cache_geometry(self._vllm_config, config, kv_caches)
        identity = describe.engine_identity(self._vllm_config, self._config, geometry)
        self._worker = build_worker(self._config, geometry, identity)
        wakeup_name = describe.wakeup_name(self._vllm_config, self._config)
        self._worker.set_wake(WakeupSender(wakeup_name))
        self._worker.register_kv_caches(describe.regions(kv_caches, config))

    def unregister_kv_caches(self) -> None:
        """Raise RuntimeError if vLLM, from 0.33 on, would now free memory that other engines read.
        Sleep mode is refused at start; what is left is this allocator."""
        if self._vllm_config.model_config.enable_cumem_allocator:
            raise RuntimeError(NO_SLEEP)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._worker is None:
            return None
        return DisaggHandshake(self._worker.get_handshake_payload())

    def _fail_loads(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DisaggMetadata)
        self.worker.fail_loads(metadata.step)

    @guarded(nothing, otherwise=_fail_loads)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DisaggMetadata)
        self.worker.start_load_kv(metadata.step)

    @guarded(nothing)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads run beside the engine's steps."""

    @guarded(nothing)
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved: other engines read, or are written to, out of the cache itself."""

    @guarded(nothing)
    def wait_for_save(self) -> None:
        """Nothing is saved."""

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self.worker.get_transfer_results()
        self._problems = merged(self._problems, results.problems)
        if results.loan_requests or results.loan_reports:
            self._loans |= results
        return KVConnectorTransferResults(
            with_marked(results),
            set(results.finished_recving),
            set(results.failed_recving),
        )

    @guarded(nothing)
    def build_connector_worker_meta(self) -> Any:
        """With a step's results, after `get_transfer_results`."""
        problems, self._problems = self._problems, {}
        loans, self._loans = self._loans, NO_RESULTS
        if not (support.is_on(LOAD_FAILURES) or support.is_on(FAILURE_POLICY)):
            problems = {}
        if not problems and loans is NO_RESULTS:
            return None
        return WorkerReport(problems, loans.loan_requests, loans.loan_reports)

    def _by_group(self, block_ids: tuple[list[int], ...]) -> BlockIds:
        """Return each group's blocks. Of a state there is one: if vLLM caches prefixes, states of
        earlier tokens, or holes, are before it, and blocks for those behind guesses follow it."""
        groups = zip(block_ids, self._windows, self._guess_blocks, strict=True)
        return tuple(
            tuple(ids[: max(1, len(ids) - guesses)][-1:] if window == STATE else ids)
            for ids, window, guesses in groups
        )

    @guarded(nothing)
    def shutdown(self) -> None:
        """Close all parts; one that fails does not stop the others from closing."""
        with ExitStack() as stack:
            if self._worker is not None:
                stack.callback(self._worker.shutdown)
            if self._scheduler is not None:
                stack.callback(self._scheduler.shutdown)
            if self._wakeups is not None:
                stack.callback(self._wakeups.close)


def _begun(times: StepTimes, output: SchedulerOutput) -> StepTimes | None:
    try:
        times.begin(output)
    except Exception:
        logger.exception("KV connector: the times of steps are no longer measured")
        return None
    return times


def _metric_deltas() -> "MetricDeltas | None":
    if not support.is_on(METRICS):
        return None
    from engine_ext.vllm.metrics import MetricDeltas

    return MetricDeltas()


def _note_loading(request: Request, num_tokens: int) -> None:
    """For resume.py, where our scheduler class has put its statistics on the request."""
    note = getattr(getattr(request, "prefill_stats", None), "note_loading", None)
    if note is not None:
        note(num_tokens)


def _install_engine_patches() -> None:
    """Install what the engine's process needs; this is that process."""
    from engine_ext.vllm.compat import patch_weights

    patch_weights.install()
    if support.is_on(EARLY_EXIT) or support.is_on(IDLE_REST):
        from engine_ext.vllm.optional.engine_loop import patch_engine_loop

        patch_engine_loop.install()


class DisaggPushConnector(DisaggConnector):
    """The prefill engine writes; chosen by name."""
