"""Tier 1: what this extension promises on every release of vLLM that it supports.

For each feature, all that is taken for granted of vLLM's interior; tier 2 is in
`engine_ext.vllm.optional`. An imported name needs no symbol: a module that cannot be imported turns
its feature off. Tests find every attribute that a module takes of vLLM's objects and that is not in
the tables. The sentence above rows is their reason.
"""

from engine_ext.vllm.compat.probe import ANY, Feature, symbols

CONFIG = "vllm.config"
KV = "vllm.distributed.kv_transfer.kv_connector"
BASE = f"{KV}.v1.base"
SCHED = "vllm.v1.core.sched"
CACHES = "vllm.v1.kv_cache_interface"
ENGINE = "vllm.v1.engine"
OPENAI = "vllm.entrypoints.openai"
APP_STATE = "vllm.entrypoints.launchers.api_server.app_state:init_app_state"
CHAT = f"{OPENAI}.chat_completion.protocol:ChatCompletionRequest"
COMPLETION = f"{OPENAI}.completion.protocol:CompletionRequest"
CHAT_SERVING = f"{OPENAI}.chat_completion.serving:OpenAIServingChat"
COMPLETION_SERVING = f"{OPENAI}.completion.serving:OpenAIServingCompletion"
OUTPUTS = f"{ENGINE}.output_processor"
SCHEDULER_CLASS = f"{SCHED}.scheduler:Scheduler"
BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"

CONNECTOR = Feature(
    "connector",
    "no KV moves",
    symbols(f"""
        - hooks that we override, and fields of the base class. A renamed hook is never called: KV
            is lost, or leaks, without an error
        {BASE}:KVConnectorBase_V1 has build_connector_meta build_connector_worker_meta
            get_handshake_metadata get_loaded_kv_cache_group_ids
            get_num_new_matched_tokens get_required_kvcache_layout get_transfer_results
            has_pending_push_work on_new_request register_kv_caches request_finished
            requires_kv_delivery reset_cache save_kv_layer set_xfer_handshake_metadata_pp_aware
            shutdown start_load_kv supports_divergent_local_hybrid_hits update_connector_output
            update_state_after_alloc wait_for_layer_load wait_for_save _kv_cache_config
            _vllm_config _get_connector_metadata
        {BASE}:KVConnectorBase_V1 abstract build_connector_meta get_num_new_matched_tokens
            save_kv_layer start_load_kv update_state_after_alloc wait_for_layer_load
            wait_for_save
        {BASE}:KVConnectorBase_V1.__init__ takes self vllm_config role kv_cache_config
        {BASE}:KVConnectorBase_V1.get_num_new_matched_tokens takes self request
            num_computed_tokens
        {BASE}:KVConnectorBase_V1.update_state_after_alloc takes self request blocks
            num_external_tokens
        {BASE}:KVConnectorBase_V1.get_transfer_results takes self finished_req_ids
        {BASE}:SupportsHMA abstract request_finished_all_groups
        {BASE}:SupportsHMA.request_finished_all_groups takes self request block_ids
        - records between vLLM and our hooks. What workers report is not understood: the engine
            ends, or waits for blocks forever
        {BASE}:KVConnectorWorkerMetadata has aggregate
        {BASE}:KVConnectorTransferResults takes finished_sending finished_recving failed_recving
        {BASE}:KVConnectorRole has SCHEDULER WORKER
        vllm.v1.outputs:KVConnectorOutput has failed_recving finished_recving finished_sending
            kv_connector_worker_meta
        vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids takes self
        - the connector's settings, parallelism and side channel, as stock reads them. The engine
            announces a wrong address, or divides heads among ranks in another way than vLLM
        {CONFIG}:KVTransferConfig has enable_permute_local_kv engine_id is_kv_consumer
            kv_buffer_device kv_connector kv_connector_extra_config kv_load_failure_policy
            kv_role
        {CONFIG}:ParallelConfig has data_parallel_index data_parallel_size
            data_parallel_size_local decode_context_parallel_size pipeline_parallel_size
            prefill_context_parallel_size rank tensor_parallel_size
        vllm.envs has VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
    """),
    modules=("connector",),
)

CACHE = Feature(
    "cache",
    "no KV moves",
    symbols(f"""
        - groups of the cache and the kind of each. Blocks are not found, or a kind that cannot be
            moved passes for one that can
        {CACHES}:KVCacheConfig has kv_cache_groups num_blocks transfer_group_ids
        {CACHES}:KVCacheGroupSpec has kv_cache_spec layer_names
        {CACHES}:KVCacheSpec has block_size prefix_cacheable
        {CACHES}:AttentionSpec has num_kv_heads num_head_slots state_content_size_bytes
            tokens_per_state
        {CACHES}:SlidingWindowSpec has sliding_window
        {CACHES}:ChunkedLocalAttentionSpec has attention_chunk_size
        {CACHES}:UniformTypeKVCacheSpecs has kv_cache_specs
        - what two engines compare before KV moves, and what is refused at start. Engines with
            different caches exchange KV
        {CONFIG}:CacheConfig has block_size cache_dtype get_resolved_kv_cache_layout
        {CONFIG}:ModelConfig has code_revision dtype enable_cumem_allocator enable_sleep_mode
            get_head_size get_total_num_hidden_layers get_total_num_kv_heads hf_config
            hf_text_config max_model_len model quantization revision
        {CONFIG}:SchedulerConfig has disable_hybrid_kv_cache_manager
        {CONFIG}:SpeculativeConfig has method num_speculative_tokens
        {CONFIG}:VllmConfig has cache_config kv_transfer_config max_concurrent_batches
            model_config parallel_config scheduler_config speculative_config
        vllm.v1.attention.backend:AttentionBackend.get_name takes
        {KV}.utils:get_current_attn_backends takes vllm_config
    """),
)

CONTENT = Feature(
    "content",
    "no KV moves",
    symbols(f"""
        - what a request's KV depends on, the ingredients of prefix hashes. KV of other content is
            loaded
        vllm.v1.request:Request has all_token_ids block_hashes cache_salt is_finished
            kv_transfer_params lora_request mm_features num_computed_tokens num_in_flight_tokens
            num_prompt_tokens num_tokens prompt_embeds prompt_token_ids request_id status
            update_block_hashes
        vllm.multimodal.inputs:MultiModalFeatureSpec has identifier mm_position
        vllm.multimodal.inputs:PlaceholderRange has length offset
        vllm.lora.request:LoRARequest has is_3d_lora_weight load_inplace lora_int_id lora_name
            lora_path
        - how a request ended. KV of an aborted or failed request is offered
        vllm.v1.request:RequestStatus has FINISHED_ABORTED FINISHED_LENGTH_CAPPED
            FINISHED_STOPPED
        - every way to change weights, and the loads that are under way then. KV of old weights is
            used with new ones
        {ENGINE}.core:EngineCore has list_loras scheduler vllm_config
        {ENGINE}.core:EngineCore.add_lora takes self lora_request
        {ENGINE}.core:EngineCore.collective_rpc takes self method {ANY}
        {ENGINE}.core:EngineCore.set_weight_version takes self weight_version
        {ENGINE}.core:EngineCore.sleep takes self level {ANY}
        {SCHED}.scheduler:Scheduler has connector requests
        {SCHED}.scheduler:Scheduler.update_from_output takes self scheduler_output
            model_runner_output
        vllm.v1.outputs:ModelRunnerOutput has kv_connector_output
        - all that vLLM hashes into a block's key. Something new that KV depends on is missing in
            our hashes
        vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys uses
            _gen_lora_extra_hash_keys _gen_mm_extra_hash_keys _gen_prompt_embeds_extra_hash_keys
            cache_salt tuple
    """),
)

METRICS = Feature(
    "metrics",
    "what moves is not counted in /metrics",
    symbols(f"""
        - the way of a connector's counts to /metrics. Nothing is counted
        {BASE}:KVConnectorBase_V1 has build_kv_connector_stats build_prom_metrics
            get_kv_connector_stats
        {KV}.v1.metrics:KVConnectorStats has aggregate data is_empty reduce reset
        {KV}.v1.metrics:KVConnectorPromMetrics.__init__ takes self vllm_config metric_types
            labelnames per_engine_labelvalues
        {KV}.v1.metrics:KVConnectorPromMetrics.observe takes self transfer_stats_data engine_idx
    """),
    modules=("metrics",),
)

PAGES = Feature(
    "pages",
    "no /disagg/identity, /disagg/release and /disagg/leases",
    symbols(f"""
        - the application that our pages are added to, and the way from a page to the engine and
            its workers. The router takes the engine for stock
        vllm.entrypoints.launchers.app:attach_endpoint_plugins
        {APP_STATE} has engine_client vllm_config
        {ENGINE}.async_llm:AsyncLLM has engine_core
        {ENGINE}.core:EngineCore has model_executor
        vllm.v1.executor:Executor.collective_rpc takes self method timeout args
        {ENGINE}.core_client:AsyncMPClient.call_utility_all_async takes self method
        - the limits of a step. Routers send decode engines no prompts
        {CONFIG}:SchedulerConfig has long_prefill_token_threshold
            long_prefill_token_threshold_adaptive max_num_batched_tokens
            max_num_scheduled_tokens max_num_seqs
    """),
    modules=("pages",),
    patches=("pages",),
)

REQUIRED = (CONNECTOR, CACHE, CONTENT)
"""Without one of these, wrong KV might be moved: nothing starts."""

PROMISED = (METRICS, PAGES)
"""Without one of these KV still moves, but a release that lacks one is not supported."""
