"""Child processes that end when their parent does, even if the parent is killed.

Each child runs in a session of its own. A child that ignores SIGTERM is killed. If the parent is
killed, the kernel kills the children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

STOP_TIMEOUT_S = 5.0
PR_SET_PDEATHSIG = 1


class ChildEndedError(Exception):
    """A child ended unexpectedly; the message has its last output."""


@dataclass(slots=True)
class ChildProcess:
    name: str
    spawn: Callable[[], subprocess.Popen[bytes]]
    log: Path | None = None
    url: str = ""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = self.spawn()

    def restart(self) -> None:
        """Start the command again after its process has ended."""
        self.process.wait()
        self.process = self.spawn()

    def check(self) -> None:
        """Raise ChildEndedError if the process has ended."""
        code = self.process.poll()
        if code is not None:
            words = "" if self.log is None else "; its last output:"
            lines = [f"{self.name} ended with status {code}{words}", *self.log_lines()[-15:]]
            raise ChildEndedError("\n  ".join(lines))

    def log_lines(self) -> list[str]:
        return [] if self.log is None else self.log.read_text(errors="replace").splitlines()


@dataclass(slots=True)
class ChildProcesses:
    """Starts and stops child processes; logs go to `directory`."""

    directory: Path
    children: list[ChildProcess] = field(default_factory=list)

    def start(
        self,
        name: str,
        command: list[str],
        url: str,
        *,
        logged: bool = True,
        shown: bool = False,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a process. With `shown`, only its standard error is logged, the rest is shown.
        With `cores`, it runs on these alone."""
        log = self.directory / f"{name.replace(' ', '-')}.log" if logged else None

        def spawn() -> subprocess.Popen[bytes]:
            with contextlib.ExitStack() as stack:
                output = stack.enter_context(log.open("ab")) if log else None
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=None if shown else output,
                    stderr=output,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                    preexec_fn=die_with(os.getpid(), cores),
                )

        child = ChildProcess(name, spawn, log, url)
        self.children.append(child)
        return child

    def stop(self, children: Sequence[ChildProcess] | None = None) -> None:
        """Send these (or all) SIGTERM, and SIGKILL to those that are left after STOP_TIMEOUT_S."""
        stopping = self.children if children is None else children
        for child in stopping:
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in stopping:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            _signal(child, signal.SIGKILL)
            child.process.wait()


def _signal(child: ChildProcess, number: signal.Signals) -> None:
    """Signal the child's whole session: an engine may have children of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def die_with(parent: int, cores: Sequence[int] = ()) -> Callable[[], None]:
    """Return a function to run in the child, which then dies with its parent, even by SIGKILL, and
    runs on `cores` alone, if there are any."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare


@contextlib.contextmanager
def handling_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Set one handler for these signals until the block ends."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
