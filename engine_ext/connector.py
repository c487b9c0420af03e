"""The two halves an engine talks to. The host calls them where vLLM's v1 engine calls a connector.

Scheduler half, in the engine's scheduler, in this order for one request:
`on_new_request` once; `get_num_new_matched_tokens` whenever a waiting request with no computed
tokens is considered; `update_state_after_alloc` after its blocks were allocated; then
`build_connector_meta` once per step, `update_connector_output` after each step's results, and
`request_finished` before its blocks are freed.

Worker half, where the KV memory is: `register_kv_caches` once, `start_load_kv` and
`get_transfer_results` once per step.
"""

from collections.abc import Callable, Sequence

from engine_ext.types import (
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


class SchedulerConnector:
    def on_new_request(self, request: EngineRequest) -> None:
        raise NotImplementedError

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> MatchedTokens:
        raise NotImplementedError

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        raise NotImplementedError

    def has_pending_work(self) -> bool:
        raise NotImplementedError

    def build_connector_meta(self) -> StepMetadata:
        raise NotImplementedError

    def update_connector_output(self, results: TransferResults) -> None:
        raise NotImplementedError

    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


class WorkerConnector:
    def set_wake(self, wake: Callable[[], None]) -> None:
        raise NotImplementedError

    def register_kv_caches(self, regions: Sequence[Region]) -> None:
        raise NotImplementedError

    def start_load_kv(self, meta: StepMetadata) -> None:
        raise NotImplementedError

    def get_transfer_results(self) -> TransferResults:
        raise NotImplementedError

    def stats(self) -> ConnectorStats:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError
