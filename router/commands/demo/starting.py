"""Starts the router of the demo, and waits until processes are ready."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import httpx

from router.commands.console import CommandError
from router.common.child_processes import ChildProcess

ROUTER = [sys.executable, "-m", "router.commands.cli"]
START_TIMEOUT_S = 600.0
REPORT_INTERVAL_S = 5.0
READY_POLL_S = 0.1
print_now = partial(print, flush=True)


def wait_until_ready(
    waiting: Sequence[ChildProcess],
    path: str,
    alive: Sequence[ChildProcess],
    say: Callable[[str], object] = print_now,
) -> None:
    """Wait until these answer, while all of `alive` run.

    Raises ChildEndedError, or CommandError after a timeout.
    """
    left = list(waiting)
    started = reported = time.monotonic()
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while left:
            for child in alive:
                child.check()
            now = time.monotonic()
            for child in [child for child in left if _answers(client, child.url + path)]:
                left.remove(child)
                say(f"{child.name} is ready on {child.url} ({now - started:.0f} s)")
            names = ", ".join(child.name for child in left)
            if left and now - reported > REPORT_INTERVAL_S:
                reported = now
                say(f"waiting for {names} ({now - started:.0f} s)")
            if left and now - started > START_TIMEOUT_S:
                raise CommandError(f"not ready after {START_TIMEOUT_S:.0f} s: {names}")
            time.sleep(READY_POLL_S)


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> Iterator[int]:
    """Return an iterator over `count` different ports that are free now."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return iter([sock.getsockname()[1] for sock in held])


def router_command(
    host: str, port: int, prefillers: Sequence[ChildProcess], decoders: Sequence[ChildProcess]
) -> list[str]:
    command = [*ROUTER, "--host", host, "--port", str(port)]
    command += ["--shutdown-delay", "0", "--shutdown-timeout", "2"]
    command += ["--target-itl", "0"]  # KV moves, however quick the small models are
    for role, children in (("prefiller", prefillers), ("decoder", decoders)):
        ports = [child.url.rpartition(":")[2] for child in children]
        command += [f"--{role}-hosts", *["127.0.0.1"] * len(children), f"--{role}-ports", *ports]
    return command
