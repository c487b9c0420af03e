"""Which bytes go where: pure functions from block ids to NIXL descriptor indices.

Blocks are matched by token position, never by count from an end of a list: block k of a request
holds tokens [k * block_size, (k + 1) * block_size). Where the two engines' block sizes differ, both
are cut into units of the smaller one; where heads, layers or layouts differ, a unit is cut into the
pieces that lie alike on both sides. Engines that are alike have one piece per region and block:
the block itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_ext.common.types import STATE, BlockIds, Region, first_seen
from engine_ext.layout.ranks import TensorRank

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


class BlockRange(NamedTuple):
    """Block ids of one group, in position order; `first` is the place of the first in the
    request, counted in blocks."""

    ids: Sequence[int]
    first: int = 0


class TokenRange(NamedTuple):
    """Of what is written, the tokens [since, until), or all from `since` on. A group with a window
    gives blocks up while the prompt is computed: its blocks go with the last part, all of them."""

    since: int = 0
    until: int | None = None

    def between(self, first_token: int, last_token: int, window: int | None) -> tuple[int, int]:
        """What of these tokens it is. Both ends may be 0: nothing."""
        if window is not None:
            return (first_token, last_token) if self.until is None else (0, 0)
        first = max(first_token, self.since)
        last = last_token if self.until is None else min(last_token, self.until)
        return (first, last) if first < last else (0, 0)


WHOLE = TokenRange()


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
    layers: tuple[str, ...] = ()
    """Ours, which that rank has."""
    skips_read: bool = False
    """A neighbour of this rank holds the same heads, and we read them from there; or this one has
    none of our layers."""
    skips_write: bool = False
    """A neighbour of ours holds the same heads, and writes them; or that rank has none of our
    layers."""
    is_alike: bool = False
    """A block there is the same bytes as a block here: the same tokens and heads of the same
    layers, in the same order."""

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
            BlockRange(ids, 0 if window is None else max(0, _blocks(held, self.remote) - len(ids)))
            for ids, window in zip(remote, self.windows, strict=True)
        ]
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
        """As `to_read`, where `local` begins at the request's start, or where its window does, and
        both lists end with the block of token `last_token - 1`; `first_token` None: as many as
        `remote` names. Of a part that is not the last one, `local` may end earlier. Raises
        PlanError."""
        self._check_groups(local, remote)
        if STATE in self.windows and (first_token is None or part.until is not None):
            raise PlanError("a state, for whom does not say of which tokens, or not of all of them")
        theirs = [BlockRange(ids, _blocks(last_token, self.remote) - len(ids)) for ids in remote]
        if any(blocks.first < 0 for blocks in theirs):
            raise PlanError(f"more remote blocks than {last_token} tokens need")
        ours = [
            BlockRange(
                ids, 0 if window is None else max(0, _blocks(last_token, self.local) - len(ids))
            )
            for ids, window in zip(local, self.windows, strict=True)
        ]
        if first_token is None:
            first_token = min(blocks.first for blocks in theirs) * self.remote.block_size
        return self._batch(ours, theirs, first_token, last_token, into_local=False, part=part)

    def check_registered(self, remote: BlockIds) -> None:
        """Raises PlanError for what no request of ours fills, however long it is."""
        self._check_groups(remote)
        for ids, group in zip(remote, self.local.groups, strict=True):
            most = _blocks(group.num_blocks * self.local.block_size, self.remote)
            if len(ids) > most:
                raise PlanError(f"{len(ids)} blocks registered, all of ours would fill {most}")

    def _check_groups(self, *sides: BlockIds) -> None:
        """The last is the remote's."""
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
        in_reach = 0 <= first_token <= last_token <= MAX_UNITS * self.unit
        if first_token % self.unit or not in_reach:
            raise PlanError(f"tokens {first_token} to {last_token} in units of {self.unit}")
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
        local: BlockRange,
        remote: BlockRange,
        first_token: int,
        last_token: int,
        into_local: bool,
    ) -> tuple[Units, Units]:
        """In ascending local order: NIXL merges descriptors only where both sides ascend by one,
        and block allocators hand out descending ids."""
        window = self.windows[group]
        if window == STATE:
            return _state("local", local), _state("remote", remote)
        positions = np.arange(first_token // self.unit, -(-last_token // self.unit))
        here = self._units("local", local, self.local, positions, window)
        there = self._units("remote", remote, self.remote, positions, window)
        if window is not None:
            ours, theirs = here.blocks != NULL_BLOCK, there.blocks != NULL_BLOCK
            wanted, given = (ours, theirs) if into_local else (theirs, ours)
            needed = self._needed(positions, window, last_token, into_local)
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
        window: int,
        last_token: int,
        into_local: bool,
    ) -> npt.NDArray[np.bool_]:
        """All that our host has made room for: it would share it, filled or not. Of another's
        blocks those in which what is seen through the window begins, whole."""
        if into_local:
            return np.ones(len(positions), dtype=np.bool_)
        block_size = self.remote.block_size
        ends = (positions * self.unit // block_size + 1) * block_size
        return ends > first_seen(window, last_token - 1)

    def _units(
        self,
        name: str,
        blocks: BlockRange,
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


def _state(name: str, blocks: BlockRange) -> Units:
    """Of all tokens, whichever are asked for. Raises PlanError."""
    if len(blocks.ids) != 1:
        raise PlanError(f"{len(blocks.ids)} {name} blocks of a state, which has one")
    return Units(np.array(blocks.ids, dtype=np.int64), np.zeros(1, dtype=np.int64))


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
