"""The layout of the bytes in a block, and the parts that are contiguous in two engines.

A layout has vLLM's name, its axes from outermost to innermost: B blocks, L layers, H heads, N
tokens, C one head's K and V of one token. The axes after B are inside a block: LBHNC has one memory
region per layer, BLHNC and BHLNC have one region whose blocks hold all layers. A block may consist
of several kernel blocks, an axis K of ours: each layer's part is then divided by tokens first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

Steps = Mapping[str, int]
"""The distance from a box's corner, by axis."""


class LayoutError(Exception):
    """The layout is unknown, or a block's length contradicts it."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block as an array: the axes, outermost first, and their extents. C counts bytes."""

    axes: str
    extents: Mapping[str, int]

    @classmethod
    def of(
        cls,
        layout: str,
        block_len: int,
        *,
        layers: int,
        heads: int,
        tokens: int,
        kernel_blocks: int = 1,
    ) -> "BlockShape":
        """`tokens` are those of a kernel block. Raises LayoutError."""
        outside, _, inside = layout.partition("B")
        if sorted(layout) != sorted("LBHNC") or layout[-1] != "C" or outside not in ("", "L"):
            raise LayoutError(f"kv_cache_layout {layout} is not supported")
        if outside and layers > 1:
            raise LayoutError(f"a block of layout {layout} holds one layer, not {layers}")
        length, rest = divmod(block_len, layers * kernel_blocks * heads * tokens)
        if rest or not length:
            raise LayoutError(
                f"block_len {block_len} is not {layers} layers of {heads} heads of "
                f"{kernel_blocks * tokens} tokens"
            )
        axes = (outside + inside).replace("L", "LK")
        extents = {"L": layers, "K": kernel_blocks, "H": heads, "N": tokens, "C": length}
        return cls(axes, extents)

    def stride(self, axis: str) -> int:
        """Return the bytes from one index of the axis to the next."""
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
        """Return the bytes from the block's start to the position after these steps."""
        return sum(
            self.shape.stride(axis) * (self.ranges[axis].start + steps.get(axis, 0))
            for axis in self.ranges
        )


def joint_axes(ours: Box, theirs: Box) -> str:
    """Return the innermost axes, C included, along which both boxes are contiguous."""
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
    """Return the axes without those of extent one on both sides, whose order does not matter."""
    return "".join(
        axis
        for axis in box.shape.axes
        if axis == "C" or box.shape.extents[axis] > 1 or other.shape.extents[axis] > 1
    )


def pieces(box: Box, joint: str) -> Iterator[int]:
    """Yield the offsets of the box's contiguous pieces, in the same order for both sides."""
    split = [axis for axis in "LHN" if axis not in joint]
    for steps in product(*(range(box.size(axis)) for axis in split)):
        yield box.offset(dict(zip(split, steps, strict=True)))


def piece_length(box: Box, joint: str) -> int:
    """Return the bytes of a piece."""
    return prod(box.size(axis) for axis in joint)
