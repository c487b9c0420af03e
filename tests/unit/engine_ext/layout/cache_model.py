"""KV caches as plain arrays, whatever their layout: what the plans are checked against."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from engine_ext.common.types import CacheGeometry, Region
from engine_ext.wire.handshake import AgentMetadata

Bytes = npt.NDArray[np.uint8]

CANONICAL = "BLHNC"


@dataclass(frozen=True)
class Model:
    """`tokens`: the KV of one request, [layers, KV heads, tokens, bytes]."""

    layers: int
    heads: int
    head_bytes: int

    def kv(self, num_tokens: int, seed: int = 0) -> Bytes:
        shape = (self.layers, self.heads, num_tokens, self.head_bytes)
        return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def heads_of(self, rank: int, size: int) -> list[int]:
        """vLLM's rule: split evenly, or copied where there are more ranks than heads."""
        if size >= self.heads:
            return [rank // (size // self.heads)]
        each = self.heads // size
        return list(range(rank * each, (rank + 1) * each))


@dataclass
class RankCache:
    """One rank's memory. `blocks` is a view: [kernel blocks, layers, heads, tokens, bytes]."""

    model: Model
    layout: str = "LBHNC"
    block_size: int = 16
    num_blocks: int = 16
    rank: int = 0
    size: int = 1
    padding: int = 0
    """Bytes between blocks."""
    parts: int = 1
    """Kernel blocks per block. More than one is for layouts of one layer after the other, without
    padding."""
    seed: int = 1
    groups: tuple[int, ...] = ()
    """KV-cache group of each layer."""
    windows: tuple[int | None, ...] = (None,)
    memory: Bytes = field(init=False)
    blocks: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.heads = self.model.heads_of(self.rank, self.size)
        extents = {
            "B": self.num_blocks * self.parts,
            "L": self.model.layers,
            "H": len(self.heads),
            "N": self.kernel_size,
            "C": self.model.head_bytes,
        }
        inside = self.layout[self.layout.index("B") + 1 :]
        self.block_len = prod(extents[axis] for axis in inside)
        self.block_stride = self.block_len + self.padding
        self.layer_stride = extents["B"] * self.block_stride
        outer = {"B": self.block_stride, "L": self.layer_stride}
        strides = {axis: prod(extents[a] for a in inside[i + 1 :]) for i, axis in enumerate(inside)}
        strides = {**outer, **strides}
        total = self.layer_stride * (self.model.layers if "L" not in inside else 1)
        rng = np.random.default_rng(self.seed)
        self.memory = rng.integers(0, 256, total, dtype=np.uint8)
        self.blocks = np.ndarray(
            [extents[axis] for axis in CANONICAL],
            dtype=np.uint8,
            buffer=self.memory.data,
            strides=[strides[axis] for axis in CANONICAL],
        )

    @property
    def kernel_size(self) -> int:
        return self.block_size // self.parts

    @property
    def _kernel_sizes(self) -> tuple[int, ...]:
        return (self.kernel_size,) * len(self.windows) if self.parts > 1 else ()

    def place(self, position: int, block_ids: Sequence[int]) -> tuple[int, int]:
        """A token's kernel block, and its place there."""
        part, place = divmod(position % self.block_size, self.kernel_size)
        return block_ids[position // self.block_size] * self.parts + part, place

    @property
    def names(self) -> list[str]:
        return [f"model.layers.{i}.self_attn.attn" for i in range(self.model.layers)]

    def regions(self) -> list[Region]:
        base = self.memory.ctypes.data
        sizes = (self.block_len * self.parts, self.block_stride * self.parts, self.num_blocks)
        if self.layout.startswith("B"):
            return [Region("all layers", base, *sizes, members=tuple(self.names))]
        groups = self.groups or (0,) * self.model.layers
        return [
            Region(name, base + i * self.layer_stride, *sizes, group=groups[i])
            for i, name in enumerate(self.names)
        ]

    def geometry(self) -> CacheGeometry:
        return CacheGeometry(
            self.block_size,
            self.num_blocks,
            self.layout,
            num_kv_heads=self.model.heads,
            tp_rank=self.rank,
            group_windows=self.windows,
            group_kernel_sizes=self._kernel_sizes,
        )

    def metadata(self) -> AgentMetadata:
        regions = self.regions()
        return AgentMetadata(
            engine_id="remote",
            agent_metadata=b"",
            kv_caches_base_addr=[region.base_addr for region in regions],
            device_id=0,
            num_blocks=self.num_blocks,
            block_lens=[region.block_len for region in regions],
            block_strides=[region.block_stride for region in regions],
            kv_cache_layout=self.layout,
            block_size=self.block_size,
            attn_backend_name="CPU_ATTN",
            region_group_ids=[region.group for region in regions],
            region_names=[region.name for region in regions],
            block_layers=[list(region.layers) for region in regions],
            group_kernel_sizes=list(self._kernel_sizes) or None,
        )

    def store(self, kv: Bytes, block_ids: Sequence[int]) -> None:
        """Token by token."""
        for position in range(kv.shape[2]):
            block, place = self.place(position, block_ids)
            self.blocks[block, :, :, place] = kv[:, self.heads, position]

    def after(
        self, kv: Bytes, block_ids: Sequence[int], positions: range, layers: Sequence[int] = ()
    ) -> Bytes:
        """`memory` as it should be once these positions have been loaded; holes are left alone."""
        copy = RankCache(**{name: getattr(self, name) for name in _SETTINGS})
        copy.memory[:] = self.memory
        which = list(layers or range(self.model.layers))
        for position in positions:
            block, place = self.place(position, block_ids)
            if block or self.windows == (None,):
                for layer in which:
                    copy.blocks[block, layer, :, place] = kv[layer, self.heads, position]
        return copy.memory


_SETTINGS = (
    "model",
    "layout",
    "block_size",
    "num_blocks",
    "rank",
    "size",
    "padding",
    "parts",
    "seed",
    "groups",
    "windows",
)
