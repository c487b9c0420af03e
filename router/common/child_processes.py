"""Processes that end when their parent does, however that ends.

Each runs in a session of its own. One that ignores SIGTERM is killed; when the parent itself is
killed, the kernel kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOP_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


class ChildEndedError(Exception):
    """A child ended that should not have; the message has its last words."""


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None = None
    url: str = ""

    def check(self) -> None:
        """Raises ChildEndedError when it has ended."""
        code = self.process.poll()
        if code is not None:
            raise ChildEndedError(f"{self.name} ended with status {code}{self._last_lines()}")

    def last_line(self) -> str:
        """Of its log; empty where there is none."""
        said = "" if self.log is None else self.log.read_text(errors="replace")
        return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")

    def _last_lines(self) -> str:
        if self.log is None:
            return ""
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "; its last words:\n" + "\n".join(f"  {line}" for line in lines)


@dataclass(slots=True)
class Family:
    """All children, started here and stopped here."""

    directory: Path
    children: list[Child] = field(default_factory=list)

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
    ) -> Child:
        """`shown`: its standard output is seen, and only what it says of errors is logged."""
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
        child = Child(name, process, log, url)
        self.children.append(child)
        return child

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to whoever is left after STOP_SECONDS; then nobody is."""
        _stop(self.children)

    def stop_in_turn(self) -> None:
        """Who was started last is stopped before the others are told to."""
        _stop(self.children[-1:])
        _stop(self.children[:-1])


def _stop(children: Sequence[Child]) -> None:
    for child in children:
        _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        _signal(child, signal.SIGKILL)
        child.process.wait()


def _signal(child: Child, number: signal.Signals) -> None:
    """To the child's whole session: an engine may have children of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def die_with(parent: int) -> Callable[[], None]:
    """Run in the child: it dies when its parent does, even by SIGKILL."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
