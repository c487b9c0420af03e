"""Which bytes a checksum is of, and how the work is divided; over real memory."""

import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from engine_ext.common.orders import PullOrder
from engine_ext.common.types import (
    SHARED,
    STATE,
    BlockIds,
    CacheGeometry,
    PeerAddress,
    Region,
    RemoteSource,
)
from engine_ext.layout.match import match_peer
from engine_ext.layout.plan import PlanError
from engine_ext.worker import checksums
from engine_ext.worker.checksums import Buffer, Checksums, HostBlocks, to_wire
from tests.unit.engine_ext.layout.cache_model import Model, RankCache

MODEL = Model(layers=2, heads=2, head_bytes=8)
BLOCKS, BLOCK_BYTES, STRIDE = 16, 96, 128
HOLDER = PeerAddress("p", "127.0.0.1", 1)


class Memory:
    """Regions of 16 blocks that do not lie back to back; `groups` has one entry per region."""

    def __init__(
        self,
        windows: tuple[int | None, ...] = (None,),
        groups: Any = (0, 0),
        blocks: HostBlocks | None = None,
    ) -> None:
        rng = np.random.default_rng(1)
        self.bytes = rng.integers(0, 255, (len(groups), BLOCKS, STRIDE), dtype=np.uint8)
        start = self.bytes.ctypes.data
        self.regions = [
            Region(f"l{i}", start + i * BLOCKS * STRIDE, BLOCK_BYTES, STRIDE, BLOCKS, group=group)
            for i, group in enumerate(groups)
        ]
        geometry = CacheGeometry(4, BLOCKS, group_windows=windows)
        self.checksums = Checksums(self.regions, geometry, blocks or HostBlocks())

    def sums(self, block_ids: BlockIds) -> tuple[bytes, ...]:
        self.checksums.lease("p-1", block_ids)
        while self.checksums.is_busy:
            self.checksums.step()
        made = self.checksums.ask("p-1")
        assert made is not None
        assert made.sums is not None
        return to_wire(made.sums)

    def problem(self, order: PullOrder, sums: tuple[bytes, ...]) -> str | None:
        """What is wrong with what was read into this memory."""
        check = self.checksums.check(order)
        while not check.is_done:
            self.checksums.step()
        return check.problem(sums)


def order_of(
    ours: BlockIds, theirs: BlockIds, first: int, last: int, held: int | None = None
) -> PullOrder:
    source = RemoteSource(HOLDER, "p-1", 1, theirs, last if held is None else held)
    return PullOrder("d-1", source, ours, first, last)


def test_a_sum_is_over_all_layers_of_a_block_and_no_byte_between_blocks() -> None:
    memory = Memory()
    found = np.frombuffer(memory.sums(((3, 1),))[0], "<u4")
    whole = [memory.bytes[:, block, :BLOCK_BYTES].tobytes() for block in (3, 1)]
    assert found.tolist() == [zlib.crc32(one) for one in whole]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("byte", [0, 40, BLOCK_BYTES - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_each_bit_that_flips_is_found_and_its_block_named(layer: int, byte: int, bit: int) -> None:
    memory = Memory()
    sums = memory.sums(((3, 1, 5),))
    order = order_of(((3, 1, 5),), ((3, 1, 5),), 0, 11)
    assert memory.problem(order, sums) is None
    memory.bytes[layer, 5, byte] ^= 1 << bit
    problem = memory.problem(order, sums)
    assert problem is not None
    assert "1 of 3 blocks of group 0" in problem
    assert "block 5" in problem


def test_two_blocks_and_two_layers_that_change_places_are_found() -> None:
    memory = Memory()
    sums = memory.sums(((3, 1),))
    order = order_of(((3, 1),), ((3, 1),), 0, 8)
    memory.bytes[:, [3, 1]] = memory.bytes[:, [1, 3]]
    assert memory.problem(order, sums) is not None
    memory.bytes[:, [3, 1]] = memory.bytes[:, [1, 3]]
    assert memory.problem(order, sums) is None
    memory.bytes[[0, 1]] = memory.bytes[[1, 0]]
    assert memory.problem(order, sums) is not None


def test_what_was_not_read_is_not_compared() -> None:
    memory = Memory()
    sums = memory.sums(((3, 1, 5),))
    order = order_of(((8, 9, 5),), ((3, 1, 5),), 8, 12)
    assert memory.problem(order, sums) is None


def test_a_window_is_compared_from_the_sources_first_block() -> None:
    """The holder's list ends where its tokens do; holes on either side hold nothing."""
    memory = Memory(windows=(None, 6), groups=(0, 1))
    held = ((1, 2, 3, 4), (6, 7))
    sums = memory.sums(held)
    memory.bytes[:, [11, 12, 13, 14]] = memory.bytes[:, [1, 2, 3, 4]]
    memory.bytes[:, [8, 9]] = memory.bytes[:, [6, 7]]
    order = order_of(((11, 12, 13, 14), (0, 0, 8, 9)), held, 0, 15)
    assert memory.problem(order, sums) is None
    memory.bytes[1, 9, 0] ^= 1
    assert "group 1" in (memory.problem(order, sums) or "")


def test_a_state_is_compared_whichever_tokens_are_asked_for() -> None:
    memory = Memory(windows=(None, STATE), groups=(0, 1))
    held = ((1, 2, 3), (7,))
    sums = memory.sums(held)
    memory.bytes[1, 9] = memory.bytes[1, 7]
    order = order_of(((4, 5, 3), (9,)), held, 8, 12)
    assert memory.problem(order, sums) is None
    memory.bytes[1, 9, 50] ^= 16
    assert "group 1" in (memory.problem(order, sums) or "")


def test_shared_memory_counts_for_each_group() -> None:
    memory = Memory(windows=(None, 6), groups=(SHARED, SHARED))
    held = ((1, 2), (6, 7))
    sums = memory.sums(held)
    order = order_of(held, held, 0, 8)
    assert memory.problem(order, sums) is None
    memory.bytes[0, 6, 0] ^= 1
    assert "group 1" in (memory.problem(order, sums) or "")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda sums: (),
        lambda sums: (*sums, b""),
        lambda sums: (sums[0][:-4],),
        lambda sums: (sums[0][:-1],),
        lambda sums: (b"",),
    ],
)
def test_sums_of_other_blocks_prove_nothing(spoil: Callable[[Any], tuple[bytes, ...]]) -> None:
    memory = Memory()
    sums = memory.sums(((3, 1),))
    order = order_of(((3, 1),), ((3, 1),), 0, 8)
    assert memory.problem(order, spoil(sums)) == "the source's checksums are of other blocks"
    assert not memory.checksums.is_busy


def test_the_work_is_done_in_slices_and_first_what_somebody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []

    class Recorded(HostBlocks):
        def read(self, region: Region, block_id: int) -> Buffer:
            read.append(block_id)
            return super().read(region, block_id)

    monkeypatch.setattr(checksums, "STEP_BYTES", 2 * BLOCK_BYTES)
    memory = Memory(blocks=Recorded())
    long, wanted, short = (*range(8, 16),), (1, 2), (3,)
    for name, ids in (("long", long), ("wanted", wanted), ("short", short)):
        memory.checksums.lease(name, (ids,))
    memory.checksums.ask("wanted")
    for number in range(1, 12):
        memory.checksums.step()
        assert len(read) == 2 * number, "of one block, both layers"
    assert read[::2] == [*wanted, *short, *long]
    memory.checksums.step()
    assert not memory.checksums.is_busy


def test_what_ends_is_summed_up_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "STEP_BYTES", BLOCK_BYTES)
    memory = Memory()
    memory.checksums.lease("p-1", ((1, 2, 3),))
    memory.checksums.step()
    memory.checksums.forget("p-1")
    assert not memory.checksums.is_busy
    assert memory.checksums.ask("p-1") is None
    memory.checksums.forget("p-1")


def test_memory_that_cannot_be_read_fails_a_load_and_gives_a_reader_no_sums() -> None:
    class Broken(HostBlocks):
        def read(self, region: Region, block_id: int) -> Buffer:
            raise OSError("no such memory")

    sums = Memory().sums(((3, 1),))
    memory = Memory(blocks=Broken())
    order = order_of(((3, 1),), ((3, 1),), 0, 8)
    assert "could not be made" in (memory.problem(order, sums) or "")
    memory.checksums.lease("p-2", ((1,),))
    memory.checksums.step()
    made = memory.checksums.ask("p-2")
    assert made is not None
    assert made.is_done
    assert made.sums is None


@pytest.mark.parametrize("window", [None, 8, 13, -8, -16])
def test_what_is_compared_is_what_a_read_moves(window: int | None) -> None:
    """The plan's pairs and these are found by different code. Of full attention, sliding windows
    and chunks, with holes on either side."""
    dice, windows = Random(f"pairs {window}"), (None, window)
    cache = RankCache(MODEL, block_size=4, num_blocks=120, groups=(0, 1), windows=windows)
    layout = match_peer(cache.geometry(), cache.regions(), cache.metadata())
    compared = Checksums(cache.regions(), cache.geometry(), HostBlocks())
    assert layout.is_alike
    num_planned = 0
    for _ in range(300):
        held = dice.randint(1, 50)
        last = dice.randint(1, held)
        first = dice.randrange(last) // 4 * 4
        ids = iter(dice.sample(range(1, 120), 60))
        theirs = [[next(ids) for _ in range(-(-held // 4))] for _ in windows]
        ours = [[next(ids) for _ in range(-(-last // 4))] for _ in windows]
        if window is not None:
            theirs[1] = theirs[1][dice.randint(0, len(theirs[1])) :]
            ours[1] = [block if dice.random() < 0.8 else 0 for block in ours[1]]
        here, there = tuple(map(tuple, ours)), tuple(map(tuple, theirs))
        try:
            batch = layout.to_read(here, there, first, last, held)
        except PlanError:
            continue  # The holder keeps too little.
        num_planned += 1
        moved = set(zip(batch.local.tolist(), batch.remote.tolist(), strict=True))
        check = compared.check(order_of(here, there, first, last, held))
        pairs = {
            (block + 120 * group, there[group][place] + 120 * group)
            for group, places in enumerate(check.places)
            for block, place in zip(check.ours.block_ids[group], places, strict=True)
        }
        assert pairs == moved
        compared.cancel(check.ours)
    assert num_planned > 50
