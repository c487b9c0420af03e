"""vLLM's prefix cache, for engine_ext/scheduler/loans.py: it finds, pins and fences blocks.

A key is vLLM's own hash of a block. It covers all tokens up to the block's end and what else their
KV depends on. Two engines hash alike if vLLM's version, the algorithm, the seed and the block size
are equal: `scheme` names them.

If vLLM cached blocks later, less would be lent. If a reference did not keep a block, lent blocks
would be overwritten: the tests fill a cache that is lent.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from vllm import __version__ as vllm_version
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_none_hash_seed
from vllm.v1.core.sched.scheduler import Scheduler

from engine_ext.common.short_hash import short_hash
from engine_ext.common.types import BlockIds, EngineRequest, LoanRequest
from engine_ext.scheduler.loans import LOAN_SHARE
from engine_ext.vllm.request_view import RequestView


class _Fenced(NamedTuple):
    """A request that waits for the steps that were under way when it came."""

    request: LoanRequest
    last_step: int
    blocks: list[KVCacheBlock]
    """The blocks that it may be lent. They are pinned until the request is answered."""


class CachedBlocks:
    """The prefix cache of one scheduler, a `PrefixCache`, and its keys, `PromptKeys`. All groups
    have full attention."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._groups = list(range(len(scheduler.kv_cache_config.kv_cache_groups)))
        self._pinned: dict[str, list[KVCacheBlock]] = {}
        """By loan."""
        self._fenced: deque[_Fenced] = deque()
        self._lendable: frozenset[int] | None = None
        """The blocks that the request that is being answered may get; None: all."""

    @property
    def scheme(self) -> str:
        algorithm = self._scheduler.vllm_config.cache_config.prefix_caching_hash_algo
        seed, size = short_hash(get_none_hash_seed()), self._pool.hash_block_size
        return f"vllm {vllm_version} {algorithm} {seed} {size}"

    def find(self, keys: Sequence[bytes]) -> BlockIds:
        found: list[list[int]] = []
        for key in keys:
            blocks = self._pool.get_cached_block(key, self._groups)
            ids = [block.block_id for block in blocks or ()]
            if not ids or not (self._lendable is None or self._lendable.issuperset(ids)):
                break
            found.append(ids)
        return tuple(zip(*found, strict=True))

    def keys_of(self, request: EngineRequest) -> Sequence[bytes]:
        return request.block_keys if isinstance(request, RequestView) else ()

    def pin(self, loan_id: str, block_ids: BlockIds) -> None:
        self._pinned[loan_id] = self._touch(block_ids)

    def unpin(self, loan_ids: set[str]) -> set[str]:
        """Unpin these loans. Return the ids that are none."""
        ended = loan_ids & self._pinned.keys()
        for loan_id in ended:
            self._free(self._pinned.pop(loan_id))
        return loan_ids - ended

    @property
    def has_pins(self) -> bool:
        return bool(self._pinned)

    def fence(self, requests: Sequence[LoanRequest]) -> Sequence[LoanRequest]:
        """Return the requests that can be answered at once, which are all if no step is under way.
        `written` yields the others."""
        # vLLM has a block in its cache as soon as the step that computes it is scheduled, so with
        # steps under way the block may not be written yet. Without asynchronous scheduling the
        # connector is called between two steps.
        scheduler = self._scheduler
        if scheduler.processed_step_seq >= scheduler.sched_step_seq:
            return requests
        most = int(LOAN_SHARE * self._pool.num_gpu_blocks)
        pinned = {block.block_id for fenced in self._fenced for block in fenced.blocks}
        for request in requests:
            keys = request.keys[: most // len(self._groups)]
            found = self.find(keys)
            # Requests share the blocks of a common beginning: only last blocks exceed the bound.
            excess = max(0, len(pinned.union(*found)) - most)
            num_found = min(map(len, found), default=0)
            count = max(0, num_found - -(-excess // len(self._groups)))
            is_cut = count < num_found or num_found == len(keys) < len(request.keys)
            # Pinned meanwhile: a block that was evicted and cached again could be one that a later
            # step writes.
            blocks = self._touch(tuple(group[:count] for group in found))
            pinned.update(block.block_id for block in blocks)
            asked = replace(request, is_cut=is_cut)
            self._fenced.append(_Fenced(asked, scheduler.sched_step_seq, blocks))
        return ()

    def written(self) -> Iterator[LoanRequest]:
        """Yield the requests whose steps have ended. While one is answered, `find` returns only
        blocks that were cached when it came."""
        while self._fenced and self._fenced[0].last_step <= self._scheduler.processed_step_seq:
            fenced = self._fenced.popleft()
            self._lendable = frozenset(block.block_id for block in fenced.blocks)
            try:
                yield fenced.request
            finally:
                self._lendable = None
                self._free(fenced.blocks)

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Give up the references of all pins meanwhile. Nothing may take a block in this time."""
        pinned = [*self._pinned.values(), *(fenced.blocks for fenced in self._fenced)]
        for blocks in pinned:
            self._free(blocks)
        try:
            yield
        finally:
            for blocks in pinned:
                self._pool.touch(blocks)

    def _touch(self, block_ids: BlockIds) -> list[KVCacheBlock]:
        blocks = [self._pool.blocks[number] for group in block_ids for number in group]
        self._pool.touch(blocks)
        return blocks

    def _free(self, blocks: list[KVCacheBlock]) -> None:
        """As vLLM does: the end of a prefix is evicted first."""
        self._pool.free_blocks(reversed(blocks))
