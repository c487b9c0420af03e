"""A prefix cache for MLA on a CPU, where vLLM 0.32 switches it off for this kind of model: a plugin
of vLLM's, for the servers of one test. One setting is put back.

`CpuPlatform.check_and_update_config` forbids it except for AMX. But the other kernels do attend to
tokens of earlier steps too, by `gather_mla_context_cache_cpu` and a merge in PyTorch.
"""

from typing import Any


def register() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        is_cached = vllm_config.cache_config.enable_prefix_caching
        original(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = is_cached

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
