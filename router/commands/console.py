"""The parts that all commands share: arguments, exit codes, and errors in lines for a person."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, NoReturn, TextIO, TypeVar

from router.common.did_you_mean import did_you_mean
from router.common.user_info import without_user_info

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8000"
GREEN, YELLOW, RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"
BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
# The exit code after Ctrl-C.
INTERRUPTED = 130
TERMINAL_PROGRESS_S, LOG_PROGRESS_S = 0.5, 5.0
Paint = Callable[[str, str], str]


class CommandError(Exception):
    """A command has failed; the message has a line for each reason."""

    exit_code = 1


class UsageError(Exception):
    """The arguments or variables of a command cannot be used; the message is one line."""


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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse, and suggest the option that an unknown one may have meant."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            what = "option" if name.startswith("-") else "argument"
            self.error(f"unknown {what} {name}{did_you_mean(name, self.option_strings())}")
        return options

    def add_router_url(self) -> None:
        text = f"default: {DEFAULT_URL}"
        self.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=text)

    def option_strings(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def run(self, work: Callable[[], int]) -> int:
        """Do the work of the command, and return its exit code. Exits for a UsageError."""
        try:
            return work()
        except UsageError as error:
            self.error(without_user_info(str(error)))
        except CommandError as error:
            for line in without_user_info(str(error)).splitlines():
                print(f"{self.prog}: error: {line}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return INTERRUPTED
        except OSError as error:  # an error of a connection is a CommandError
            return self._report_unwritable(error)

    def _report_unwritable(self, error: OSError) -> int:
        """Return the exit code for output that cannot be written.

        A closed pipe is no error: its reader has enough, as `head` does.
        """
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if not isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):
                print(f"{self.prog}: error: {error}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):  # Python flushes both once more at the end
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
                continue
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(nowhere, stream.fileno())
        return 0 if isinstance(error, BrokenPipeError) else 1


def number_in(
    least: float, most: float, kind: type = float, unit: str = ""
) -> Callable[[str], Any]:
    """Return the argparse type of numbers from `least` to `most`, in this unit."""

    def number(text: str) -> Any:
        if not least <= (value := kind(text)) <= most:
            bounds = f"{least:g} to {most:,.12g} {unit}".rstrip()
            raise argparse.ArgumentTypeError(f"{text} is not from {bounds}")
        return value

    return number


def columns_of(stream: TextIO) -> int:
    """Return how many columns the terminal has that `stream` writes to."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def paint(text: str, colour: str) -> str:
    return f"{colour}{text}{PLAIN}"


def no_paint(text: str, colour: str) -> str:
    return text


def paint_for(stream: TextIO | None) -> Paint:
    """Return `paint` for a terminal, unless the user wants no colours."""
    is_terminal = stream is not None and stream.isatty()
    return paint if is_terminal and not os.environ.get("NO_COLOR") else no_paint


def time_text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


class TerminalLine:
    """Prints a line for each change, or on a terminal one line that changes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self._shown = ""

    def __enter__(self) -> TerminalLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_terminal and self._shown:
            print(file=self._stream, flush=True)

    def show(self, line: str) -> None:
        if self.is_terminal:  # a line that wraps cannot be replaced
            line = line[: columns_of(self._stream) - 1]
        if line == self._shown:
            return
        before, self._shown = self._shown, line
        if self.is_terminal:
            print(f"\r{line.ljust(len(before))}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)


async def run_with_progress(
    work: Coroutine[Any, Any, T],
    line: Callable[[], str],
    silent_s: float = TERMINAL_PROGRESS_S,
) -> T:
    """Return what `work` returns. Meanwhile show `line()`, after `silent_s` seconds.

    Progress goes to standard error, since the result may be piped.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task,), timeout=silent_s)
        with TerminalLine(sys.stderr) as progress:
            interval = TERMINAL_PROGRESS_S if progress.is_terminal else LOG_PROGRESS_S
            shown_at = -inf
            while not task.done():
                if time.monotonic() - shown_at >= interval:
                    shown_at = time.monotonic()
                    progress.show(line())
                await asyncio.wait((task,), timeout=TERMINAL_PROGRESS_S)
            if progress.is_terminal and shown_at > 0:
                progress.show(line())
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait((task,))
