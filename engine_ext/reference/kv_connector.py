"""The interface of a KV connector in this engine, and a connector that transfers nothing.

`engine_ext.connector.Connector` provides it; the hooks are described there and in its two halves.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine_ext.common.config import LoadFailurePolicy
from engine_ext.common.inspection import Inspection
from engine_ext.common.load_failure import LoadFailures
from engine_ext.common.orders import EMPTY_STEP, StepMetadata
from engine_ext.common.types import (
    BlockIds,
    ConnectorStats,
    EngineRequest,
    FinishDecision,
    FinishStatus,
    MatchedTokens,
    Region,
    TransferResults,
)
from engine_ext.scheduler.loans import PrefixCache, PromptKeys
from engine_ext.worker.staging import StagingFactory


class SchedulerHalf(Protocol):
    @property
    def proofs_unreadable(self) -> int: ...
    @property
    def engine_id_clashes(self) -> int: ...
    @property
    def load_failures(self) -> LoadFailures: ...
    @property
    def wants_steps(self) -> bool: ...
    def on_new_request(self, request: EngineRequest) -> None: ...
    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> MatchedTokens: ...
    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None: ...
    def fail_load(self, request_id: str) -> None: ...
    def on_step(
        self, request_id: str, block_ids: BlockIds, num_computed_tokens: int, num_new_tokens: int
    ) -> None: ...
    def on_preempted(self, request_id: str) -> None: ...
    def load_failure_policy(self, request: EngineRequest) -> LoadFailurePolicy: ...
    def has_pending_work(self) -> bool: ...
    def release(self, engine_id: str, request_id: str) -> bool: ...
    def revoke(self, request_id: str) -> bool: ...
    def drain(self) -> None: ...
    def lend_from(self, cache: PrefixCache) -> None: ...
    def borrow_with(self, keys: PromptKeys) -> None: ...
    def build_connector_meta(self) -> StepMetadata: ...
    def recover(self, results: TransferResults) -> TransferResults: ...
    def update_connector_output(self, results: TransferResults) -> TransferResults: ...
    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision: ...
    def fail_finish(self, request_id: str) -> FinishDecision: ...


class WorkerHalf(Protocol):
    def set_wake(self, wake: Callable[[], None]) -> None: ...
    def start_load_kv(self, meta: StepMetadata) -> None: ...
    def fail_loads(self, meta: StepMetadata) -> None: ...
    def wait_for_save(self, meta: StepMetadata) -> None: ...
    def get_transfer_results(self) -> TransferResults: ...
    @property
    def has_results(self) -> bool: ...
    def stats(self) -> ConnectorStats: ...
    def inspect(self, asked: str | None = None) -> Inspection | None: ...


class KVConnector(Protocol):
    @property
    def scheduler(self) -> SchedulerHalf: ...
    @property
    def worker(self) -> WorkerHalf: ...
    def start(self, regions: Sequence[Region], stage: StagingFactory | None = None) -> None: ...
    def shutdown(self) -> None: ...


class _NoHalf:
    """`results` of the hooks, each of which does nothing else; None for one that is not there."""

    def __init__(self, results: dict[str, Any], **attributes: Any) -> None:
        self._results = results
        vars(self).update(attributes)

    def __getattr__(self, hook: str) -> Any:
        return lambda *_: self._results.get(hook)


class NoConnector:
    def __init__(self) -> None:
        self.scheduler: Any = _NoHalf(
            {
                "get_num_new_matched_tokens": MatchedTokens(0, False),
                "build_connector_meta": EMPTY_STEP,
                "request_finished": FinishDecision(delay_free=False, kv_transfer_params=None),
            },
            recover=lambda results: results,
            update_connector_output=lambda results: results,
            wants_steps=False,
            proofs_unreadable=0,
            engine_id_clashes=0,
            load_failures=LoadFailures(),
        )
        results = {"get_transfer_results": TransferResults(), "stats": ConnectorStats()}
        self.worker: Any = _NoHalf(results, has_results=False)

    def start(self, regions: Sequence[Region], stage: StagingFactory | None = None) -> None:
        pass

    def shutdown(self) -> None:
        pass
