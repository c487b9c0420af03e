"""A reader that stops the holder, or itself (SIGSTOP), as soon as it has started a READ of the
holder's memory.

The ids of the processes to stop are in the file that HOLDER names: without it nothing is stopped,
and the first READ deletes it. The READ hangs if it needs the holder's help: see `nixl_puppet.TCP`.

A plugin of vLLM's, or `python -m tests.integration.stopping_engine` with the options of
`disagg-engine`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from engine_ext.worker.agent import NixlAgent, Transfer
from tests.integration.processes import Server, family

HOLDER = "TEST_HOLDER_PROCESSES"


def stop_at_next_read(server: Server, file: Path) -> None:
    """Make the reader stop `server`, its first process last. `file` is the reader's HOLDER."""
    whole = file.with_suffix(".new")
    whole.write_text(" ".join(map(str, reversed(family(server.process.pid)))))
    whole.rename(file)


def register() -> None:
    start_read = NixlAgent.start_read

    def start_read_and_stop(self: NixlAgent, *args: Any) -> Transfer:
        transfer = start_read(self, *args)
        file = Path(os.environ[HOLDER])
        if file.exists():
            stopped = [int(pid) for pid in file.read_text().split()]
            file.unlink()
            for pid in sorted(stopped, key=os.getpid().__eq__):  # itself last
                os.kill(pid, signal.SIGSTOP)
        return transfer

    NixlAgent.start_read = start_read_and_stop  # type: ignore[assignment] # the planted fault


if __name__ == "__main__":
    from engine_ext.reference import cli

    register()
    sys.exit(cli.main())
