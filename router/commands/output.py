"""What a command does where its output cannot be written."""

from __future__ import annotations

import contextlib
import os
import sys


def unwritable(program: str, error: OSError) -> int:
    """The exit code. Silent where who read has enough, as `head` has."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if not isinstance(error, BrokenPipeError):
        with contextlib.suppress(OSError):
            print(f"{program}: error: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):  # they are written once more at the end
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())
    return 0 if isinstance(error, BrokenPipeError) else 1
