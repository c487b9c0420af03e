"""The feature that adds `kv_transfer_params` and token ids to vLLM's streams."""

from engine_ext.vllm.compat.probe import ANY, Feature, symbols
from engine_ext.vllm.compat.vllm_symbols import CHAT, CHAT_SERVING, COMPLETION, COMPLETION_SERVING

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
    modules=("optional.streams.patch_streams",),
    patches=("optional.streams.patch_streams",),
)
