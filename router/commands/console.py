"""The parts that all commands share: the argument parser, and errors of writing the output."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def report_unwritable(program: str, error: OSError) -> int:
    """Return the exit code for output that cannot be written.

    A closed pipe is no error: its reader has enough, as `head` does.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if not isinstance(error, BrokenPipeError):
        with contextlib.suppress(OSError):
            print(f"{program}: error: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):  # Python flushes both once more at the end
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())
    return 0 if isinstance(error, BrokenPipeError) else 1
