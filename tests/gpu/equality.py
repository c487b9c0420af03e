"""Check that two engines on one device answer as one engine alone: the oracle for wrong KV.

    python -m tests.gpu.equality --device cuda
    python -m tests.gpu.equality --engine vllm --lengths 33,16001 --mode push
    python -m tests.gpu.equality --engine vllm --kind latents

Exit status: 0 all answers are equal; 1 one is not, or an engine does not start; 4 (with --kind)
this vLLM cannot run a model of that kind, with any connector or none.

This module imports only the standard library: scripts/gpu_check.sh runs it on bare machines.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

from scripts.benchmarks.common import BenchError, free_ports, positive

LENGTHS = (1, 31, 32, 33, 64, 100, 255, 256, 500)
"""Lengths of prompts in tokens: around one block, and several blocks."""
MAX_TOKENS = 16
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Between log-probabilities: tests/integration/oracle.py says why, of float32. In bfloat16 nothing
differs where the same kernels compute the same shapes, see `alone_answers`."""
COUNTER_TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 300.0
BLOCK_SIZE = 32
MAX_LOG_LINES = 30
"""The end of an engine's log that is shown when it fails."""
CONNECTORS = {"pull": "DisaggConnector", "push": "DisaggPushConnector"}
KINDS = {
    "windows of other block sizes": "gemma4_model.write_gemma4_model",
    "latents": "mla_model.write_mla_model",
    "sparse attention": "sparse_model.write_sparse_model",
    "Mamba beside attention": "state_model.write_state_model",
    "delta nets": "qwen_next_model.write_qwen_next",
}
"""Functions of tests.vllm that write a tiny model of each kind: Gemma 4, DeepSeek-V2 and V3.2,
Falcon-H1, Qwen3-Next."""
CHUNK = 256
UNABLE = 4
COORDINATES = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
"""The address of a prefill engine in `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def in_body(cls, body: dict[str, Any]) -> Answer:
        """Read a completion with token ids and log-probabilities."""
        choice = body["choices"][0]
        return cls(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))

    def difference(self, other: Answer, tolerance: float) -> str:
        """Describe the difference; empty where log-probabilities differ within the tolerance."""
        if self.tokens != other.tokens:
            return f"tokens {list(self.tokens)} alone, {list(other.tokens)} by two"
        far = distance(self.logprobs, other.logprobs)
        if far <= tolerance:
            return ""
        return f"log-probabilities differ by {far:.2g}, more than {tolerance:g}"


def distance(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference; infinite for different lengths and for what is no number."""
    pairs = zip_longest(some, others, fillvalue=float("inf"))
    apart = [abs(one - other) for one, other in pairs]
    return max((far if far == far else float("inf") for far in apart), default=float("inf"))


@dataclass(frozen=True, slots=True)
class Setup:
    num_blocks: int
    device: str = "cpu"
    mode: str = "pull"
    dtype: str = "float32"
    buffers: str | None = None
    """The memory that KV is transferred from: the device's by default, or "cpu"."""
    model: Path | None = None
    """The tiny model by default, written beside the log."""
    lease_seconds: int = 600
    checksums: bool = False
    kind: str | None = None
    """One of KINDS; None: the tiny model of the reference engine."""
    is_plain: bool = False
    """vLLM alone, with nothing of ours."""


class EngineError(BenchError):
    """An engine does not start or answer."""


class EngineProcess:
    """An engine with a tiny model, as a process whose log is in `directory`."""

    module = "engine_ext.reference.cli"
    start_timeout_s = START_TIMEOUT_S
    fetched = r"disagg_engine_prompt_tokens_fetched(_total)?"
    """The counter of prompt tokens whose KV came from another engine."""

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
            **self._options(setup, _transfer(setup)),
        }
        command = [sys.executable, "-m", self.module]
        command += [str(word) for option in options.items() for word in option if word != ""]
        environment = {
            **os.environ,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            **self._environment(directory, setup),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._wait_until_ready()

    def _options(self, setup: Setup, transfer: dict[str, Any]) -> dict[str, Any]:
        return {
            "--num-threads": 1,
            "--device": setup.device,
            "--block-size": BLOCK_SIZE,
            "--num-blocks": setup.num_blocks,
            "--kv-transfer-config": json.dumps(transfer),
        }

    def _environment(self, directory: Path, setup: Setup) -> dict[str, str]:
        return {}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def complete(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        request_id: str = "",
    ) -> dict[str, Any]:
        """Return a greedy completion with token ids and log-probabilities. Raises BenchError."""
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
            self._request("/v1/completions", json.dumps(body).encode(), headers)
        )
        return answer

    def coordinates(self) -> dict[str, Any]:
        """Return the address that the engine reports to routers."""
        (rank,) = json.loads(self._request("/disagg/identity"))["ranks"]
        return {key: rank[key] for key in COORDINATES}

    def tokens_fetched(self) -> int:
        """Return how many prompt tokens' KV came from another engine."""
        lines = self._request("/metrics").decode().splitlines()
        samples = (line.rpartition(" ") for line in lines)
        found = [float(value) for name, _, value in samples if re.fullmatch(self.fetched, name)]
        if not found:
            raise self._failure("the engine does not count tokens that it fetched")
        return int(sum(found))

    def _request(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        url = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, body, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            text = error.read()
            raise self._failure(f"the engine answered {error.code} to {path}: {text!r}") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(f"the engine did not answer to {path}: {error!r}") from None

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
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

    def _failure(self, what: str) -> EngineError:
        """Show the end of the log, which may be kept on another machine, and return the error."""
        with self._log.open(errors="replace") as log:
            last = "".join(deque(log, MAX_LOG_LINES))
        sys.stderr.write(f"the end of {self._log}:\n{last}\n")
        return EngineError(f"{what}; see {self._log}")


class VllmProcess(EngineProcess):
    """The vLLM that is installed beside this Python, which detects the device.

    It has our scheduler class and plugin, as in docs/with-vllm.md, even if they are not installed.
    """

    module = "vllm.entrypoints.openai.api_server"
    start_timeout_s = 600.0
    fetched = r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\}'

    def _options(self, setup: Setup, transfer: dict[str, Any]) -> dict[str, Any]:
        ours = transfer | {"kv_connector_module_path": "engine_ext.vllm"}
        options = {
            "--host": "127.0.0.1",
            "--max-num-seqs": 8,
            "--enforce-eager": "",
        }
        if setup.kind is None:
            options |= {"--block-size": BLOCK_SIZE, "--num-gpu-blocks-override": setup.num_blocks}
        else:  # vLLM chooses the blocks. A last token behind whole chunks has a step of its own.
            options |= {"--no-enable-prefix-caching": "", "--max-num-batched-tokens": CHUNK}
        if setup.device == "cpu":
            ours["kv_buffer_device"] = "cpu"
            if setup.kind == "latents":  # with AMX vLLM takes a backend that knows no float32
                options["--attention-backend"] = "CPU_MLA"
        else:
            # Three start at once on one device: none may measure what the others leave of it.
            options |= {"--gpu-memory-utilization": 0.2, "--kv-cache-memory-bytes": 2**30}
        if setup.is_plain:
            return options
        scheduler = "engine_ext.vllm.scheduler.DisaggAsyncScheduler"
        return options | {"--scheduler-cls": scheduler, "--kv-transfer-config": json.dumps(ours)}

    def _environment(self, directory: Path, setup: Setup) -> dict[str, str]:
        plugins = {"VLLM_PLUGINS": "none"} if setup.is_plain else {}
        return plugins | {
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
    """Return a directory where vLLM finds our plugin, as if this checkout were installed."""
    metadata = directory / "plugin" / "disagg_router-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: disagg-router\nVersion: 0\n")
    entry = "[vllm.general_plugins]\ndisagg = engine_ext.vllm.plugin:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    return str((directory / "plugin").resolve())


ENGINES: dict[str, Callable[[Path, Setup], EngineProcess]] = {
    "reference": EngineProcess,
    "vllm": VllmProcess,
}


@dataclass(frozen=True, slots=True)
class Trio:
    alone: EngineProcess
    prefiller: EngineProcess
    decoder: EngineProcess


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="equality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--engine", choices=ENGINES, default="reference")
    parser.add_argument("--kind", choices=KINDS, help="a model of this kind, in vLLM")
    parser.add_argument("--mode", choices=CONNECTORS, default="pull")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--buffers", choices=("cpu", "cuda"), help="where KV is handed over")
    parser.add_argument("--checksums", action="store_true", help="with kv_checksum; pull only")
    parser.add_argument("--lengths", type=_lengths, default=LENGTHS, help="of prompts, in tokens")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the engines' logs there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("UCX_NET_DEVICES", "all")  # UCX otherwise looks for RDMA devices only.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    setup = Setup(
        0,
        options.device,
        options.mode,
        options.dtype,
        options.buffers,
        checksums=options.checksums,
        kind=options.kind,
    )
    try:
        summary = compare(setup, options.engine, options.lengths, options.logs)
    except BenchError as error:
        is_asked = options.kind and isinstance(error, EngineError)
        problem = why_unable(setup, options.logs) if is_asked else None
        sys.stderr.write(f"{problem or f'equality: error: {error}'}\n")
        return UNABLE if problem else 1
    sys.stdout.write(f"{summary}\n")
    return 0


def why_unable(setup: Setup, logs: Path | None) -> str | None:
    """Return why this vLLM answers nothing with such a model, without anything of ours, either;
    None if it does."""
    with tempfile.TemporaryDirectory() as directory:
        folder = (logs or Path(directory)) / "plain"
        model = _write_model(Path(directory) / "model", setup, 1000)
        try:
            with VllmProcess(folder, replace(setup, model=model, is_plain=True)) as plain:
                plain.complete([1] * max(LENGTHS), 2)
        except EngineError as error:
            log = (folder / "engine.log").read_text(errors="replace")
            reasons = re.findall(r"(?m)(?:^|[\])] )(\w+(?:Error|Exception): .*)", log)
            return f"this vLLM cannot run such a model: {reasons[0] if reasons else error}"
    return None


def compare(
    setup: Setup,
    engine: str = "reference",
    lengths: Sequence[int] = LENGTHS,
    logs: Path | None = None,
) -> str:
    """Compare answers. Raises BenchError if one differs, or if KV was not transferred."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as engines:
        trio = _start(setup, engine, max(lengths), Path(directory), logs, engines)
        farthest, fetched = 0.0, 0
        for length in lengths:
            prompt = [random.Random(length * 1000 + i).randrange(256) for i in range(length)]
            expected = alone_answers(trio.alone, prompt, engine)
            before = trio.decoder.tokens_fetched()
            found = _by_two(trio, prompt, setup.mode)
            if difference := expected.difference(found, TOLERANCES[setup.dtype]):
                raise BenchError(f"prompt of {length} tokens: {difference}")
            fetched += _fetched(trio.decoder, before, length)
            farthest = max(farthest, distance(expected.logprobs, found.logprobs))
    return (
        f"{len(lengths)} prompts of up to {max(lengths)} tokens on {setup.device}: every token "
        f"equal, log-probabilities within {farthest:.1g}, KV of {fetched} tokens transferred"
    )


def _start(
    setup: Setup, engine: str, longest: int, directory: Path, logs: Path | None, engines: ExitStack
) -> Trio:
    positions = max(longest, 1000) + 2 * MAX_TOKENS
    # One for all: to vLLM, models at two places are two models.
    model = _write_model(directory / "model", setup, positions)
    full = replace(setup, num_blocks=256 + 2 * (positions // BLOCK_SIZE), model=model)

    def start(name: str) -> EngineProcess:
        return engines.enter_context(ENGINES[engine]((logs or directory) / name, full))

    with ThreadPoolExecutor(3) as pool:
        return Trio(*pool.map(start, ("alone", "p", "d")))


def _write_model(directory: Path, setup: Setup, positions: int) -> Path:
    from engine_ext.reference.tiny_model import TinyModel, write_tiny_model

    if setup.kind is None:
        return write_tiny_model(directory, TinyModel(max_positions=positions))
    module, _, name = KINDS[setup.kind].partition(".")
    written: Path = getattr(importlib.import_module(f"tests.vllm.{module}"), name)(directory)
    return written


def alone_answers(alone: EngineProcess, prompt: list[int], engine: str) -> Answer:
    """Return one engine's own answer, computed in the shapes in which a decode engine computes it.

    A decode engine computes a prompt's last token in a step of its own. On a GPU vLLM's kernels
    round differently there (in float32, too: Triton multiplies in TF32), which may change tokens.
    So vLLM is asked twice: the second time it takes all but the last token of a prompt of whole
    blocks and a token from its prefix cache.
    """
    if engine == "vllm":
        alone.complete(prompt, 1)
    return Answer.in_body(alone.complete(prompt, MAX_TOKENS))


def _by_two(trio: Trio, prompt: list[int], mode: str) -> Answer:
    request_id = str(uuid.uuid4())
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(trio.prefiller.complete, prompt, 1, asked, request_id)
        if mode == "pull":
            params = prefill.result().get("kv_transfer_params")
            if not params:
                raise BenchError("the prefill engine offers no KV")
        else:
            params = {"do_remote_prefill": True, "remote_request_id": request_id}
            params |= trio.prefiller.coordinates()
        answer = trio.decoder.complete(prompt, MAX_TOKENS, {"retain": False, **params}, request_id)
        prefill.result()
    return Answer.in_body(answer)


def _fetched(decoder: EngineProcess, before: int, length: int) -> int:
    """Return how many tokens were fetched. Raises BenchError if the decoder computed them itself.

    All of a prompt but its last token is fetched; the counter follows the answer.
    """
    deadline = time.monotonic() + COUNTER_TIMEOUT_S
    while (fetched := decoder.tokens_fetched() - before) < length - 1:
        if time.monotonic() > deadline:
            raise BenchError(
                f"prompt of {length} tokens: the decode engine was given the KV of {fetched} and "
                "computed the others itself"
            )
        time.sleep(0.05)
    return fetched


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


if __name__ == "__main__":
    raise SystemExit(main())
