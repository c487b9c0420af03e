"""Plans carried out on plain arrays: every byte once, from the right byte, and no other."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.common.types import (
    SHARED,
    STATE,
    CacheGeometry,
    Region,
    StateSection,
    chunked,
    first_seen,
)
from engine_ext.layout.match import match_peer
from engine_ext.layout.plan import (
    Batch,
    PeerLayout,
    PlanError,
    Side,
    TokenRange,
    strided_descriptors,
    to_fill,
    without_holes,
)
from engine_ext.layout.ranks import TensorRank
from engine_ext.wire.handshake import AgentMetadata
from tests.unit.engine_ext.layout.cache_model import Bytes, Model, RankCache
from tests.unit.engine_ext.scheduler.fakes import regions

GEOMETRY = CacheGeometry(block_size=16, num_blocks=32)


def match(ours: RankCache, theirs: RankCache, *, permute: bool = True) -> PeerLayout:
    us, them = TensorRank(ours.rank, ours.size), TensorRank(theirs.rank, theirs.size)
    return match_peer(ours.geometry(), ours.regions(), theirs.metadata(), us, them, permute=permute)


def stretches(side: Side) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    """Address and length of every descriptor, as NIXL numbers them."""
    counts = side.rows[:, 4].astype(np.int64)
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.concatenate([np.arange(count) for count in counts])
    address, length, _, stride, _ = side.rows.T.astype(np.int64)
    return address[row] + place * stride[row], length[row]


def carry_out(
    batch: Batch, source: tuple[RankCache, Side], target: tuple[RankCache, Side], write: bool
) -> Bytes:
    """Copies; returns how often each byte of the target's memory was written."""
    touched = np.zeros(len(target[0].memory), dtype=np.uint8)
    there, here = (batch.local, batch.remote) if write else (batch.remote, batch.local)
    froms, tos = stretches(source[1]), stretches(target[1])
    total = 0
    for i, j in zip(there, here, strict=True):
        length = froms[1][i]
        assert length == tos[1][j]
        first = froms[0][i] - source[0].memory.ctypes.data
        start = tos[0][j] - target[0].memory.ctypes.data
        assert 0 <= first <= len(source[0].memory) - length
        assert 0 <= start <= len(target[0].memory) - length
        target[0].memory[start : start + length] = source[0].memory[first : first + length]
        touched[start : start + length] += 1
        total += length
    assert total == batch.num_bytes
    return touched


LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BHLNC", "BLNHC")


@dataclass
class Case:
    """A request of `num_tokens` on P's ranks, wanted from `first_token` on by D's."""

    prefill: list[RankCache]
    decode: list[RankCache]
    kv: Bytes
    prefill_blocks: list[int]
    decode_blocks: list[int]
    first_token: int

    @property
    def num_tokens(self) -> int:
        return int(self.kv.shape[2])

    def loaded(self) -> range:
        """In whole units; P's garbage behind the last token comes along."""
        unit = match(self.decode[0], self.prefill[0]).units[0]
        return range(self.first_token, -(-self.num_tokens // unit) * unit)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = Model(
        draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    )
    sizes = draw(st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2))
    block_sizes = draw(st.tuples(*[st.sampled_from([1, 2, 4, 6])] * 2))
    layouts = draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 2))
    num_blocks = draw(st.integers(9, 12))
    num_tokens = draw(st.integers(1, 8 * min(block_sizes)))
    parts = [
        draw(st.sampled_from([1, 2, 4])) if layout.startswith("L") else 1 for layout in layouts
    ]
    caches = [
        [
            RankCache(
                model,
                layouts[side],
                block_sizes[side],
                num_blocks,
                rank,
                sizes[side],
                padding=draw(st.sampled_from([0, 3])) if parts[side] == 1 else 0,
                parts=gcd(parts[side], block_sizes[side]),
                seed=side + 2 * rank,
            )
            for rank in range(sizes[side])
        ]
        for side in (0, 1)
    ]
    tables = [draw(st.permutations(range(num_blocks))) for _ in caches]
    first = draw(st.integers(0, (num_tokens - 1) // block_sizes[1])) * block_sizes[1]
    unit = match(caches[1][0], caches[0][0]).units[0]
    kv = model.kv(-(-num_tokens // unit) * unit)
    for cache in caches[0]:
        cache.store(kv, tables[0])
    prefill, decode = caches
    return Case(prefill, decode, kv[:, :, :num_tokens], tables[0], tables[1], first)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_byte_of_a_read_comes_once_from_its_place(case: Case) -> None:
    truth = case.prefill[0].model.kv(case.loaded().stop)
    for reader in case.decode:
        expected = reader.after(truth, case.decode_blocks, case.loaded())
        touched = np.zeros(len(reader.memory), dtype=np.uint8)
        for rank in TensorRank(reader.rank, reader.size).faces(len(case.prefill)):
            holder = case.prefill[rank]
            plan = match(reader, holder)
            if plan.skips_read:
                continue
            batch = plan.to_read(
                (tuple(case.decode_blocks),),
                (tuple(case.prefill_blocks),),
                case.first_token,
                case.num_tokens,
                case.num_tokens,
            )
            touched += carry_out(batch, (holder, plan.remote), (reader, plan.local), write=False)
        assert (reader.memory == expected).all()
        assert touched.max() == 1
        assert touched.sum() == reader.blocks[0, :, :, 0].size * len(case.loaded())


@settings(max_examples=150, deadline=None)
@given(cases(), st.lists(st.integers(1, 8), max_size=3).map(sorted))
def test_every_byte_of_a_write_goes_once_to_its_place(case: Case, computed: list[int]) -> None:
    """In parts, of which the last but one end after so many of the writer's blocks."""
    truth = case.prefill[0].model.kv(case.loaded().stop)
    blocks = range(case.first_token, case.num_tokens, case.decode[0].block_size)
    registered = tuple(case.decode_blocks[t // case.decode[0].block_size] for t in blocks)
    touched = [np.zeros(len(target.memory), dtype=np.uint8) for target in case.decode]
    expected = [one.after(truth, case.decode_blocks, case.loaded()) for one in case.decode]
    for writer in case.prefill:
        for rank in TensorRank(writer.rank, writer.size).faces(len(case.decode)):
            target = case.decode[rank]
            plan = match(writer, target)
            if plan.skips_write:
                continue
            ends = [number * writer.block_size for number in computed]
            parts = [*map(TokenRange, [0, *ends], ends), TokenRange(since=ends[-1] if ends else 0)]
            for number, part in zip([*computed, None], parts, strict=True):
                ours = (tuple(case.prefill_blocks[:number]),)
                batch = plan.to_write(ours, (registered,), case.first_token, case.num_tokens, part)
                touched[rank] += carry_out(
                    batch, (writer, plan.local), (target, plan.remote), write=True
                )
    for target, right, times in zip(case.decode, expected, touched, strict=True):
        assert (target.memory == right).all()
        assert times.max() == 1


@given(
    st.permutations(range(20)),
    st.permutations(range(20)),
    st.integers(0, 19),
    st.integers(0, 320),
)
def test_engines_alike_pair_whole_blocks_by_position_in_ascending_order(
    local: list[int], remote: list[int], first_block: int, num_tokens: int
) -> None:
    last_token = min(first_block * 16 + num_tokens, 320)
    layout = match_peer(GEOMETRY, regions(layers=1), metadata(1))
    batch = layout.to_read((tuple(local),), (tuple(remote),), first_block * 16, last_token, 320)
    last_block = -(-last_token // 16)
    expected = dict(zip(local[first_block:last_block], remote[first_block:last_block], strict=True))
    assert dict(zip(batch.local.tolist(), batch.remote.tolist(), strict=True)) == expected
    assert sorted(batch.local.tolist()) == batch.local.tolist()
    assert batch.num_blocks == len(expected)
    assert batch.num_bytes == len(expected) * 4096


def test_descending_ids_become_one_ascending_run_per_region() -> None:
    layout = match_peer(GEOMETRY, regions(), metadata())
    batch = layout.to_read(((9, 8, 7, 6),), ((29, 28, 27, 26),), 0, 64, 64)
    assert batch.local.tolist() == [6, 7, 8, 9, 38, 39, 40, 41]
    assert batch.remote.tolist() == [26, 27, 28, 29, 90, 91, 92, 93]
    assert batch.local.dtype == np.int32


def test_a_longer_remote_list_is_cut_at_the_tokens_wanted_not_at_its_end() -> None:
    layout = match_peer(GEOMETRY, regions(layers=1), metadata(1))
    assert layout.to_read(((1, 2),), ((10, 11, 12, 13),), 0, 32, 64).remote.tolist() == [10, 11]


@pytest.mark.parametrize(
    ("local", "remote", "first", "last"),
    [
        ([1], [1, 2], 0, 32),
        ([1, 2], [1], 0, 32),
        ([1, 2], [1, 2], 8, 32),
        ([1], [1], -16, 16),
        ([1], [99], 0, 16),
        ([32], [1], 0, 16),
        ([1], [1], 0, 1 << 60),
    ],
)
def test_lists_that_do_not_cover_the_tokens_are_refused(
    local: list[int], remote: list[int], first: int, last: int
) -> None:
    layout = match_peer(GEOMETRY, regions(), metadata())
    with pytest.raises(PlanError):
        layout.to_read((tuple(local),), (tuple(remote),), first, last, None)


@pytest.mark.parametrize(
    ("registered", "first", "last"),
    [
        ((1 << 63,), 0, 16),
        ((1,), 1 << 63, 1 << 63),
        ((1, 2, 3), 0, 32),
        ((1,), 0, 32),
        ((1,), 3, 16),
        ((), 0, 16),
        ((1,), 0, 1 << 60),
    ],
)
def test_a_registration_that_does_not_name_the_blocks_is_refused(
    registered: tuple[int, ...], first: int, last: int
) -> None:
    layout = match_peer(GEOMETRY, regions(), metadata())
    with pytest.raises(PlanError):
        layout.to_write(((1, 2, 3),), (registered,), first, last)


@pytest.mark.parametrize(("ours", "theirs", "most"), [(4, 4, 12), (4, 1, 48), (2, 4, 6), (1, 4, 3)])
def test_no_more_blocks_are_registered_than_all_of_ours_would_fill(
    ours: int, theirs: int, most: int
) -> None:
    model = Model(1, 1, 1)
    layout = match(
        RankCache(model, "LBHNC", ours, 12, 0, 1), RankCache(model, "LBHNC", theirs, 99, 0, 1)
    )
    layout.check_registered((tuple(range(most)),))
    for registered in ((tuple(range(most + 1)),), ((1,), (1,)), ()):
        with pytest.raises(PlanError):
            layout.check_registered(registered)


def test_a_stock_registration_is_written_up_to_the_last_token() -> None:
    layout = match_peer(GEOMETRY, regions(layers=1), metadata(1))
    batch = layout.to_write(((1, 2, 3),), ((8, 9),), None, 40)
    assert (batch.local.tolist(), batch.remote.tolist()) == ([2, 3], [8, 9])


def test_one_descriptor_row_per_region_whatever_the_blocks() -> None:
    many = regions(num_blocks=1_000_000, layers=3)
    assert strided_descriptors(many).shape == (3, 5)
    plan = match_peer(GEOMETRY, many, metadata(3))
    assert (plan.local.rows == strided_descriptors(many)).all()
    assert plan.remote.rows.shape == (3, 5)


def test_layers_that_lie_together_on_both_sides_are_one_descriptor_per_block() -> None:
    model = Model(layers=4, heads=2, head_bytes=8)
    plan = match(RankCache(model, "BLHNC"), RankCache(model, "BLHNC"))
    assert plan.local.rows.shape == plan.remote.rows.shape == (1, 5)


@pytest.mark.parametrize(
    ("ours", "theirs", "rows"),
    [
        ({"size": 2}, {}, 1),  # Half of the heads: one slice per block.
        ({}, {"size": 2}, 1),
        ({"block_size": 8}, {}, 4),  # Two halves of a block for each of two heads.
        ({"layout": "BLHNC"}, {}, 1),
        ({"layout": "LBNHC"}, {}, 32),  # Per head and token.
    ],
)
def test_a_block_is_cut_into_no_more_pieces_than_it_must(
    ours: dict[str, int], theirs: dict[str, int], rows: int
) -> None:
    model = Model(layers=1, heads=2, head_bytes=8)
    plan = match(RankCache(model, **ours), RankCache(model, **theirs))  # type: ignore[arg-type] # settings
    assert max(len(plan.local.rows), len(plan.remote.rows)) == rows


@pytest.mark.parametrize(("sizes", "tokens"), [((1, 2), 8), ((2, 1), 8), ((2, 1), 4), ((8, 2), 16)])
def test_a_latent_that_every_rank_has_is_read_and_written_once(
    sizes: tuple[int, int], tokens: int
) -> None:
    """Latent attention is one head, copied; here the sides' blocks are of 8 and of `tokens`."""
    model = Model(layers=2, heads=1, head_bytes=576)
    ours, theirs = (
        [RankCache(model, block_size=each, rank=rank, size=size) for rank in range(size)]
        for each, size in zip((8, tokens), sizes, strict=True)
    )
    for reader in ours:
        faced = TensorRank(reader.rank, reader.size).faces(len(theirs))
        plans = [match(reader, theirs[rank], permute=False) for rank in faced]
        assert [plan.skips_read for plan in plans] == [False] + [True] * (len(faced) - 1)
        assert len(plans[0].local.rows) == model.layers * max(1, 8 // tokens)
    for target in theirs:
        faced = TensorRank(target.rank, target.size).faces(len(ours))
        writing = [not match(ours[rank], target, permute=False).skips_write for rank in faced]
        assert writing == [True] + [False] * (len(faced) - 1)


def test_a_single_head_lies_alike_in_either_order_of_heads_and_tokens() -> None:
    model = Model(layers=2, heads=1, head_bytes=576)
    plan = match(RankCache(model, "LBHNC"), RankCache(model, "LBNHC"), permute=False)
    assert len(plan.local.rows) == len(plan.remote.rows) == model.layers


# Pipeline stages.


def stage_of(cache: RankCache, layers: slice) -> AgentMetadata:
    """What a rank says that has these layers alone."""
    said = cache.metadata()
    said.kv_caches_base_addr = said.kv_caches_base_addr[layers]
    said.block_lens = said.block_lens[layers]
    said.block_strides = said.block_strides[layers]
    said.region_group_ids = [0] * len(said.block_lens)
    said.region_names = cache.names[layers]
    said.block_layers = [[name] for name in said.region_names]
    return said


@pytest.mark.parametrize("cut", [1, 2])
def test_layers_are_read_from_the_stages_that_have_them(cut: int) -> None:
    model = Model(layers=3, heads=2, head_bytes=2)
    holder, reader = RankCache(model), RankCache(model, seed=2)
    kv, theirs, ours = model.kv(40), (3, 2, 1), (4, 5, 6)
    holder.store(kv, theirs)
    expected = reader.after(kv, ours, range(40))
    for layers in (slice(cut), slice(cut, None)):
        said = stage_of(holder, layers)
        plan = match_peer(reader.geometry(), reader.regions(), said, in_part=True)
        assert plan.layers == tuple(reader.names[layers])
        batch = plan.to_read((ours,), (theirs,), 0, 40, 40)
        carry_out(batch, (holder, plan.remote), (reader, plan.local), write=False)
    # Whole blocks are moved, the last of them with what lies behind its tokens.
    reader.blocks[6, :, :, 8:] = RankCache(model, seed=2).blocks[6, :, :, 8:]
    assert (reader.memory == expected).all()


def test_a_rank_of_other_layers_is_neither_read_nor_written() -> None:
    model = Model(layers=3, heads=2, head_bytes=2)
    cache = RankCache(model)
    said = stage_of(cache, slice(2, None))
    plan = match_peer(cache.geometry(), cache.regions()[:2], said, in_part=True)
    assert plan.layers == ()
    assert plan.skips_read
    assert plan.skips_write
    with pytest.raises(PlanError, match="number of layers differs"):
        match_peer(cache.geometry(), cache.regions()[:2], said)


SHARES: dict[str, Region] = {
    "whole": Region("a0", 0x1000, 64, 64, 8, group=SHARED, tenants=("a0", "b0")),
    "rest of whole": Region("a1", 0x2000, 64, 64, 8, group=0),
    "stage": Region("a1", 0x5000, 64, 64, 8, group=SHARED, tenants=("a1", "b0")),
}
"""Of an engine with all of a0, a1 and b0, and of one's stage that has the last two: a0 and a1 are
of one group, b0 is of another, and shares the memory of the group's first layer there."""


def said_of(regions: list[Region]) -> AgentMetadata:
    said = RankCache(Model(len(regions), 1, 4)).metadata()
    said.kv_caches_base_addr = [region.base_addr for region in regions]
    said.block_lens = said.block_strides = [64] * len(regions)
    said.region_num_blocks = [8] * len(regions)
    said.region_group_ids = [region.group for region in regions]
    said.region_names = [region.name for region in regions]
    said.block_layers = [list(region.layers) for region in regions]
    said.region_tenants = [list(region.tenants) for region in regions]
    return said


def test_a_stage_reads_each_layer_where_it_is_whoever_shares_its_memory() -> None:
    """Both have a region a1 that layers share; behind the name is not b0 but at one of them."""
    geometry = CacheGeometry(16, 8, group_windows=(None, 8))
    said = said_of([SHARES["whole"], SHARES["rest of whole"]])
    plan = match_peer(geometry, [SHARES["stage"]], said, in_part=True)
    assert plan.layers == ("a1", "b0")
    assert plan.local.rows[:, 0].tolist() == [0x5000, 0x5000]
    assert plan.remote.rows[:, 0].tolist() == [0x2000, 0x1000]
    for side in (plan.local, plan.remote):
        assert [table.starts.tolist() for table in side.groups] == [[[0]], [[8]]]


def test_a_stage_that_does_not_say_who_shares_its_memory_is_refused() -> None:
    geometry = CacheGeometry(16, 8, group_windows=(None, 8))
    said = said_of([SHARES["whole"], SHARES["rest of whole"]])
    said.region_tenants = None
    with pytest.raises(PlanError, match="the layers that share a0 are not known"):
        match_peer(geometry, [SHARES["stage"]], said, in_part=True)


OTHER_TENANTS: dict[str, tuple[str, ...]] = {
    "groups the other way round": ("b0", "a0"),
    "another layer": ("a0", "b1"),
    "another model's": ("a0", "c0"),
    "nobody": (),
}


@pytest.mark.parametrize("tenants", OTHER_TENANTS.values(), ids=OTHER_TENANTS)
def test_memory_that_other_layers_share_there_is_refused(tenants: tuple[str, ...]) -> None:
    """It has the name of one of them, and each group's blocks are moved whole."""
    geometry = CacheGeometry(16, 8, group_windows=(None, 8))
    ours = SHARES["whole"]
    assert match_peer(geometry, [ours], said_of([ours])).layers == ("a0",)
    with pytest.raises(PlanError, match="layers that share the memory of a0 differs"):
        match_peer(geometry, [ours], said_of([replace(ours, tenants=tenants)]))


@pytest.mark.parametrize("in_part", [False, True])
def test_layers_of_more_groups_than_ours_share_no_memory(in_part: bool) -> None:
    """As many as fit into a handshake would be made regions of."""
    geometry = CacheGeometry(16, 8, group_windows=(None, 8))
    said = said_of([replace(SHARES["whole"], tenants=("a0", *["x"] * 4000))])
    with pytest.raises(PlanError, match="KV-cache groups differ: 2 here, 4001 there"):
        match_peer(geometry, [SHARES["whole"]], said, in_part=in_part)


def test_a_layer_of_another_group_there_is_refused() -> None:
    geometry = CacheGeometry(16, 8, group_windows=(None, 8))
    said = said_of([SHARES["whole"], replace(SHARES["rest of whole"], group=1)])
    with pytest.raises(PlanError, match="KV-cache group of a1 differs: 0 here, 1 there"):
        match_peer(geometry, [replace(SHARES["rest of whole"], group=0)], said, in_part=True)


def test_a_stage_that_does_not_name_its_layers_is_refused() -> None:
    cache = RankCache(Model(2, 1, 4))
    said = cache.metadata()
    said.region_names = None
    with pytest.raises(PlanError, match="does not name its layers"):
        match_peer(cache.geometry(), cache.regions(), said, in_part=True)


# Sliding windows.

WINDOWED = Model(layers=2, heads=1, head_bytes=2)


def windowed() -> RankCache:
    return RankCache(WINDOWED, block_size=4, groups=(0, 1), windows=(None, 8), padding=1)


def holes(ids: tuple[int, ...], kept: int) -> tuple[int, ...]:
    return (0,) * (len(ids) - kept) + ids[len(ids) - kept :]


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("kept", [3, 4])
def test_a_window_is_read_by_position_and_its_holes_are_left_alone(
    kept: int, is_short: bool
) -> None:
    holder, reader = windowed(), windowed()
    kv = WINDOWED.kv(20)
    ids = (1, 2, 3, 4, 5), (11, 12, 13, 14, 15)
    holder.store(kv, ids[0])
    holder.blocks[list(ids[1])] = holder.blocks[list(ids[0])]
    theirs = ids[0], holes(ids[1], kept)
    ours = (10, 9, 8, 7, 6), holes((1, 2, 3, 4, 5), 3)
    expected = reader.after(kv, ours[0], range(20), layers=[0])
    reader_memory = reader.memory.copy()
    reader.memory[:] = expected
    expected = reader.after(kv, ours[1], range(20), layers=[1])
    reader.memory[:] = reader_memory
    plan = match(reader, holder)
    if is_short:
        theirs = without_holes(theirs, (None, 8))  # type: ignore[assignment] # two groups
        assert len(theirs[1]) == kept
    batch = plan.to_read(ours, theirs, 0, 20, 20)
    carry_out(batch, (holder, plan.remote), (reader, plan.local), write=False)
    assert (reader.memory == expected).all()


def test_a_block_that_is_there_for_no_window_is_filled_all_the_same() -> None:
    """Else our host would share it with the next prompt that begins alike, as it was."""
    plan = match(windowed(), windowed())
    ours, theirs = (10, 9, 8, 7, 6), (1, 2, 3, 4, 5)
    lists = (ours, holes(ours, 4)), (theirs, holes(theirs, 3))
    with pytest.raises(PlanError, match="the remote keeps less than the window of 8 tokens"):
        plan.to_read(*lists, 0, 20, 20)


def test_groups_that_share_their_memory_are_each_moved_in_their_own_blocks() -> None:
    caches = [replace(windowed(), groups=(-1, -1)) for _ in range(2)]
    holder, reader = caches
    kvs = WINDOWED.kv(20, seed=3), WINDOWED.kv(20, seed=4)
    theirs, ours = ((1, 2, 3, 4, 5), (0, 0, 13, 14, 15)), ((9, 8, 7, 6, 5), (0, 0, 3, 2, 1))
    for kv, ids in zip(kvs, theirs, strict=True):
        holder.store(kv, ids)
    expected = reader.memory
    for kv, ids in zip(kvs, ours, strict=True):
        expected = reader.after(kv, ids, range(20))
        held, reader.memory[:] = reader.memory.copy(), expected
        if kv is kvs[0]:
            start = held
    reader.memory[:] = start
    plan = match(reader, holder)
    batch = plan.to_read(ours, theirs, 0, 20, 20)
    carry_out(batch, (holder, plan.remote), (reader, plan.local), write=False)
    assert (reader.memory == expected).all()


def test_a_holder_that_keeps_less_than_the_window_is_refused() -> None:
    plan = match(windowed(), windowed())
    full_list = (1, 2, 3, 4, 5)
    with pytest.raises(PlanError, match="window"):
        plan.to_read((full_list, full_list), (full_list, (0, 0, 0, 0, 5)), 0, 20, 20)
    with pytest.raises(PlanError, match="window"):
        plan.to_write((full_list, (0, 0, 0, 0, 5)), (full_list, full_list), 0, 20)
    # What the reader has given up itself, it need not be given.
    batch = plan.to_write((full_list, full_list), (full_list, (0, 0, 0, 0, 5)), 0, 20)
    assert batch.num_blocks == 6


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("window", [8, chunked(12)])
@pytest.mark.parametrize(
    ("held_in", "filled", "outcomes"),
    [
        (4, 4, {"filled"}),
        (8, 4, {"filled"}),
        (8, 2, {"filled"}),
        (4, 8, {"filled", "{} less than the window of {} tokens"}),
        (2, 8, {"filled", "{} less than the window of {} tokens"}),
    ],
)
def test_a_block_of_a_window_is_filled_whole_or_not_at_all(
    held_in: int, filled: int, outcomes: set[str], window: int, write: bool
) -> None:
    """Whose prefix cache knows a block by its tokens would take the rest for written, too. Larger
    blocks begin where smaller ones may have been given up."""
    seen = set()
    for num_tokens in range(9, 33):
        holder, reader = (
            replace(windowed(), block_size=size, num_blocks=17, windows=(None, window))
            for size in (held_in, filled)
        )
        kv = WINDOWED.kv(num_tokens)
        full_lists = [tuple(range(1, -(-num_tokens // size) + 1)) for size in (held_in, filled)]
        kept = [
            tuple(block * (block * size > first_seen(window, num_tokens)) for block in ids)
            for ids, size in zip(full_lists, (held_in, filled), strict=True)
        ]
        holder.store(kv, full_lists[0])
        theirs, ours = ((ids, in_window) for ids, in_window in zip(full_lists, kept, strict=True))
        try:
            if write:
                plan = match(holder, reader)
                batch = plan.to_write(theirs, ours, 0, num_tokens)
                carry_out(batch, (holder, plan.local), (reader, plan.remote), write=True)
            else:
                plan = match(reader, holder)
                batch = plan.to_read(ours, theirs, 0, num_tokens, num_tokens)
                carry_out(batch, (holder, plan.remote), (reader, plan.local), write=False)
        except PlanError as error:
            seen.add(str(error))
            continue
        seen.add("filled")
        for position in range(num_tokens):
            if block := kept[1][position // filled]:
                got = reader.blocks[block, 1, :, position % filled]
                assert (got == kv[1, :, position]).all(), (num_tokens, position)
    keeper = "we keep" if write else "the remote keeps"
    assert seen == {outcome.format(keeper, abs(window)) for outcome in outcomes}


@pytest.mark.parametrize(("num_tokens", "needed"), [(16, 2), (17, 1), (20, 1), (21, 2), (24, 2)])
def test_of_a_chunk_its_own_blocks_are_needed(num_tokens: int, needed: int) -> None:
    """Chunks of 8 tokens, blocks of 4: those in which the last token's chunk lies."""
    caches = [replace(windowed(), windows=(None, chunked(8))) for _ in range(2)]
    plan = match(*caches)
    number = -(-num_tokens // 4)
    full_list = tuple(range(1, number + 1))
    for kept in range(1, number + 1):
        ours, theirs = (full_list, holes(full_list, needed)), (full_list, holes(full_list, kept))
        if kept < needed:
            with pytest.raises(PlanError, match="window of 8 tokens"):
                plan.to_read(ours, theirs, 0, num_tokens, num_tokens)
        else:
            batch = plan.to_read(ours, theirs, 0, num_tokens, num_tokens)
            assert batch.num_blocks == number + needed


def test_a_group_with_a_window_goes_with_the_last_part() -> None:
    plan = match(windowed(), windowed())
    ours, theirs = (1, 2, 3, 4, 5), (6, 7, 8, 9, 10)
    early = plan.to_write((ours[:3], (0, 2, 3)), (theirs, theirs), 0, 20, TokenRange(until=12))
    last = plan.to_write((ours, (0, 0, 3, 4, 5)), (theirs, theirs), 0, 20, TokenRange(since=12))
    assert (early.num_blocks, last.num_blocks) == (3, 2 + 3)
    # A reader registers the blocks that its prefix cache lacks: of a window, perhaps more.
    behind = plan.to_write((ours, (0, 0, 3, 4, 5)), (theirs[3:], theirs[2:]), 12, 20)
    assert behind.num_blocks == 2 + 3


@pytest.mark.parametrize(("uncached", "filled"), [((), (0, 0, 7, 8)), ({1}, (0, 6, 7, 8))])
def test_window_blocks_of_the_prefix_cache_are_not_filled(
    uncached: Iterable[int], filled: tuple[int, ...]
) -> None:
    windows = (None, 32, STATE)
    geometry = CacheGeometry(16, 9, group_windows=windows, uncached_groups=frozenset(uncached))
    ids = ((1, 2, 3, 4), (0, 6, 7, 8), (5,))
    assert to_fill(ids, geometry, 32) == (ids[0], filled, ids[2])
    assert to_fill(ids, geometry, 0) == ids


def test_a_state_is_one_block_whichever_tokens_are_read() -> None:
    caches = [replace(windowed(), windows=(None, STATE)) for _ in range(2)]
    plan = match(*caches)
    batch = plan.to_read(((1, 2, 3), (9,)), ((4, 5, 6), (7,)), 0, 11, 11)
    assert batch.num_blocks == 3 + 1
    only = plan.to_read(((), (9,)), ((), (7,)), 0, 0, 0)
    assert only.num_blocks == 1
    assert carry_out(only, (caches[1], plan.remote), (caches[0], plan.local), write=False).any()


SECTIONS = (StateSection(1, 2), StateSection(4, 3))
"""A group, of which every rank has a copy, and heads."""


def match_states(
    us: TensorRank,
    them: TensorRank,
    ours: tuple[StateSection, ...] = SECTIONS,
    theirs: tuple[StateSection, ...] = SECTIONS,
    block_len: int = 14,
) -> PeerLayout:
    """A single layer, in blocks of that many bytes."""
    geometry = replace(GEOMETRY, num_kv_heads=1, group_windows=(STATE,), state_sections=ours)
    remote = metadata(1, block_lens=[block_len], state_sections=list(theirs) or None)
    return match_peer(geometry, [replace(regions()[0], block_len=block_len)], remote, us, them)


def test_of_a_state_each_rank_gets_its_heads_and_one_copy_of_what_all_have() -> None:
    one = TensorRank(0, 1)
    for rank in range(2):
        wide = TensorRank(rank, 2)
        gather, scatter = match_states(one, wide), match_states(wide, one)
        for plan in (gather, scatter):
            assert plan.local.rows[:, 1].tolist() == plan.remote.rows[:, 1].tolist() == [2, 6]
        starts = gather.local.rows[:, 0] - gather.local.rows[0, 0]
        assert starts.tolist() == [0, 2 + 6 * rank]
        held = ((3,),), ((5,),)
        assert gather.to_read(*held, 0, 9, 9).num_bytes == (6 if rank else 8)
        assert gather.to_write(*held, 0, 9).num_bytes == 8
        assert scatter.to_read(*held, 0, 9, 9).num_bytes == 8


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ours": ()}, "how a state is divided is not known"),
        ({"theirs": ()}, "how a state is divided is not known"),
        ({"theirs": SECTIONS[::-1]}, "sections of a state differs"),
        ({"theirs": (StateSection(0, 2), SECTIONS[1])}, "sections of a state differs"),
        ({"block_len": 13}, "longer than a block"),
    ],
)
def test_a_state_is_not_divided_by_what_is_not_known_of_both(
    change: dict[str, Any], word: str
) -> None:
    with pytest.raises(PlanError, match=word):
        match_states(TensorRank(0, 1), TensorRank(1, 2), **change)


@pytest.mark.parametrize("ids", [(), (7, 8)])
def test_a_state_in_more_or_fewer_blocks_is_refused(ids: tuple[int, ...]) -> None:
    caches = [replace(windowed(), windows=(None, STATE)) for _ in range(2)]
    plan = match(*caches)
    with pytest.raises(PlanError, match="remote blocks of a state"):
        plan.to_read(((1,), (9,)), ((4,), ids), 0, 4, 4)
    with pytest.raises(PlanError, match="local blocks of a state"):
        plan.to_read(((1,), ids), ((4,), (9,)), 0, 4, 4)


def test_a_state_is_written_to_none_but_who_says_of_which_tokens() -> None:
    caches = [replace(windowed(), windows=(None, STATE)) for _ in range(2)]
    plan = match(*caches)
    batch = plan.to_write(((1, 2, 3), (9,)), ((4, 5, 6), (7,)), 0, 11)
    assert batch.num_blocks == 3 + 1
    assert carry_out(batch, (caches[0], plan.local), (caches[1], plan.remote), write=True).any()
    with pytest.raises(PlanError, match="does not name its tokens"):
        plan.to_write(((1, 2, 3), (9,)), ((4, 5, 6), (7,)), None, 11)
    with pytest.raises(PlanError, match="in parts"):
        plan.to_write(((1, 2, 3), (9,)), ((4, 5, 6), (7,)), 0, 11, TokenRange(until=8))


def test_kernel_blocks_of_the_same_size_need_not_be_cut_by_tokens() -> None:
    """Whatever a kernel's block looks like inside: here blocks of two, there of one."""
    model = Model(layers=2, heads=1, head_bytes=3)
    ours, theirs = RankCache(model, block_size=8, parts=2), RankCache(model, block_size=4)
    geometry = replace(ours.geometry(), is_cut_by_tokens=False)
    assert match_peer(geometry, ours.regions(), theirs.metadata()).units == (4,)
    whole = RankCache(model, block_size=8)
    with pytest.raises(PlanError, match=r"a kernel's block differ: \(4,\) here, \(8,\) there"):
        match_peer(geometry, ours.regions(), whole.metadata())


@pytest.mark.parametrize("sizes", [[0], [3], [-1], [1 << 40], [4, 4]])
def test_kernel_blocks_that_fit_no_block_are_refused(sizes: list[int]) -> None:
    with pytest.raises(PlanError, match=r"cannot be cut|number of KV-cache groups"):
        match_peer(GEOMETRY, regions(), metadata(group_kernel_sizes=sizes))


@pytest.mark.parametrize("size", [2, 8])
def test_blocks_that_are_not_cut_by_tokens_are_of_one_size(size: int) -> None:
    ours, theirs = replace(windowed(), block_size=4), replace(windowed(), block_size=size)
    geometry = replace(ours.geometry(), is_cut_by_tokens=False)
    with pytest.raises(PlanError, match=f"4 here, {size} there, and CPU_ATTN has all keys"):
        match_peer(geometry, ours.regions(), theirs.metadata())
    assert match_peer(geometry, ours.regions(), ours.metadata()).units == (4, 4)


def test_groups_may_have_blocks_of_different_sizes() -> None:
    """Four blocks of 16 tokens and two of 32: of the windowed group, the reader needs the last."""
    geometry = replace(
        GEOMETRY, block_size=32, group_windows=(None, 20), group_block_sizes=(16, 32)
    )
    ours = [replace(region, group=group) for group, region in enumerate(regions(layers=2))]
    theirs = metadata(block_size=32, group_block_sizes=[16, 32], region_group_ids=[0, 1])
    plan = match_peer(geometry, ours, theirs)
    # Descriptors are numbered by region; the remote's has 64 blocks.
    batch = plan.to_read(((1, 2, 3, 4), (0, 6)), ((9, 8, 7, 6), (5,)), 0, 64, 64)
    assert dict(zip(batch.local.tolist(), batch.remote.tolist(), strict=True)) == {
        1: 9,
        2: 8,
        3: 7,
        4: 6,
        GEOMETRY.num_blocks + 6: 64 + 5,
    }
    written = plan.to_write(((1, 2, 3, 4), (6,)), ((8, 7, 6), (5,)), 32, 64, TokenRange())
    assert written.num_blocks == 2 + 1
    with pytest.raises(PlanError, match="do not cover"):
        plan.to_read(((1, 2, 3, 4), (5, 6)), ((9, 8, 7), (5,)), 0, 64, 64)


@pytest.mark.parametrize(
    ("ours", "theirs", "extension"),
    [((16, 32), [32, 16], None), ((16, 32), None, 2), ((), [16, 32], 2), ((16, 32), [16], 2)],
)
def test_groups_of_other_block_sizes_are_refused_by_name(
    ours: tuple[int, ...], theirs: list[int] | None, extension: int | None
) -> None:
    geometry = replace(GEOMETRY, group_windows=(None, 20), group_block_sizes=ours)
    told = metadata(group_block_sizes=theirs, region_group_ids=[0, 1], disagg_ext=extension)
    with pytest.raises(PlanError, match=r"tokens per block of each group differ: \(16, "):
        match_peer(geometry, regions(), told)


@pytest.mark.parametrize("groups", [1, 3])
def test_another_number_of_groups_is_refused(groups: int) -> None:
    plan = match(windowed(), windowed())
    with pytest.raises(PlanError, match="groups differ"):
        plan.to_read(((1,), (1,)), ((1,),) * groups, 0, 4, 4)


# What fits together.


def metadata(layers: int = 2, **changes: object) -> AgentMetadata:
    ours = regions(layers=layers)
    fields: dict[str, object] = {
        "engine_id": "p",
        "agent_metadata": b"",
        "kv_caches_base_addr": [region.base_addr for region in ours],
        "device_id": 0,
        "num_blocks": 64,
        "block_lens": [4096] * layers,
        "block_strides": [8192] * layers,
        "kv_cache_layout": "LBHNC",
        "block_size": 16,
        "attn_backend_name": "CPU_ATTN",
        "region_names": [region.name for region in ours],
    }
    return AgentMetadata(**{**fields, **changes})  # type: ignore[arg-type] # msgspec struct


def test_regions_are_lined_up_by_name() -> None:
    names = [region.name for region in regions()]
    layout = match_peer(
        GEOMETRY, regions(), metadata(region_names=names[::-1], region_num_blocks=[7, 8])
    )
    assert [region.name for region in layout.regions] == names
    assert layout.remote.rows[:, 4].tolist() == [8, 7]
    assert layout.regions[0].block_stride == 8192


def test_a_region_that_their_groups_share_fits_one_that_is_a_groups_own() -> None:
    theirs = metadata(region_group_ids=[0, -1], region_names=None)
    assert len(match_peer(GEOMETRY, regions(), theirs).regions) == 2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_size": 24}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1 << 40}, "block_size"),
        ({"block_size": 32}, "num_kv_heads is not known"),
        ({"kv_cache_layout": "LBNHC"}, "kv_cache_layout"),
        ({"attn_backend_name": "FLASH_ATTN"}, "attn_backend_name"),
        ({"block_lens": [4096, 8192], "block_strides": [8192, 8192]}, "block_len"),
        ({"block_strides": [4096, 1]}, "block_stride"),
        ({"kv_caches_base_addr": [1 << 32, (1 << 64) - 4096]}, "64-bit"),
        ({"num_blocks": 1 << 62}, "64-bit"),
        ({"region_names": ["a", "b"]}, "no region"),
        (
            {"kv_caches_base_addr": [1], "block_lens": [1], "block_strides": [1]},
            "number of regions",
        ),
        ({"attn_backend_name": "TRITON_MLA"}, "attn_backend_name"),
        ({"ssm_sizes": (1, 1)}, "Mamba"),
        ({"dcp_size": 2}, "decode context parallel"),
        ({"pcp_size": 2}, "prefill context parallel"),
        ({"ple_block_len": 8}, "embeddings"),
        ({"physical_blocks_per_logical_kv_block": 2}, "physical blocks"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_name(change: dict[str, object], word: str) -> None:
    with pytest.raises(PlanError, match=word):
        match_peer(GEOMETRY, regions(), metadata(**change))  # type: ignore[arg-type] # settings


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: setattr(m, "block_lens", [33, 33]), "block_len 33"),
        (lambda m: setattr(m, "kv_cache_layout", "XBHNC"), "kv_cache_layout XBHNC"),
        (lambda m: setattr(m, "block_lens", [16, 16]), "bytes per head"),
        (lambda m: setattr(m, "kv_caches_base_addr", [1, (1 << 64) - 1]), "int"),
    ],
)
def test_memory_that_contradicts_what_the_peer_says_is_refused(
    change: Callable[[AgentMetadata], None], word: str
) -> None:
    model = Model(layers=2, heads=2, head_bytes=4)
    ours, theirs = RankCache(model, block_size=8), RankCache(model, block_size=4)
    told = theirs.metadata()
    told.block_strides = [1 << 20] * 2
    change(told)
    with pytest.raises(PlanError, match=word):
        match_peer(ours.geometry(), ours.regions(), told, permute=True)


@pytest.mark.parametrize(
    ("us", "them", "heads", "word"),
    [
        (TensorRank(0, 1), TensorRank(0, 3), 4, "KV heads on 3 ranks"),
        (TensorRank(0, 2), TensorRank(1, 2), 4, "share no heads"),
    ],
)
def test_ranks_that_do_not_go_together_are_refused(
    us: TensorRank, them: TensorRank, heads: int, word: str
) -> None:
    ours = RankCache(Model(1, heads, 4), rank=us.rank, size=us.size)
    with pytest.raises(PlanError, match=word):
        match_peer(ours.geometry(), ours.regions(), ours.metadata(), us, them)


def test_groups_that_differ_are_refused_by_region() -> None:
    theirs = windowed().metadata()
    theirs.region_group_ids = [1, 0]
    with pytest.raises(PlanError, match="KV-cache group"):
        match_peer(windowed().geometry(), windowed().regions(), theirs)


def test_a_region_without_a_name_has_ours() -> None:
    plain = metadata()
    plain.region_names = None
    assert [r.name for r in match_peer(GEOMETRY, regions(), plain).regions] == [
        r.name for r in regions()
    ]


def test_a_layout_told_by_members_alone_is_not_a_layer_of_ours() -> None:
    region = Region("all", 0x1000, 64, 64, 8, members=("a", "b"))
    geometry = replace(GEOMETRY, kv_cache_layout="BLHNC", num_kv_heads=1)
    with pytest.raises(PlanError, match="number of layers"):
        match_peer(geometry, [region], metadata(1, kv_cache_layout="BLHNC"))
