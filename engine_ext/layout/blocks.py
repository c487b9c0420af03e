"""How the bytes of a block lie, and which stretches of it lie alike on two engines.

A layout is vLLM's name for it, axes from outermost to innermost: B blocks, L layers, H heads, N
tokens, C one head's K and V of one token. What stands behind the B is inside a block: LBHNC has one
memory region per layer, BLHNC and BHLNC have one whose blocks hold all layers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

Steps = Mapping[str, int]
"""Distance from a box's corner, by axis."""


class LayoutError(Exception):
    """The layout is not one we know, or a block's length contradicts it."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block as an array: its axes, outermost first, and their extents; C counts bytes."""

    axes: str
    extents: Mapping[str, int]

    @classmethod
    def of(
        cls, layout: str, block_len: int, *, layers: int, heads: int, tokens: int
    ) -> "BlockShape":
        """Raises LayoutError."""
        outside, _, inside = layout.partition("B")
        if sorted(layout) != sorted("LBHNC") or layout[-1] != "C" or outside not in ("", "L"):
            raise LayoutError(f"kv_cache_layout {layout} is not supported")
        if outside and layers > 1:
            raise LayoutError(f"a block of layout {layout} holds one layer, not {layers}")
        length, rest = divmod(block_len, layers * heads * tokens)
        if rest or not length:
            raise LayoutError(
                f"block_len {block_len} is not {layers} layers of {heads} heads of {tokens} tokens"
            )
        return cls(outside + inside, {"L": layers, "H": heads, "N": tokens, "C": length})

    def stride(self, axis: str) -> int:
        """Bytes from one index of the axis to the next."""
        return prod(self.extents[inner] for inner in self.axes[self.axes.index(axis) + 1 :])


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a block: a range of every axis."""

    shape: BlockShape
    ranges: Mapping[str, range]

    def size(self, axis: str) -> int:
        return len(self.ranges[axis]) if axis in self.ranges else self.shape.extents[axis]

    def is_whole(self, axis: str) -> bool:
        return self.size(axis) == self.shape.extents[axis]

    def offset(self, steps: Steps) -> int:
        """Bytes from the block's start to where the steps lead."""
        return sum(
            self.shape.stride(axis) * (self.ranges[axis].start + steps.get(axis, 0))
            for axis in self.ranges
        )


def joint_axes(ours: Box, theirs: Box) -> str:
    """The innermost axes along which both boxes, of equal sizes, lie in one piece, C included."""
    joint = ""
    for axis, other in zip(
        reversed(_real_axes(ours, theirs)), reversed(_real_axes(theirs, ours)), strict=True
    ):
        if axis != other:
            break
        joint = axis + joint
        if not (ours.is_whole(axis) and theirs.is_whole(axis)):
            break
    return joint


def _real_axes(box: Box, other: Box) -> str:
    """Without those of extent one on both sides, whose place means nothing."""
    return "".join(
        axis
        for axis in box.shape.axes
        if axis == "C" or box.shape.extents[axis] > 1 or other.shape.extents[axis] > 1
    )


def pieces(box: Box, joint: str) -> Iterator[int]:
    """Offsets of the box's pieces, each in one along `joint`: in the same order for both sides."""
    split = [axis for axis in "LHN" if axis not in joint]
    for steps in product(*(range(box.size(axis)) for axis in split)):
        yield box.offset(dict(zip(split, steps, strict=True)))


def piece_length(box: Box, joint: str) -> int:
    """Bytes."""
    return prod(box.size(axis) for axis in joint)
