"""The demo's pods as processes: the chart's own commands, arguments, variables and settings."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import yaml

from tests.conftest import find_free_ports
from tests.integration.processes import Server, serving, wait_for
from tests.k8s.chart import Manifest, only, pods, rendered

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "ignore_eos": True,
}


def test_the_demo_answers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(engine(role, tmp_path)) for role in ("prefill", "decode")
        )
        router = stack.enter_context(router_of(prefill, decode, tmp_path))
        answer = httpx.post(f"{router.url}/v1/chat/completions", json=CHAT, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        released = "disagg_engine_kv_leases_released_total"
        wait_for(lambda: prefill.metrics()[released] == 1, "the prefill engine's lease is released")


@contextmanager
def engine(role: str, directory: Path) -> Iterator[Server]:
    pod = dict(pods(rendered("demo")))[f"r-disagg-router-{role}"]
    [make_model], [container] = pod["initContainers"], pod["containers"]
    cache = directory / f"cache-{role}"
    here(make_model["command"], cache)
    [port, side_channel] = find_free_ports(2)
    assert container["command"] == ["disagg-engine"]
    secret = directory / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    here_is = {"/cache": str(cache), "/etc/disagg/secret": str(secret)}
    arguments = container["args"]
    for path, replacement in here_is.items():
        arguments = [one.replace(path, replacement) for one in arguments]
    arguments[arguments.index("--port=8000")] = f"--port={port}"
    variables = variables_of(container) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
    del variables["UCX_TCP_PORT_RANGE"]  # two engines of one machine may not have room in it
    variables = {name: value.replace("/cache", str(cache)) for name, value in variables.items()}
    command = ["engine_ext.reference.cli", *arguments]
    with serving(role, command, port, directory, "/health", variables) as server:
        yield server


def here(command: list[str], cache: Path) -> None:
    program, *arguments = (one.replace("/cache", str(cache)) for one in command)
    assert program == "python"
    cache.mkdir()
    subprocess.run([sys.executable, *arguments], check=True, timeout=240, capture_output=True)


def variables_of(container: Manifest) -> dict[str, str]:
    """As the kubelet would fill them in."""
    return {one["name"]: one.get("value", "127.0.0.1") for one in container["env"]}


@contextmanager
def router_of(prefill: Server, decode: Server, directory: Path) -> Iterator[Server]:
    """With the chart's settings, but for those that name other machines."""
    settings = yaml.safe_load(only(rendered("demo"), "ConfigMap")["data"]["config.yaml"])
    settings = {key: value for key, value in settings.items() if not key.startswith("kubernetes-")}
    port, liveness = find_free_ports(2)
    settings |= {"port": port, "liveness-port": liveness, "shutdown-delay": 0}
    settings |= {"prefiller-hosts": ["127.0.0.1"], "prefiller-ports": [prefill.port]}
    settings |= {"decoder-hosts": ["127.0.0.1"], "decoder-ports": [decode.port]}
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = ["router.commands.cli", "--config", str(file)]
    with serving("router", command, port, directory, "/ready") as server:
        health = httpx.get(f"http://127.0.0.1:{liveness}/health", timeout=30)
        assert health.status_code == 200
        yield server
