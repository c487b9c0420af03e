"""Run the shell blocks of a page that are marked, in order, as a reader would.

A mark is an HTML comment on the line before the block:

    <!-- run -->             runs to its end in the page's one shell (set -eu -o pipefail)
    <!-- run until TEXT -->  runs in a terminal of its own; the next block waits for TEXT

A mark with more lines is a block that readers do not see; those lines are the commands:

    <!-- run until Uvicorn running
    python "$ROOT/scripts/mock_engine.py"
    -->

A page runs in an empty temporary directory. The virtual environment's programs come first in PATH,
and $ROOT is the repository. If another process uses a port that the page names, all blocks of the
page use a free port instead. Whatever the page started is stopped at the end.

    python -m tests.docs.blocks docs/quick-start.md    # runs the blocks of one page
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.docs.markdown import FENCE, ROOT

BLOCK_TIMEOUT_S = 240
KILL_TIMEOUT_S = 60
POLL_S = 0.02
LANGUAGES = ("sh", "bash")
MARK = re.compile(r"^ *<!-- run(?: until (?P<until>.*?))?(?P<end> -->)?$")
PORT = re.compile(r"(?:^|(?<=[:\s=]))[1-9]\d{3,4}\b(?![.\d])")
OWNER = "DISAGG_DOCS_PAGE"
"""The environment variable by which processes that a page started are found."""


@dataclass(frozen=True)
class Block:
    """Commands of a page. `until` is set for a block with a terminal of its own."""

    line: int
    commands: str
    until: str | None = None


class BlockError(Exception):
    """A block ended with an error, did not print what it should, or took too long."""


def marked_blocks(text: str) -> list[Block]:
    """Return the marked blocks of a page. A mark without a shell block raises ValueError."""
    lines = text.splitlines()
    found = []
    for index, line in enumerate(lines):
        if not (match := MARK.match(line)):
            continue
        begin = index + 1
        if match["end"]:
            fence = FENCE.match(lines[begin]) if begin < len(lines) else None
            if not fence or fence["language"] not in LANGUAGES:
                raise ValueError(f"line {begin}: no ```sh block follows this mark")
            indent, end = len(fence["indent"]), f"{fence['indent']}{fence['fence']}"
            begin += 1
        else:
            indent, end = 0, "-->"
        commands = [one[indent:] for one in lines[begin : lines.index(end, begin)]]
        found.append(Block(begin + 1, "\n".join(commands), match["until"]))
    return found


def run_page(page: Path, directory: Path, timeout_s: float = BLOCK_TIMEOUT_S) -> int:
    """Run the marked blocks of `page` in `directory` and return their number.

    Raises BlockError with the block and its output. No process of the page is left in any case.
    """
    blocks = marked_blocks(page.read_text(encoding="utf-8"))
    ports = _free_ports("\n".join(block.commands for block in blocks))
    owner = uuid.uuid4().hex
    environment = os.environ | {
        OWNER: owner,
        "ROOT": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DISAGG_ROUTER_PORT": ports.get("8000", "8000"),
    }
    with _Shell(page, directory, environment) as shell:
        try:
            for block in blocks:
                shell.run(with_ports(block, ports), time.monotonic() + timeout_s)
        finally:
            _stop_processes(owner)
    return len(blocks)


def with_ports(block: Block, ports: dict[str, str]) -> Block:
    """Replace the ports in a block's commands and in the text that it waits for."""

    def replaced(text: str) -> str:
        return PORT.sub(lambda match: ports.get(match[0], match[0]), text)

    until = None if block.until is None else replaced(block.until)
    return Block(block.line, replaced(block.commands), until)


def _free_ports(commands: str) -> dict[str, str]:
    """Map each port that the commands name to itself, or to a free one if that is taken."""
    with contextlib.ExitStack() as held:
        return {port: _bind(port, held) for port in sorted(set(PORT.findall(commands)))}


def _bind(port: str, held: contextlib.ExitStack) -> str:
    # Ports stay bound until each has its own, so that none is chosen twice.
    for candidate in (int(port), 0):
        if candidate > 65535:
            break  # a number of four or five digits that is no port
        listener = held.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", candidate))
            return str(listener.getsockname()[1])
    return port


class _Shell:
    """One bash that runs the blocks of a page, and the terminals beside it."""

    def __init__(self, page: Path, directory: Path, environment: dict[str, str]) -> None:
        self._page, self._directory, self._environment = page, directory, environment
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._bash, self._output = self._start("bash", "-eu", "-o", "pipefail")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            process.wait(KILL_TIMEOUT_S)

    def run(self, block: Block, deadline: float) -> None:
        if block.until is None:
            self._run_to_its_end(block, deadline)
        else:
            self._run_until(block, block.until, deadline)

    def _start(self, *command: str) -> tuple[subprocess.Popen[bytes], Path]:
        path = self._beside(f"output{len(self._processes)}")
        with path.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=self._environment,
                start_new_session=True,
            )
        self._processes.append(process)
        return process, path

    def _beside(self, name: str) -> Path:
        return self._directory.with_name(f"{self._directory.name}.{name}")

    def _run_to_its_end(self, block: Block, deadline: float) -> None:
        done, begin = self._beside(f"line{block.line}"), self._output.stat().st_size
        # A command that reads its input must not read the next block.
        script = f"{{ {block.commands}\n}} < /dev/null\ntouch '{done}'\n"
        assert self._bash.stdin
        self._bash.stdin.write(script.encode())
        self._bash.stdin.flush()
        while not done.exists():
            if self._bash.poll() is not None:
                why = f"ended with status {self._bash.returncode}"
            elif time.monotonic() > deadline:
                why = "took too long"
            else:
                time.sleep(POLL_S)
                continue
            raise self._error(block, why, self._output.read_bytes()[begin:])

    def _run_until(self, block: Block, until: str, deadline: float) -> None:
        terminal, path = self._start("bash", "-eu", "-o", "pipefail", "-c", block.commands)
        while until.encode() not in path.read_bytes():
            if terminal.poll() is not None:
                why = f"ended with status {terminal.returncode} before it printed {until!r}"
            elif time.monotonic() > deadline:
                why = f"did not print {until!r} in time"
            else:
                time.sleep(POLL_S)
                continue
            raise self._error(block, why, path.read_bytes())

    def _error(self, block: Block, why: str, output: bytes) -> BlockError:
        tail = output.decode(errors="replace")[-4000:]
        where = f"{self._page.name}, line {block.line}"
        return BlockError(f"{where}: the block {why}\n\n{block.commands}\n\nIts output:\n{tail}")


def _stop_processes(owner: str) -> None:
    """Ask the page's processes to end, wait, and kill those that are left."""
    for number, seconds in ((signal.SIGTERM, KILL_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S)):
        deadline = time.monotonic() + seconds
        for pid in _processes(owner):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while any(_processes(owner)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    assert not list(_processes(owner)), "a page's processes do not end"


def _processes(owner: str) -> Iterator[int]:
    """Yield the processes, zombies aside, that have the page's variable in their environment."""
    wanted = f"{OWNER}={owner}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            (directory := Path(folder) / "page").mkdir()
            print(f"{name}: {run_page(Path(name), directory)} blocks ran")
