"""Host buffers (`kv_buffer_device: cpu` on a GPU): KV travels between mirrors of the caches.

NIXL knows a mirror of the cache in host memory, block for block. The source copies to the mirror
what a step has written for a request that others will read, before the step's tokens leave the
engine: no reader can ask for it earlier. The reader copies from the mirror what has arrived, before
it is reported. Both copies happen in the engine's thread.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from engine_ext.common.orders import (
    LeaseCancel,
    LeaseGrant,
    PullOrder,
    PushOffer,
    PushRegistration,
    Revoke,
    SaveOrder,
    StepMetadata,
)
from engine_ext.common.types import BlockIds, Region, TransferResults

logger = logging.getLogger(__name__)


class Staging(Protocol):
    """A cache's mirror in host memory. Both copies are complete when they return."""

    @property
    def regions(self) -> Sequence[Region]:
        """The mirror's, one for each of the cache's and in their order."""

    def save(self, block_ids: BlockIds) -> None:
        """Cache -> mirror. `block_ids` by KV-cache group."""

    def load(self, block_ids: BlockIds) -> None:
        """Mirror -> cache."""


StagingFactory = Callable[[Sequence[Region]], Staging]
"""The cache's regions -> its mirror."""


class StagedTransfers:
    """Copies at the right moments. KV that could not be copied is never used."""

    def __init__(self, staging: Staging, block_size: int) -> None:
        self._staging = staging
        self._block_size = block_size
        self._arriving: dict[str, BlockIds] = {}
        self._unsaved: set[str] = set()

    def begin(self, meta: StepMetadata) -> StepMetadata:
        """Return the step's orders, with leases that cannot be served revoked."""
        loads: tuple[PullOrder | PushRegistration, ...] = (
            *meta.all(PullOrder),
            *meta.all(PushRegistration),
        )
        for order in loads:
            blocks = self._between(order.local_block_ids, order.first_token, order.last_token)
            self._arriving[order.request_id] = blocks
        if not self._unsaved:
            return meta
        self._unsaved.difference_update(cancel.request_id for cancel in meta.all(LeaseCancel))
        granted = (grant.request_id for grant in meta.all(LeaseGrant))
        lost = [request_id for request_id in granted if request_id in self._unsaved]
        self._unsaved.difference_update(lost)
        kept = [
            order
            for order in meta.orders
            if type(order) is not PushOffer or order.request_id not in lost
        ]
        return StepMetadata((*kept, *map(Revoke, lost)))

    def save(self, orders: Iterable[SaveOrder]) -> None:
        """A request whose blocks cannot be saved is revoked when it is granted."""
        for order in orders:
            try:
                self._staging.save(order.block_ids)
            except Exception:
                logger.exception(
                    "request %s: its KV could not be copied to host memory", order.request_id
                )
                self._unsaved.add(order.request_id)

    def finish_loads(self, results: TransferResults) -> TransferResults:
        """Copy loads that ended well to the cache; a load that cannot be copied has failed."""
        failed = set(results.failed_recving)
        for request_id in results.finished_recving:
            blocks = self._arriving.pop(request_id, ())
            if request_id not in failed and not self._load(request_id, blocks):
                failed.add(request_id)
        return replace(results, failed_recving=frozenset(failed))

    def _load(self, request_id: str, blocks: BlockIds) -> bool:
        try:
            self._staging.load(blocks)
        except Exception:
            logger.exception("request %s: its KV could not be copied from host memory", request_id)
            return False
        return True

    def _between(self, block_ids: BlockIds, first_token: int, last_token: int) -> BlockIds:
        first, end = first_token // self._block_size, -(-last_token // self._block_size)
        return tuple(ids[first:end] for ids in block_ids)
