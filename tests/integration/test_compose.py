"""compose.yaml, as far as it can be tried without Docker: its services run as processes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import find_free_ports
from tests.integration.oracle import complete
from tests.integration.processes import Launcher, Server, serving, wait_for
from tests.k8s.dockerfile import stages

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())[
    "services"
]
ENGINES = [name for name in SERVICES if name not in ("model", "router")]
PROGRAMS = {"reference": "engine_ext.reference.cli", "router": "router.commands.cli"}
CHAT_MODEL = "SmolLM2-135M-Instruct"


def test_services_use_images_of_the_dockerfile() -> None:
    known = stages(ROOT / "Dockerfile")
    for service in SERVICES.values():
        target = service["build"]["target"]
        assert service["image"].startswith(f"disagg-{target}:")
        if "entrypoint" not in service:
            (entrypoint,) = known[target].all("ENTRYPOINT")
            assert entrypoint == f'["disagg-{"engine" if target == "reference" else "router"}"]'


@contextlib.contextmanager
def running(launcher: Launcher, ports: dict[str, int]) -> Iterator[dict[str, Server]]:
    """Run the services on ports of this machine, with a small random model."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, port in ports.items():
            service = SERVICES[name]
            command = [PROGRAMS[service["build"]["target"]], *service["command"]]
            replaced = {"--port=8000": f"--port={port}", "/cache/chat": str(launcher.model)}
            replaced |= {f"{one}:8000": f"127.0.0.1:{at}" for one, at in ports.items()}
            for old, new in replaced.items():
                command = [word.replace(old, new) for word in command]
            environment = dict(service.get("environment", {}))
            if "VLLM_NIXL_SIDE_CHANNEL_HOST" in environment:
                assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == name
                (side_channel,) = find_free_ports(1)
                environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "localhost"  # a name, as there
                environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel)
            made = serving(name, command, port, launcher.directory, "/health", environment)
            servers[name] = stack.enter_context(made)
        yield servers


@pytest.mark.slow
def test_services_answer_together_and_survive_a_killed_decode_engine(launcher: Launcher) -> None:
    names = [*ENGINES, "router"]
    ports = dict(zip(names, find_free_ports(len(names)), strict=True))
    with running(launcher, ports) as servers:
        router = servers["router"]
        wait_for(lambda: router.get("/ready").json()["status"] == "ready", "the engines are found")
        assert complete(router, "hello there, " * 20, model=CHAT_MODEL).tokens
        moved = sum(
            sum(
                len(rank["transfers"])
                for rank in servers[name].get("/disagg/leases").json()["ranks"]
            )
            for name in ENGINES
        )
        assert moved
        servers["decode-1"].kill()
        for _ in range(3):
            assert complete(router, "hello again, " * 20, model=CHAT_MODEL).tokens
