"""The routers that are compared: this checkout, another one, vllm-router or smg."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.benchmarks.common import BenchError, free_ports

ROOT = Path(__file__).resolve().parents[2]
OURS = "disagg-router"
CHECKOUT = "checkout"
VLLM_ROUTER = "vllm-router"
SMG = "smg"
PD_FLAGS = {
    VLLM_ROUTER: ("vllm-router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"),
    SMG: ("smg", "launch", "--pd-disaggregation", "--backend", "vllm"),
}
"""The command with which each router from PyPI disaggregates engines that use NixlConnector."""
PEERS = (CHECKOUT, *PD_FLAGS)

Ports = Sequence[int]
LOCAL = ("127.0.0.1",)


def our_command(
    port: int,
    prefillers: Ports,
    decoders: Ports,
    flags: Sequence[str] = (),
    checkout: Path = ROOT,
    hosts: Sequence[str] = LOCAL,
) -> list[str]:
    """Return the command that starts a checkout's router, with default settings but for `flags`."""
    command = ["env", "-C", str(checkout), f"PYTHONPATH={checkout}", sys.executable]
    command += ["-m", "router.commands.cli", "--port", str(port), *flags]
    for role, ports in (("prefiller", prefillers), ("decoder", decoders)):
        command += [f"--{role}-hosts", *(host for host in hosts for _ in ports)]
        command += [f"--{role}-ports", *map(str, [*ports] * len(hosts))]
    return command


def package_command(
    name: str,
    environment: Path,
    port: int,
    prefillers: Ports,
    decoders: Ports,
    flags: Sequence[str] = (),
    hosts: Sequence[str] = LOCAL,
) -> list[str]:
    """Return the command that starts a router of PyPI, see `install_package`."""

    def urls(flag: str, ports: Ports) -> Iterator[str]:
        for host in hosts:
            for each in ports:
                yield from (flag, f"http://{host}:{each}")

    program, *mode = PD_FLAGS[name]
    return [
        *(str(environment / "bin" / program), *mode, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(free_ports(1)[0]), *flags),
        *urls("--prefill", prefillers),
        *urls("--decode", decoders),
    ]


def install_package(name: str, environment: Path) -> None:
    """Make the virtual environment of a router of PyPI unless it is there. Raises BenchError."""
    if (environment / "bin/python").exists():
        return
    venv.create(environment, with_pip=True)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", name]
    if subprocess.run(pip, check=False).returncode:
        shutil.rmtree(environment)
        raise BenchError(f"{name} could not be installed")
