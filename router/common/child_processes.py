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
    process: subprocess.Popen[bytes]
    log: Path | None = None
    url: str = ""

    def check(self) -> None:
        """Raise ChildEndedError if the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ChildEndedError(f"{self.name} ended with status {code}{self._last_lines()}")

    def last_line(self) -> str:
        """Return the last line of the log, or ""."""
        text = "" if self.log is None else self.log.read_text(errors="replace")
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

    def _last_lines(self) -> str:
        if self.log is None:
            return ""
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "; its last words:\n" + "\n".join(f"  {line}" for line in lines)


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
        **variables: str,
    ) -> ChildProcess:
        """Start a process. With `shown`, only its standard error is logged, the rest is shown."""
        log = self.directory / f"{name.replace(' ', '-')}.log" if logged else None
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else None
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if shown else output,
                stderr=output,
                env={**os.environ, **(environment or {}), **variables},
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        child = ChildProcess(name, process, log, url)
        self.children.append(child)
        return child

    def stop(self) -> None:
        """Send SIGTERM to all, and SIGKILL to those that are left after STOP_TIMEOUT_S."""
        _stop(self.children)

    def stop_in_turn(self) -> None:
        """Stop the process that was started last before the others."""
        _stop(self.children[-1:])
        _stop(self.children[:-1])


def _stop(children: Sequence[ChildProcess]) -> None:
    for child in children:
        _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        _signal(child, signal.SIGKILL)
        child.process.wait()


def _signal(child: ChildProcess, number: signal.Signals) -> None:
    """Signal the child's whole session: an engine may have children of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def die_with(parent: int) -> Callable[[], None]:
    """Return a function to run in the child, which then dies with its parent, even by SIGKILL."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

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
