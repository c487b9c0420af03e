"""What we touch of vLLM that may be another in its next version, by what we need it for.

Each feature is on where every name that it needs is as we know it, and only there; what works by
way of another needs its names too. Of a name, what is told here is all that we take for granted. A
test finds every import of vLLM's in this package that is not here.
"""

from dataclasses import dataclass

from engine_ext.vllm import fit
from engine_ext.vllm.compat.names import ANY, Name

KV = "vllm.distributed.kv_transfer.kv_connector"
BASE = f"{KV}.v1.base"
SCHED = "vllm.v1.core.sched"
OPENAI = "vllm.entrypoints.openai"
SERVING = f"{OPENAI}.chat_completion.serving", f"{OPENAI}.completion.serving"
ERRORS = "vllm.entrypoints.serve.exception_handling.handlers.vllm_error"
APP_STATE = "vllm.entrypoints.launchers.api_server.app_state:init_app_state"
PROTOCOL = (
    f"{OPENAI}.chat_completion.protocol:ChatCompletionRequest",
    f"{OPENAI}.completion.protocol:CompletionRequest",
)


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    lost: str
    """What is not there without it, for the log."""
    needs: tuple[Name, ...]


CONNECTOR = Feature(
    "connector",
    "no KV moves",
    (
        Name(
            f"{BASE}:KVConnectorBase_V1",
            has=(
                "build_connector_meta",
                "get_finished",
                "get_handshake_metadata",
                "get_loaded_kv_cache_group_ids",
                "get_num_new_matched_tokens",
                "get_required_kvcache_layout",
                "get_transfer_results",
                "has_pending_push_work",
                "on_new_request",
                "register_kv_caches",
                "request_finished",
                "requires_kv_delivery",
                "reset_cache",
                "save_kv_layer",
                "set_xfer_handshake_metadata_pp_aware",
                "shutdown",
                "start_load_kv",
                "update_connector_output",
                "wait_for_layer_load",
                "wait_for_save",
                "_kv_cache_config",
                "_vllm_config",
            ),
            asks=(
                "build_connector_meta",
                "get_num_new_matched_tokens",
                "save_kv_layer",
                "start_load_kv",
                "update_state_after_alloc",
                "wait_for_layer_load",
                "wait_for_save",
            ),
        ),
        Name(
            f"{BASE}:KVConnectorBase_V1.__init__",
            ("self", "vllm_config", "role", "kv_cache_config"),
        ),
        Name(
            f"{BASE}:KVConnectorBase_V1.get_num_new_matched_tokens",
            ("self", "request", "num_computed_tokens"),
        ),
        Name(
            f"{BASE}:KVConnectorBase_V1.update_state_after_alloc",
            ("self", "request", "blocks", "num_external_tokens"),
        ),
        Name(f"{BASE}:KVConnectorBase_V1.get_transfer_results", ("self", "finished_req_ids")),
        Name(f"{BASE}:KVConnectorBase_V1._get_connector_metadata", ("self",)),
        Name(f"{BASE}:SupportsHMA", asks=("request_finished_all_groups",)),
        Name(f"{BASE}:SupportsHMA.request_finished_all_groups", ("self", "request", "block_ids")),
        Name(
            f"{BASE}:KVConnectorTransferResults",
            ("finished_sending", "finished_recving", "failed_recving"),
        ),
        Name(f"{BASE}:KVConnectorRole", has=("SCHEDULER", "WORKER")),
        Name(f"{BASE}:KVConnectorMetadata"),
        Name(f"{BASE}:KVConnectorHandshakeMetadata"),
        Name(
            "vllm.v1.outputs:KVConnectorOutput",
            has=("finished_sending", "finished_recving", "failed_recving"),
        ),
        Name("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids", ("self",)),
        Name(f"{SCHED}.output:SchedulerOutput"),
        Name(
            "vllm.config:KVTransferConfig",
            has=(
                "enable_permute_local_kv",
                "engine_id",
                "is_kv_consumer",
                "kv_buffer_device",
                "kv_connector",
                "kv_connector_extra_config",
                "kv_load_failure_policy",
                "kv_role",
            ),
        ),
        Name(
            "vllm.config:ParallelConfig",
            has=(
                "data_parallel_index",
                "data_parallel_size",
                "data_parallel_size_local",
                "decode_context_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "tensor_parallel_size",
            ),
        ),
        Name("vllm.envs", has=("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")),
    ),
)
"""The hooks that vLLM calls, when, and what it does with their answers."""

CACHE = Feature(
    "cache",
    "no KV moves",
    (
        Name(
            "vllm.v1.kv_cache_interface:KVCacheConfig",
            has=("kv_cache_groups", "num_blocks", "transfer_group_ids"),
        ),
        Name("vllm.v1.kv_cache_interface:KVCacheGroupSpec", has=("kv_cache_spec", "layer_names")),
        Name("vllm.v1.kv_cache_interface:KVCacheSpec", has=("block_size",)),
        Name("vllm.v1.kv_cache_interface:FullAttentionSpec", has=("block_size",)),
        Name(
            "vllm.v1.kv_cache_interface:AttentionSpec",
            has=("num_kv_heads", "num_head_slots", "state_content_size_bytes"),
        ),
        Name("vllm.v1.kv_cache_interface:MLAAttentionSpec", has=("tokens_per_state",)),
        Name("vllm.v1.kv_cache_interface:SlidingWindowSpec", has=("sliding_window",)),
        Name("vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec", has=("attention_chunk_size",)),
        Name("vllm.v1.kv_cache_interface:MambaSpec"),
        Name("vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs", has=("kv_cache_specs",)),
        Name(
            "vllm.config:CacheConfig",
            has=(
                "block_size",
                "cache_dtype",
                "enable_prefix_caching",
                "get_resolved_kv_cache_layout",
            ),
        ),
        Name(
            "vllm.config:ModelConfig",
            has=(
                "dtype",
                "enable_cumem_allocator",
                "enable_sleep_mode",
                "get_head_size",
                "max_model_len",
                "get_total_num_hidden_layers",
                "get_total_num_kv_heads",
                "hf_text_config",
                "model",
                "multimodal_config",
                "use_mla",
            ),
        ),
        Name("vllm.config:SchedulerConfig", has=("disable_hybrid_kv_cache_manager",)),
        Name("vllm.config:SpeculativeConfig", has=("method", "num_speculative_tokens")),
        Name(
            "vllm.config:VllmConfig",
            has=(
                "cache_config",
                "kv_transfer_config",
                "max_concurrent_batches",
                "model_config",
                "parallel_config",
                "scheduler_config",
                "speculative_config",
            ),
        ),
        Name("vllm.v1.attention.backend:AttentionBackend.get_name", ()),
        Name("vllm.v1.kv_cache_layout:KVCacheLayout", has=("LBHNC",)),
        Name(f"{KV}.utils:get_current_attn_backends", ("vllm_config",)),
        Name("vllm.distributed.parallel_state:get_tensor_model_parallel_rank", ()),
        Name("vllm.distributed.parallel_state:get_pp_group", ()),
        Name("vllm.distributed.parallel_state:GroupCoordinator", has=("rank_in_group",)),
    ),
)
"""Where a token's KV lies."""

CONTENT = Feature(
    "content",
    "no KV moves",
    (
        Name(
            "vllm.v1.request:Request",
            has=(
                "all_token_ids",
                "block_hashes",
                "cache_salt",
                "is_finished",
                "kv_transfer_params",
                "lora_request",
                "mm_features",
                "num_computed_tokens",
                "num_in_flight_tokens",
                "num_prompt_tokens",
                "num_tokens",
                "prompt_embeds",
                "prompt_token_ids",
                "request_id",
                "status",
            ),
        ),
        Name("vllm.v1.request:Request.update_block_hashes", ("self",)),
        Name(
            "vllm.v1.request:RequestStatus",
            has=("FINISHED_ABORTED", "FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"),
        ),
        Name("vllm.v1.engine.core:EngineCore", has=("list_loras", "scheduler", "vllm_config")),
        Name("vllm.v1.engine.core:EngineCore.add_lora", ("self", "lora_request")),
        Name("vllm.v1.engine.core:EngineCore.collective_rpc", ("self", "method", ANY)),
        Name("vllm.v1.engine.core:EngineCore.set_weight_version", ("self", "weight_version")),
        Name("vllm.v1.engine.core:EngineCore.sleep", ("self", "level", ANY)),
        Name(f"{SCHED}.scheduler:Scheduler", has=("connector", "requests")),
        Name(
            f"{SCHED}.scheduler:Scheduler.update_from_output",
            ("self", "scheduler_output", "model_runner_output"),
        ),
        Name("vllm.v1.outputs:ModelRunnerOutput", has=("kv_connector_output",)),
        Name(
            "vllm.lora.request:LoRARequest",
            has=("is_3d_lora_weight", "load_inplace", "lora_int_id", "lora_name", "lora_path"),
        ),
        Name("vllm.lora.utils:get_adapter_absolute_path", ("lora_path",)),
        Name("vllm.multimodal.inputs:MultiModalFeatureSpec", has=("identifier", "mm_position")),
        Name("vllm.config:MultiModalConfig", has=("mm_processor_cache_gb",)),
        Name("vllm.multimodal.inputs:PlaceholderRange", has=("length", "offset")),
        Name(
            "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
            uses=(
                "_gen_lora_extra_hash_keys",
                "_gen_mm_extra_hash_keys",
                "_gen_prompt_embeds_extra_hash_keys",
                "cache_salt",
                "tuple",
            ),
        ),
    ),
)
"""What a block's KV was computed of and with which weights, and how much of it is written."""

STOCK_PEERS = Feature(
    "stock_peers",
    "this engine and stock ones read nothing from each other",
    (
        Name(
            f"{KV}.v1.nixl.metadata:compute_nixl_compatibility_hash",
            ("vllm_config", "attn_backend_name", "transfer_mode"),
        ),
        Name(f"{KV}.v1.nixl.metadata:NIXL_CONNECTOR_VERSION", values=(13, 14, 15)),
    ),
)

METRICS = Feature(
    "metrics",
    "what moves is not counted in /metrics",
    (
        Name(f"{BASE}:KVConnectorBase_V1.get_kv_connector_stats", ("self",)),
        Name(f"{BASE}:KVConnectorBase_V1.build_kv_connector_stats", ("data",)),
        Name(
            f"{BASE}:KVConnectorBase_V1.build_prom_metrics",
            ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        ),
        Name(
            f"{KV}.v1.metrics:KVConnectorStats",
            has=("aggregate", "data", "is_empty", "reduce", "reset"),
        ),
        Name(
            f"{KV}.v1.metrics:KVConnectorPromMetrics.__init__",
            ("self", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        ),
        Name(
            f"{KV}.v1.metrics:KVConnectorPromMetrics.observe",
            ("self", "transfer_stats_data", "engine_idx"),
        ),
        Name(
            "vllm.v1.metrics.utils:create_metric_per_engine", ("metric", "per_engine_labelvalues")
        ),
    ),
)

SEVERAL = Feature(
    "several_connectors",
    "ours is not to be one of MultiConnector's, which looks for each by its name alone",
    (
        Name(
            f"{KV}.factory:KVConnectorFactory.register_connector",
            ("name", "module_path", "class_name"),
        ),
        Name(f"{KV}.v1.multi_connector:MultiConnector", has=("sub_connectors",)),
    ),
)

LEAVING = Feature(
    "leaving",
    "an engine that waits for readers does not rest, and leaves when they have gone by itself",
    (
        Name("vllm.v1.engine.core:EngineCoreProc.run_busy_loop", ("self",)),
        Name("vllm.v1.engine.core:EngineCoreProc._handle_shutdown", ("self",)),
        Name(
            "vllm.v1.engine.core:EngineCoreProc",
            has=("input_queue", "scheduler", "shutdown_state", "vllm_config"),
        ),
        Name("vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop", ("self",)),
        Name("vllm.v1.engine.core:EngineShutdownState", has=("REQUESTED",)),
        Name("vllm.v1.engine:EngineCoreRequestType", has=("WAKEUP",)),
        Name("vllm.config:VllmConfig", has=("shutdown_timeout",)),
        Name(f"{SCHED}.interface:PauseState", has=("UNPAUSED",)),
        Name(f"{SCHED}.scheduler:Scheduler.set_pause_state", ("self", "pause_state")),
        Name(f"{SCHED}.scheduler:Scheduler", has=("connector",)),
    ),
)

PAGES = Feature(
    "pages",
    "no /disagg/identity, /disagg/release and /disagg/leases",
    (
        Name("vllm.entrypoints.launchers.app:attach_endpoint_plugins"),
        Name(APP_STATE, has=("engine_client", "vllm_config")),
        Name("vllm.v1.engine.async_llm:AsyncLLM", has=("engine_core",)),
        Name(
            "vllm.entrypoints.serve.exception_handling.error_response:create_error_response",
            ("message", "err_type", "status_code"),
        ),
        Name("vllm.v1.engine.core:EngineCore", has=("model_executor", "scheduler")),
        Name(f"{SCHED}.scheduler:Scheduler", has=("connector",)),
        Name("vllm.v1.executor:Executor.collective_rpc", ("self", "method", "timeout", "args")),
        Name("vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async", ("self", "method")),
        Name("vllm.distributed.kv_transfer:get_kv_transfer_group", ()),
        Name("vllm.distributed.kv_transfer:has_kv_transfer_group", ()),
    ),
)

STREAMS = Feature(
    "streams",
    "streams say no kv_transfer_params, nor the ids of their tokens",
    (
        Name(
            f"{SERVING[0]}:OpenAIServingChat.chat_completion_stream_generator",
            ("self", "request", "result_generator", "request_id", ANY),
        ),
        Name(
            f"{SERVING[1]}:OpenAIServingCompletion.completion_stream_generator",
            ("self", "request", "engine_inputs", "result_generator", "request_id", ANY),
        ),
        *(Name(at, has=("kv_transfer_params", "model", "n", "stream")) for at in PROTOCOL),
        Name("vllm.outputs:RequestOutput.add", ("self", "next_output", "aggregate")),
        Name(
            "vllm.outputs:RequestOutput",
            has=("finished", "kv_transfer_params", "outputs", "prompt_token_ids"),
        ),
        Name(
            "vllm.outputs:CompletionOutput",
            has=("finish_reason", "index", "logprobs", "stop_reason", "text", "token_ids"),
        ),
    ),
)

LOAD_FAILURES = Feature(
    "load_failures",
    "answers do not say from which engine a prompt's KV could not be loaded",
    (
        *STREAMS.needs,
        Name(f"{BASE}:KVConnectorBase_V1.build_connector_worker_meta", ("self",)),
        Name(f"{BASE}:KVConnectorWorkerMetadata", has=("aggregate",)),
        Name("vllm.v1.outputs:KVConnectorOutput", has=("kv_connector_worker_meta",)),
        Name("vllm.v1.engine:EngineCoreOutput", has=("finish_reason", "kv_transfer_params")),
        Name(
            f"{SERVING[0]}:OpenAIServingChat.chat_completion_full_generator",
            ("self", "request", "result_generator", "request_id", ANY),
        ),
        Name(
            f"{SERVING[1]}:OpenAIServingCompletion.request_output_to_completion_response",
            ("self", "final_res_batch", "request", "request_id", ANY),
        ),
        Name(ERRORS, has=("create_error_response",)),
        Name(f"{ERRORS}:create_error_response", ("message", "err_type", "status_code")),
        Name("vllm.entrypoints.serve.engine.protocol:ErrorResponse", has=("error",)),
        Name("vllm.exceptions:GenerationError"),
    ),
)
"""With our scheduler class."""

RENDERS = Feature(
    "renders",
    "it is not known whether another engine renders messages as this one",
    (
        Name(APP_STATE, has=("online_renderer", "vllm_config")),
        Name(
            "vllm.renderers.online_renderer:OnlineRenderer",
            has=("chat_template", "default_chat_template_kwargs", "renderer"),
        ),
        Name("vllm.renderers.base:BaseRenderer", has=("tokenizer",)),
        Name("vllm.config:ModelConfig", has=("hf_config", "model", "revision")),
    ),
)

SCHEDULER = Feature(
    "scheduler",
    "no --scheduler-cls of ours",
    (
        Name(
            f"{SCHED}.scheduler:Scheduler",
            has=("connector", "defer_block_free", "kv_cache_manager", "requests", "vllm_config"),
        ),
        Name(f"{SCHED}.async_scheduler:AsyncScheduler"),
        Name("vllm.config:SchedulerConfig", has=("scheduler_cls",)),
        Name(f"{SCHED}.interface:PauseState", has=("UNPAUSED",)),
        Name(f"{SCHED}.output:SchedulerOutput"),
        Name("vllm.v1.engine:EngineCoreOutput"),
        Name("vllm.v1.engine:EngineCoreOutputs"),
        Name("vllm.v1.outputs:ModelRunnerOutput"),
        Name("vllm.v1.request:Request", has=("request_id", "status")),
        Name("vllm.v1.request:RequestStatus"),
        Name("vllm.sampling_params:RequestOutputKind"),
        Name("vllm.v1.metrics.stats:PrefillStats"),
    ),
)
"""What it cannot be defined without. Whoever asks for it where it is off is refused."""

FAILURE_POLICY = Feature(
    "failure_policy",
    "a turn whose KV is lost ends by the engine's policy, as every request, and prompts are pushed "
    "early only where the longest one fits beside",
    (
        Name(f"{SCHED}.scheduler:Scheduler._handle_failed_recving", ("self", "failed_req_ids")),
        Name(f"{SCHED}.scheduler:Scheduler", has=("recompute_kv_load_failures",)),
        Name(f"{SCHED}.scheduler:Scheduler", has=("_inflight_prefills",)),
    ),
)

REST = Feature(
    "rest",
    "an engine steps all the time while it waits for readers, or for KV",
    (
        Name(f"{SCHED}.scheduler:Scheduler.has_finished_requests", ("self",)),
        Name(f"{SCHED}.scheduler:Scheduler.get_request_counts", ("self",)),
        Name(f"{SCHED}.scheduler:Scheduler.has_requests", ("self",)),
        Name(
            f"{SCHED}.scheduler:Scheduler",
            has=(
                "connector",
                "ec_connector",
                "failed_recving_kv_req_ids",
                "finished_recving_kv_req_ids",
                "finished_req_ids",
                "kv_holding_waiting",
                "pause_state",
                "running",
                "waiting",
            ),
        ),
        Name("vllm.v1.request:RequestStatus", has=("WAITING_FOR_REMOTE_KVS",)),
        Name("vllm.config:ParallelConfig", has=("distributed_executor_backend", "nnodes")),
    ),
)

LAST_WINDOW = Feature(
    "last_window",
    "behind sliding windows, decode engines compute some prompts again",
    (
        Name(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.remove_skipped_blocks",
            ("self", "request_id", "processed_computed_tokens", "num_prompt_tokens"),
        ),
    ),
)

STATE_LAYERS = Feature(
    "state_layers",
    "models with layers that keep a state (Mamba, linear attention) are refused",
    (
        Name(f"{BASE}:KVConnectorBase_V1", has=("supports_divergent_local_hybrid_hits",)),
        Name(
            "vllm.v1.kv_cache_interface:MambaSpec",
            has=("mamba_cache_mode", "num_speculative_blocks"),
        ),
        Name("vllm.config:CacheConfig", has=("mamba_cache_dtype", "mamba_ssm_cache_dtype")),
        Name("vllm.config:ModelConfig", has=("is_attention_free", "is_hybrid")),
        Name("vllm.envs", has=("VLLM_SSM_CONV_STATE_LAYOUT",)),
        Name(
            "vllm.v1.request:Request",
            has=("_all_token_ids", "get_skip_reading_prefix_cache", "max_tokens"),
        ),
    ),
)
"""One block of each request is its state, and a prompt's last token can be left out."""

LOOKAHEAD = Feature(
    "lookahead",
    "behind what was loaded, layers that guess (EAGLE's, MTP's) guess worse",
    (
        Name("vllm.config:VllmConfig", has=("num_prefill_lookahead_tokens",)),
        Name("vllm.v1.kv_cache_interface:SlidingWindowSpec", has=("extra_retained_tokens",)),
    ),
)
"""Their keys and values depend on tokens to come; see CacheGeometry.lookahead."""

_ENDS = (
    Name(f"{SCHED}.scheduler:Scheduler.schedule"),
    Name(
        f"{SCHED}.scheduler:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Name(f"{SCHED}.scheduler:Scheduler.has_requests", ("self",)),
    Name(
        f"{SCHED}.scheduler:Scheduler.finish_requests",
        ("self", "request_ids", "finished_status"),
    ),
    Name(f"{SCHED}.scheduler:Scheduler._handle_blocked_waiting_request", ("self", "request")),
    Name("vllm.v1.engine", has=("FINISH_REASON_STRINGS",)),
    Name("vllm.v1.engine:FinishReason", has=("ABORT", "ERROR", "LENGTH", "STOP")),
    Name(
        "vllm.v1.engine:EngineCoreOutput",
        has=(
            "events",
            "finish_reason",
            "kv_transfer_params",
            "new_logprobs",
            "new_token_ids",
            "request_id",
            "stop_reason",
            "trace_headers",
        ),
    ),
    Name("vllm.v1.engine:EngineCoreOutputs", has=("outputs",)),
    Name(
        "vllm.v1.request:Request",
        has=(
            "client_index",
            "num_output_tokens",
            "num_preemptions",
            "num_tokens",
            "sampling_params",
            "take_events",
            "trace_headers",
        ),
    ),
    Name(
        "vllm.v1.request:RequestStatus",
        has=("FINISHED_ABORTED", "PREEMPTED", "WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"),
    ),
)
"""Our scheduler class ends a request in its own words."""

_FIELDS = (
    Name(f"{PROTOCOL[0]}.to_sampling_params", ("self", "max_tokens", "default_sampling_params")),
    Name(f"{PROTOCOL[1]}.to_sampling_params", ("self", "max_tokens", "default_sampling_params")),
    *(Name(at, has=("kv_transfer_params", "model_extra", "n")) for at in PROTOCOL),
    Name("vllm.sampling_params:SamplingParams", has=("extra_args",)),
)
"""What our HTTP server says to our scheduler class."""

EARLY_WRITES = Feature(
    "early_writes",
    "prompts are pushed when they are computed, not before",
    (
        Name(
            f"{SCHED}.output:SchedulerOutput",
            has=(
                "num_scheduled_tokens",
                "preempted_req_ids",
                "scheduled_cached_reqs",
                "scheduled_new_reqs",
            ),
        ),
        Name(f"{SCHED}.output:NewRequestData", has=("block_ids", "num_computed_tokens", "req_id")),
        Name(
            f"{SCHED}.output:CachedRequestData",
            has=("new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids"),
        ),
    ),
)
"""What a step computes, and into which blocks."""

THRESHOLD = Feature(
    "cache_hit_threshold",
    "no request is refused for its cache hits",
    (
        *_ENDS,
        *_FIELDS,
        *STREAMS.needs,
        Name(f"{SCHED}.scheduler:Scheduler._get_local_prefix_cache_hit", ("self", "request")),
        Name(f"{SCHED}.scheduler:Scheduler", has=("block_size",)),
        Name(
            "vllm.v1.core.kv_cache_manager:KVCacheManager", has=("get_computed_blocks", "log_stats")
        ),
    ),
)

BEGUN = Feature(
    "begun",
    "answers do not begin in the middle, and none is handed back",
    (
        *_ENDS,
        *_FIELDS,
        *STREAMS.needs,
        Name(f"{SCHED}.scheduler:Scheduler.add_request", ("self", "request")),
        Name(
            f"{SCHED}.scheduler:Scheduler",
            has=("grammar_compile_error_reqs", "max_model_len", "structured_output_manager"),
        ),
        Name(f"{SCHED}.output:SchedulerOutput", has=("preempted_req_ids", "scheduled_new_reqs")),
        Name(f"{SCHED}.output:NewRequestData", has=("num_computed_tokens", "req_id")),
        Name(
            "vllm.v1.structured_output:StructuredOutputManager.accept_tokens",
            ("self", "request", "new_token_ids"),
        ),
        Name(f"{SCHED}.utils:check_stop", ("request", "max_model_len")),
        Name(
            "vllm.v1.metrics.stats:PrefillStats.set",
            (
                "self",
                "num_prompt_tokens",
                "num_local_cached_tokens",
                "num_external_cached_tokens",
            ),
        ),
        Name(
            "vllm.v1.request:Request",
            has=(
                "abort_immediately",
                "append_output_token_ids",
                "get_finished_reason",
                "max_tokens",
                "output_token_ids",
                "prefill_stats",
                "resumable",
                "stop_reason",
            ),
        ),
        Name("vllm.v1.request:Request.from_engine_core_request", ("request", "block_hasher")),
        Name(
            "vllm.v1.engine.output_processor:OutputProcessor.add_request",
            ("self", "request", "prompt", "parent_req", "request_index", "queue"),
        ),
        Name(
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            ("self", "engine_core_outputs"),
        ),
        Name(
            "vllm.v1.engine.output_processor:OutputProcessorOutput",
            has=("request_outputs",),
        ),
        Name("vllm.v1.engine.output_processor:RequestOutputCollector.put", ("self", "output")),
        Name(
            "vllm.v1.engine.output_processor:OutputProcessor.abort_requests",
            ("self", "request_ids", "internal"),
        ),
        Name(
            "vllm.v1.engine.output_processor:OutputProcessor",
            has=("has_request", "request_states"),
        ),
        Name(
            "vllm.v1.engine.output_processor:RequestState.make_request_output",
            (
                "self",
                "new_token_ids",
                "pooling_output",
                "finish_reason",
                "stop_reason",
                "kv_transfer_params",
            ),
        ),
        Name(
            "vllm.v1.engine.output_processor:RequestState",
            has=(
                "detokenizer",
                "is_prefilling",
                "logprobs_processor",
                "output_kind",
                "queue",
                "request_id",
                "sent_tokens_offset",
                "stream_interval",
            ),
        ),
        Name(
            "vllm.v1.engine.detokenizer:IncrementalDetokenizer.get_next_output_text",
            ("self", "finished", "delta"),
        ),
        Name("vllm.v1.engine.detokenizer:IncrementalDetokenizer.num_output_tokens", ("self",)),
        Name("vllm.v1.engine.logprobs:LogprobsProcessor", has=("logprobs", "num_logprobs")),
        Name("vllm.logprobs:Logprob", has=("logprob",)),
        Name(
            "vllm.v1.outputs:LogprobsLists",
            ("logprob_token_ids", "logprobs", "sampled_token_ranks"),
        ),
        Name(
            f"{SERVING[0]}:OpenAIServingChat", has=("engine_client", "model_config", "parser_cls")
        ),
        Name(f"{SERVING[1]}:OpenAIServingCompletion", has=("engine_client", "model_config")),
        Name("vllm.v1.engine.async_llm:AsyncLLM", has=("vllm_config",)),
        Name("vllm.config:ModelConfig", has=("get_vocab_size", "max_model_len")),
        Name(
            PROTOCOL[0],
            has=("logprobs", "max_completion_tokens", "max_tokens", "messages", "top_logprobs"),
        ),
        Name(PROTOCOL[1], has=("logprobs", "max_tokens", "prompt")),
        *(Name(at, has=fit.UNFIT) for at in PROTOCOL),
        Name(PROTOCOL[0], has=fit.UNFIT_OF_CHATS),
        Name(PROTOCOL[1], has=fit.UNFIT_OF_COMPLETIONS),
        Name(
            "vllm.v1.engine:EngineCoreRequest",
            has=("abort_immediately", "prompt_token_ids", "request_id", "sampling_params"),
        ),
        Name(
            "vllm.sampling_params:SamplingParams",
            has=("logprobs", "max_tokens", "min_tokens", "output_kind"),
        ),
        Name(f"{SERVING[0]}:OpenAIServingChat.render_chat_request", ("self", "request")),
        Name(
            f"{SERVING[1]}:OpenAIServingCompletion.render_completion_request", ("self", "request")
        ),
        Name("vllm.exceptions:VLLMValidationError"),
        Name("vllm.renderers.chat_utils:has_non_text_content", ("messages",)),
        Name("vllm.v1.worker.gpu_input_batch:InputBatch.add_request", ("self", "request")),
        Name(
            "vllm.v1.worker.gpu_input_batch:CachedRequestState",
            has=("generator", "output_token_ids", "sampling_params"),
        ),
        Name("vllm.sampling_params:RequestOutputKind", has=("DELTA",)),
    ),
)

REQUIRED = (CONNECTOR, CACHE, CONTENT)
"""Without one of these, KV might be moved that is wrong: nothing starts."""

OPTIONAL = (
    STOCK_PEERS,
    METRICS,
    SEVERAL,
    LEAVING,
    PAGES,
    STREAMS,
    LOAD_FAILURES,
    RENDERS,
    SCHEDULER,
    FAILURE_POLICY,
    REST,
    LAST_WINDOW,
    EARLY_WRITES,
    STATE_LAYERS,
    LOOKAHEAD,
    THRESHOLD,
    BEGUN,
)
