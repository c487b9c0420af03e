"""Answers that report which engine's KV could not be loaded."""

from engine_ext.vllm.compat.probe import ANY, Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import ENGINE, PAGES
from engine_ext.vllm.optional.streams import STREAMS

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
    modules=("optional.load_failures.patch_load_errors",),
    patches=("optional.streams.patch_streams", "optional.load_failures.patch_load_errors"),
)
"""With our scheduler class."""
