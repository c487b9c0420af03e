"""The routers that are compared, each a process on the same core, and no router at all."""

import os
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from scripts.bench.errors import BenchError
from scripts.bench.ports import free_ports

START = 60.0
"""Seconds that a router may take until it answers /health."""
TOY = Path(__file__).with_name("toy.py")
WATCHED = Path(__file__).with_name("watched.py")


@dataclass(frozen=True, slots=True)
class Engines:
    """Ports on 127.0.0.1."""

    prefiller: int
    decoder: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Another router: what pip installs for it, and how it is started. `engines_tell`: both routers
    are before engines that name the tokens of their streams."""

    packages: tuple[str, ...]
    command: tuple[str, ...]
    engines_tell: bool = False

    def arguments(self, environment: Path, port: int, engines: Engines) -> list[str]:
        known = {
            "bin": environment / "bin",
            "port": port,
            "metrics": free_ports(1)[0],
            "checkout": environment,
            "python": sys.executable,
            "prefiller_port": engines.prefiller,
            "decoder_port": engines.decoder,
            "prefiller": f"http://127.0.0.1:{engines.prefiller}",
            "decoder": f"http://127.0.0.1:{engines.decoder}",
            "toy": TOY,
            "watched": WATCHED,
        }
        return [part.format(**known) for part in self.command]


PORTS = ("{prefiller_port}", "{decoder_port}")
PEERS: Mapping[str, Peer] = {
    "vllm-router": Peer(
        ("vllm-router",),
        (
            *("{bin}/vllm-router", "--host", "127.0.0.1", "--port", "{port}"),
            *("--vllm-pd-disaggregation", "--kv-connector", "nixl"),
            *("--prefill", "{prefiller}", "--decode", "{decoder}"),
            *("--prometheus-port", "{metrics}"),
        ),
    ),
    "toy": Peer(
        ("fastapi", "httpx", "uvicorn"),
        ("{bin}/python", "{toy}", "{port}", "{prefiller}", "{decoder}"),
    ),
    # This checkout, with --ui and nobody who looks.
    "ui": Peer(
        (),
        (
            *("{python}", "-m", "router.commands.cli", "--port", "{port}", "--ui"),
            *("--prefiller-hosts", "127.0.0.1", "--prefiller-ports", "{prefiller_port}"),
            *("--decoder-hosts", "127.0.0.1", "--decoder-ports", "{decoder_port}"),
        ),
    ),
    # This checkout, which asks no engine for the tokens of its streams: no stream can move.
    "untold": Peer(
        (),
        (
            *("{python}", "-m", "router.commands.cli", "--port", "{port}", "--max-resumes", "0"),
            *("--prefiller-hosts", "127.0.0.1", "--prefiller-ports", "{prefiller_port}"),
            *("--decoder-hosts", "127.0.0.1", "--decoder-ports", "{decoder_port}"),
        ),
        engines_tell=True,
    ),
    # This checkout, looked at, or with a collector of traces.
    "page": Peer((), ("{python}", "{watched}", "page", "{port}", *PORTS)),
    "traces": Peer((), ("{python}", "{watched}", "traces", "{port}", *PORTS)),
    # This project at another commit, in a work tree that --peer-venv names.
    "checkout": Peer(
        (),
        (
            *("env", "-C", "{checkout}", "PYTHONPATH={checkout}"),
            *("{python}", "-m", "router.commands.cli", "--port", "{port}"),
            *("--prefiller-hosts", "127.0.0.1", "--prefiller-ports", "{prefiller_port}"),
            *("--decoder-hosts", "127.0.0.1", "--decoder-ports", "{decoder_port}"),
        ),
    ),
}


def ours(port: int, engines: Engines) -> list[str]:
    """This checkout's router, with every setting as it is by default."""
    return [
        *(sys.executable, "-m", "router.commands.cli", "--port", str(port)),
        *("--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(engines.prefiller)),
        *("--decoder-hosts", "127.0.0.1", "--decoder-ports", str(engines.decoder)),
    ]


def prepare(name: str, environment: Path) -> None:
    """Makes the peer's virtual environment, unless it is there. Raises BenchError."""
    packages = PEERS[name].packages
    if not packages or (environment / "bin" / "python").exists():
        return
    venv.create(environment, with_pip=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    done = subprocess.run([*pip, *packages], check=False)
    if done.returncode:
        shutil.rmtree(environment)
        raise BenchError(f"{name} could not be installed")


class Process:
    """A child on given cores, killed at the end. Its output goes to a file, as under a service."""

    def __init__(self, command: Sequence[str], cores: set[int], log: Path | None) -> None:
        self._log = log
        out = subprocess.PIPE if log is None else log.open("wb")
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=None if log is None else subprocess.STDOUT,
            preexec_fn=lambda: _settle(cores),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.child.pid

    def until_healthy(self, port: int) -> None:
        """Raises BenchError when it ends or does not answer in time."""
        latest = time.monotonic() + START
        while not _answers(port):
            if self.child.poll() is not None or time.monotonic() > latest:
                raise BenchError(f"{self.child.args!r} does not serve: see {self._log}")
            time.sleep(0.1)

    def stop(self) -> None:
        self.child.terminate()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def _settle(cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (URLError, OSError):
        return False
