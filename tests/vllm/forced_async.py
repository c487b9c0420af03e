"""Asynchronous scheduling on a CPU, where vLLM 0.32 switches it off because it brings nothing: a
plugin of vLLM's, for the servers of one test."""

from typing import Any


def register() -> None:
    """What vLLM had decided before it asked the platform stands."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
