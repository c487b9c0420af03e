"""NIXL without us: the same bytes in as few descriptors as there can be."""

import threading
import time
import uuid
from collections.abc import Sequence

from nixl._api import nixl_agent, nixl_agent_config

from scripts.bench.errors import BenchError
from scripts.transfer_bench.engine import WAIT_SECONDS
from scripts.transfer_bench.memory import Memory, Shape

Extent = tuple[int, int, int]
"""NIXL's descriptor: address, bytes, device."""


class RawSide:
    """An agent over the whole memory, of the connector's kind: no progress thread, UCX."""

    def __init__(self, memory: Memory, shape: Shape, threads: int) -> None:
        self._memory = memory
        self._shape = shape
        config = nixl_agent_config(enable_prog_thread=False, num_threads=threads, backends=["UCX"])
        self._nixl = nixl_agent(str(uuid.uuid4()), config)
        whole = [(memory.address, shape.total_bytes, memory.device_id, "")]
        self._registered = self._nixl.register_memory(whole, memory.mem_type)
        self._peer = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._progress, daemon=True)

    def metadata(self) -> bytes:
        return bytes(self._nixl.get_agent_metadata())

    def serve(self) -> None:
        """For the side that is read: connections need somebody who polls."""
        self._thread.start()

    def meet(self, metadata: bytes) -> None:
        name = self._nixl.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def one(self, num_blocks: int) -> list[Extent]:
        """As many bytes as `num_blocks` blocks of all layers, in one piece."""
        return [(self._memory.address, self._shape.moved_bytes(num_blocks), self._device)]

    def per_region(self, num_blocks: int) -> list[Extent]:
        """The same, one piece per layer."""
        size = num_blocks * self._shape.block_bytes
        starts = range(0, self._shape.total_bytes, self._shape.layer_bytes)
        return [(self._memory.address + start, size, self._device) for start in starts]

    def read(self, local: Sequence[Extent], remote: Sequence[Extent]) -> float:
        """Seconds from the post to the end, polled without a pause."""
        descriptors = [
            self._nixl.get_xfer_descs(list(side), self._memory.mem_type) for side in (local, remote)
        ]
        handle = self._nixl.initialize_xfer("READ", *descriptors, self._peer)
        started = time.monotonic()
        state = self._nixl.transfer(handle)
        while state == "PROC" and time.monotonic() < started + WAIT_SECONDS:
            state = self._nixl.check_xfer_state(handle)
        seconds = time.monotonic() - started
        self._nixl.release_xfer_handle(handle)
        if state != "DONE":
            raise BenchError(f"raw NIXL: READ ended as {state}")
        return seconds

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._nixl.deregister_memory(self._registered)

    @property
    def _device(self) -> int:
        return self._memory.device_id

    def _progress(self) -> None:
        while not self._stop.wait(0.001):
            self._nixl.get_new_notifs()
