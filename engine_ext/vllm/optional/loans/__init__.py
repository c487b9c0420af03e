"""Loans out of vLLM's prefix cache."""

from engine_ext.vllm.compat.probe import Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import BLOCK_POOL, CACHES, CONFIG, SCHEDULER_CLASS
from engine_ext.vllm.optional.engine_loop import IDLE_REST
from engine_ext.vllm.optional.without_patch import SCHEDULER

LENDING = Feature(
    "lending",
    "other engines cannot read what this engine's prefix cache holds",
    symbols(f"""
        - vLLM's cached blocks, found by their hashes and pinned by references. Other engines read
            blocks of other tokens, or blocks that a step still writes
        {BLOCK_POOL} has blocks hash_block_size num_gpu_blocks
        {BLOCK_POOL}.get_cached_block takes self block_hash kv_cache_group_ids
        {BLOCK_POOL}.touch takes self blocks
        {BLOCK_POOL}.free_blocks takes self ordered_blocks
        vllm.v1.core.kv_cache_utils:KVCacheBlock has block_id
        vllm.v1.core.kv_cache_manager:KVCacheManager has block_pool
        {SCHEDULER_CLASS} has has_requests kv_cache_config kv_cache_manager processed_step_seq
            sched_step_seq vllm_config
        - pause and reset of the cache beside loans. Both fail while a loan is out
        {SCHEDULER_CLASS}.reset_prefix_cache takes self reset_running_requests reset_connector
        - how blocks are hashed. Engines that hash in different ways find nothing at each other
        vllm.v1.core.kv_cache_utils:get_none_hash_seed takes
        {CONFIG}:CacheConfig has enable_prefix_caching prefix_caching_hash_algo prefix_match_unit
        {CONFIG}:ParallelConfig has distributed_executor_backend nnodes
        {CACHES}:KVCacheConfig has kv_cache_groups
    """),
    requires=(SCHEDULER, IDLE_REST),
    modules=("optional.loans.lending", "optional.loans.cached_blocks"),
)
