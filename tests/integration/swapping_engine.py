"""A reference engine in which each READ brings two blocks in each other's place, in all layers.

Run as `python -m tests.integration.swapping_engine`, with the options of `disagg-engine`.
"""

import ctypes
import sys

from engine_ext.layout.plan import Indices
from engine_ext.reference import cli
from engine_ext.worker import worker
from engine_ext.worker.agent import NixlAgent, PeerHandle, Transfer, TransferState


class SwappingAgent(NixlAgent):
    """The real one, until a READ has ended well."""

    def start_read(
        self, peer: PeerHandle, local: Indices, remote: Indices, notification: bytes
    ) -> Transfer:
        blocks = sorted({index % self._regions[0].num_blocks for index in local.tolist()})
        self._swapped = blocks[0], blocks[-1]
        return super().start_read(peer, local, remote, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        state = super().poll(transfer)
        if state is TransferState.DONE:
            for region in self._regions:
                one, other = (
                    (ctypes.c_ubyte * region.block_len).from_address(
                        region.base_addr + block * region.block_stride
                    )
                    for block in self._swapped
                )
                first, second = bytes(one), bytes(other)
                ctypes.memmove(one, second, len(second))
                ctypes.memmove(other, first, len(first))
        return state


if __name__ == "__main__":
    worker.NixlAgent = SwappingAgent  # type: ignore[attr-defined] # the planted error
    sys.exit(cli.main())
