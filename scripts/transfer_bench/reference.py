"""An engine with a tiny model, as a process: ours for reference, or vLLM with our connector."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.bench.errors import BenchError
from scripts.bench.ports import free_ports

START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
BLOCK_SIZE = 32


RECEIVED = "disagg_engine_kv_blocks_received"


class ReferenceEngine:
    """Serves a model, by default the tiny one, which it writes into `directory`; the log is there
    too. `buffers`: where KV is handed over, the device's own memory by default, or "cpu"."""

    module = "engine_ext.reference.cli"
    start_seconds = START_SECONDS

    def __init__(
        self,
        directory: Path,
        num_blocks: int,
        device: str = "cpu",
        lease_seconds: int = 600,
        buffers: str | None = None,
        model: Path | None = None,
    ) -> None:
        from engine_ext.reference.tiny_model import write_tiny_model

        self._port, side_channel = free_ports(2)
        directory.mkdir(exist_ok=True)
        self._log = directory / "engine.log"
        model = model or write_tiny_model(directory / "model")
        transfer: dict[str, Any] = {
            "kv_connector": "DisaggConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kv_lease_duration": lease_seconds},
        }
        if buffers is not None:
            transfer["kv_buffer_device"] = buffers
        options = {
            "--model": model,
            "--port": self._port,
            "--served-model-name": "tiny",
            "--dtype": "float32",
            "--block-size": BLOCK_SIZE,
            **self._options(num_blocks, device, transfer),
        }
        command = [sys.executable, "-m", self.module]
        command += [str(word) for option in options.items() for word in option if word != ""]
        environment = {
            **os.environ,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._wait_until_ready()

    def _options(self, num_blocks: int, device: str, transfer: dict[str, Any]) -> dict[str, Any]:
        return {
            "--num-threads": 1,
            "--device": device,
            "--num-blocks": num_blocks,
            "--kv-transfer-config": json.dumps(transfer),
        }

    def lease(self, count: int) -> None:
        """Prefills whose single block each nobody reads."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._prefill, range(count)))

    def cpu_percent(self, seconds: float) -> float:
        started, spent = time.monotonic(), self._cpu_seconds()
        time.sleep(seconds)
        return 100 * (self._cpu_seconds() - spent) / (time.monotonic() - started)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)

    def __enter__(self) -> "ReferenceEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cpu_seconds(self) -> float:
        """Of all threads now alive: the first number of proc(5)'s schedstat, in nanoseconds."""
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def _prefill(self, index: int) -> None:
        """Every prompt differs from its first token on: no block is shared."""
        prompt = [index % 256, index // 256, *range(BLOCK_SIZE // 2)]
        params = {"do_remote_decode": True}
        self.complete(prompt, 1, params)

    def complete(
        self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Greedy; the answer carries token ids. Raises BenchError."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": params,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise BenchError(f"the engine answered {error.code}: {error.read()!r}") from None

    def blocks_received(self) -> int:
        """KV blocks that came from another engine."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        found = [line for line in lines if line.startswith(RECEIVED) and "_created" not in line]
        if not found:
            raise BenchError("the engine does not count received blocks")
        return int(float(found[0].rpartition(" ")[2]))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise BenchError(f"the engine did not start; see {self._log}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


class VllmEngine(ReferenceEngine):
    """Of the vLLM that is installed beside this Python; it finds the device by itself."""

    module = "vllm.entrypoints.openai.api_server"
    start_seconds = 600.0

    def _options(self, num_blocks: int, device: str, transfer: dict[str, Any]) -> dict[str, Any]:
        ours = transfer | {"kv_connector_module_path": "engine_ext.vllm"}
        if device == "cpu":
            ours["kv_buffer_device"] = "cpu"
        return {
            "--host": "127.0.0.1",
            "--kv-transfer-config": json.dumps(ours),
            "--num-gpu-blocks-override": num_blocks,
            "--gpu-memory-utilization": 0.25,  # three of them on one device
            "--max-num-seqs": 8,
            "--enforce-eager": "",
        }
