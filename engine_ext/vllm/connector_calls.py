"""The methods of `DisaggConnector` that our patches, scheduler class and HTTP pages call.

vLLM itself calls none of them: its interface is connector.py. Patches find our connector by
`find_our_connector`. They import this file and never the connector, which installs some of them.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engine_ext.common.config import ConnectorConfig, LoadFailurePolicy
from engine_ext.common.step_budget import StepBudget
from engine_ext.common.step_costs import StepFit
from engine_ext.common.types import LoadProblem, TransferResults
from engine_ext.http import leases
from engine_ext.scheduler.scheduler import SchedulerConnector
from engine_ext.vllm import describe
from engine_ext.vllm.guard import guarded, nothing
from engine_ext.vllm.request_view import RequestView
from engine_ext.vllm.wakeup_socket import WakeupListener
from engine_ext.vllm.weights import Adapter, Weights
from engine_ext.vllm.worker_reports import LOST, WorkerReport, lost_checks, merged
from engine_ext.worker.worker import WorkerConnector

if TYPE_CHECKING:
    from engine_ext.vllm.optional.loans.cached_blocks import CachedBlocks

logger = logging.getLogger(__name__)

NO_SLEEP = "DisaggConnector does not support /sleep (the KV cache would move)"


class ConnectorCalls:
    """The part of `DisaggConnector` that vLLM does not call. In the scheduler's process, but for
    `inspect`."""

    _of_this_worker: ClassVar["weakref.ref[ConnectorCalls] | None"] = None
    """In a worker's process, its half, for `inspect_worker`."""
    _vllm_config: VllmConfig
    _kv_cache_config: KVCacheConfig
    _config: ConnectorConfig
    _weights: Weights
    _scheduler: SchedulerConnector | None = None
    _worker: WorkerConnector | None = None
    _wakeups: WakeupListener | None = None
    _problems: dict[str, LoadProblem]
    """Why loads have failed, until vLLM reports to the scheduler half that they have."""
    _lent: "CachedBlocks | None" = None
    loan_scheme: str | None = None
    """How vLLM's cache names its blocks, if it lends or borrows."""
    step_fit: StepFit | None = None
    step_budget: StepBudget | None = None
    """For our scheduler class; None without `target_itl_ms`."""

    @property
    def scheduler(self) -> SchedulerConnector:
        assert self._scheduler is not None, "this is the worker's half"
        return self._scheduler

    @property
    def worker(self) -> WorkerConnector:
        assert self._worker is not None, "this is the scheduler's half, or has no KV cache yet"
        return self._worker

    @property
    def step_model(self) -> dict[str, float] | None:
        """`step_model` of the identity page; None until fitted."""
        return None if self.step_fit is None else self.step_fit.to_wire()

    @guarded(nothing)
    def load_failure_policy(self, request: Request) -> LoadFailurePolicy | None:
        """For our scheduler class; vLLM's own has one policy for all requests. None: that one."""
        return self.scheduler.load_failure_policy(RequestView(request))

    @guarded(nothing)
    def note_problems(self, output: KVConnectorOutput) -> None:
        """Note why loads have failed. Our scheduler class calls this first, because vLLM acts on
        failed loads before it calls `update_connector_output`."""
        problems = output.kv_connector_worker_meta
        for each in getattr(problems, "metadata", (problems,)):  # several, of a MultiConnector
            if isinstance(each, WorkerReport):
                self._problems = merged(self._problems, each.problems)
        for name in output.failed_recving & self._problems.keys():
            self.scheduler.loads.note_problem(name, self._problems[name])

    @guarded(nothing)
    def take_back(self) -> None:
        """Note that our scheduler class is there: a request whose load was given back can wait
        again."""
        self.scheduler.loads.take_back()

    @guarded(bool)
    def is_given_back(self, request: Request) -> bool:
        """Return True if the load failed because its blocks were given back."""
        return self.scheduler.loads.is_returned(str(request.request_id))

    @guarded(bool)
    def is_passed_over(self, request: Request) -> bool:
        """Return True if the request is passed over until a worker wakes the engine."""
        return self.scheduler.is_passed_over(str(request.request_id))

    @guarded(nothing)
    def drain(self) -> None:
        """Keep nothing for later, because the engine leaves or pauses. Readers may continue."""
        self.scheduler.drain()

    # Weights that change; see weights.py and compat/patch_weights.py.

    @guarded(nothing)
    def look_at_adapter(self, lora: Any) -> Adapter | None:
        """Return an adapter's files before vLLM loads them, for `adapter_loaded`."""
        return self._weights.look(lora)

    @guarded(nothing)
    def adapter_loaded(self, lora: Any, seen: Adapter | None, requests: Sequence[Request]) -> None:
        """Note that vLLM has loaded an adapter. `seen`: what `look_at_adapter` returned, or None if
        the load failed. `requests`: all of the engine's, also those that have ended and are
        leased."""
        if self._weights.load(lora, seen):
            with_adapter = [each for each in requests if each.lora_request is not None]
            of_it = [one for one in with_adapter if one.lora_request.lora_name == lora.lora_name]
            self._end_kv(f"LoRA adapter {lora.lora_name} may have changed", of_it)

    @guarded(nothing)
    def weights_changed(self, by: str, requests: Sequence[Request], keeps_adapters: bool) -> None:
        """Note that the model's own weights have changed, or may have, and its adapters' unless
        these are kept."""
        self._weights.change(keeps_adapters)
        self._end_kv(f"the model's weights may have changed ({by})", requests)

    def _end_kv(self, why: str, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.is_finished():
                self._weights.disown(request)
        self.scheduler.change_weights([str(request.request_id) for request in requests])
        logger.warning("%s: KV computed before is no longer used or offered", why)

    @guarded(nothing)
    def weights_named(self, version: str) -> None:
        """Note the operator's name for the weights. Engines with equal names share KV."""
        self._weights.name(version)

    @guarded(nothing)
    def fail_stale_loads(self, output: KVConnectorOutput) -> None:
        """Report loads as failed that were in progress when the weights changed."""
        stale = {
            name for name in output.finished_recving or () if self.scheduler.is_stale_load(name)
        }
        if stale:
            output.failed_recving = {*(output.failed_recving or ()), *stale}

    @guarded(nothing)
    def recover_reports(self, output: KVConnectorOutput) -> None:
        """Put reports that were lost among the results, before vLLM acts on any."""
        sent = output.finished_sending or set()
        lost = lost_checks(sent)
        if not lost:
            return
        results = TransferResults(
            frozenset(name for name in sent if not name.startswith(LOST)),
            frozenset(output.finished_recving or ()),
            frozenset(output.failed_recving or ()),
            lost=lost,
        )
        results = self.scheduler.recover(results)
        output.finished_sending = set(results.finished_sending)
        output.finished_recving = set(results.finished_recving)
        output.failed_recving = set(results.failed_recving)
        self._problems = merged(self._problems, results.problems)

    @guarded(nothing)
    def resume(self) -> None:
        """Keep turns again, because the engine continues."""
        self.scheduler.resume()

    @guarded(bool)
    def release(self, engine_id: str, request_id: str) -> bool:
        """See engine_ext.http.release; for our HTTP page, by way of vLLM's engine process."""
        return self.scheduler.release(engine_id, request_id)

    # Loans; see optional/loans/lending.py.

    @guarded(nothing)
    def lend_from(self, cache: "CachedBlocks") -> None:
        self._lent, self.loan_scheme = cache, cache.scheme
        self.scheduler.lend_from(cache)

    @guarded(nothing)
    def revoke_loans(self) -> None:
        """End all loans, because the cache that they are of is reset. Readers may finish."""
        self.scheduler.revoke_loans()

    @property
    def lends(self) -> bool:
        return self._lent is not None

    @property
    def loan_problem(self) -> str | None:
        """Why it does not lend."""
        return describe.why_not_lent(self._vllm_config, self._kv_cache_config)

    @guarded(nothing)
    def borrow_with(self, cache: "CachedBlocks") -> None:
        self.scheduler.borrow_with(cache)
        self.loan_scheme = cache.scheme

    @property
    def borrows(self) -> bool:
        return self._scheduler is not None and self._scheduler.borrows

    @guarded(nothing)
    def answer_fenced(self) -> None:
        """Answer the requests for loans whose steps have ended."""
        assert self._lent is not None
        for request in self._lent.written():
            self.scheduler.update_connector_output(TransferResults(loan_requests=(request,)))

    @guarded(bool)
    def listen_for_wakeups(self, on_wakeup: Callable[[bool], None]) -> bool:
        """Call `on_wakeup`, from another thread, when a worker has results, and with True when none
        has called for a while. Return False if that cannot be."""
        name = describe.wakeup_name(self._vllm_config, self._config)
        self._wakeups = WakeupListener(name, on_wakeup)
        return True

    def inspect(self, key: bytes, asked: str | None) -> dict[str, Any]:
        """See engine_ext.http.leases. Raises TimeoutError."""
        return leases.rank(self.worker.inspect(asked), key)


def inspect_worker(worker: Any, key: bytes, asked: str | None) -> dict[str, Any] | str:
    """Called in each worker process. Return its leases and transfers, or why there are none."""
    reference = ConnectorCalls._of_this_worker
    connector = None if reference is None else reference()
    if connector is None:
        return "this worker has no DisaggConnector"
    try:
        return connector.inspect(key, asked)
    except Exception as error:
        logger.exception("KV connector: inspect")
        return f"no answer: {error!r}"


def find_our_connector(connector: object) -> ConnectorCalls | None:
    """Return our connector: an engine's own, or one of its several (vLLM's MultiConnector)."""
    among = (connector, *getattr(connector, "sub_connectors", ()))
    return next((each for each in among if isinstance(each, ConnectorCalls)), None)
