"""Asynchronous scheduling on a CPU, where vLLM 0.32 switches it off because it brings nothing: a
plugin of vLLM's, for the servers of one test."""

from pathlib import Path
from typing import Any

NAME = "forced_async"


def register() -> None:
    """What vLLM had decided before it asked the platform stands."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def write_plugin(directory: Path) -> Path:
    """A directory for PYTHONPATH in which vLLM finds the plugin."""
    metadata = directory / f"{NAME}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{NAME} = {__name__}:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    return directory
