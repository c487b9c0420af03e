"""A reference engine that zeroes one block of every load: the fault the oracle must see.

Run as `python -m tests.integration.corrupting_engine`, with the options of `disagg-engine`.
"""

import ctypes
import sys
from collections.abc import Sequence

from engine_ext import connector
from engine_ext.common.orders import PullOrder, StepMetadata
from engine_ext.common.types import Region, TransferResults
from engine_ext.reference import cli
from engine_ext.worker.staging import StagingFactory
from engine_ext.worker.worker import WorkerConnector
from tests.unit.engine_ext.orders import ordered


class CorruptingWorker(WorkerConnector):
    """Everything is real until a load has ended; then its second block is zero in layer 0."""

    def register_kv_caches(
        self, regions: Sequence[Region], stage: StagingFactory | None = None
    ) -> None:
        self._first_layer = regions[0]
        self._loading: dict[str, int] = {}
        super().register_kv_caches(regions, stage)

    def start_load_kv(self, meta: StepMetadata) -> None:
        for order in ordered(meta, PullOrder):
            if len(order.local_block_ids[0]) > 1:
                self._loading[order.request_id] = order.local_block_ids[0][1]
        super().start_load_kv(meta)

    def get_transfer_results(self) -> TransferResults:
        results = super().get_transfer_results()
        for request_id in results.finished_recving & self._loading.keys():
            region = self._first_layer
            address = region.base_addr + self._loading.pop(request_id) * region.block_stride
            ctypes.memset(address, 0, region.block_len)
        return results


if __name__ == "__main__":
    connector.WorkerConnector = CorruptingWorker  # type: ignore[misc] # the planted error
    sys.exit(cli.main())
