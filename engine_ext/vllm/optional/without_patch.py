"""Features that patch nothing: they read vLLM's objects, or are part of our scheduler class."""

from engine_ext.vllm.compat.probe import Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import (
    APP_STATE,
    CACHES,
    CONFIG,
    KV,
    SCHED,
    SCHEDULER_CLASS,
)

STOCK_PEERS = Feature(
    "stock_peers",
    "no KV moves between this engine and stock engines",
    symbols(f"""
        - stock's own hash of what must be equal, and the version of its protocol. A stock engine
            refuses our handshake, or reads it in another way
        {KV}.v1.nixl.metadata:compute_nixl_compatibility_hash takes vllm_config
            attn_backend_name transfer_mode
        {KV}.v1.nixl.metadata:NIXL_CONNECTOR_VERSION is 13 14 15
    """),
)

RENDERS = Feature(
    "renders",
    "routers do not know which engines render messages alike",
    symbols(f"""
        - templates and tokenizer that render a chat. Routers do not know which engines may resume
            each other's answers
        {APP_STATE} has online_renderer vllm_config
        {CONFIG}:ModelConfig has hf_config revision
    """),
)

SCHEDULER = Feature(
    "scheduler",
    "--scheduler-cls cannot be one of engine_ext",
    symbols(f"""
        - what our scheduler class reads and sets when it is built. With steps under way, blocks of
            an aborted request are handed out while they are written
        {SCHEDULER_CLASS} has defer_block_free kv_cache_manager schedule vllm_config
        {CONFIG}:SchedulerConfig has scheduler_cls
    """),
    modules=("scheduler",),
)
"""An engine that is started with the class where this is off is refused."""

FAILURE_POLICY = Feature(
    "failure_policy",
    "a turn whose KV is lost ends by the engine's policy, and a decode engine registers early for "
    "a push only while the longest possible request still fits",
    symbols(f"""
        - what becomes of a request whose load failed. A turn that is lost ends with an error,
            though its prompt is there
        {SCHEDULER_CLASS}._handle_failed_recving takes self failed_req_ids
        {SCHEDULER_CLASS}.update_from_output takes self scheduler_output model_runner_output
        {KV}.v1.multi_connector:MultiKVConnectorWorkerMetadata has metadata
        {SCHEDULER_CLASS} has recompute_kv_load_failures _inflight_prefills
    """),
    requires=(SCHEDULER,),
)

LAST_WINDOW = Feature(
    "last_window",
    "behind sliding windows, decode engines compute some prompts again",
    symbols("""
        - the blocks that leave a sliding window. Decode engines compute one prompt in a block's
            number of tokens again
        vllm.v1.core.kv_cache_manager:KVCacheManager.remove_skipped_blocks takes self request_id
            processed_computed_tokens num_prompt_tokens
    """),
    requires=(SCHEDULER,),
)

EARLY_WRITES = Feature(
    "early_writes",
    "prompts are pushed when they are computed, not before",
    symbols(f"""
        - what a step computes, and into which blocks. Blocks are pushed before they are written
        {SCHED}.output:SchedulerOutput has num_scheduled_tokens preempted_req_ids
            scheduled_cached_reqs scheduled_new_reqs
        {SCHED}.output:NewRequestData has block_ids num_computed_tokens req_id
        {SCHED}.output:CachedRequestData has new_block_ids num_computed_tokens req_ids
            resumed_req_ids
    """),
    modules=("prompt_progress",),
)

STATE_LAYERS = Feature(
    "state_layers",
    "models with layers that keep a state (Mamba, linear attention) are refused",
    symbols(f"""
        - how a state is kept, typed and laid out. A state of another layout, or of other tokens,
            is loaded
        {CACHES}:MambaSpec has dtypes mamba_cache_mode mamba_type num_speculative_blocks shapes
            tp_replicated
        {CONFIG}:CacheConfig has mamba_cache_dtype mamba_ssm_cache_dtype
        {CONFIG}:ModelConfig has is_attention_free is_hybrid
        vllm.envs has VLLM_SSM_CONV_STATE_LAYOUT
        - a prompt is cut by its last token, which the reader of its state computes. The state
            includes that token twice
        vllm.v1.request:Request has _all_token_ids get_skip_reading_prefix_cache max_tokens
    """),
)

LOOKAHEAD = Feature(
    "lookahead",
    "after a load, fewer drafts of EAGLE and MTP layers are accepted",
    symbols(f"""
        - how far drafting layers look ahead. Their KV at the end of a loaded prompt is of other
            tokens, and fewer drafts are accepted
        {CONFIG}:VllmConfig has num_prefill_lookahead_tokens
        {CACHES}:SlidingWindowSpec has extra_retained_tokens
    """),
)
"""Their keys and values depend on tokens to come; see CacheGeometry.lookahead."""
