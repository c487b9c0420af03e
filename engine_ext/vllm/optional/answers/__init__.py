"""Answers that our scheduler class ends early, and answers that continue another engine's."""

from engine_ext.vllm.compat.probe import Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import (
    CHAT,
    COMPLETION,
    CONFIG,
    ENGINE,
    OUTPUTS,
    SCHED,
    SCHEDULER_CLASS,
)
from engine_ext.vllm.optional.answers import resumed_request
from engine_ext.vllm.optional.streams import STREAMS
from engine_ext.vllm.optional.without_patch import SCHEDULER

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
    "optional.streams.patch_streams",
    "optional.answers.patch_outputs",
    "optional.answers.patch_requests",
)

_EARLY_END_MODULES = ("optional.answers.early_ends", *_EARLY_END_PATCHES)

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
    modules=("optional.answers.threshold", *_EARLY_END_MODULES),
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
    modules=("optional.answers.preemption_return", *_EARLY_END_MODULES),
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
        "optional.answers.resume",
        *_EARLY_END_MODULES,
        "optional.answers.patch_replay",
        "optional.answers.patch_worker",
    ),
    patches=(*_EARLY_END_PATCHES, "optional.answers.patch_worker", "optional.answers.patch_replay"),
)
