"""Cached states on a CPU, where vLLM 0.32 starts with them and ends at the first longer prompt: a
plugin of vLLM's, for the servers of one test. One thing is missing there, and is left out.

Mamba-2 there says that it can put by the state in the middle of a step, which its kernels for GPUs
can; the one for CPUs returns the last state alone. Without, vLLM ends a step where a state is to be
put by, as it does for other layers that keep a state.
"""

from dataclasses import replace
from typing import Any


def register() -> None:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    original = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        return replace(original(self, vllm_config), num_prefill_checkpoint_blocks=0)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
