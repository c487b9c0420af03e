"""Pipeline stages on a CPU, where vLLM 0.32 starts with them and ends at the first prompt: a plugin
of vLLM's, for the servers of one test. One thing is missing there, and is added.

A stage takes over what the one before it hands on into buffers that only a trial run makes. The CPU
build has none where nothing is compiled (`--enforce-eager`).
"""

from typing import Any


def register() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.sync_and_gather_intermediate_tensors

    def sync_and_gather_intermediate_tensors(self: Any, *given: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *given)

    GPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors
