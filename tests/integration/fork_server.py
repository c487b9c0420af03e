"""Start `python -m MODULE` in a fraction of the time: fork it from a process that has imported it.

A vLLM server starts in 5 s instead of 20 s of CPU time, a reference engine in less than 1 s instead
of 2 s. A forked process behaves like a started one except that all of them share one hash seed and
the addresses of their memory. The prefill engines of tests/smoke are therefore started as usual.

`ForkServer` runs this file as a process of any Python that has the modules, so it imports nothing
but the standard library. The two speak lines of JSON: a request names arguments, log file and
environment; the answers are {"started": pid} and, later, {"ended": pid, "status": code}.
"""

import gc
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 300


class ForkServer:
    """A process that has imported `preload`. It ends, and all it started, when this process ends.

    `environment` is for what modules read when they are imported.
    """

    def __init__(
        self, python: Path, preload: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._server = subprocess.Popen(
            [str(python), "-m", "tests.integration.fork_server", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self._one_request = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._statuses: dict[int, int] = {}
        self._is_closed = False
        threading.Thread(target=self._read_answers, daemon=True).start()

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> "Forked":
        """Run `python -m *command`, its output in `log`, with changes to this environment."""
        variables = {**os.environ, **environment}
        request = {"command": list(command), "log": str(log), "environment": variables}
        with self._one_request, self._changed:
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            self._changed.wait_for(lambda: self._started or self._is_closed, ANSWER_TIMEOUT_S)
            assert self._started, f"the fork server of {self._server.args!r} does not answer"
            return Forked(self._started.pop(), list(command), self)

    def status(self, pid: int, timeout: float | None) -> int | None:
        """The exit status of a process it started, as subprocess has it; None after `timeout`."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._statuses or self._is_closed, timeout)
            return self._statuses.get(pid, -signal.SIGKILL if self._is_closed else None)

    def _read_answers(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            answer = json.loads(line)
            with self._changed:
                if "started" in answer:
                    self._started.append(answer["started"])
                else:
                    self._statuses[answer["ended"]] = answer["status"]
                self._changed.notify_all()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


@dataclass(eq=False)
class Forked:
    """The part of subprocess.Popen's interface that tests use."""

    pid: int
    args: list[str]
    _server: ForkServer = field(repr=False)
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._server.status(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main(preload: Sequence[str]) -> None:
    """Serve requests until standard input ends. In a forked process, return when its module has."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an import prints
    for name in preload:
        import_module(name)
    gc.freeze()  # else a collection in a forked process copies what all could share
    children: dict[int, int] = {}  # pidfd -> pid
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in children:
                    selector.unregister(key.fd)
                    pid = children.pop(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    answers.write(json.dumps({"ended": pid, "status": status}) + "\n")
                    continue
                request = _read_request()
                if request is None:
                    _kill(children.values())
                    return
                pid = os.fork()
                if not pid:
                    selector.close()
                    answers.close()
                    for descriptor in children:
                        os.close(descriptor)
                    return _run(**request)
                descriptor = os.pidfd_open(pid)
                children[descriptor] = pid
                selector.register(descriptor, selectors.EVENT_READ)
                answers.write(json.dumps({"started": pid}) + "\n")


def _read_request() -> dict[str, Any] | None:
    """None when the other end is closed. Nothing is buffered, for `select` to see what is left."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return None
        line += piece
    request: dict[str, Any] = json.loads(line)
    return request


def _kill(processes: Any) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(command: list[str], log: str, environment: dict[str, str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    if "PYTHONPATH" in environment:
        sys.path[1:1] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
