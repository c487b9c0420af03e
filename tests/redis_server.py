"""A real redis-server, for as long as a block runs."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.conftest import find_free_ports

PASSWORD = "not a secret"


@dataclass
class RedisServer:
    process: subprocess.Popen[bytes]
    port: int
    password: str = PASSWORD

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def keys(self) -> list[str]:
        return self._cli("keys", "*").split()

    def dump(self) -> str:
        """Everything it holds, as text."""
        return " ".join(self._cli("get", key) for key in self.keys())

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _cli(self, *command: str) -> str:
        given = ["redis-cli", "-p", str(self.port), "--no-auth-warning", "-a", self.password]
        done = subprocess.run([*given, *command], capture_output=True, timeout=10, check=True)
        return done.stdout.decode(errors="replace")


@contextlib.contextmanager
def running_redis(port: int | None = None) -> Iterator[RedisServer]:
    path = shutil.which("redis-server")
    assert path, "redis-server is missing: install Debian's package redis-server"
    port = port or find_free_ports(1)[0]
    with tempfile.TemporaryDirectory() as directory:
        command = [path, "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
        command += ["--save", "", "--appendonly", "no", "--requirepass", PASSWORD]
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
