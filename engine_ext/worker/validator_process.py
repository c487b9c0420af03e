"""The process that loads an unauthenticated agent's metadata before the engine does.

    python -m engine_ext.worker.validator_process PACKAGE BACKENDS PARENT

Standard input is a socket to the engine (`validator.py`). Each request is a length of four bytes
and the metadata; each answer is one line: `ready` once and the seconds that a check may take, then
`ok` or `bad` and a reason. Malformed
metadata makes UCX crash or hang, and this process with it: the engine sees the socket close.

It has an agent of its own, without memory worth anything, and does with the metadata what an engine
does before it moves KV: load it, which connects, and prepare descriptors. It sends nothing, since
an engine takes an unknown message for a fault. The agent has no progress thread, which would burn a
core; a check drives it, so what a check leaves behind is polled for shortly.

NIXL keeps part of what it failed to load and then refuses the same name (NIXL 1.5 to 1.6), so each
check loads the metadata under a name of its own.

Nothing here imports torch: the process starts within a fraction of a second.
"""

import contextlib
import importlib
import os
import resource
import select
import signal
import socket
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_ext.wire.nixl_metadata import NixlMetadata, parse
from engine_ext.worker.process_end import skip_library_exit_handlers

LENGTH_BYTES = 4
CHECK_SECONDS = 3.0
"""One check may take so long, or as long as this process took to start where that is longer: then
the machine is slow. After that the kernel ends this process, whatever the check does."""
PARENT_SECONDS = 1.0
"""How often an idle process looks whether its parent is still there: other children of the parent
may hold the other end of the socket open."""
POLLS = 20
MEMORY_TYPES = ("DRAM", "VRAM", "BLOCK", "OBJ", "FILE")
"""NIXL's names, by number."""
READY, OK, BAD = "ready", "ok", "bad"


def main(package: str, backends: str, parent: str) -> None:
    connection = socket.socket(fileno=os.dup(0))
    _become_disposable()
    began = time.monotonic()
    agent = _open_agent(package, backends.split(","))
    seconds = max(CHECK_SECONDS, time.monotonic() - began)
    _answer(connection, f"{READY} {seconds:.3f}")
    while (metadata := _receive(connection, int(parent))) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        problem = check(agent, metadata)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(connection, OK if problem is None else f"{BAD} {problem}")


def check(agent: Any, metadata: bytes) -> str | None:
    """Load it and forget it again. Return why NIXL refused it."""
    try:
        parsed = replace(parse(metadata), name=str(uuid.uuid4()))
        agent.add_remote_agent(parsed.encode())
        try:
            _prepare(agent, parsed)
            _poll(agent)
        finally:
            agent.remove_remote_agent(parsed.name)
            _poll(agent)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _prepare(agent: Any, metadata: NixlMetadata) -> None:
    """The first byte of each piece of memory."""
    for section in metadata.sections:
        pieces = [(one.address, min(one.length, 1), one.device) for one in section.descriptors]
        if pieces:
            handle = agent.prep_xfer_dlist(metadata.name, pieces, MEMORY_TYPES[section.memory_type])
            agent.release_dlist_handle(handle)


def _poll(agent: Any) -> None:
    for _ in range(POLLS):
        agent.get_new_notifs()


def _open_agent(package: str, backends: list[str]) -> Any:
    skip_library_exit_handlers()
    nixl = importlib.import_module(f"{package}._api")
    config = nixl.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=backends)
    return nixl.nixl_agent(str(uuid.uuid4()), config)


def _receive(connection: socket.socket, parent: int) -> bytes | None:
    """The next metadata to check; None when the parent is gone."""
    while not select.select([connection], [], [], PARENT_SECONDS)[0]:
        if os.getppid() != parent:
            return None
    length = _read(connection, LENGTH_BYTES)
    return _read(connection, int.from_bytes(length, "big")) if length else None


def _read(connection: socket.socket, length: int) -> bytes | None:
    taken = bytearray()
    while len(taken) < length:
        part = connection.recv(length - len(taken))
        if not part:
            return None
        taken += part
    return bytes(taken)


def _answer(connection: socket.socket, words: str) -> None:
    line = " ".join(words.split())[:500]
    connection.sendall(line.encode(errors="replace") + b"\n")


def _become_disposable() -> None:
    """No core files, the first to go where memory is short, and ended by the timer."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which ends us.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main(*sys.argv[1:])
