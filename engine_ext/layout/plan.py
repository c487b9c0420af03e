"""Which bytes are transferred: pure functions from block ids to NIXL descriptor indices.

Blocks are matched by token position, never by counting from the end of a list: block k of a request
holds tokens [k * block_size, (k + 1) * block_size), with the block size of the group. If the block
sizes of two engines differ, both are cut into units of their common divisor. If heads, layers or
layouts differ, a unit is cut into the pieces that are contiguous in both engines. Engines with the
same layout have one piece per region and block: the block itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_ext.common.types import STATE, BlockIds, CacheGeometry, Region, first_seen
from engine_ext.layout.ranks import TensorRank

Indices = npt.NDArray[np.int32]
Rows = npt.NDArray[np.uint64]

NULL_BLOCK = 0
"""The id that a group with a window lists where it holds no block."""

MAX_RATIO = 1024
"""The most units of a block."""
MAX_UNITS = 1 << 22
"""The most units of one transfer."""
MAX_ROWS = 1 << 17
MAX_DESCRIPTORS = 1 << 31
ALONE = TensorRank(0, 1)


class PlanError(Exception):
    """The peer's memory does not match, or the blocks do not cover the tokens."""


class BlockRange(NamedTuple):
    """Block ids of one group in position order. `first` is the position of the first block in the
    request, counted in blocks."""

    ids: Sequence[int]
    first: int = 0


class TokenRange(NamedTuple):
    """A part of a WRITE: the tokens [since, until), or all tokens from `since` on. A group with a
    window frees blocks while the prompt is computed, so all its blocks are written with the last
    part. The range covers its whole list, which has holes for blocks that must not be filled."""

    since: int = 0
    until: int | None = None

    def between(self, first_token: int, last_token: int, window: int | None) -> tuple[int, int]:
        """Return the common range with these tokens; (0, 0) if there is none."""
        if window is not None:
            return (0, last_token if self.until is None else 0)
        first = max(first_token, self.since)
        last = last_token if self.until is None else min(last_token, self.until)
        return (first, last) if first < last else (0, 0)


WHOLE = TokenRange()


class Batch(NamedTuple):
    """Descriptor indices of one transfer: `local[i]` and `remote[i]` are for the same bytes."""

    local: Indices
    remote: Indices
    num_blocks: int
    """Local blocks, including partial ones."""
    num_bytes: int


class Units(NamedTuple):
    """Parts of blocks: the block and the place in it. Shapes: [units]."""

    blocks: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """The pieces of a group's units that move in one direction. The others are copies of what
    another rank reads or writes."""

    which: list[int]
    num_bytes: int
    """The bytes that move of each unit."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Pieces":
        """`lengths`: the bytes of each piece, 0 for one that does not move."""
        return cls([piece for piece, length in enumerate(lengths) if length], sum(lengths))


@dataclass(frozen=True, slots=True)
class GroupTable:
    """The first descriptors of one group: `starts[unit in its block, piece]`, to which the block id
    is added."""

    starts: Indices
    num_blocks: int

    def indices(self, units: Units, pieces: Pieces) -> Indices:
        """Return the indices, piece after piece. Shape: [pieces * units]. Raises PlanError for a
        block outside the cache."""
        blocks = units.blocks
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.num_blocks:
            raise PlanError(f"block {blocks.max()} of {self.num_blocks}")
        places = [0] if len(self.starts) == 1 else units.places
        indices: Indices = self.starts[:, pieces.which][places].T + blocks.astype(np.int32)
        return indices.ravel()


@dataclass(frozen=True, slots=True)
class Side:
    """The memory of one engine. `rows` are NIXL's five columns: address, length, device, stride and
    count. Descriptors are numbered through the rows."""

    block_sizes: tuple[int, ...]
    """Tokens per block, by group."""
    rows: Rows
    groups: tuple[GroupTable, ...]

    def num_blocks(self, num_tokens: int, group: int) -> int:
        """Return how many blocks of the group hold so many tokens."""
        return -(-num_tokens // self.block_sizes[group])


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """The mapping from the blocks of one remote rank to ours."""

    regions: tuple[Region, ...]
    """The remote's regions."""
    local: Side
    remote: Side
    units: tuple[int, ...]
    """Tokens per unit, by group."""
    windows: tuple[int | None, ...]
    read: tuple[Pieces, ...]
    """The pieces of a unit that are read, by group."""
    written: tuple[Pieces, ...]
    """The pieces of a unit that are written, by group."""
    layers: tuple[str, ...] = ()
    """Our layers that the remote rank has."""
    is_alike: bool = False
    """A remote block has exactly the bytes of a local one: the same tokens and heads of the same
    layers, in the same order."""

    @property
    def skips_read(self) -> bool:
        """Nothing is read from the remote rank: another rank holds the same heads and is read
        instead, or this one has none of our layers."""
        return not any(pieces.which for pieces in self.read)

    @property
    def skips_write(self) -> bool:
        """Nothing is written to the remote rank: another rank of ours writes the same heads, or the
        remote rank has none of our layers."""
        return not any(pieces.which for pieces in self.written)

    def to_read(
        self,
        local: BlockIds,
        remote: BlockIds,
        first_token: int,
        last_token: int,
        held_tokens: int | None,
    ) -> Batch:
        """Return the batch that reads tokens [first_token, last_token).

        `local` begins at the request's start, and `remote` holds its first `held_tokens`. Raises
        PlanError.
        """
        self._check_groups(local, remote)
        held = last_token if held_tokens is None else held_tokens
        theirs = self._kept(remote, self.remote, held)
        ours = [BlockRange(ids) for ids in local]
        return self._batch(ours, theirs, first_token, last_token, into_local=True)

    def to_write(
        self,
        local: BlockIds,
        remote: BlockIds,
        first_token: int | None,
        last_token: int,
        part: TokenRange = WHOLE,
    ) -> Batch:
        """Return the batch that writes tokens [first_token, last_token), or those in `remote` if
        `first_token` is None.

        `local` begins at the request's start, or at its window. Both lists end with the block of
        token `last_token - 1`; for a part that is not the last one, `local` may end earlier. Raises
        PlanError.
        """
        self._check_groups(local, remote)
        if STATE in self.windows and (first_token is None or part.until is not None):
            raise PlanError(
                "a state cannot be written in parts, or for a peer that does not name its tokens"
            )
        theirs = [
            BlockRange(ids, self.remote.num_blocks(last_token, group) - len(ids))
            for group, ids in enumerate(remote)
        ]
        if any(blocks.first < 0 for blocks in theirs):
            raise PlanError(f"more remote blocks than {last_token} tokens need")
        ours = self._kept(local, self.local, last_token)
        if first_token is None:
            sizes = self.remote.block_sizes
            first_token = min(
                blocks.first * size for blocks, size in zip(theirs, sizes, strict=True)
            )
        return self._batch(ours, theirs, first_token, last_token, into_local=False, part=part)

    def _kept(self, lists: BlockIds, side: Side, num_tokens: int) -> list[BlockRange]:
        """Return each group's blocks of a prompt. A window keeps the last ones."""
        firsts = [
            0 if window is None else max(0, side.num_blocks(num_tokens, group) - len(ids))
            for group, (ids, window) in enumerate(zip(lists, self.windows, strict=True))
        ]
        return [BlockRange(ids, first) for ids, first in zip(lists, firsts, strict=True)]

    def check_registered(self, remote: BlockIds) -> None:
        """Raise PlanError for more blocks than any request of ours could fill."""
        self._check_groups(remote)
        for group, (ids, table) in enumerate(zip(remote, self.local.groups, strict=True)):
            num_tokens = table.num_blocks * self.local.block_sizes[group]
            most = self.remote.num_blocks(num_tokens, group)
            if len(ids) > most:
                raise PlanError(
                    f"{len(ids)} blocks registered, more than the {most} that all local blocks fill"
                )

    def _check_groups(self, *sides: BlockIds) -> None:
        number = len(self.windows)
        if any(len(side) != number for side in sides):
            raise PlanError(f"KV-cache groups differ: {number} here, {len(sides[-1])} there")

    def _batch(
        self,
        local: Sequence[BlockRange],
        remote: Sequence[BlockRange],
        first_token: int,
        last_token: int,
        *,
        into_local: bool,
        part: TokenRange = WHOLE,
    ) -> Batch:
        in_reach = 0 <= first_token <= last_token <= MAX_UNITS * min(self.units)
        if any(first_token % unit for unit in self.units) or not in_reach:
            raise PlanError(f"tokens {first_token} to {last_token} in units of {self.units}")
        parts = [
            self._pair(
                group,
                local[group],
                remote[group],
                *part.between(first_token, last_token, window),
                into_local,
            )
            for group, window in enumerate(self.windows)
        ]
        moved = self.read if into_local else self.written
        tables = zip(self.local.groups, self.remote.groups, parts, moved, strict=True)
        indices = [
            (ours.indices(here, pieces), theirs.indices(there, pieces))
            for ours, theirs, (here, there), pieces in tables
        ]
        sizes = [(here.blocks, pieces) for (here, _), pieces in zip(parts, moved, strict=True)]
        return Batch(
            np.concatenate([here for here, _ in indices]),
            np.concatenate([there for _, there in indices]),
            sum(len(np.unique(blocks)) for blocks, pieces in sizes if pieces.which),
            sum(len(blocks) * pieces.num_bytes for blocks, pieces in sizes),
        )

    def _pair(
        self,
        group: int,
        local: BlockRange,
        remote: BlockRange,
        first_token: int,
        last_token: int,
        into_local: bool,
    ) -> tuple[Units, Units]:
        """Return the units of both sides in ascending local order. NIXL merges descriptors only if
        both sides ascend by one, and block allocators return descending ids."""
        window = self.windows[group]
        if window == STATE:
            return state_units("local", local), state_units("remote", remote)
        unit = self.units[group]
        positions = np.arange(first_token // unit, -(-last_token // unit))
        here = self._units("local", local, self.local, positions, group)
        there = self._units("remote", remote, self.remote, positions, group)
        if window is not None:
            ours, theirs = here.blocks != NULL_BLOCK, there.blocks != NULL_BLOCK
            wanted, given = (ours, theirs) if into_local else (theirs, ours)
            needed = self._needed(positions, group, window, last_token, into_local)
            if (wanted & needed & ~given).any():
                holder = "the remote keeps" if into_local else "we keep"
                raise PlanError(f"{holder} less than the window of {abs(window)} tokens")
            kept = wanted & given
            here, there = _take(here, kept), _take(there, kept)
        order = np.lexsort((here.places, here.blocks))
        return _take(here, order), _take(there, order)

    def _needed(
        self,
        positions: npt.NDArray[np.int64],
        group: int,
        window: int,
        last_token: int,
        into_local: bool,
    ) -> npt.NDArray[np.bool_]:
        """Return which units must be filled. Into our blocks: all, because our host shares a block
        whether it was filled or not. Into remote blocks: those from the begin of the window on."""
        if into_local:
            return np.ones(len(positions), dtype=np.bool_)
        block_size = self.remote.block_sizes[group]
        ends = (positions * self.units[group] // block_size + 1) * block_size
        return ends > first_seen(window, last_token - 1)

    def _units(
        self,
        name: str,
        blocks: BlockRange,
        side: Side,
        positions: npt.NDArray[np.int64],
        group: int,
    ) -> Units:
        """Return the units of these positions. With a window, positions before the list are
        holes."""
        window = self.windows[group]
        per_block = side.block_sizes[group] // self.units[group]
        index = positions // per_block - blocks.first
        if len(index) and (index[-1] >= len(blocks.ids) or (window is None and index[0] < 0)):
            raise PlanError(f"{len(blocks.ids)} {name} blocks do not cover the tokens")
        try:
            ids = np.array([NULL_BLOCK, *blocks.ids], dtype=np.int64)
        except OverflowError:
            raise PlanError(f"{name} block ids beyond 63 bits") from None
        return Units(ids[np.maximum(index + 1, 0)], positions % per_block)


def state_units(name: str, blocks: BlockRange) -> Units:
    """Return the single unit of a state, which includes all tokens. Raises PlanError."""
    if len(blocks.ids) != 1:
        raise PlanError(f"{len(blocks.ids)} {name} blocks of a state, which has one")
    return Units(np.array(blocks.ids, dtype=np.int64), np.zeros(1, dtype=np.int64))


def _take(units: Units, which: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Units:
    return Units(units.blocks[which], units.places[which])


def without_holes(block_ids: BlockIds, windows: Sequence[int | None]) -> BlockIds:
    """Return block lists as they are sent to other engines: without the holes before the blocks of
    a group with a window."""
    return tuple(
        ids if window is None else tuple(dropwhile(lambda block: block == NULL_BLOCK, ids))
        for ids, window in zip_longest(block_ids, windows[: len(block_ids)])
    )


def to_fill(block_ids: BlockIds, geometry: CacheGeometry, first_token: int) -> BlockIds:
    """Return a request's blocks with a hole for each block that a load from `first_token` on must
    not fill. In a group with a window, the blocks before this token belong to the prefix cache, and
    other requests may read them. `uncached_groups` have no blocks in the prefix cache."""
    found = []
    for group, ids in enumerate(block_ids):
        is_cached = geometry.group_windows[group] and group not in geometry.uncached_groups
        cached = first_token // geometry.block_sizes[group] if is_cached else 0
        found.append((NULL_BLOCK,) * cached + ids[cached:])
    return tuple(found)


def strided_descriptors(regions: Sequence[Region]) -> Rows:
    """Return NIXL's five columns (address, length, device, stride, count), one row per region. This
    costs O(layers), not O(blocks)."""
    return np.array(
        [(r.base_addr, r.block_len, r.device_id, r.block_stride, r.num_blocks) for r in regions],
        dtype=np.uint64,
    ).reshape(len(regions), 5)
