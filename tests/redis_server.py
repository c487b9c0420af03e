"""A real redis-server, for as long as a block runs."""

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import find_free_ports

PASSWORD = "not a secret"
KEY = "neither is this one, of 32 bytes"


@dataclass
class RedisServer:
    process: subprocess.Popen[bytes]
    port: int
    password: str = PASSWORD

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a router that shares it with others."""
        return {
            "conversation_store": self.url,
            "conversation_store_password": self.password,
            "conversation_store_key": KEY,
            "conversation_store_timeout": 10,  # a busy machine is no Redis that fails
        }

    @property
    def options(self) -> list[str]:
        """Return the settings as command-line options of `disagg-router`."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]

    def keys(self, pattern: str = "*") -> list[str]:
        return self.cli("keys", pattern).split()

    def dump(self) -> str:
        """Everything it holds, as text."""
        return " ".join(self.cli("get", key) for key in self.keys())

    def scores(self, name: str) -> list[float]:
        """Of a sorted set."""
        told = self.cli("zrange", name, "0", "-1", "withscores").split()
        return [float(score) for score in told[1::2]]

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def cli(self, *command: str) -> str:
        given = ["redis-cli", "-p", str(self.port), "--no-auth-warning", "-a", self.password]
        done = subprocess.run([*given, *command], capture_output=True, timeout=10, check=True)
        return done.stdout.decode(errors="replace")


@contextlib.contextmanager
def running_redis(port: int | None = None, *options: str) -> Iterator[RedisServer]:
    port = port or find_free_ports(1)[0]
    given = ["--port", str(port), "--save", "", "--appendonly", "no", "--requirepass", PASSWORD]
    with _running(port, [*given, *options]) as server:
        yield server


@contextlib.contextmanager
def running_tls_redis(certificate: Path, key: Path) -> Iterator[RedisServer]:
    (port,) = find_free_ports(1)
    options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(certificate), "--requirepass", PASSWORD]
    with _running(port, options) as server:
        yield server


@contextlib.contextmanager
def running_cluster(at: int | None = None) -> Iterator[RedisServer]:
    """One node that has all slots."""
    port, bus = find_free_ports(2)
    port = at or port
    options = ["--cluster-enabled", "yes", "--cluster-port", str(bus)]
    with running_redis(port, *options) as server:
        server.cli("cluster", "addslotsrange", "0", "16383")
        _wait_until(server, "cluster_state:ok")
        yield server


def _wait_until(node: RedisServer, line: str, *command: str) -> None:
    deadline = time.monotonic() + 20
    while line not in node.cli(*(command or ("cluster", "info"))):
        assert time.monotonic() < deadline, "the cluster does not come up"
        time.sleep(0.01)


@contextlib.contextmanager
def running_cluster_of(size: int, replicates: int | None = None) -> Iterator[list[RedisServer]]:
    """Masters with equal shares of the slots, which answer while another one is dead. A replica of
    the master number `replicates` follows them."""
    count = size + (replicates is not None)
    ports = find_free_ports(2 * count)
    options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]
    options += ["--cluster-node-timeout", "500", "--masterauth", PASSWORD]
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(count):
            running = running_redis(ports[number], *options, "--cluster-port", str(ports[~number]))
            nodes.append(stack.enter_context(running))
            nodes[-1].cli("cluster", "meet", "127.0.0.1", str(ports[0]), str(ports[-1]))
            if number < size:
                first, after = (16384 * at // size for at in (number, number + 1))
                nodes[-1].cli("cluster", "addslotsrange", str(first), str(after - 1))
        for node in nodes:
            _wait_until(node, "cluster_slots_ok:16384")
            _wait_until(node, "cluster_state:ok")
        if replicates is not None:
            name = nodes[replicates].cli("cluster", "myid").strip()
            nodes[-1].cli("cluster", "replicate", name)
            _wait_until(nodes[-1], "master_link_status:up", "info", "replication")
            for node in nodes:
                _wait_until(node, f"slave {name}", "cluster", "nodes")
        yield nodes


@contextlib.contextmanager
def running_sentinel(
    directory: Path, masters: Mapping[str, RedisServer], *options: str
) -> Iterator[RedisServer]:
    """One sentinel, which alone decides."""
    (port,) = find_free_ports(1)
    lines = []
    for name, master in masters.items():
        lines.append(f"sentinel monitor {name} 127.0.0.1 {master.port} 1")
        lines.append(f'sentinel auth-pass {name} "{PASSWORD}"')
    config = directory / "sentinel.conf"
    config.write_text("\n".join(lines))
    with _running(port, [str(config), "--sentinel", "--port", str(port), *options]) as server:
        yield server


@contextlib.contextmanager
def _running(port: int, options: Sequence[str]) -> Iterator[RedisServer]:
    path = shutil.which("redis-server")
    assert path, "redis-server is missing: install Debian's package redis-server"
    with tempfile.TemporaryDirectory() as directory:
        command = [path, *options, "--bind", "127.0.0.1", "--dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_until_it_listens(process, port)
            yield RedisServer(process, port)
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(timeout=10)


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        assert process.poll() is None, "redis-server ended at once"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < deadline, "redis-server does not listen"
        time.sleep(0.01)
