"""The routers that are compared: this checkout, another one, or vllm-router."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from scripts.benchmarks.common import BenchError, free_ports

ROOT = Path(__file__).resolve().parents[2]
OURS = "disagg-router"
CHECKOUT = "checkout"
VLLM_ROUTER = "vllm-router"
PEERS = (CHECKOUT, VLLM_ROUTER)
START_TIMEOUT_S = 60.0

Ports = Sequence[int]


def our_command(
    port: int, prefillers: Ports, decoders: Ports, flags: Sequence[str] = (), checkout: Path = ROOT
) -> list[str]:
    """Return the command that starts a checkout's router, with default settings but for `flags`."""
    command = ["env", "-C", str(checkout), f"PYTHONPATH={checkout}", sys.executable]
    command += ["-m", "router.commands.cli", "--port", str(port), *flags]
    for role, ports in (("prefiller", prefillers), ("decoder", decoders)):
        command += [f"--{role}-hosts", *["127.0.0.1"] * len(ports)]
        command += [f"--{role}-ports", *map(str, ports)]
    return command


def vllm_router_command(
    environment: Path, port: int, prefillers: Ports, decoders: Ports, flags: Sequence[str] = ()
) -> list[str]:
    def urls(flag: str, ports: Ports) -> Iterator[str]:
        for each in ports:
            yield from (flag, f"http://127.0.0.1:{each}")

    return [
        *(str(environment / "bin/vllm-router"), "--host", "127.0.0.1", "--port", str(port)),
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl"),
        *("--prometheus-port", str(free_ports(1)[0]), *flags),
        *urls("--prefill", prefillers),
        *urls("--decode", decoders),
    ]


def install_vllm_router(environment: Path) -> None:
    """Make vllm-router's virtual environment unless it is there. Raises BenchError."""
    if (environment / "bin/python").exists():
        return
    venv.create(environment, with_pip=True)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", VLLM_ROUTER]
    if subprocess.run(pip, check=False).returncode:
        shutil.rmtree(environment)
        raise BenchError(f"{VLLM_ROUTER} could not be installed")


class Process:
    """A child on given cores, ended by `stop`. Its output goes to `log`, or else to a pipe."""

    def __init__(self, command: Sequence[str], cores: set[int], log: Path | None = None) -> None:
        self._log = log
        with nullcontext(subprocess.PIPE) if log is None else log.open("wb") as output:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if log is None else subprocess.STDOUT,
                preexec_fn=lambda: _prepare(cores),
                start_new_session=True,
                text=True,
            )

    def wait_until_healthy(self, port: int) -> None:
        """Wait until GET /health answers 200. Raises BenchError if it ends or takes too long."""
        latest = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    return
            except OSError:
                if self.child.poll() is not None or time.monotonic() > latest:
                    raise BenchError(f"{self.child.args!r} does not serve: {self._log}") from None
            time.sleep(0.1)

    def stop(self) -> None:
        self.child.terminate()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def _prepare(cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
