"""vLLM servers on the CPU, each with a connector or without one."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.processes import Server, serving

OURS: dict[str, Any] = {
    "kv_connector": "DisaggConnector",
    "kv_connector_module_path": "engine_ext.vllm",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
}
PUSH: dict[str, Any] = {**OURS, "kv_connector": "DisaggPushConnector"}
STOCK: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
SCHEDULER = ("--scheduler-cls", "engine_ext.vllm.scheduler.DisaggScheduler")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}
START_SECONDS = 300


@dataclass(frozen=True)
class Fleet:
    python: Path
    model: Path
    logs: Path
    free_ports: Callable[[int], list[int]]

    @contextmanager
    def server(
        self, name: str, transfer: dict[str, Any] | None = None, *options: str
    ) -> Iterator[Server]:
        port, side_channel = self.free_ports(2)
        command = ["vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--block-size", "32", "--enforce-eager", "--dtype", "float32"]
        command += ["--max-model-len", "2048", *options]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        with serving(
            name,
            command,
            port,
            self.logs,
            "/health",
            {**ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)},
            python=self.python,
            start_seconds=START_SECONDS,
        ) as server:
            yield server
