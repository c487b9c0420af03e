"""Tier 2: features that a new release of vLLM may cost, each alone.

Each has its probe (the symbols), its patch list and its off switch: its name in DISAGG_VLLM_DISABLE
(see compat/support.py). Six of them have modules of their own:

| feature | in the scheduler class | patches |
|---|---|---|
| `cache_hit_threshold` | `threshold.py` | `patch_requests`, `patch_outputs`, `patch_streams` |
| `resume` | `resume.py` | these, `patch_replay` and `patch_worker` |
| `preemption_return` | `preemption_return.py` | as of `cache_hit_threshold` |
| `idle_rest` | `idle_rest.py` | `patch_engine_loop` wakes the loop |
| `lending` (loans) | `lending.py` | |
| `early_exit` | | `patch_engine_loop` |
| `step_budget` | `step_budget.py` | |
"""

from engine_ext.vllm.compat.probe import ANY, Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import (
    APP_STATE,
    BASE,
    CACHES,
    CONFIG,
    ENGINE,
    KV,
    OPENAI,
    PAGES,
    SCHED,
)
from engine_ext.vllm.optional import resumed_request

CHAT = f"{OPENAI}.chat_completion.protocol:ChatCompletionRequest"
COMPLETION = f"{OPENAI}.completion.protocol:CompletionRequest"
CHAT_SERVING = f"{OPENAI}.chat_completion.serving:OpenAIServingChat"
COMPLETION_SERVING = f"{OPENAI}.completion.serving:OpenAIServingCompletion"
OUTPUTS = f"{ENGINE}.output_processor"
SCHEDULER_CLASS = f"{SCHED}.scheduler:Scheduler"
BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"

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

SEVERAL = Feature(
    "several_connectors",
    "DisaggConnector cannot be used inside MultiConnector",
    symbols(f"""
        - DisaggConnector among MultiConnector's. Weight changes, pages and our scheduler class do
            not find it
        {KV}.v1.multi_connector:MultiConnector has sub_connectors
    """),
    modules=("optional.connector_names",),
    patches=("optional.connector_names",),
)

_ENGINE_LOOP = symbols(f"""
    - the loop of the engine: what is called before it sleeps or ends, and what wakes it. The
        engine sleeps while KV has come, or leaves while a remote reads
    {ENGINE}.core:EngineCoreProc._handle_shutdown takes self
    {ENGINE}.core:EngineCoreProc has input_queue scheduler shutdown_state vllm_config
    {ENGINE}.core:EngineShutdownState has REQUESTED
    {ENGINE}:EngineCoreRequestType has WAKEUP
    {CONFIG}:VllmConfig has shutdown_timeout
    {SCHED}.interface:PauseState has UNPAUSED
""")

EARLY_EXIT = Feature(
    "early_exit",
    "an engine that shuts down or pauses waits for retained turns until they expire",
    _ENGINE_LOOP
    + symbols(f"""
        - pause and sleep. Both wait until retained turns expire, even if no engine reads them
        {SCHEDULER_CLASS}.set_pause_state takes self pause_state
    """),
    modules=("optional.patch_engine_loop",),
)
"""The connector itself installs the patches of the engine's loop, with the plugin or without."""

STREAMS = Feature(
    "streams",
    "streams contain no kv_transfer_params and no token ids",
    symbols(f"""
        - the generators of streams, and the choices, ids and errors of the results that they get.
            Chunks are doubled, or lack ids and params
        {CHAT_SERVING}.chat_completion_stream_generator takes self request result_generator
            request_id {ANY}
        {COMPLETION_SERVING}.completion_stream_generator takes self request engine_inputs
            result_generator request_id {ANY}
        {CHAT_SERVING} has parser_cls
        {CHAT} has kv_transfer_params model n
        {COMPLETION} has kv_transfer_params model n
        - results that wait for a slow stream are merged. Replayed tokens are sent twice, or are
            lost
        vllm.outputs:RequestOutput.add takes self next_output aggregate
        vllm.outputs:RequestOutput has finished kv_transfer_params outputs prompt_token_ids
        vllm.outputs:CompletionOutput has finish_reason index logprobs stop_reason text
            token_ids
    """),
    modules=("optional.patch_streams",),
    patches=("optional.patch_streams",),
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

LOAD_FAILURES = Feature(
    "load_failures",
    "answers do not report which engine's KV could not be loaded",
    symbols(f"""
        - outputs and results of a failed request. Errors do not name the engine that lost the KV,
            and the router retries without knowing
        {ENGINE}:EngineCoreOutput has finish_reason kv_transfer_params request_id
        {ENGINE}:EngineCoreOutputs has outputs
        {ENGINE}.async_llm:AsyncLLM.generate takes self prompt sampling_params request_id {ANY}
        vllm.sampling_params:SamplingParams has output_kind
        vllm.sampling_params:RequestOutputKind has DELTA
    """),
    requires=(STREAMS, PAGES),
    modules=("optional.patch_load_errors",),
    patches=("optional.patch_streams", "optional.patch_load_errors"),
)
"""With our scheduler class."""

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

IDLE_REST = Feature(
    "idle_rest",
    "an engine takes steps all the time while it waits for readers or for KV",
    _ENGINE_LOOP
    + symbols(f"""
        - what the scheduler still has to do. The engine rests while a request could run
        {SCHEDULER_CLASS} has connector ec_connector failed_recving_kv_req_ids
            finished_recving_kv_req_ids finished_req_ids has_finished_requests has_requests
            kv_holding_waiting pause_state running schedule waiting
        vllm.v1.request:RequestStatus has WAITING_FOR_REMOTE_KVS
        {CONFIG}:ParallelConfig has distributed_executor_backend nnodes
    """),
    requires=(SCHEDULER,),
    modules=("optional.idle_rest", "optional.patch_engine_loop"),
)

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
    modules=("optional.lending", "optional.cached_blocks"),
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
    modules=("optional.step_times",),
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
    modules=("optional.step_budget",),
)

STATE_LAYERS = Feature(
    "state_layers",
    "models with layers that keep a state (Mamba, linear attention) are refused",
    symbols(f"""
        - how a state is kept, typed and laid out. A state of another layout, or of other tokens,
            is loaded
        {CACHES}:MambaSpec has mamba_cache_mode num_speculative_blocks
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

_REQUESTS = symbols(f"""
    - the request as the HTTP server has it before the prompt is rendered, and the fields that rule
        a resumed answer out. A payload is ignored, or an answer resumed that cannot be
    vllm.entrypoints.serve.engine.serving:BaseServing._check_model takes self request
    {CHAT} has kv_transfer_params model_extra n vllm_xargs to_sampling_params
    {COMPLETION} has kv_transfer_params model_extra n vllm_xargs to_sampling_params
    vllm.sampling_params:SamplingParams has extra_args
    {CHAT} has {" ".join(resumed_request.FIELDS_NOT_RESUMED)}
    {COMPLETION} has {" ".join(resumed_request.FIELDS_NOT_RESUMED)}
    {CHAT} has {" ".join(resumed_request.CHAT_FIELDS_NOT_RESUMED)}
    {COMPLETION} has {" ".join(resumed_request.COMPLETION_FIELDS_NOT_RESUMED)}
""")

_OUTPUTS = symbols(f"""
    - where the engine's outputs become results. Clients see `abort` instead of our finish reason;
        a resumed answer lacks text or log-probabilities
    {OUTPUTS}:RequestState.make_request_output takes self new_token_ids pooling_output
        finish_reason stop_reason kv_transfer_params
    {OUTPUTS}:RequestState has detokenizer logprobs_processor output_kind
    {ENGINE}.detokenizer:IncrementalDetokenizer.get_next_output_text takes self finished
        delta
    {ENGINE}.logprobs:LogprobsProcessor has logprobs
    vllm.logprobs:Logprob has logprob
    {ENGINE}:FinishReason has ABORT LENGTH
    vllm.sampling_params:RequestOutputKind has DELTA
""")

_EARLY_ENDS = _OUTPUTS + symbols(f"""
    - our scheduler class ends a request itself. Its output is late or lost, and the client waits
    {SCHEDULER_CLASS} has has_requests schedule
    {SCHEDULER_CLASS}.finish_requests takes self request_ids finished_status
    {ENGINE}:EngineCoreOutput has events finish_reason kv_transfer_params new_token_ids
        request_id stop_reason trace_headers
    {ENGINE}:EngineCoreOutputs has outputs
    vllm.v1.request:Request has client_index num_output_tokens num_preemptions
        sampling_params take_events trace_headers
    vllm.v1.request:RequestStatus has PREEMPTED WAITING
""")

_EARLY_END_PATCHES = (
    "optional.patch_streams",
    "optional.patch_outputs",
    "optional.patch_requests",
)

_EARLY_END_MODULES = ("optional.early_ends", *_EARLY_END_PATCHES)

THRESHOLD = Feature(
    "cache_hit_threshold",
    "cache_hit_threshold rejects no request",
    _EARLY_ENDS
    + _REQUESTS
    + symbols(f"""
        - a request's turn has come, and how much of it is cached. It is never rejected, or after
            blocks were allocated
        {SCHEDULER_CLASS}._handle_blocked_waiting_request takes self request
        {SCHEDULER_CLASS}._get_local_prefix_cache_hit takes self request
        {SCHEDULER_CLASS} has block_size
        vllm.v1.core.kv_cache_manager:KVCacheManager has get_computed_blocks log_stats
    """),
    requires=(SCHEDULER, STREAMS),
    modules=("optional.threshold", *_EARLY_END_MODULES),
    patches=_EARLY_END_PATCHES,
)

PREEMPTION_RETURN = Feature(
    "preemption_return",
    "an answer without blocks is preempted and computed again, not returned to the router",
    _EARLY_ENDS
    + _REQUESTS
    + symbols(f"""
        - the preempted requests of a step, and what is needed to resume them. They are computed
            again here
        {SCHED}.output:SchedulerOutput has preempted_req_ids
        vllm.v1.request:Request has output_token_ids resumable
        vllm.sampling_params:SamplingParams has logprobs output_kind
    """),
    requires=(SCHEDULER, STREAMS),
    modules=("optional.preemption_return", *_EARLY_END_MODULES),
    patches=_EARLY_END_PATCHES,
)

RESUME = Feature(
    "resume",
    "this engine cannot resume answers or take over a first token",
    _REQUESTS
    + _OUTPUTS
    + symbols(f"""
        - the scheduler's and the grammar's view of a request that already has output. The answer
            repeats tokens, or its JSON is not that of its schema
        {SCHEDULER_CLASS}.add_request takes self request
        {SCHEDULER_CLASS}._handle_blocked_waiting_request takes self request
        {SCHEDULER_CLASS} has grammar_compile_error_reqs max_model_len schedule
            structured_output_manager
        {SCHED}.output:SchedulerOutput has scheduled_new_reqs
        {SCHED}.output:NewRequestData has num_computed_tokens req_id
        vllm.v1.structured_output:StructuredOutputManager.accept_tokens takes self request
            new_token_ids
        vllm.v1.metrics.stats:PrefillStats.set takes self num_prompt_tokens
            num_local_cached_tokens num_external_cached_tokens
        - vLLM's rules for the end of an answer. An answer whose replayed tokens end it continues
        {SCHED}.utils:check_stop takes request max_model_len
        vllm.v1.request:Request has abort_immediately append_output_token_ids
            get_finished_reason max_tokens num_output_tokens output_token_ids prefill_stats
            resumable sampling_params stop_reason
        vllm.v1.request:RequestStatus has WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        vllm.v1.request:Request.from_engine_core_request takes request block_hasher
        {ENGINE}:FinishReason has STOP
        {ENGINE}:EngineCoreOutput has new_logprobs
        - the HTTP server's state of a request, which replayed tokens are fed to. Resumed answers
            lack text or fail
        {OUTPUTS}:OutputProcessor.add_request takes self request prompt parent_req request_index
            queue
        {OUTPUTS}:OutputProcessor.process_outputs takes self engine_core_outputs
        {OUTPUTS}:OutputProcessorOutput has request_outputs
        {OUTPUTS}:RequestOutputCollector.put takes self output
        {OUTPUTS}:OutputProcessor.abort_requests takes self request_ids internal
        {OUTPUTS}:OutputProcessor has has_request request_states
        {OUTPUTS}:RequestState has is_prefilling queue request_id sent_tokens_offset
            stream_interval
        {ENGINE}.logprobs:LogprobsProcessor has num_logprobs
        {ENGINE}:EngineCoreRequest has abort_immediately prompt_token_ids request_id
            sampling_params
        vllm.v1.outputs:LogprobsLists takes logprob_token_ids logprobs sampled_token_ranks
        - limits of the model and of the request. A payload that does not fit reaches the engine
        vllm.entrypoints.generate.base.serving:GenerateBaseServing has engine_client model_config
        {ENGINE}.async_llm:AsyncLLM has vllm_config
        {CONFIG}:ModelConfig has get_vocab_size
        {CHAT} has logprobs max_completion_tokens max_tokens messages stream top_logprobs
        {COMPLETION} has logprobs max_tokens prompt stream
        vllm.sampling_params:SamplingParams has max_tokens min_tokens
        vllm.renderers.chat_utils:has_non_text_content takes messages
        - the workers' view of a request that already has output. Penalties and seeds act as if the
            output were prompt
        vllm.v1.worker.gpu_input_batch:InputBatch.add_request takes self request
        vllm.v1.worker.gpu_input_batch:CachedRequestState has generator output_token_ids
            sampling_params
    """),
    requires=(SCHEDULER, STREAMS),
    modules=(
        "optional.resume",
        *_EARLY_END_MODULES,
        "optional.patch_replay",
        "optional.patch_worker",
    ),
    patches=(*_EARLY_END_PATCHES, "optional.patch_worker", "optional.patch_replay"),
)

TIER_2 = (
    STOCK_PEERS,
    SEVERAL,
    EARLY_EXIT,
    STREAMS,
    LOAD_FAILURES,
    RENDERS,
    SCHEDULER,
    FAILURE_POLICY,
    IDLE_REST,
    LENDING,
    LAST_WINDOW,
    EARLY_WRITES,
    STEP_MODEL,
    STEP_BUDGET,
    STATE_LAYERS,
    LOOKAHEAD,
    THRESHOLD,
    RESUME,
    PREEMPTION_RETURN,
)
