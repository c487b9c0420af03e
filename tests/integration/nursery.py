"""Reference engines that start in a second: forked from a process that has imported torch already.

Each leaves its last words when it ends by itself: what it had counted when there was nobody left to
ask it over HTTP, and nothing had been ended by force.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from router.common.child_processes import die_with

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["engine_ext.reference.host", __name__])

Counts = dict[str, int]


class Engine:
    """A process that runs `disagg-engine` with these arguments, until `close`. The nicer, the less
    it is in the way of others."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        niceness: int = 0,
    ) -> None:
        self.log, self._words = folder / f"{name}.log", folder / f"{name}.json"
        given = (list(arguments), dict(variables), self.log, self._words, niceness)
        self._process = _context.Process(target=_live, args=given, name=name, daemon=True)
        self._process.start()

    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """It is gone, and what it held here is freed."""
        self._process.kill()
        self._process.join(10)
        self._process.close()

    def last_words(self) -> Counts:
        """The numbers of ConnectorStats and EngineStats, when it had waited for its readers."""
        words: Counts = json.loads(self._words.read_text())
        return words


def _live(
    arguments: list[str], variables: dict[str, str], log: Path, words: Path, niceness: int
) -> None:
    die_with(os.getppid())()
    os.nice(niceness)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(variables)
    from engine_ext.reference import cli, host

    class Remembered(host.Host):
        def run(self, bound: socket.socket, *, shutdown_timeout: int) -> None:
            shut_down = self.engine.shutdown

            def shutdown(timeout: float) -> None:
                words.write_text(json.dumps(_counts(self.engine)))
                shut_down(timeout)

            self.engine.shutdown = shutdown  # type: ignore[assignment, method-assign]
            super().run(bound, shutdown_timeout=shutdown_timeout)

    host.Host = Remembered  # type: ignore[misc] # the command makes it
    sys.exit(cli.main(arguments))


def _counts(engine: Any) -> Counts:
    return {
        each.name: value
        for stats in (engine.connector_stats(), engine.stats())
        for each in fields(stats)
        if isinstance(value := getattr(stats, each.name), int)
    }
