"""A router before a pair of reference engines, as processes of the project's own environment; and
one before engines that say what a test wants."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.benchmarks.common import free_ports
from scripts.mock_engine import MockEngine, Script
from tests.integration.processes import BOTH_WAYS, Server, metric, serving, wait_for
from tests.unit.router.engine_scripts import usual_prefill
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.openai.chats import thinks_and_calls

# Of the project's environment; not resolved, or it would be another one.
PYTHON = Path(os.environ.get("DISAGG_ROUTER_PYTHON", ".venv/bin/python")).absolute()
# The folder with node_modules.
CLIENTS = Path(os.environ.get("DISAGG_CLIENTS", "/nowhere"))
MODEL = "tiny"
# Tokens of an answer that lasts for seconds, so that its client leaves before its end.
LASTING = 7000
# litellm asks the internet for prices otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
WRITE_MODEL = (
    "import pathlib, sys; from engine_ext.reference.tiny_model import write_tiny_model; "
    "write_tiny_model(pathlib.Path(sys.argv[1]))"
)


@dataclass(frozen=True)
class Stack:
    router: Server
    prefiller: Server
    decoder: Server

    @property
    def openai(self) -> str:
        return f"{self.router.url}/v1"

    def count(self, endpoint: str, flow: str = "pull", outcome: str = "ok") -> float:
        """Requests that ended so, by the router's own books."""
        wanted = (f'endpoint="{endpoint}"', f'flow="{flow}"', f'outcome="{outcome}"')
        return sum(
            value
            for name, value in self.router.metrics().items()
            if name.startswith("disagg_router_requests_total{") and all(w in name for w in wanted)
        )

    def left(self) -> float:
        """Clients that left before their answer's end."""
        name = "disagg_router_client_disconnects_total"
        return sum(v for n, v in self.router.metrics().items() if n.startswith(name))

    def wait_for_one_to_leave(self, before: float) -> None:
        """The router has noticed, and no engine works for it any more."""
        wait_for(lambda: self.left() > before, "the router has noticed", 60)
        wait_for(lambda: not self._running(), "its engines are idle", 60)

    def _running(self) -> float:
        name = "disagg_engine_requests_running.*"
        return metric(self.prefiller, name) + metric(self.decoder, name)


@contextmanager
def engine_server(name: str, model: Path, folder: Path) -> Iterator[Server]:
    port, side_channel = free_ports(2)
    transfer = {
        "kv_connector": "DisaggConnector",
        "kv_role": "kv_both",
        "engine_id": f"{name}-{port}",
        "kv_connector_extra_config": BOTH_WAYS,
    }
    command = ["engine_ext.reference.cli", "--model", str(model), "--port", str(port)]
    command += ["--num-threads", "1", "--served-model-name", MODEL]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    variables = {
        "UCX_NET_DEVICES": "all",
        "NIXL_LOG_LEVEL": "ERROR",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
    }
    with serving(name, command, port, folder, "/health", variables, PYTHON) as server:
        yield server


@contextmanager
def router_server(prefiller: int, decoder: int, folder: Path, *options: str) -> Iterator[Server]:
    (port,) = free_ports(1)
    command = ["router.commands.cli", "--port", str(port), "--health-timeout", "10"]
    # KV moves, however quick the tiny engines are.
    command += ["--target-itl", "0"]
    command += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(prefiller)]
    command += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(decoder), *options]
    with serving("router", command, port, folder, "/ready", None, PYTHON) as server:
        yield server


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, model = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("model")
    subprocess.run([PYTHON, "-c", WRITE_MODEL, str(model)], check=True, timeout=120)
    with (
        engine_server("prefill", model, folder) as prefiller,
        engine_server("decode", model, folder) as decoder,
        router_server(prefiller.port, decoder.port, folder) as server,
    ):
        yield Stack(server, prefiller, decoder)


@dataclass(frozen=True)
class Acted:
    """A router whose decoder thinks, says "Well", and calls two tools."""

    router: Server
    decoder: MockEngine


@asynccontextmanager
async def scripted_stack(
    prefill: Script, decode: Script, folder: Path, *flags: str
) -> AsyncIterator[tuple[Server, MockEngine, MockEngine]]:
    """Run a router before two engines that answer with these scripts."""
    async with AsyncExitStack() as open_ones:
        prefiller = await open_ones.enter_async_context(running_engine(prefill))
        decoder = await open_ones.enter_async_context(running_engine(decode))
        starting = router_server(prefiller.port, decoder.port, folder, *flags)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            yield server, prefiller, decoder
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


@pytest.fixture
async def acted(tmp_path: Path) -> AsyncIterator[Acted]:
    async with scripted_stack(usual_prefill, thinks_and_calls, tmp_path) as (server, _, decoder):
        yield Acted(server, decoder)
