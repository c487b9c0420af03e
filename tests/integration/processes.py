"""Real engines and routers, as processes: started, waited for, and gone at the end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.integration.fork_server import Forked, ForkServer

T = TypeVar("T")

START_SECONDS = 120
# A killed vLLM server with two ranks has taken more than ten seconds until the kernel freed it.
KILL_TIMEOUT_S = 60
BOTH_WAYS = {"bidirectional_kv_xfer": True, "prefill_load_timeout": 5.0, "loan_timeout": 5.0}
"""With the default limits of a second, a machine that stands still for a moment costs reuse."""
REFERENCE = "engine_ext.reference.cli"
UNCACHED = "--no-enable-prefix-caching"
"""For a prefill engine, which would find the last turn in its own cache and pull nothing."""
CONNECTORS = {"pull": "DisaggConnector", "push": "DisaggPushConnector"}
PRELOADED = (
    "engine_ext.reference.host",
    "router.server.serve",
    "router.server.supervisor",
    "uvicorn.protocols.http.httptools_impl",
)
START_POLL = 0.1


def start_fork_server() -> ForkServer:
    """A process that forks reference engines and routers."""
    # Read when torch is imported: engine_ext.reference.cli sets it for the same reason.
    return ForkServer(Path(sys.executable), PRELOADED, {"OMP_WAIT_POLICY": "passive"})


def wait_for(
    condition: Callable[[], T],
    what: str | Callable[[], str],
    seconds: float = 60,
    poll: float = 0.005,
) -> T:
    """The first true value of `condition`, which is asked every `poll` seconds. `what` may be asked
    when it did not come."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not reached within {seconds:g} s: {text}")
        time.sleep(poll)
    return value


def pause(seconds: float, why: str) -> None:
    """Where the passing of time itself is what a test is about."""
    started = time.monotonic()
    wait_for(lambda: time.monotonic() - started > seconds, why, seconds + 10, poll=0.1)


def cpu_seconds(processes: list[int]) -> float:
    """That all their threads have used, to the nanosecond; /proc/PID/stat counts hundredths."""
    threads = [thread for pid in processes for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def family(pid: int) -> list[int]:
    """The process and all that it started, and they: vLLM is an engine and workers besides."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = [child for t in threads for child in (t / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended since its parent named it
    return [pid, *(each for child in children for each in family(int(child)))]


def wait_until_stopped(pid: int) -> None:
    status = Path(f"/proc/{pid}/stat")
    wait_for(lambda: status.read_text().rpartition(") ")[2][0] == "T", f"{pid} is stopped")


@dataclass(frozen=True)
class Server:
    """A process that serves HTTP on `port`."""

    name: str
    process: "subprocess.Popen[bytes] | Forked"
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        # verify=False: to read all authorities' certificates costs more than the request.
        return httpx.get(f"{self.url}{path}", timeout=30, verify=False)

    def post(
        self,
        path: str,
        body: dict[str, Any],
        request_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        headers = dict(headers or {})
        if request_id is not None:
            headers["X-Request-Id"] = request_id
        return httpx.post(
            f"{self.url}{path}", json=body, headers=headers, timeout=120, verify=False
        )

    def metrics(self) -> dict[str, float]:
        """Sample name with labels -> value."""
        lines = self.get("/metrics").text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line and line[0] != "#")
        return {name: float(value) for name, _, value in samples}

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It stands still, and all that it started, until the block ends."""
        processes = family(self.process.pid)
        try:
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)
            for pid in processes:
                wait_until_stopped(pid)
            yield
        finally:
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """As its machine would be lost: a vLLM whose server alone is killed leaves an engine and
        its memory behind."""
        for pid in family(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=KILL_TIMEOUT_S)


@contextmanager
def serving(
    name: str,
    command: list[str],
    port: int,
    directory: Path,
    ready: str,
    env: dict[str, str] | None = None,
    python: Path = Path(sys.executable),
    start_seconds: float = START_SECONDS,
    end_seconds: float = 20,
    fork_server: ForkServer | None = None,
) -> Iterator[Server]:
    """Runs `python -m command...` until the block ends; enters when GET `ready` answers 200.

    With a fork server, which has its own Python, the process is forked there."""
    log = directory / f"{name}-{port}.log"
    process = (
        fork_server.start(command, log, env or {})
        if fork_server
        else _start(python, command, log, env or {})
    )
    server = Server(name, process, port, log)
    try:
        what = f"{name} on port {port}"
        wait_for(lambda: _answers(server, ready), what, start_seconds, START_POLL)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(end_seconds)
        except subprocess.TimeoutExpired:
            server.kill()


def _start(
    python: Path, command: list[str], log: Path, env: dict[str, str]
) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(python), "-m", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
        )


def _answers(server: Server, path: str) -> bool:
    assert server.process.poll() is None, f"{server.name} died:\n{server.log.read_text()[-4000:]}"
    try:
        return server.get(path).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def post_and_leave(
    server: Server, body: dict[str, Any], request_id: str = "leaving"
) -> Iterator[None]:
    """A client that sends its request and hangs up when the block ends, answered or not."""
    content = json.dumps(body).encode()
    lines = {"host": "x", "content-type": "application/json", "x-request-id": request_id}
    lines["content-length"] = str(len(content))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + content)
        yield


@dataclass(frozen=True)
class Launcher:
    """Starts servers on free ports; `directory` takes their logs. A fork server makes
    starts cheap."""

    directory: Path
    model: Path
    free_ports: Callable[[int], list[int]]
    fork_server: ForkServer | None = None

    @contextmanager
    def engine(
        self,
        name: str,
        *options: str,
        module: str = REFERENCE,
        extra: dict[str, Any] | None = None,
        policy: str = "fail",
        connector: str = "DisaggConnector",
        model: Path | None = None,
        ports: tuple[int, int] | None = None,
        engine_id: str | None = None,
    ) -> Iterator[Server]:
        """A reference engine with a connector; `extra` is its kv_connector_extra_config.

        `ports`: HTTP and side channel, where it must be at a known place.
        """
        port, side_channel = ports or self.free_ports(2)
        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "engine_id": engine_id or f"{name}-{port}-{time.monotonic_ns()}",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra or {},
        }
        command = [module, "--model", str(model or self.model), "--port", str(port)]
        command += ["--num-threads", "1"]
        command += ["--served-model-name", "tiny", "--kv-transfer-config", json.dumps(transfer)]
        side = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        }
        command += options
        # Another module may change what the fork server has imported.
        forks = self.fork_server if module == REFERENCE else None
        with serving(
            name, command, port, self.directory, "/health", side, fork_server=forks
        ) as server:
            yield server
            if server.process.poll() is None:
                leaves_nothing_behind(server)

    @contextmanager
    def router(
        self, prefillers: list[Server], decoders: list[Server], *options: str
    ) -> Iterator[Server]:
        (port,) = self.free_ports(1)
        command = ["router.commands.cli", "--port", str(port)]
        for role, servers in (("prefiller", prefillers), ("decoder", decoders)):
            command += [f"--{role}-hosts", *("127.0.0.1" for _ in servers)]
            command += [f"--{role}-ports", *(str(server.port) for server in servers)]
        # Two cores run all of it: an engine that is slow to say that it is well is not dead.
        command += ["--health-timeout", "5", "--shutdown-delay", "0"]
        command += options
        forks = self.fork_server
        with serving(
            "router", command, port, self.directory, "/ready", fork_server=forks
        ) as server:
            yield server


Description = Callable[[Launcher], AbstractContextManager[Server]]


def described(*arguments: Any, **settings: Any) -> Description:
    """Return what starts an engine: see `Launcher.engine`."""
    return lambda launcher: launcher.engine(*arguments, **settings)


def leaves_nothing_behind(server: Server) -> None:
    """Whatever a test did: once no request is left, every block is free or held by a live lease,
    and the engine's own check of its bookkeeping finds nothing when it ends."""
    wait_for(
        lambda: is_settled(server.metrics()),
        lambda: f"{server.name} has settled: {server.metrics()}",
        30,
    )
    server.process.terminate()
    server.process.wait(timeout=45)
    assert server.process.returncode == 0, server.log.read_text()[-4000:]


def freed(server: Server) -> bool:
    """Return True if no finished request holds a block."""
    return metric(server, "disagg_engine_blocks_delayed") == 0


def is_settled(metrics: dict[str, float]) -> bool:
    values = {name.removeprefix("disagg_engine_"): value for name, value in metrics.items()}
    if any(values[f"requests_{where}"] for where in ("running", "waiting")):
        return False
    if values["requests_waiting_for_remote_kv"] or values["kv_pulls_active"]:
        return False
    held = values["blocks_delayed"]
    return values["blocks_free"] + held == values["blocks"] and held <= (
        values["kv_leases_active"] and values["blocks"]
    )


def metric(server: Server, pattern: str) -> float:
    """Sum of the samples whose name matches; there must be one."""
    values = [value for name, value in server.metrics().items() if re.fullmatch(pattern, name)]
    assert values, f"{server.name} has no metric {pattern}"
    return sum(values)
