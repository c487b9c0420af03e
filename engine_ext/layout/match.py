"""Matches the memory of a remote rank with ours, once per handshake."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import NamedTuple

import numpy as np

from engine_ext.common.types import SHARED, STATE, CacheGeometry, Region, StateSection
from engine_ext.layout.blocks import BlockShape, Box, LayoutError, joint_axes, piece_length, pieces
from engine_ext.layout.plan import (
    ALONE,
    MAX_DESCRIPTORS,
    MAX_RATIO,
    MAX_ROWS,
    GroupTable,
    PeerLayout,
    Pieces,
    PlanError,
    Side,
)
from engine_ext.layout.ranks import RankError, TensorRank, common_range, is_spare
from engine_ext.wire.handshake import AgentMetadata

SAME = "give both engines the same tensor parallel size, block size and KV cache layout"


class Span(NamedTuple):
    """Layers that are adjacent in both engines: the two regions, and the places of the layers."""

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
    in_part: bool = False,
) -> PeerLayout:
    """Return how the memory of a remote rank maps onto ours. Raises PlanError with the difference.

    `permute`: accept another order of heads and tokens inside a block, which costs a descriptor per
    head and token. `in_part`: one of the engines has several pipeline stages, so the rank may have
    only some of our layers, or none. The caller checks that the other ranks have the rest.
    """
    if (unsupported := unsupported_by(remote)) is not None:
        raise PlanError(f"{unsupported} there: not supported")
    _require("attn_backend_name", geometry.attn_backend_name, remote.attn_backend_name)
    if geometry.num_kv_heads != 1:  # a single head has no order
        _check_layouts(geometry.kv_cache_layout, remote.kv_cache_layout, permute)
    _check_block_sizes(geometry, remote)
    try:
        matcher = _Matcher(geometry, remote, us, them)
        theirs = _remote_regions(local, remote, in_part)
        _check_tenants(theirs, len(geometry.group_windows))
        has_same_regions = [r.layers for r in local] == [r.layers for r in theirs]
        if in_part:
            local, theirs = one_by_one(local), one_by_one(theirs)
        for span in _spans(local, theirs, in_part):
            matcher.add(span)
        return matcher.finish(has_same_regions)
    except (LayoutError, RankError, OverflowError) as error:
        raise PlanError(str(error)) from None


def one_by_one(regions: Sequence[Region]) -> list[Region]:
    """Split memory that layers of several groups share into one region per layer, because the
    stages of another engine may combine them in another way. Raises PlanError if the layers are
    unknown."""
    found: list[Region] = []
    for region in regions:
        if region.group != SHARED:
            found.append(region)
            continue
        if not any(region.tenants):
            raise PlanError(
                f"several stages, and the layers that share {region.name} are not known"
            )
        for group, layer in enumerate(region.tenants):
            if layer:
                found.append(replace(region, name=layer, group=group, members=(), tenants=()))
    return found


def _check_tenants(remote: Sequence[Region], num_groups: int) -> None:
    """Raise PlanError for a wrong number of names, before a region is made of each: a peer may send
    as many as fit into its handshake."""
    for region in remote:
        if region.tenants and len(region.tenants) != num_groups:
            raise PlanError(
                f"KV-cache groups differ: {num_groups} here, {len(region.tenants)} there"
            )


def _check_layouts(ours: str, theirs: str, permute: bool) -> None:
    """Raise PlanError if heads and tokens have another order, which is expensive to permute. The
    place of the layers matters only for addresses."""
    inside = [layout.partition("B")[2].replace("L", "") for layout in (ours, theirs)]
    if ours != theirs and inside[0] != inside[1] and not permute:
        raise PlanError(
            f"kv_cache_layout differs: {ours} here, {theirs} there; enable_permute_local_kv is off"
        )


def _check_block_sizes(geometry: CacheGeometry, remote: AgentMetadata) -> None:
    ours, theirs = geometry.block_size, remote.block_size
    named = remote.group_block_sizes
    # A stock engine does not name them. Its blocks have as many bytes, or are refused.
    is_known = named is not None or remote.disagg_ext is not None
    if is_known and geometry.group_block_sizes != tuple(named or ()):
        raise PlanError(
            f"tokens per block of each group differ: {geometry.block_sizes} here, "
            f"{named or theirs} there: {SAME}"
        )
    kernels = geometry.kernel_sizes, _kernel_sizes(geometry, remote)
    _require("number of KV-cache groups", len(kernels[0]), len(kernels[1]))
    differ = f"block_size differs: {ours} here, {theirs} there"
    if ours == theirs:
        differ = f"tokens of a kernel's block differ: {kernels[0]} here, {kernels[1]} there"
    every = {*geometry.block_sizes, theirs, *kernels[0], *kernels[1]}
    pairs = zip(_block_sizes(geometry, remote), kernels[1], strict=True)
    is_cut = min(every) > 0 and not any(size % kernel for size, kernel in pairs)
    if not is_cut or max(every) > gcd(*every) * MAX_RATIO:
        raise PlanError(f"{differ}, which cannot be cut into equal parts")
    if kernels[0] != kernels[1] and not geometry.is_cut_by_tokens:
        raise PlanError(
            f"{differ}, and {geometry.attn_backend_name} has all keys of a block before all values "
            f"or scales: {SAME}"
        )
    if (ours, kernels[0]) != (theirs, kernels[1]) and geometry.num_kv_heads is None:
        raise PlanError(f"{differ}, and num_kv_heads is not known: {SAME}")


def _kernel_sizes(geometry: CacheGeometry, remote: AgentMetadata) -> tuple[int, ...]:
    """Return the tokens of a kernel's block there, by group."""
    return tuple(remote.group_kernel_sizes or _block_sizes(geometry, remote))


def _block_sizes(geometry: CacheGeometry, remote: AgentMetadata) -> tuple[int, ...]:
    """Return the tokens of a block there, by group. Engines whose groups differ have ours."""
    return geometry.group_block_sizes or (remote.block_size,) * len(geometry.group_windows)


@dataclass(slots=True)
class _Rows:
    """A `Side` under construction."""

    block_sizes: tuple[int, ...]
    units: tuple[int, ...]
    """Tokens per unit, by group. A state is one unit."""
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    size: int = 0
    starts: list[list[list[int]]] = field(init=False)
    """[group][unit][piece]"""
    num_blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [[[] for _ in self.places(group)] for group in range(len(self.units))]
        self.num_blocks = [MAX_DESCRIPTORS] * len(self.units)

    def places(self, group: int) -> range:
        """Return the units of a block."""
        return range(self.block_sizes[group] // self.units[group])

    def groups_of(self, region: Region) -> range:
        """Return the groups of a region. A shared region has blocks of all groups."""
        if region.group == SHARED:
            return range(len(self.units))
        return range(region.group, region.group + 1)

    def add(
        self, region: Region, groups: Sequence[int], place: int, offset: int, length: int
    ) -> None:
        for group in groups:
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
            self.block_sizes,
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
        self._kernels = _kernel_sizes(geometry, remote)
        self._moves_whole_blocks = (
            geometry.block_size == remote.block_size
            and geometry.kernel_sizes == self._kernels
            and geometry.kv_cache_layout == remote.kv_cache_layout
            # Of a single head every rank has all, of a state it has not.
            and (us == them or (geometry.num_kv_heads == 1 and not geometry.has_state))
        )
        theirs = tuple(map(StateSection._make, remote.state_sections or ()))
        self._sections = geometry.state_sections if theirs else ()
        if self._sections:
            _require("the sections of a state", self._sections, theirs)
        num_groups = len(geometry.group_windows)
        self._units = geometry.block_sizes
        if not self._moves_whole_blocks:  # no piece is of two of a kernel's blocks
            self._units = (gcd(*geometry.kernel_sizes, *self._kernels),) * num_groups
        self._ours = _Rows(self._cut(geometry.block_sizes), self._units)
        self._theirs = _Rows(self._cut(_block_sizes(geometry, remote)), self._units)
        # By group, the bytes of each piece; 0 where another rank has a copy, which is moved.
        self._read: list[list[int]] = [[] for _ in range(num_groups)]
        self._written: list[list[int]] = [[] for _ in range(num_groups)]
        self._regions: dict[str, Region] = {}
        self._layers: list[str] = []

    def add(self, span: Span) -> None:
        ours, theirs = span.ours, span.theirs
        groups = self._ours.groups_of(ours)
        self._regions[theirs.name] = theirs
        self._layers += (ours.layers[place] for place in span.our_layers)
        _require(f"KV-cache group of {ours.name}", ours.group, theirs.group)
        if self._remote.region_tenants is not None:
            _require(f"layers that share the memory of {ours.name}", ours.tenants, theirs.tenants)
        if theirs.block_stride < theirs.block_len:
            raise PlanError(f"block_stride of {theirs.name} is less than its block_len")
        # NIXL adds these without an overflow check, and would find the sum registered.
        if theirs.base_addr + theirs.block_stride * theirs.num_blocks > 1 << 64:
            raise PlanError(f"{theirs.name} ends beyond what a 64-bit int addresses")
        if self._moves_whole_blocks and len(span.our_layers) == len(ours.layers) == len(
            theirs.layers
        ):
            _require(f"block_len of {ours.name}", ours.block_len, theirs.block_len)
            self._ours.add(ours, groups, 0, 0, ours.block_len)
            self._theirs.add(theirs, groups, 0, 0, theirs.block_len)
            self._count(groups, [ours.block_len], self._geometry.num_kv_heads)
            return
        states = [group for group in groups if self._geometry.group_windows[group] == STATE]
        if others := [group for group in groups if group not in states]:
            self._add_heads(span, others)
        if states:
            self._add_sections(span, states)

    def finish(self, has_same_regions: bool) -> PeerLayout:
        return PeerLayout(
            tuple(self._regions.values()),
            self._ours.finish(),
            self._theirs.finish(),
            self._units,
            self._geometry.group_windows,
            tuple(map(Pieces.of, self._read)),
            tuple(map(Pieces.of, self._written)),
            tuple(self._layers),
            self._moves_whole_blocks and self._us == self._them and has_same_regions,
        )

    def _cut(self, block_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of each group's blocks, of which a state's is one unit."""
        groups = zip(block_sizes, self._units, self._geometry.group_windows, strict=True)
        return tuple(unit if window == STATE else size for size, unit, window in groups)

    def _add_heads(self, span: Span, groups: Sequence[int]) -> None:
        here = self._box(self._geometry, span.ours, span.our_layers, self._us, groups)
        there = self._box(self._remote, span.theirs, span.their_layers, self._them, groups)
        name = f"bytes per head and token of {span.ours.name}"
        _require(name, here(0).shape.extents["C"], there(0).shape.extents["C"])
        joint = joint_axes(here(0), there(0))
        length = piece_length(here(0), joint)
        for rows, region, box in (
            (self._ours, span.ours, here),
            (self._theirs, span.theirs, there),
        ):
            for place in rows.places(groups[0]):
                for offset in pieces(box(place), joint):
                    rows.add(region, groups, place, offset, length)
        lengths = [length for _ in pieces(here(0), joint)]
        self._count(groups, lengths, self._geometry.num_kv_heads)

    def _add_sections(self, span: Span, groups: Sequence[int]) -> None:
        if not self._sections:
            raise self._unknown("how a state is divided")
        starts = [0, 0]
        for items, size in self._sections:
            held = self._us.heads(items), self._them.heads(items)
            common = common_range(*held)
            sides = (self._ours, span.ours), (self._theirs, span.theirs)
            for side, (rows, region) in enumerate(sides):
                offset = starts[side] + (common.start - held[side].start) * size
                rows.add(region, groups, 0, offset, len(common) * size)
                starts[side] += len(held[side]) * size
            self._count(groups, [len(common) * size], items)
        if starts[0] > span.ours.block_len or starts[1] > span.theirs.block_len:
            raise PlanError(f"a state is longer than a block of {span.ours.name}")

    def _count(self, groups: Sequence[int], lengths: Sequence[int], items: int | None) -> None:
        """Record pieces with heads, or other items, of which several ranks may have copies."""
        is_read = items is None or not is_spare(self._them, self._us, items)
        is_written = items is None or not is_spare(self._us, self._them, items)
        for group in groups:
            self._read[group] += (length * is_read for length in lengths)
            self._written[group] += (length * is_written for length in lengths)

    def _box(
        self,
        engine: CacheGeometry | AgentMetadata,
        region: Region,
        layers: range,
        rank: TensorRank,
        groups: Sequence[int],
    ) -> Callable[[int], Box]:
        """Return a function from a unit's place in the block to the box of its common heads."""
        held = self._heads(rank)
        common = common_range(self._heads(self._us), self._heads(self._them))
        heads = range(common.start - held.start, common.stop - held.start)
        is_ours = engine is self._geometry
        by_group = self._geometry.kernel_sizes if is_ours else self._kernels
        rows = self._ours if is_ours else self._theirs
        sizes = {(by_group[g], rows.block_sizes[g], self._units[g]) for g in groups}
        if len(sizes) > 1:
            raise PlanError(f"the groups that share {region.name} have different blocks: {SAME}")
        ((size, block_size, unit),) = sizes
        shape = BlockShape.of(
            engine.kv_cache_layout,
            region.block_len,
            layers=len(region.layers),
            heads=len(held),
            tokens=size,
            kernel_blocks=block_size // size,
        )

        def box(place: int) -> Box:
            kernel, token = divmod(place * unit, size)
            ranges = {"L": layers, "K": range(kernel, kernel + 1), "H": heads}
            return Box(shape, {**ranges, "N": range(token, token + unit)})

        return box

    def _heads(self, rank: TensorRank) -> range:
        if self._geometry.num_kv_heads is None:
            has_state = self._geometry.has_state
            raise self._unknown("how a state is divided" if has_state else "num_kv_heads")
        return rank.heads(self._geometry.num_kv_heads)

    def _unknown(self, needed: str) -> PlanError:
        return PlanError(
            f"the engines' memory is laid out differently, and {needed} is not known: {SAME}"
        )


def _spans(local: Sequence[Region], remote: Sequence[Region], in_part: bool) -> Iterator[Span]:
    """Yield whole regions if both engines have the same layers in them, else single layers."""
    alike = {region.layers: region for region in remote}
    place = {layer: (r, i) for r in remote for i, layer in enumerate(r.layers)}
    for ours in local:
        theirs = alike.get(ours.layers)
        if theirs is not None:
            yield Span(ours, theirs, range(len(ours.layers)), range(len(theirs.layers)))
            continue
        for i, layer in enumerate(ours.layers):
            if layer not in place:
                if in_part:
                    continue
                raise PlanError(f"the peer has no region {layer}")
            theirs, there = place[layer]
            yield Span(ours, theirs, range(i, i + 1), range(there, there + 1))


def _remote_regions(local: Sequence[Region], remote: AgentMetadata, in_part: bool) -> list[Region]:
    """Return the peer's regions, with the names that it sent, or else in the order of ours."""
    number = len(remote.kv_caches_base_addr)
    if in_part and remote.region_names is None:
        raise PlanError("several stages, and the peer does not name its layers")
    names = remote.region_names or [region.name for region in local]
    _require("number of regions", number, len(names))
    layers = remote.block_layers or [[name] for name in names]
    if not in_part:
        _require("number of layers", sum(len(r.layers) for r in local), sum(map(len, layers)))
    groups = remote.region_group_ids or [0] * number
    if not in_part and len({region.group for region in local}) == 1:
        groups = [local[0].group] * number
    counts = remote.region_num_blocks or [remote.num_blocks] * number
    tenants = remote.region_tenants or [[]] * number
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
            tuple(tenants[i]),
        )
        for i in range(number)
    ]


def unsupported_by(remote: AgentMetadata) -> str | None:
    """Return the feature of the peer's cache that we cannot read or write, or None."""
    parts = 1 if remote.group_kernel_sizes else remote.physical_blocks_per_logical_kv_block
    facts = (
        ("Mamba and other state-space layers", remote.ssm_sizes != (0, 0)),
        (f"decode context parallel size {remote.dcp_size}", remote.dcp_size != 1),
        (f"prefill context parallel size {remote.pcp_size}", remote.pcp_size != 1),
        ("embeddings in the KV blocks", remote.ple_block_len is not None),
        (f"{parts} physical blocks per logical block", parts != 1),
    )
    return next((name for name, is_so in facts if is_so), None)


def _require(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise PlanError(f"{what} differs: {ours} here, {theirs} there")
