"""Sparse attention (DeepSeek-V3.2's) on a CPU, where vLLM has no backend for it: a plugin of
vLLM's, for the servers of one test. The kernels are those of tests/vllm/sparse_kernels.py, and four
settings that vLLM's CPU build changes for latent attention are put back.
"""

from typing import Any

KEPT = (
    ("cache_config", "block_size"),
    ("cache_config", "enable_prefix_caching"),
    ("scheduler_config", "enable_chunked_prefill"),
    ("scheduler_config", "max_num_batched_tokens"),
)


def register() -> None:
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models import deepseek_v2
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    from tests.vllm import sparse_kernels

    backend_of, check = CpuPlatform.get_attn_backend_cls, CpuPlatform.check_and_update_config

    def get_attn_backend_cls(
        cls: Any, /, selected_backend: Any, attn_selector_config: Any, **more: Any
    ) -> str:
        if attn_selector_config.use_sparse:
            return f"{sparse_kernels.__name__}.Backend"
        return str(backend_of(selected_backend, attn_selector_config, **more))

    def check_and_update_config(vllm_config: Any) -> None:
        given = [(getattr(vllm_config, part), name) for part, name in KEPT]
        before = [getattr(part, name) for part, name in given]
        check(vllm_config)
        for (part, name), value in zip(given, before, strict=True):
            setattr(part, name, value)

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    DeepseekV32IndexerBackend.get_builder_cls = staticmethod(lambda: sparse_kernels.Builder)
    SparseAttnIndexer.forward_native = SparseAttnIndexer.forward_cpu = sparse_kernels.choose
    deepseek_v2.per_token_group_quant_fp8 = sparse_kernels.as_they_are
