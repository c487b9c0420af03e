"""A process that does, one after the other, the steps it is told through a pipe: `Strings` is the
end that tells, `dance` the one that does."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.integration.processes import wait_until_stopped

PATIENCE = 60.0


@dataclass(frozen=True)
class Strings:
    """To a puppet."""

    name: str
    process: ForkServerProcess
    ends: Connection

    def does(self, step: str, *arguments: Any) -> Any:
        said, raised = self.tries(step, *arguments)
        assert not raised, f"{self.name} {step}: {raised}"
        return said

    def raises(self, step: str, *arguments: Any) -> str:
        """The exception's name; empty if there was none."""
        return self.tries(step, *arguments)[1]

    def tries(self, step: str, *arguments: Any) -> tuple[Any, str]:
        """What came of it and the exception's name. Raises EOFError when the puppet has died."""
        self.begins(step, *arguments)
        return self.hears()

    def begins(self, step: str, *arguments: Any) -> None:
        """Whoever may be stopped in the middle of it is heard later."""
        self.ends.send((step, arguments))

    def hears(self) -> tuple[Any, str]:
        assert self.ends.poll(PATIENCE), f"{self.name} hangs"
        answer: tuple[Any, str] = self.ends.recv()
        return answer

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        self.wait_until_stopped()
        yield
        self.thaw()

    def wait_until_stopped(self) -> None:
        assert self.process.pid is not None
        wait_until_stopped(self.process.pid)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)


def dance(
    strings: Connection, log: Path, env: dict[str, str], make: Callable[..., object], *names: Any
) -> None:
    """Makes the puppet; then answers each (step, arguments) with what came of it, and the name of
    what was raised."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(env)
    puppet = make(*names)
    strings.send((None, ""))
    while True:
        step, arguments = strings.recv()
        try:
            strings.send((getattr(puppet, step)(*arguments), ""))
        except Exception as error:
            strings.send((None, type(error).__name__))
