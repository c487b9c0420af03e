"""An engine with a tiny model, as a process: ours for reference, or vLLM with our connector."""

import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.errors import BenchError
from scripts.bench.ports import free_ports

START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
BLOCK_SIZE = 32
LAST_LINES = 30
"""Of an engine's log, told where it fails."""
CONNECTORS = {"pull": "DisaggConnector", "push": "DisaggPushConnector"}
COORDINATES = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
"""Where a prefill engine is, in the words of `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class Setup:
    num_blocks: int
    device: str = "cpu"
    mode: str = "pull"
    dtype: str = "float32"
    buffers: str | None = None
    """Where KV is handed over, the device's own memory by default, or "cpu"."""
    model: Path | None = None
    """By default the tiny one, which is written beside the log."""
    lease_seconds: int = 600
    checksums: bool = False


class ReferenceEngine:
    """Its log is in `directory`."""

    module = "engine_ext.reference.cli"
    start_seconds = START_SECONDS
    fetched = r"disagg_engine_prompt_tokens_fetched(_total)?"
    """Its counter of prompt tokens whose KV another engine gave."""

    def __init__(self, directory: Path, setup: Setup) -> None:
        from engine_ext.reference.tiny_model import write_tiny_model

        self._port, side_channel = free_ports(2)
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "engine.log"
        options = {
            "--model": setup.model or write_tiny_model(directory / "model"),
            "--port": self._port,
            "--served-model-name": "tiny",
            "--dtype": setup.dtype,
            "--block-size": BLOCK_SIZE,
            **self._options(setup, _transfer(setup)),
        }
        command = [sys.executable, "-m", self.module]
        command += [str(word) for option in options.items() for word in option if word != ""]
        environment = {
            **os.environ,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            **self._environment(directory),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._wait_until_ready()

    def _options(self, setup: Setup, transfer: dict[str, Any]) -> dict[str, Any]:
        return {
            "--num-threads": 1,
            "--device": setup.device,
            "--num-blocks": setup.num_blocks,
            "--kv-transfer-config": json.dumps(transfer),
        }

    def _environment(self, directory: Path) -> dict[str, str]:
        return {}

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
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        request_id: str = "",
    ) -> dict[str, Any]:
        """Greedy; the answer carries token ids and log-probabilities. Raises BenchError."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": params,
        }
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        answer: dict[str, Any] = json.loads(
            self._asked("/v1/completions", json.dumps(body).encode(), headers)
        )
        return answer

    def coordinates(self) -> dict[str, Any]:
        """Where it is, as it tells a router."""
        (rank,) = json.loads(self._asked("/disagg/identity"))["ranks"]
        return {key: rank[key] for key in COORDINATES}

    def tokens_fetched(self) -> int:
        """Prompt tokens whose KV came from another engine."""
        lines = self._asked("/metrics").decode().splitlines()
        samples = (line.rpartition(" ") for line in lines)
        found = [float(value) for name, _, value in samples if re.fullmatch(self.fetched, name)]
        if not found:
            raise self._failure("the engine does not count tokens that it fetched")
        return int(sum(found))

    def _asked(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        url = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, body, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            said = error.read()
            raise self._failure(f"the engine answered {error.code} to {path}: {said!r}") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(f"the engine did not answer to {path}: {error!r}") from None

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise self._failure("the engine did not start")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                return True
        except OSError:
            return False

    def _failure(self, what: str) -> BenchError:
        """Its log is shown first, for whoever keeps it may not be who reads this."""
        with self._log.open(errors="replace") as log:
            last = "".join(deque(log, LAST_LINES))
        sys.stderr.write(f"the end of {self._log}:\n{last}\n")
        return BenchError(f"{what}; see {self._log}")


class VllmEngine(ReferenceEngine):
    """Of the vLLM that is installed beside this Python; it finds the device by itself. With our
    scheduler class and our plugin, as in the README, installed or not."""

    module = "vllm.entrypoints.openai.api_server"
    start_seconds = 600.0
    fetched = r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\}'

    def _options(self, setup: Setup, transfer: dict[str, Any]) -> dict[str, Any]:
        ours = transfer | {"kv_connector_module_path": "engine_ext.vllm"}
        options = {
            "--host": "127.0.0.1",
            "--scheduler-cls": "engine_ext.vllm.scheduler.DisaggAsyncScheduler",
            "--num-gpu-blocks-override": setup.num_blocks,
            "--max-num-seqs": 8,
            "--enforce-eager": "",
        }
        if setup.device == "cpu":
            ours["kv_buffer_device"] = "cpu"
        else:
            # Three start at once on one device: none may measure what the others leave of it.
            options |= {"--gpu-memory-utilization": 0.2, "--kv-cache-memory-bytes": 2**30}
        return options | {"--kv-transfer-config": json.dumps(ours)}

    def _environment(self, directory: Path) -> dict[str, str]:
        return {
            "PYTHONPATH": os.pathsep.join([_plugin(directory), os.getenv("PYTHONPATH", "")]),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled when it is first used
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }


def _transfer(setup: Setup) -> dict[str, Any]:
    transfer: dict[str, Any] = {
        "kv_connector": CONNECTORS[setup.mode],
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kv_lease_duration": setup.lease_seconds,
            "kv_checksum": setup.checksums,
        },
    }
    return transfer | ({"kv_buffer_device": setup.buffers} if setup.buffers else {})


def _plugin(directory: Path) -> str:
    """A directory in which vLLM finds our plugin, as if this checkout were installed."""
    metadata = directory / "plugin" / "disagg_router-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: disagg-router\nVersion: 0\n")
    entry = "[vllm.general_plugins]\ndisagg = engine_ext.vllm.plugin:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    return str((directory / "plugin").resolve())
