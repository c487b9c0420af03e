"""Which bytes go where: pure functions from block ids to NIXL descriptor indices.

Blocks are matched by token position, never by count from an end of a list: block k of a request
holds tokens [k * block_size, (k + 1) * block_size). Where the two engines' block sizes differ, both
are cut into units of the smaller one; where heads, layers or layouts differ, a unit is cut into the
pieces that lie alike on both sides. Engines that are alike have one piece per region and block:
the block itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_ext.base.types import SHARED, BlockIds, CacheGeometry, Region
from engine_ext.layout.blocks import BlockShape, Box, LayoutError, joint_axes, piece_length, pieces
from engine_ext.layout.ranks import RankError, TensorRank, is_spare
from engine_ext.wire.notifications import AgentMetadata

Indices = npt.NDArray[np.int32]
Rows = npt.NDArray[np.uint64]

NULL_BLOCK = 0
"""What a group with a window lists where it keeps nothing."""

MAX_RATIO = 1024
"""Of block sizes."""
MAX_UNITS = 1 << 22
"""Of one transfer."""
MAX_ROWS = 1 << 17
MAX_DESCRIPTORS = 1 << 31
ALONE = TensorRank(0, 1)


class PlanError(Exception):
    """The peer does not fit, or the blocks named do not cover the tokens asked for."""


class Blocks(NamedTuple):
    """Block ids of one group, in position order; `first` is the place of the first in the
    request, counted in blocks."""

    ids: Sequence[int]
    first: int = 0


class Batch(NamedTuple):
    """`local[i]` and `remote[i]` are descriptors of the same bytes."""

    local: Indices
    remote: Indices
    num_blocks: int
    """Local blocks, whole or in part."""
    num_bytes: int


class Units(NamedTuple):
    """Units of the smaller block size, each by its block and its place in it. Shapes: [units]."""

    blocks: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Where the descriptors of one group's blocks begin: `starts[unit in its block, piece]`, to
    which the block id is added."""

    starts: Indices
    num_blocks: int

    def indices(self, units: Units) -> Indices:
        """Piece after piece, shape [pieces * units]. Raises PlanError for a block outside."""
        blocks = units.blocks
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.num_blocks:
            raise PlanError(f"block {blocks.max()} of {self.num_blocks}")
        places = [0] if len(self.starts) == 1 else units.places
        indices: Indices = self.starts[places].T + blocks.astype(np.int32)
        return indices.ravel()


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's part in a plan. `rows` are NIXL's five columns: address, length, device, stride,
    count; descriptors are numbered through them."""

    block_size: int
    rows: Rows
    groups: tuple[GroupTable, ...]


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """How the blocks of one remote rank map onto ours."""

    regions: tuple[Region, ...]
    """The remote's."""
    local: Side
    remote: Side
    unit: int
    """Tokens."""
    windows: tuple[int | None, ...]
    unit_bytes: tuple[int, ...]
    """By group."""
    skips_read: bool = False
    """A neighbour of this rank holds the same heads, and we read them from there."""
    skips_write: bool = False
    """A neighbour of ours holds the same heads, and writes them."""

    def to_read(
        self,
        local: BlockIds,
        remote: BlockIds,
        first_token: int,
        last_token: int,
        held_tokens: int | None,
    ) -> Batch:
        """Tokens [first_token, last_token), where `local` begins at the request's start and
        `remote` holds its first `held_tokens`. Raises PlanError."""
        self._check_groups(local, remote)
        held = last_token if held_tokens is None else held_tokens
        theirs = [
            Blocks(ids, 0 if window is None else max(0, _blocks(held, self.remote) - len(ids)))
            for ids, window in zip(remote, self.windows, strict=True)
        ]
        ours = [Blocks(ids) for ids in local]
        return self._batch(ours, theirs, first_token, last_token, into_local=True)

    def to_write(
        self,
        local: BlockIds,
        remote: BlockIds,
        first_token: int | None,
        last_token: int,
    ) -> Batch:
        """As `to_read`, where `local` begins at the request's start, or where its window does, and
        both lists end with the block of token `last_token - 1`; `first_token` None: as many as
        `remote` names. Raises PlanError."""
        self._check_groups(local, remote)
        theirs = [Blocks(ids, _blocks(last_token, self.remote) - len(ids)) for ids in remote]
        if any(blocks.first < 0 for blocks in theirs):
            raise PlanError(f"more remote blocks than {last_token} tokens need")
        ours = [
            Blocks(ids, 0 if window is None else max(0, _blocks(last_token, self.local) - len(ids)))
            for ids, window in zip(local, self.windows, strict=True)
        ]
        if first_token is None:
            first_token = min(blocks.first for blocks in theirs) * self.remote.block_size
        return self._batch(ours, theirs, first_token, last_token, into_local=False)

    def _check_groups(self, local: BlockIds, remote: BlockIds) -> None:
        number = len(self.windows)
        if not len(local) == len(remote) == number:
            raise PlanError(f"KV-cache groups differ: {number} here, {len(remote)} there")

    def _batch(
        self,
        local: Sequence[Blocks],
        remote: Sequence[Blocks],
        first_token: int,
        last_token: int,
        *,
        into_local: bool,
    ) -> Batch:
        in_reach = 0 <= first_token <= last_token <= MAX_UNITS * self.unit
        if first_token % self.unit or not in_reach:
            raise PlanError(f"tokens {first_token} to {last_token} in units of {self.unit}")
        parts = [
            self._pair(group, local[group], remote[group], first_token, last_token, into_local)
            for group in range(len(self.windows))
        ]
        tables = zip(self.local.groups, self.remote.groups, parts, strict=True)
        indices = [
            (ours.indices(here), theirs.indices(there)) for ours, theirs, (here, there) in tables
        ]
        return Batch(
            np.concatenate([here for here, _ in indices]),
            np.concatenate([there for _, there in indices]),
            sum(len(np.unique(here.blocks)) for here, _ in parts),
            sum(
                len(here.blocks) * size
                for size, (here, _) in zip(self.unit_bytes, parts, strict=True)
            ),
        )

    def _pair(
        self,
        group: int,
        local: Blocks,
        remote: Blocks,
        first_token: int,
        last_token: int,
        into_local: bool,
    ) -> tuple[Units, Units]:
        """In ascending local order: NIXL merges descriptors only where both sides ascend by one,
        and block allocators hand out descending ids."""
        window = self.windows[group]
        positions = np.arange(first_token // self.unit, -(-last_token // self.unit))
        here = self._units("local", local, self.local, positions, window)
        there = self._units("remote", remote, self.remote, positions, window)
        if window is not None:
            needed = (positions + 1) * self.unit > last_token - window
            ours, theirs = here.blocks != NULL_BLOCK, there.blocks != NULL_BLOCK
            wanted, given = (ours, theirs) if into_local else (theirs, ours)
            if (wanted & needed & ~given).any():
                holder = "the remote keeps" if into_local else "we keep"
                raise PlanError(f"{holder} less than the window of {window} tokens")
            kept = wanted & given
            here, there = _take(here, kept), _take(there, kept)
        order = np.lexsort((here.places, here.blocks))
        return _take(here, order), _take(there, order)

    def _units(
        self,
        name: str,
        blocks: Blocks,
        side: Side,
        positions: npt.NDArray[np.int64],
        window: int | None,
    ) -> Units:
        """Where a window allows holes, what lies before the list is one."""
        per_block = side.block_size // self.unit
        index = positions // per_block - blocks.first
        if len(index) and (index[-1] >= len(blocks.ids) or (window is None and index[0] < 0)):
            raise PlanError(f"{len(blocks.ids)} {name} blocks do not cover the tokens")
        try:
            ids = np.array([NULL_BLOCK, *blocks.ids], dtype=np.int64)
        except OverflowError:
            raise PlanError(f"{name} block ids beyond 63 bits") from None
        return Units(ids[np.maximum(index + 1, 0)], positions % per_block)


def _blocks(tokens: int, side: Side) -> int:
    return -(-tokens // side.block_size)


def _take(units: Units, which: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Units:
    return Units(units.blocks[which], units.places[which])


def without_holes(block_ids: BlockIds, windows: Sequence[int | None]) -> BlockIds:
    """As other engines are told: a group with a window lists its blocks up to the last, not the
    holes before them."""
    return tuple(
        ids if window is None else tuple(dropwhile(lambda block: block == NULL_BLOCK, ids))
        for ids, window in zip_longest(block_ids, windows[: len(block_ids)])
    )


def strided_descriptors(regions: Sequence[Region]) -> Rows:
    """NIXL's five columns (address, length, device, stride, count), one row per region: building
    them costs O(layers), not O(blocks)."""
    return np.array(
        [(r.base_addr, r.block_len, r.device_id, r.block_stride, r.num_blocks) for r in regions],
        dtype=np.uint64,
    ).reshape(len(regions), 5)


class Span(NamedTuple):
    """Layers that lie side by side both here and there: regions, and the layers' places in them."""

    ours: Region
    theirs: Region
    our_layers: range
    their_layers: range


def match_peer(
    geometry: CacheGeometry,
    local: Sequence[Region],
    remote: AgentMetadata,
    us: TensorRank = ALONE,
    them: TensorRank = ALONE,
    *,
    permute: bool = False,
) -> PeerLayout:
    """Lines a remote rank's memory up with ours. Raises PlanError naming what does not fit.

    `permute`: another order of heads and tokens inside a block is accepted; it costs a descriptor
    per head and token.
    """
    if (unsupported := unsupported_by(remote)) is not None:
        raise PlanError(f"{unsupported} there: not supported")
    _require("attn_backend_name", geometry.attn_backend_name, remote.attn_backend_name)
    _check_layouts(geometry.kv_cache_layout, remote.kv_cache_layout, permute)
    _check_block_sizes(geometry, remote)
    try:
        matcher = _Matcher(geometry, remote, us, them)
        for span in _spans(local, _remote_regions(local, remote)):
            matcher.add(span)
        return matcher.finish()
    except (LayoutError, RankError, OverflowError) as error:
        raise PlanError(str(error)) from None


def _check_layouts(ours: str, theirs: str, permute: bool) -> None:
    """Where the layers are is a matter of addresses; to take heads and tokens apart costs much."""
    inside = [layout.partition("B")[2].replace("L", "") for layout in (ours, theirs)]
    if ours != theirs and inside[0] != inside[1] and not permute:
        raise PlanError(
            f"kv_cache_layout differs: {ours} here, {theirs} there; enable_permute_local_kv is off"
        )


def _check_block_sizes(geometry: CacheGeometry, remote: AgentMetadata) -> None:
    ours, theirs = geometry.block_size, remote.block_size
    larger, smaller = max(ours, theirs), min(ours, theirs)
    if smaller < 1 or larger % smaller or larger // smaller > MAX_RATIO:
        raise PlanError(f"block_size differs: {ours} here, {theirs} there, not multiples")
    if ours != theirs and geometry.num_kv_heads is None:
        raise PlanError(
            f"block_size differs: {ours} here, {theirs} there, and num_kv_heads is not known"
        )


@dataclass(slots=True)
class _Rows:
    """A side in the making."""

    block_size: int
    places: range
    """Units of a block."""
    num_groups: int
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    size: int = 0
    starts: list[list[list[int]]] = field(init=False)
    """[group][unit][piece]"""
    num_blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [[[] for _ in self.places] for _ in range(self.num_groups)]
        self.num_blocks = [MAX_DESCRIPTORS] * self.num_groups

    def groups_of(self, region: Region) -> range:
        """Blocks of all groups lie in a shared region."""
        if region.group == SHARED:
            return range(self.num_groups)
        return range(region.group, region.group + 1)

    def add(self, region: Region, place: int, offset: int, length: int) -> None:
        for group in self.groups_of(region):
            self.starts[group][place].append(self.size)
            self.num_blocks[group] = min(self.num_blocks[group], region.num_blocks)
        self.rows.append(
            (
                region.base_addr + offset,
                length,
                region.device_id,
                region.block_stride,
                region.num_blocks,
            )
        )
        self.size += region.num_blocks
        if len(self.rows) > MAX_ROWS or self.size >= MAX_DESCRIPTORS:
            raise LayoutError("too many pieces for one peer")

    def finish(self) -> Side:
        groups = zip(self.starts, self.num_blocks, strict=True)
        return Side(
            self.block_size,
            np.array(self.rows, dtype=np.uint64).reshape(len(self.rows), 5),
            tuple(GroupTable(np.array(starts, dtype=np.int32), count) for starts, count in groups),
        )


class _Matcher:
    def __init__(
        self, geometry: CacheGeometry, remote: AgentMetadata, us: TensorRank, them: TensorRank
    ) -> None:
        self._geometry = geometry
        self._remote = remote
        self._us = us
        self._them = them
        self._unit = min(geometry.block_size, remote.block_size)
        self._ours = self._side(geometry.block_size)
        self._theirs = self._side(remote.block_size)
        self._unit_bytes = [0] * len(geometry.group_windows)
        self._regions: dict[str, Region] = {}
        self._is_alike = (
            geometry.block_size == remote.block_size
            and geometry.kv_cache_layout == remote.kv_cache_layout
            and us == them
        )

    def add(self, span: Span) -> None:
        ours, theirs = span.ours, span.theirs
        self._regions[theirs.name] = theirs
        _require(f"KV-cache group of {ours.name}", ours.group, theirs.group)
        if theirs.block_stride < theirs.block_len:
            raise PlanError(f"block_stride of {theirs.name} is less than its block_len")
        if self._is_alike and len(span.our_layers) == len(ours.layers) == len(theirs.layers):
            self._add_whole(ours, theirs)
        else:
            self._add_pieces(span)

    def finish(self) -> PeerLayout:
        spare = False, False
        if (heads := self._geometry.num_kv_heads) is not None:
            spare = is_spare(self._them, self._us, heads), is_spare(self._us, self._them, heads)
        return PeerLayout(
            tuple(self._regions.values()),
            self._ours.finish(),
            self._theirs.finish(),
            self._unit,
            self._geometry.group_windows,
            tuple(self._unit_bytes),
            *spare,
        )

    def _side(self, block_size: int) -> _Rows:
        return _Rows(block_size, range(block_size // self._unit), len(self._geometry.group_windows))

    def _add_whole(self, ours: Region, theirs: Region) -> None:
        _require(f"block_len of {ours.name}", ours.block_len, theirs.block_len)
        self._ours.add(ours, 0, 0, ours.block_len)
        self._theirs.add(theirs, 0, 0, theirs.block_len)
        self._count(ours, ours.block_len)

    def _add_pieces(self, span: Span) -> None:
        here, there = self._our_box(span), self._their_box(span)
        name = f"bytes per head and token of {span.ours.name}"
        _require(name, here(0).shape.extents["C"], there(0).shape.extents["C"])
        joint = joint_axes(here(0), there(0))
        length = piece_length(here(0), joint)
        for rows, region, box in (
            (self._ours, span.ours, here),
            (self._theirs, span.theirs, there),
        ):
            for place in rows.places:
                for offset in pieces(box(place), joint):
                    rows.add(region, place, offset, length)
        self._count(span.ours, length * sum(1 for _ in pieces(here(0), joint)))

    def _count(self, region: Region, unit_bytes: int) -> None:
        for group in self._ours.groups_of(region):
            self._unit_bytes[group] += unit_bytes

    def _our_box(self, span: Span) -> Callable[[int], Box]:
        return self._box(
            self._geometry.kv_cache_layout,
            self._geometry.block_size,
            span.ours,
            span.our_layers,
            self._us,
        )

    def _their_box(self, span: Span) -> Callable[[int], Box]:
        return self._box(
            self._remote.kv_cache_layout,
            self._remote.block_size,
            span.theirs,
            span.their_layers,
            self._them,
        )

    def _box(
        self, layout: str, block_size: int, region: Region, layers: range, rank: TensorRank
    ) -> Callable[[int], Box]:
        """The common heads of a unit, by the unit's place in the block."""
        held = self._heads(rank)
        common = self._common_heads()
        heads = range(common.start - held.start, common.stop - held.start)
        shape = BlockShape.of(
            layout, region.block_len, layers=len(region.layers), heads=len(held), tokens=block_size
        )

        def box(place: int) -> Box:
            tokens = range(place * self._unit, (place + 1) * self._unit)
            return Box(shape, {"L": layers, "H": heads, "N": tokens})

        return box

    def _heads(self, rank: TensorRank) -> range:
        if self._geometry.num_kv_heads is None:
            raise PlanError(
                "the engines' memory is laid out differently, and num_kv_heads is not known"
            )
        return rank.heads(self._geometry.num_kv_heads)

    def _common_heads(self) -> range:
        ours, theirs = self._heads(self._us), self._heads(self._them)
        common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if not common:
            raise RankError(f"ranks {self._us} here and {self._them} there share no heads")
        return common


def _spans(local: Sequence[Region], remote: Sequence[Region]) -> Iterator[Span]:
    """Region by region where both have the same layers in a region, else layer by layer."""
    alike = {region.layers: region for region in remote}
    place = {layer: (r, i) for r in remote for i, layer in enumerate(r.layers)}
    for ours in local:
        theirs = alike.get(ours.layers)
        if theirs is not None:
            yield Span(ours, theirs, range(len(ours.layers)), range(len(theirs.layers)))
            continue
        for i, layer in enumerate(ours.layers):
            if layer not in place:
                raise PlanError(f"the peer has no region {layer}")
            theirs, there = place[layer]
            yield Span(ours, theirs, range(i, i + 1), range(there, there + 1))


def _remote_regions(local: Sequence[Region], remote: AgentMetadata) -> list[Region]:
    """Named by the peer, else in the order of ours."""
    number = len(remote.kv_caches_base_addr)
    names = remote.region_names or [region.name for region in local]
    _require("number of regions", number, len(names))
    layers = remote.block_layers or [[name] for name in names]
    _require("number of layers", sum(len(r.layers) for r in local), sum(map(len, layers)))
    groups = remote.region_group_ids or [0] * number
    if len({region.group for region in local}) == 1:
        groups = [local[0].group] * number
    counts = remote.region_num_blocks or [remote.num_blocks] * number
    types = remote.region_mem_types or [local[0].mem_type] * number
    return [
        Region(
            names[i],
            remote.kv_caches_base_addr[i],
            remote.block_lens[i],
            remote.block_strides[i],
            counts[i],
            remote.device_id,
            types[i],
            groups[i],
            tuple(layers[i]),
        )
        for i in range(number)
    ]


def unsupported_by(remote: AgentMetadata) -> str | None:
    """What of the peer's cache we cannot read or write; None when nothing."""
    ratio = remote.physical_blocks_per_logical_kv_block
    facts = (
        ("MLA (multi-head latent attention)", "MLA" in remote.attn_backend_name),
        ("Mamba and other state-space layers", remote.ssm_sizes != (0, 0)),
        (f"decode context parallel size {remote.dcp_size}", remote.dcp_size != 1),
        (f"prefill context parallel size {remote.pcp_size}", remote.pcp_size != 1),
        ("embeddings in the KV blocks", remote.ple_block_len is not None),
        (f"{ratio} physical blocks per logical block", ratio != 1),
    )
    return next((name for name, is_so in facts if is_so), None)


def _require(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise PlanError(f"{what} differs: {ours} here, {theirs} there")
