"""Which bytes go where: pure functions from block ids to NIXL descriptor indices.

Blocks are matched by token position, never by count from an end of a list: block k of a request
holds tokens [k * block_size, (k + 1) * block_size) on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_ext.types import CacheGeometry, Region
from engine_ext.wire import AgentMetadata

Indices = npt.NDArray[np.int32]


class PlanError(Exception):
    """The blocks named do not cover the tokens asked for, or lie outside the memory."""


class BlockPairs(NamedTuple):
    """`local[i]` receives what `remote[i]` holds; both of shape [blocks]."""

    local: Indices
    remote: Indices


def pair_blocks(
    local_block_ids: Sequence[int],
    remote_block_ids: Sequence[int],
    first_token: int,
    last_token: int,
    block_size: int,
) -> BlockPairs:
    """The blocks that hold tokens [first_token, last_token), in ascending local order.

    NIXL merges descriptors only where both sides ascend by one, and block allocators hand out
    descending ids: sorted pairs turn one descriptor per block into one per run.
    Raises PlanError when either list is too short, or `first_token` is inside a block.
    """
    first, inside = divmod(first_token, block_size)
    last = -(-last_token // block_size)
    if inside or first < 0 or last < first:
        raise PlanError(f"tokens {first_token} to {last_token} at block size {block_size}")
    for side, ids in (("local", local_block_ids), ("remote", remote_block_ids)):
        if len(ids) < last:
            raise PlanError(f"{len(ids)} {side} blocks do not reach token {last_token}")
    local = np.asarray(local_block_ids[first:last], dtype=np.int32)
    remote = np.asarray(remote_block_ids[first:last], dtype=np.int32)
    order = np.argsort(local, kind="stable")
    return BlockPairs(local[order], remote[order])


def pair_tail(
    local_block_ids: Sequence[int],
    remote_block_ids: Sequence[int],
    last_token: int,
    block_size: int,
) -> BlockPairs:
    """Pairs a remote list that ends with the block of token `last_token - 1`, and may begin late.

    `local_block_ids` cover the request from position 0. Raises PlanError when they do not reach.
    """
    last = -(-last_token // block_size)
    first = last - len(remote_block_ids)
    if first < 0:
        raise PlanError(f"{len(remote_block_ids)} remote blocks for {last_token} tokens")
    aligned = [*([0] * first), *remote_block_ids]
    return pair_blocks(local_block_ids, aligned, first * block_size, last_token, block_size)


def descriptor_indices(block_ids: Indices, region_num_blocks: Sequence[int]) -> Indices:
    """Indices of the same blocks in every region, region after region: shape [regions * blocks].

    A side's descriptors are numbered through its regions in order, `region_num_blocks[i]` each.
    Raises PlanError for a block outside a region.
    """
    if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < min(region_num_blocks):
        raise PlanError(f"block {block_ids.max()} of {min(region_num_blocks)}")
    offsets = np.concatenate(([0], np.cumsum(region_num_blocks)[:-1])).astype(np.int32)
    return (offsets[:, None] + block_ids[None, :]).ravel()


def strided_descriptors(regions: Sequence[Region]) -> npt.NDArray[np.uint64]:
    """NIXL's five columns (address, length, device, stride, count), one row per region: building
    them costs O(layers), not O(blocks)."""
    return np.array(
        [
            (r.base_addr, r.block_len, r.device_id, r.block_stride, r.num_blocks)
            for r in regions
        ],
        dtype=np.uint64,
    ).reshape(len(regions), 5)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """A remote engine's regions in the order of ours, so that index i means the same layer."""

    regions: tuple[Region, ...]

    @property
    def region_num_blocks(self) -> list[int]:
        return [region.num_blocks for region in self.regions]


def match_peer(
    geometry: CacheGeometry, local: Sequence[Region], remote: AgentMetadata
) -> PeerLayout:
    """Lines the remote's regions up with ours. Raises PlanError naming what does not fit."""
    _require("block_size", geometry.block_size, remote.block_size)
    _require("kv_cache_layout", geometry.kv_cache_layout, remote.kv_cache_layout)
    _require("attn_backend_name", geometry.attn_backend_name, remote.attn_backend_name)
    _require("number of regions", len(local), len(remote.kv_caches_base_addr))
    _require("block ratio", 1, remote.physical_blocks_per_logical_kv_block)
    regions = _remote_regions(local, remote)
    for ours, theirs in zip(local, regions, strict=True):
        _require("region name", ours.name, theirs.name)
        _require(f"block_len of {ours.name}", ours.block_len, theirs.block_len)
        if theirs.block_stride < theirs.block_len:
            raise PlanError(f"block_stride of {theirs.name} is less than its block_len")
    return PeerLayout(regions)


def _remote_regions(local: Sequence[Region], remote: AgentMetadata) -> tuple[Region, ...]:
    """By name where the peer names its regions, else in order."""
    names = remote.region_names or [region.name for region in local]
    counts = remote.region_num_blocks or [remote.num_blocks] * len(local)
    types = remote.region_mem_types or [region.mem_type for region in local]
    by_name = {
        name: Region(name, address, length, stride, count, remote.device_id, mem_type)
        for name, address, length, stride, count, mem_type in zip(
            names,
            remote.kv_caches_base_addr,
            remote.block_lens,
            remote.block_strides,
            counts,
            types,
            strict=True,
        )
    }
    try:
        return tuple(by_name[region.name] for region in local)
    except KeyError as missing:
        raise PlanError(f"the peer has no region {missing.args[0]}") from None


def _require(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise PlanError(f"{what} differs: {ours} here, {theirs} there")
