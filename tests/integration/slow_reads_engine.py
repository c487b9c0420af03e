"""A reference engine whose READs take SECONDS, as over a network that hangs.

Run as `python -m tests.integration.slow_reads_engine`, with the options of `disagg-engine`.
"""

import sys
import time

from engine_ext.layout.plan import Indices
from engine_ext.reference import cli
from engine_ext.worker import worker
from engine_ext.worker.agent import NixlAgent, PeerHandle, Transfer, TransferState

SECONDS = 6.0


class SlowAgent(NixlAgent):
    """The real one, which reports the end of each transfer late."""

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        self._ends_at = time.monotonic() + SECONDS
        return super().start_read(peer, local, remote, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        if time.monotonic() < self._ends_at:
            return TransferState.RUNNING
        return super().poll(transfer)


if __name__ == "__main__":
    worker.NixlAgent = SlowAgent  # type: ignore[attr-defined] # the planted fault
    sys.exit(cli.main())
