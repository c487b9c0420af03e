"""What other threads tell the engine's thread."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engine_ext.reference.beginning import Beginning
from engine_ext.reference.messages import GenerateRequest
from engine_ext.reference.output_stream import OutputStream


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest
    stream: OutputStream
    begun: Beginning | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str
    stream: OutputStream | None = None
    """Only if the request is this stream's; None: whosever it is."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run `function` between two steps."""

    function: Callable[[], Any]
    result: Future[Any]


Command = Submit | Abort | Call


class Inbox:
    """Unbounded, but every entry stands for a caller who waits, or who has just left."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._commands: deque[Command] = deque()
        self._woken = False
        self._closed = False

    def put(self, command: Command) -> bool:
        """False, and nothing is kept, once the inbox is closed."""
        with self._news:
            if self._closed:
                return False
            self._commands.append(command)
            self._news.notify()
            return True

    def wake(self) -> None:
        """From any thread, at any time."""
        with self._news:
            self._woken = True
            self._news.notify()

    def take(self, timeout: float) -> list[Command]:
        """All commands. Waits up to `timeout` seconds for a command or a wake."""
        with self._news:
            self._news.wait_for(lambda: self._woken or bool(self._commands), timeout)
            return self._drain()

    def close(self) -> list[Command]:
        """The last commands; none come after them."""
        with self._news:
            self._closed = True
            return self._drain()

    def _drain(self) -> list[Command]:
        self._woken = False
        commands = list(self._commands)
        self._commands.clear()
        return commands
