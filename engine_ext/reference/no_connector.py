"""The connector of an engine that transfers nothing."""

from collections.abc import Callable, Sequence

from engine_ext.common.config import LoadFailurePolicy
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


class NoSchedulerHalf:
    proofs_unreadable = 0
    engine_id_clashes = 0
    load_failures = LoadFailures()

    def on_new_request(self, request: EngineRequest) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> MatchedTokens:
        return MatchedTokens(0, False)

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        pass

    def fail_load(self, request_id: str) -> None:
        pass

    wants_steps = False

    def on_step(
        self, request_id: str, block_ids: BlockIds, num_computed_tokens: int, num_new_tokens: int
    ) -> None:
        pass

    def on_preempted(self, request_id: str) -> None:
        pass

    def load_failure_policy(self, request: EngineRequest) -> LoadFailurePolicy:
        return "fail"

    def has_pending_work(self) -> bool:
        return False

    def release(self, engine_id: str, request_id: str) -> bool:
        return False

    def revoke(self, request_id: str) -> bool:
        return False

    def drain(self) -> None:
        pass

    def build_connector_meta(self) -> StepMetadata:
        return EMPTY_STEP

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        return results

    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision:
        return FinishDecision(delay_free=False, kv_transfer_params=None)

    def fail_finish(self, request_id: str) -> FinishDecision:
        return FinishDecision(delay_free=False, kv_transfer_params=None)


class NoWorkerHalf:
    def set_wake(self, wake: Callable[[], None]) -> None:
        pass

    def start_load_kv(self, meta: StepMetadata) -> None:
        pass

    def fail_loads(self, meta: StepMetadata) -> None:
        pass

    def wait_for_save(self, meta: StepMetadata) -> None:
        pass

    def get_transfer_results(self) -> TransferResults:
        return TransferResults()

    def stats(self) -> ConnectorStats:
        return ConnectorStats()

    def inspect(self, asked: str | None = None) -> None:
        return None


class NoConnector:
    def __init__(self) -> None:
        self.scheduler = NoSchedulerHalf()
        self.worker = NoWorkerHalf()

    def start(self, regions: Sequence[Region], stage: StagingFactory | None = None) -> None:
        pass

    def shutdown(self) -> None:
        pass
