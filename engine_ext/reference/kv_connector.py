"""What this engine needs of a KV connector; `engine_ext.connector.Connector` provides it.

The methods' bodies are the connector of an engine that transfers nothing, `NoConnector`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_ext.common.config import LoadFailurePolicy
from engine_ext.common.inspection import Inspection
from engine_ext.common.load_failure import LoadFailures
from engine_ext.common.types import (
    EMPTY_STEP,
    BlockIds,
    ConnectorStats,
    EngineRequest,
    FinishDecision,
    FinishStatus,
    MatchedTokens,
    Region,
    StepMetadata,
    TransferResults,
)
from engine_ext.worker.staging import StagingFactory


class SchedulerHalf(Protocol):
    @property
    def proofs_unreadable(self) -> int:
        """For ConnectorStats. Read from any thread."""
        return 0

    @property
    def engine_id_clashes(self) -> int:
        """Likewise."""
        return 0

    @property
    def load_failures(self) -> LoadFailures:
        """What answers report of failed loads."""
        return LoadFailures()

    def on_new_request(self, request: EngineRequest) -> None: ...
    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> MatchedTokens:
        return MatchedTokens(0, False)

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None: ...
    def fail_load(self, request_id: str) -> None:
        """`update_state_after_alloc` raised for a request that now waits for a load."""

    @property
    def wants_steps(self) -> bool:
        """Whether `on_step` is to be called."""
        return False

    def on_step(
        self, request_id: str, block_ids: BlockIds, num_computed_tokens: int, num_new_tokens: int
    ) -> None: ...
    def on_preempted(self, request_id: str) -> None:
        """Its blocks go to others; it is computed again later."""

    def load_failure_policy(self, request: EngineRequest) -> LoadFailurePolicy:
        return "fail"

    def has_pending_work(self) -> bool:
        return False

    def release(self, engine_id: str, request_id: str) -> bool:
        """Give up what is kept for a remote reader. True: it was kept."""
        return False

    def revoke(self, request_id: str) -> bool:
        """Likewise, for a request whose answer no client received."""
        return False

    def drain(self) -> None:
        """Give up what is kept for later; what a remote reader waits for stays."""

    def build_connector_meta(self) -> StepMetadata:
        return EMPTY_STEP

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Returns the results that the engine is to act upon."""
        return results

    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision:
        return FinishDecision(delay_free=False, kv_transfer_params=None)

    def fail_finish(self, request_id: str) -> FinishDecision:
        """`request_finished` raised: whether the blocks must stay all the same."""
        return FinishDecision(delay_free=False, kv_transfer_params=None)


class WorkerHalf(Protocol):
    def set_wake(self, wake: Callable[[], None]) -> None: ...
    def start_load_kv(self, meta: StepMetadata) -> None: ...
    def fail_loads(self, meta: StepMetadata) -> None:
        """`start_load_kv` raised: loads that did not get through are reported as failed."""

    def wait_for_save(self, meta: StepMetadata) -> None: ...
    def get_transfer_results(self) -> TransferResults:
        return TransferResults()

    def stats(self) -> ConnectorStats:
        return ConnectorStats()

    def inspect(self, asked: str | None = None) -> Inspection | None:
        """None without a connector. Raises TimeoutError."""
        return None


class KVConnector(Protocol):
    @property
    def scheduler(self) -> SchedulerHalf: ...
    @property
    def worker(self) -> WorkerHalf: ...
    def start(self, regions: Sequence[Region], stage: StagingFactory | None = None) -> None:
        """Register the KV memory, or the host buffers that `stage` makes; transfers may begin."""

    def shutdown(self) -> None:
        """No access to the KV memory after this."""


class _NoScheduler(SchedulerHalf):
    pass


class _NoWorker(WorkerHalf):
    pass


class NoConnector:
    # An empty body does nothing, as it should here.
    scheduler = _NoScheduler()  # type: ignore[abstract]
    worker = _NoWorker()  # type: ignore[abstract]

    def start(self, regions: Sequence[Region], stage: StagingFactory | None = None) -> None:
        pass

    def shutdown(self) -> None:
        pass
