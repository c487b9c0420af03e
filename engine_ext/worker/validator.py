"""The engine's side of the metadata validator: a disposable process loads metadata first.

Malformed NIXL metadata makes UCX crash or hang in the process that loads it. So metadata of an
agent without the shared secret is first loaded by a process that the engine can lose
(`validator_process.py`), and by the engine only if that process survived.

    submit --(not what NIXL writes)--> refused
       |-----(checked before)--------> accepted, refused
       `--> queue --> in the process --(ok)--> accepted
                          |--(NIXL refuses, the process dies, the deadline passes)--> refused

Nothing here blocks: the owner thread submits, calls `step`, and looks at the check's state. Checks
run one at a time. Metadata of handshakes that this engine began comes before metadata in unexpected
hellos, which is checked at a bounded rate. Both queues are bounded.

A process that has died is replaced: `BURST` times at once, then once in `RESTART_SECONDS`, and less
often where it does not start. A stream of malformed metadata therefore neither ends the engine nor
affects peers that it knows. New peers without the secret wait for their turn and may be refused.
"""

import logging
import os
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from nixl._api import nixlBind

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.latest import keep_latest
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.types import ConnectorStats
from engine_ext.wire.errors import WireError
from engine_ext.wire.nixl_metadata import parse
from engine_ext.worker import validator_process
from engine_ext.worker.agent import Agent, NixlAgent
from engine_ext.worker.validator_process import BAD, LENGTH_BYTES, READY

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

GRACE_SECONDS = 1.0
"""The process itself ends a check that hangs; this bound is for a process that is stopped."""
MAX_REFUSED = 64
"""By one process, because each may leave a connection behind in NIXL."""
NEVER = float("inf")
SLOW_START_SECONDS = 30.0
"""A start that takes longer is logged. It is not ended: another start would take as long."""
WAIT_SECONDS = 10.0
"""A check that has not begun by then is refused."""
BURST = 4
RESTART_SECONDS = 2.0
MAX_RESTART_SECONDS = 60.0
UNEXPECTED_SECONDS = 0.01
"""Between two checks of metadata that this engine did not ask for, on average."""
UNEXPECTED_BURST = 64
MAX_WAITING = 256
"""Checks in each of the two queues."""
MAX_WAITING_BYTES = 32 << 20
REFUSED_SECONDS = 5.0
"""How long it is remembered that a process died of some metadata, or NIXL refused it."""
MAX_REMEMBERED = 4096

_MEANS = "peers without the shared secret are rejected, see docs/security.md"
_NOT_FOR_IT = ("UCX_TCP_PORT_RANGE", "UCX_LOG_FILE", "PYTHONSTARTUP", "PYTHONINSPECT")
"""Environment variables that the process does not get. No engine connects to its port, and a port
range may be too small for two processes."""


@dataclass(slots=True, eq=False)
class MetadataValidation:
    """Metadata under validation. Its state is `problem`."""

    metadata: bytes
    """What to load in place of the submitted metadata: see `nixl_metadata.padded`."""
    deadline: float
    problem: str | None = None
    """Why it must not be loaded; empty if it may be; None until that is known."""
    is_wanted: bool = True
    """Set to False by an owner that does not wait any more."""

    @property
    def is_pending(self) -> bool:
        return self.problem is None


class Validator(Protocol):
    """Decides which metadata of unauthenticated agents the engine may load."""

    @property
    def num_pending(self) -> int: ...
    def submit(self, metadata: bytes, now: float, *, is_expected: bool) -> MetadataValidation:
        """Begin a check, whose result may be there at once. `is_expected`: the metadata answers a
        handshake of this engine."""

    def step(self, now: float) -> None: ...
    def close(self) -> None: ...


class Trusting:
    """Accepts all metadata unchanged: of authenticated agents, and where NIXL loads none."""

    num_pending = 0

    def submit(self, metadata: bytes, now: float, *, is_expected: bool) -> MetadataValidation:
        return MetadataValidation(metadata, now, problem="")

    def step(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass


TRUSTING = Trusting()


def open_validator(agent: Agent, config: ConnectorConfig, stats: ConnectorStats) -> "Validator":
    """Return a process's validator where NIXL may have to load unauthenticated metadata."""
    is_needed = config.access.secret is None or config.access.is_mixed
    if not is_needed or not isinstance(agent, NixlAgent):
        return TRUSTING
    return ProcessValidator(config.backends, stats)


class ProcessValidator:
    """`Validator` by a process of its own, which `step` starts and replaces."""

    def __init__(self, backends: Sequence[str], stats: ConnectorStats) -> None:
        self._backends = backends
        self._stats = stats
        self._process: _Process | None = None
        self._ended: list[subprocess.Popen[bytes]] = []
        self._expected: deque[MetadataValidation] = deque()
        self._unexpected: deque[MetadataValidation] = deque()
        self._running: MetadataValidation | None = None
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """By digest: the problem, or an empty string, and when it was found."""
        self._starts = float(BURST)
        self._counted_at: float | None = None
        self._failed_starts = 0
        self._next_unexpected = -NEVER

    @property
    def num_pending(self) -> int:
        return len(self._expected) + len(self._unexpected) + (self._running is not None)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.popen.pid

    def submit(self, metadata: bytes, now: float, *, is_expected: bool) -> MetadataValidation:
        try:
            check = MetadataValidation(parse(metadata).padded().encode(), now + WAIT_SECONDS)
        except WireError as error:
            return self._refuse(MetadataValidation(b"", now), str(error))
        problem, found_at = self._known.get(_digest(check.metadata), (None, now))
        if problem == "":
            return self._accept(check)
        if problem is not None and now - found_at < REFUSED_SECONDS:
            return self._refuse(check, problem)
        queue = self._expected if is_expected else self._unexpected
        waiting_bytes = sum(len(one.metadata) for one in queue) + len(check.metadata)
        if len(queue) >= MAX_WAITING or waiting_bytes > MAX_WAITING_BYTES:
            return self._refuse(check, f"{len(queue)} others wait for validation already")
        queue.append(check)
        return check

    def step(self, now: float) -> None:
        self._ended = [one for one in self._ended if one.poll() is None]
        self._refill(now)
        if self._process is None:
            self._start(now)
        if self._process is not None:
            self._serve(self._process, now)
        for queue in (self._expected, self._unexpected):
            while queue and now >= queue[0].deadline:
                self._refuse(queue.popleft(), "the metadata validator did not get to it in time")

    def close(self) -> None:
        if self._process is not None:
            self._end(self._process)
        for popen in self._ended:
            popen.wait()
        self._ended.clear()

    def _refill(self, now: float) -> None:
        if self._counted_at is not None:
            every = min(RESTART_SECONDS * 2**self._failed_starts, MAX_RESTART_SECONDS)
            gained = max(0.0, now - self._counted_at) / every
            self._starts = min(float(BURST), self._starts + gained)
        self._counted_at = now

    def _start(self, now: float) -> None:
        if self._starts < 1:
            return
        self._starts -= 1
        try:
            self._process = _Process(self._backends, now)
        except OSError as error:
            self._fail_to_start(str(error))

    def _serve(self, process: "_Process", now: float) -> None:
        if process.is_ready and self._running is None:
            self._begin(process, now)
        lines, is_alive = process.exchange()
        for line in lines:
            self._receive(process, line.decode(errors="replace"), now)
        if process.is_slow(now):
            logger.warning("the metadata validator takes long to start; until then %s", _MEANS)
        if not is_alive:
            self._lose(process, "died", now)
        elif now >= process.deadline:
            self._lose(process, "did not come to an end", now)
        elif process.num_refused >= MAX_REFUSED:
            self._end(process)

    def _begin(self, process: "_Process", now: float) -> None:
        while self._expected and self._running is None:
            check = self._expected.popleft()
            self._running = check if check.is_wanted else None
        if self._running is None and self._unexpected and now >= self._next_unexpected:
            self._running = self._unexpected.popleft()
            earliest = now - UNEXPECTED_BURST * UNEXPECTED_SECONDS
            self._next_unexpected = max(self._next_unexpected, earliest) + UNEXPECTED_SECONDS
        if self._running is not None:
            process.ask(self._running.metadata, now + process.check_seconds + GRACE_SECONDS)

    def _receive(self, process: "_Process", line: str, now: float) -> None:
        word, _, reason = line.partition(" ")
        process.deadline = NEVER
        if word == READY:
            process.is_ready, process.check_seconds = True, float(reason)
            self._failed_starts = 0
        elif self._running is not None:
            process.num_refused += word == BAD
            self._decide(f"malformed NIXL metadata: {reason}" if word == BAD else "", now)

    def _lose(self, process: "_Process", how: str, now: float) -> None:
        self._end(process)
        if self._running is not None:
            self._stats.validators_lost += 1
            self._decide(f"malformed NIXL metadata: the process that loaded it {how}", now)
        elif not process.is_ready:
            self._fail_to_start(how)

    def _fail_to_start(self, how: str) -> None:
        self._failed_starts = min(self._failed_starts + 1, 16)
        logger.warning("the metadata validator did not start (%s): %s", how, _MEANS)

    def _end(self, process: "_Process") -> None:
        self._process = None
        self._ended.append(process.end())

    def _decide(self, problem: str, now: float) -> None:
        check, self._running = self._running, None
        assert check is not None
        keep_latest(self._known, _digest(check.metadata), (problem, now), MAX_REMEMBERED)
        if problem:
            self._refuse(check, problem)
        else:
            self._accept(check)

    def _accept(self, check: MetadataValidation) -> MetadataValidation:
        check.problem = ""
        self._stats.metadata_accepted += 1
        return check

    def _refuse(self, check: MetadataValidation, problem: str) -> MetadataValidation:
        check.problem = problem
        self._stats.metadata_refused += 1
        return check


class _Process:
    """One process and the socket to it. Raises OSError where none can be started."""

    def __init__(self, backends: Sequence[str], now: float) -> None:
        self.is_ready = False
        self.check_seconds = 0.0
        """How long a check may take; from when it is ready."""
        self.deadline = NEVER
        """Of the check that runs."""
        self._slow_from = now + SLOW_START_SECONDS
        self.num_refused = 0
        self._unsent = memoryview(b"")
        self._received = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self.popen = subprocess.Popen(
                    _command(backends),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,  # UCX logs to standard output.
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                )
            except OSError:
                self._socket.close()
                raise
        self._socket.setblocking(False)

    def is_slow(self, now: float) -> bool:
        """Return True once, if it is not ready after a long time."""
        is_slow = not self.is_ready and now >= self._slow_from
        if is_slow:
            self._slow_from = NEVER
        return is_slow

    def ask(self, metadata: bytes, deadline: float) -> None:
        self._unsent = memoryview(len(metadata).to_bytes(LENGTH_BYTES, "big") + metadata)
        self.deadline = deadline

    def exchange(self) -> tuple[list[bytes], bool]:
        """Send and receive without waiting. Return the lines, and whether the process is alive."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return [], False
        try:
            part = self._socket.recv(4096)
        except BlockingIOError:
            return [], True
        except OSError:
            part = b""
        *lines, self._received = (self._received + part).split(b"\n")
        return lines, bool(part)

    def end(self) -> subprocess.Popen[bytes]:
        self._socket.close()
        self.popen.kill()
        return self.popen


def _command(backends: Sequence[str]) -> list[str]:
    """The same NIXL as ours: `nixl` itself would import torch to choose one."""
    package = nixlBind.__name__.rpartition(".")[0]
    module = validator_process.__name__
    # `-P`: imports come from this process's path, not from the working directory.
    return [sys.executable, "-P", "-m", module, package, ",".join(backends), str(os.getpid())]


def _environment() -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("NIXL_TELEMETRY") and name not in _NOT_FOR_IT
    }
    return environment | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "UCX_HANDLE_ERRORS": "none",
        "UCX_VFS_ENABLE": "n",
    }


def _digest(metadata: bytes) -> bytes:
    return blake2b(metadata, digest_size=16).digest()
