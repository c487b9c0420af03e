"""A KV connector that transfers nothing, for an engine without one.

It stands for `engine_ext.connector.Connector`, whose calls are described there.
"""

from collections.abc import Sequence
from typing import Any

from engine_ext.common.load_failure import LoadFailures
from engine_ext.common.orders import EMPTY_STEP
from engine_ext.common.types import (
    ConnectorStats,
    FinishDecision,
    MatchedTokens,
    Region,
    TransferResults,
)
from engine_ext.worker.staging import StagingFactory


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
