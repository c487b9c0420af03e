"""Count the router files that one request passes: run a router and trace its Python calls.

The script starts mock engines in a process of their own and a router in this process, with its
default settings. It sends one unary chat, one streamed chat and two turns of a conversation, each
over a new connection, to a router that has already served such requests.

    python scripts/trace_request.py             print the table
    python scripts/trace_request.py --sequence  print each step as well

What is counted:

* A step is a `call` event of `sys.setprofile`, in any thread, whose code is in a file of `router/`.
  Python reports this event also when a suspended coroutine or generator resumes, once for each
  frame of the chain. `return` events and functions written in C are no steps.
* Steps are recorded from the connection's start until 0.25 s after its end, so that the metrics and
  the access log, which the router writes in blocks, are included.
* `files` is the number of different files among the steps.
* `returns` is the number of steps into a file other than that of the step before, which an earlier
  step has already visited: a reader of the trace has to go back to a page.
* `whole router` counts all steps. `request alone` leaves out what an idle router does as well (the
  server's ticks, the warm-up, the release of lost engines): the script first watches the router for
  some seconds without a request, and ignores each task and callback that it saw then. These
  figures repeat exactly, those of the whole router do not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOOPS = (os.path.join("uvloop", "__init__.py"), os.path.join("asyncio", "runners.py"))
IDLE_S = 3.0
SETTLE_S = 0.25
WARM_UP_ROUNDS = 3
START_TIMEOUT_S = 30.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A call of a function, with its file relative to `router/`.

    `is_idle_work`: the task or callback that it belongs to runs without a request as well.
    """

    file: str
    function: str
    is_idle_work: bool


def count_returns(steps: Sequence[Step]) -> int:
    """Count the steps into a file that was visited before and left since."""
    visited: set[str] = set()
    current, count = "", 0
    for step in steps:
        if step.file != current:
            count += step.file in visited
            visited.add(step.file)
            current = step.file
    return count


@dataclass
class Tracer:
    """Records the calls of functions whose files are below `root`, a path that ends with a slash.

    `state` is "off", "idle" (learn what runs without a request) or "request" (record steps).
    """

    root: str
    state: str = "off"
    steps: list[Step] = field(default_factory=list)
    idle_work: set[CodeType] = field(default_factory=set)

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Handle one event of `sys.setprofile`."""
        code = frame.f_code
        if self.state == "off" or event != "call" or not code.co_filename.startswith(self.root):
            return
        work = self._outermost(frame)
        if self.state == "idle":
            self.idle_work.add(work)
        else:
            file = code.co_filename[len(self.root) :]
            self.steps.append(Step(file, code.co_name, work in self.idle_work))

    def _outermost(self, frame: FrameType) -> CodeType:
        """Return the router's function that the event loop or the thread has called."""
        outermost, caller = frame.f_code, frame.f_back
        while caller is not None and not caller.f_code.co_filename.endswith(LOOPS):
            if caller.f_code.co_filename.startswith(self.root):
                outermost = caller.f_code
            caller = caller.f_back
        return outermost


def cases(conversation: str) -> list[tuple[str, Json, dict[str, str]]]:
    """Return name, body and headers of each request, in the order in which they are sent."""
    first = [{"role": "user", "content": "hello"}]
    second = [*first, {"role": "assistant", "content": "x"}, {"role": "user", "content": "and?"}]
    session = {"x-session-id": conversation}
    body: Json = {"model": "m", "messages": first, "max_tokens": 1}
    return [
        ("unary", body, {}),
        ("streamed", body | {"stream": True}, {}),
        ("first turn", body, session),
        ("second turn", body | {"messages": second}, session),
    ]


def wait_until_ready(port: int) -> None:
    """Return when /ready answers 200. Raises TimeoutError."""
    latest = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < latest:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the router does not become ready")


def chat(port: int, body: Json, headers: dict[str, str]) -> None:
    """Send one chat and read its answer. Raises ConnectionError if it is an error.

    Head and body are sent together: of two reads, the router has more steps than of one.
    """
    content = json.dumps(body)
    headers = {
        "host": f"127.0.0.1:{port}",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(content)),
        **headers,
    }
    lines = ["POST /v1/chat/completions HTTP/1.1", *map(": ".join, headers.items()), "", content]
    with socket.create_connection(("127.0.0.1", port), START_TIMEOUT_S) as connection:
        connection.sendall("\r\n".join(lines).encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise ConnectionError(answer.decode())


def trace(tracer: Tracer, port: int) -> dict[str, list[Step]]:
    """Return the steps of each case, of a router that is warm."""
    wait_until_ready(port)
    for number in range(WARM_UP_ROUNDS):
        for _, body, headers in cases(f"warm-up-{number}"):
            chat(port, body, headers)
    time.sleep(1)
    tracer.state = "idle"
    time.sleep(IDLE_S)
    found = {}
    for name, body, headers in cases("traced"):
        tracer.steps = []
        tracer.state = "request"
        chat(port, body, headers)
        time.sleep(SETTLE_S)
        tracer.state = "off"
        found[name] = tracer.steps
    return found


def report(found: dict[str, list[Step]], with_sequence: bool) -> None:
    print(f"{'':12}{'whole router':>24}{'request alone':>24}")
    print(f"{'':12}" + f"{'files':>8}{'returns':>8}{'steps':>8}" * 2)
    for name, steps in found.items():
        line = f"{name:12}"
        for counted in (steps, [step for step in steps if not step.is_idle_work]):
            files = len({step.file for step in counted})
            line += f"{files:8}{count_returns(counted):8}{len(counted):8}"
        print(line)
    for name, steps in found.items() if with_sequence else ():
        print(f"\n{name}")
        previous = ""
        for step in steps:
            file = step.file if step.file != previous else ""
            print(f"  {file:36}{step.function}{' (idle work)' if step.is_idle_work else ''}")
            previous = step.file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--sequence", action="store_true", help="print each step as well")
    options = parser.parse_args()
    sys.path[0] = str(ROOT)  # this checkout, and not the router that may be installed
    from router.commands import cli
    from scripts.benchmarks.common import free_ports

    tracer = Tracer(f"{ROOT / 'router'}{os.sep}")
    engines = subprocess.Popen(
        [sys.executable, "-m", "scripts.mock_engine", "pair"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engines.stdout is not None
        prefiller, decoder = engines.stdout.readline().split()
        (port,) = free_ports(1)
        found: dict[str, list[Step]] = {}
        client = threading.Thread(target=_trace_and_stop, args=(tracer, port, found))
        client.start()
        command = f"--port {port} --prefiller-ports {prefiller} --decoder-ports {decoder}"
        hosts = "--prefiller-hosts 127.0.0.1 --decoder-hosts 127.0.0.1"
        threading.setprofile(tracer.profile)
        sys.setprofile(tracer.profile)
        cli.main([*command.split(), *hosts.split()])
        sys.setprofile(None)
        client.join()
    finally:
        engines.terminate()
    report(found, options.sequence)
    return 0 if found else 1


def _trace_and_stop(tracer: Tracer, port: int, found: dict[str, list[Step]]) -> None:
    try:
        found.update(trace(tracer, port))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
