"""Checksums of KV blocks: a reader compares the bytes that it has with those that the source had.

The prefix hashes show of which tokens the blocks are, not that the bytes arrived unchanged. A bit
that flipped on the way, or two blocks that changed places, would be a wrong answer with status 200.
With `kv_checksum: true` in both engines:

    source                                      reader
    grants the lease, sums up its blocks        READs the blocks
             <--------- Read(wants_sums) ------ the READ has ended: sums up its own blocks
    when its sums are made: ReadAck(sums) ----> compares:
                                                  equal: the load has ended well
                                                  different: it has failed, nothing is used

Blocks are compared by their place in the request. `_places` pairs them by itself, so that a wrong
pair in the plan of the READ (layout/plan.py) is found as well. One sum is over a whole block: its
bytes in every region of its KV-cache group, one layer after the other. So the two engines' blocks
must be the same bytes (`PeerLayout.is_alike`: equal block sizes, layouts, ranks and stages); a READ
that converts is not checked. The last block is summed up whole even where it is not full: a READ
moves it whole, and nothing writes into a leased block.

A sum is CRC-32: it finds every single error of up to 32 bits in a row, and misses one in 2^32 of
all others. It protects from faults, not from forgery.

Summing up a gigabyte takes a good part of a second, in which leases have to be renewed. So the work
is done in slices, one per step of the owner thread. Sums that a reader waits for come first, the
smallest before the others.
"""

import ctypes
import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_ext.common.orders import PullOrder
from engine_ext.common.types import SHARED, STATE, BlockIds, CacheGeometry, Region
from engine_ext.layout.plan import NULL_BLOCK, WHOLE

logger = logging.getLogger(__name__)

STEP_BYTES = 2 << 20
"""Summed up in one step of the owner thread, which takes a millisecond. Over TCP the READs of other
engines make progress only between two steps."""
SUM_BYTES = 4
SLOWEST_BYTES_PER_SECOND = 20e6
"""The slowest rate that a reader expects of a source: a hundredth of what a core does."""

Buffer = bytes | memoryview | ctypes.Array[ctypes.c_ubyte]
Sums = npt.NDArray[np.uint32]


class BlockMemory(Protocol):
    """The memory that KV blocks lie in."""

    def read(self, region: Region, block_id: int) -> Buffer:
        """Return the bytes of a region's block, to be used at once."""

    def settle(self) -> None:
        """Wait until what was computed for a request that has finished stands in its blocks."""


class HostBlocks:
    """Host memory, read in place. An engine on a CPU has written when its step ends."""

    def read(self, region: Region, block_id: int) -> Buffer:
        address = region.base_addr + block_id * region.block_stride
        return (ctypes.c_ubyte * region.block_len).from_address(address)

    def settle(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class Summing:
    """Sums of some blocks, in the making."""

    block_ids: BlockIds
    num_bytes: int
    work: Iterator[int] = field(default_factory=lambda: iter(()))
    """Sums up one region's part of a block, and yields its length in bytes."""
    is_wanted: bool = False
    """A request waits for it."""
    is_done: bool = False
    sums: tuple[Sums, ...] | None = None
    """By KV-cache group, one for each block. None at the end: they could not be made."""


@dataclass(slots=True, eq=False)
class ChecksumComparison:
    """The blocks that a READ has brought, to be compared with the source's."""

    ours: Summing
    places: list[list[int]]
    """By KV-cache group, where each of our blocks is in the source's list."""
    num_theirs: list[int]
    """By KV-cache group, the length of that list."""

    @property
    def is_done(self) -> bool:
        return self.ours.is_done

    def problem(self, sums: Sequence[bytes]) -> str | None:
        """Return what is wrong, once it is done; None if nothing is. `sums` are the source's, one
        entry per KV-cache group."""
        theirs = [np.frombuffer(one, "<u4") for one in sums if not len(one) % SUM_BYTES]
        if list(map(len, theirs)) != self.num_theirs:
            return "the source's checksums are of other blocks"
        if self.ours.sums is None:
            return "the checksums of what was read could not be made"
        for group, (ours, places) in enumerate(zip(self.ours.sums, self.places, strict=True)):
            wrong = np.flatnonzero(ours != theirs[group][places])
            if len(wrong):
                return (
                    f"checksum: {len(wrong)} of {len(ours)} blocks of group {group} are not what "
                    f"the source had, block {self.ours.block_ids[group][wrong[0]]} the first"
                )
        return None


class Checksums:
    """The sums of one rank's blocks, as source and as reader. Only the owner thread uses it."""

    def __init__(
        self, regions: Sequence[Region], geometry: CacheGeometry, blocks: BlockMemory
    ) -> None:
        self._block_sizes = geometry.block_sizes
        self._windows = geometry.group_windows
        self._regions = tuple(
            [region for region in regions if region.group in (group, SHARED)]
            for group in range(len(self._windows))
        )
        self._blocks = blocks
        self._unfinished: list[Summing] = []
        self._leased: dict[str, Summing] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._unfinished)

    def step(self) -> None:
        """Sum up `STEP_BYTES`, or what there is."""
        left = STEP_BYTES
        while left > 0 and self._unfinished:
            summing = min(self._unfinished, key=lambda one: (not one.is_wanted, one.num_bytes))
            try:
                for num_bytes in summing.work:
                    left -= num_bytes
                    if left <= 0:
                        return
            except Exception:
                logger.exception("checksums of %d bytes", summing.num_bytes)
            summing.is_done = True
            self._unfinished.remove(summing)

    # The source's side.

    def lease(self, request_id: str, block_ids: BlockIds) -> None:
        """Begin the sums of what readers of this request will read."""
        self.forget(request_id)
        self._blocks.settle()
        self._leased[request_id] = self._begin(block_ids)

    def forget(self, request_id: str) -> None:
        """Drop the sums of a request whose lease has ended: its blocks may be another's."""
        summing = self._leased.pop(request_id, None)
        if summing is not None:
            self.cancel(summing)

    def ask(self, request_id: str) -> Summing | None:
        """Return the sums of a leased request, and hurry up with them. None: not begun."""
        summing = self._leased.get(request_id)
        if summing is not None:
            summing.is_wanted = True
        return summing

    # The reader's side.

    def check(self, order: PullOrder) -> ChecksumComparison:
        """Begin the sums of the blocks that `order` has read."""
        pairs = [
            list(self._places(order, group, window)) for group, window in enumerate(self._windows)
        ]
        summing = self._begin(tuple(tuple(ours for ours, _ in group) for group in pairs))
        summing.is_wanted = True
        places = [[place for _, place in group] for group in pairs]
        return ChecksumComparison(summing, places, [len(ids) for ids in order.source.block_ids])

    def cancel(self, summing: Summing) -> None:
        """Stop the work on sums that no request waits for any more."""
        if not summing.is_done:
            self._unfinished.remove(summing)
            summing.is_done = True

    def _places(
        self, order: PullOrder, group: int, window: int | None
    ) -> Iterator[tuple[int, int]]:
        """Yield each block of ours that was read, and its place in the source's list. A state is
        one block, whichever tokens are asked for. A window's list ends where the source's tokens
        do, and neither side keeps anything in a hole."""
        source, ours = order.source, order.local_block_ids[group]
        theirs = source.block_ids[group]
        if window == STATE:
            yield ours[0], 0
            return
        skipped, size = 0, self._block_sizes[group]
        first, last = WHOLE.between(order.first_token, order.last_token, window)
        if window is not None:
            held = order.last_token if source.num_tokens is None else source.num_tokens
            skipped = max(0, -(-held // size) - len(theirs))
        for position in range(first // size, -(-last // size)):
            place = position - skipped
            is_hole = window is not None and (
                place < 0 or NULL_BLOCK in (ours[position], theirs[place])
            )
            if not is_hole:
                yield ours[position], place

    def _begin(self, block_ids: BlockIds) -> Summing:
        num_bytes = sum(
            len(ids) * sum(region.block_len for region in regions)
            for ids, regions in zip(block_ids, self._regions, strict=True)
        )
        summing = Summing(block_ids, num_bytes)
        summing.work = self._sum_up(summing)
        self._unfinished.append(summing)
        return summing

    def _sum_up(self, summing: Summing) -> Iterator[int]:
        sums = tuple(np.zeros(len(ids), np.uint32) for ids in summing.block_ids)
        for group, ids in enumerate(summing.block_ids):
            for place, block_id in enumerate(ids):
                if block_id == NULL_BLOCK and self._windows[group] not in (None, STATE):
                    continue
                total = 0
                for region in self._regions[group]:
                    total = zlib.crc32(self._blocks.read(region, block_id), total)
                    yield region.block_len
                sums[group][place] = total
        summing.sums = sums


def to_wire(sums: Sequence[Sums]) -> tuple[bytes, ...]:
    """Return four bytes for each block, little-endian."""
    return tuple(one.astype("<u4").tobytes() for one in sums)
