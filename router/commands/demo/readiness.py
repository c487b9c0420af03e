"""Ports that are free, and children until they are ready."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import httpx

from router.commands.demo.errors import DemoError
from router.common.child_processes import Child

START_SECONDS = 600.0
REPORT_SECONDS = 5.0
POLL_SECONDS = 0.1


def wait_until_ready(
    waiting: Sequence[Child],
    path: str,
    say: Callable[[str], None],
    alive: Sequence[Child] | None = None,
) -> None:
    """Raises ChildEndedError, or DemoError for a child not ready after START_SECONDS."""
    left, everyone = list(waiting), alive or list(waiting)
    started = reported = time.monotonic()
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while left:
            for child in everyone:
                child.check()
            now = time.monotonic()
            for child in [child for child in left if _answers(client, child.url + path)]:
                left.remove(child)
                say(f"{child.name} is ready on {child.url} ({now - started:.0f} s)")
            names = ", ".join(child.name for child in left)
            if left and now - reported > REPORT_SECONDS:
                reported = now
                say(f"waiting for {names} ({now - started:.0f} s)")
            if left and now - started > START_SECONDS:
                raise DemoError(f"not ready after {START_SECONDS:.0f} s: {names}")
            time.sleep(POLL_SECONDS)


def check_port(host: str, port: int) -> None:
    """Notices a taken port before the engines have started, which takes a while.

    Raises DemoError.
    """
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DemoError(f"cannot listen on {host}:{port}: {reason}") from error


def free_ports(count: int) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return iter([sock.getsockname()[1] for sock in held])


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False
