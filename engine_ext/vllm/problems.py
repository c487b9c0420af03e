"""Why loads have failed, on its way from vLLM's workers to its scheduler with a step's output."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from engine_ext.common.types import LoadProblem


@dataclass
class LoadProblems(KVConnectorWorkerMetadata):
    by_request: Mapping[str, LoadProblem]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LoadProblems":
        """Of several ranks: one of them has the request's problem, or each has one."""
        others = other.by_request if isinstance(other, LoadProblems) else {}
        return LoadProblems({**others, **self.by_request})
