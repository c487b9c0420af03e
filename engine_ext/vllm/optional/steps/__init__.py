"""How long steps take, and how many prompt tokens they may compute."""

from engine_ext.vllm.compat.probe import Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import BASE, CONFIG, PAGES, SCHED, SCHEDULER_CLASS
from engine_ext.vllm.optional.without_patch import SCHEDULER

STEP_MODEL = Feature(
    "step_model",
    "routers do not know how long the engine's steps take",
    symbols(f"""
        - what a step computes, and the call after each step. Times are fitted to other work
        {SCHED}.output:SchedulerOutput has num_scheduled_tokens scheduled_cached_reqs
            scheduled_encoder_inputs scheduled_new_reqs scheduled_spec_decode_tokens
            total_num_scheduled_tokens
        {SCHED}.output:NewRequestData has num_computed_tokens req_id
        {SCHED}.output:CachedRequestData has num_computed_tokens req_ids
        {BASE}:KVConnectorBase_V1 has get_kv_connector_stats
        {CONFIG}:SchedulerConfig has max_num_batched_tokens
    """),
    requires=(PAGES,),
    modules=("optional.steps.step_times",),
)

STEP_BUDGET = Feature(
    "step_budget",
    "target_itl_ms is refused",
    symbols(f"""
        - how many tokens of a request a step computes, and what else it computes. Steps take as
            long as without a target
        {SCHEDULER_CLASS}._reserve_prefill_lookahead takes self request num_computed_tokens
            num_new_tokens
        {SCHEDULER_CLASS} has cache_config max_num_scheduled_tokens need_mamba_block_aligned_split
            num_spec_tokens running scheduler_config
        {CONFIG}:CacheConfig has block_size
        {CONFIG}:SchedulerConfig has disable_chunked_mm_input enable_chunked_prefill
        vllm.v1.request:Request has has_encoder_inputs is_prefill_chunk num_computed_tokens
            request_id status
        vllm.v1.request:RequestStatus has RUNNING
    """),
    requires=(SCHEDULER, STEP_MODEL),
    modules=("optional.steps.step_budget",),
)
