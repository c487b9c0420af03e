"""KV memory to move: one contiguous stretch, layer after layer, block after block."""

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine_ext.base.types import Region


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    blocks: int
    block_bytes: int

    @property
    def layer_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def moved_bytes(self, num_blocks: int) -> int:
        return self.layers * num_blocks * self.block_bytes


class Memory(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def device_id(self) -> int: ...
    @property
    def mem_type(self) -> str:
        """NIXL's name: DRAM or VRAM."""

    def stamp(self, seed: int) -> None:
        """Writes every block's own mark, so that wrong bytes are seen. Touches every page."""

    def marks(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """The marks of these blocks, shape [layers, blocks]."""

    def copy(self, size: int) -> float:
        """Seconds for so many bytes within this memory, as the device itself copies them; at most
        half of it, for nothing copies onto itself at once. The last half is overwritten."""


class HostMemory:
    """Pages of ordinary size that exist once touched: what torch gives a CPU engine."""

    mem_type = "DRAM"
    device_id = 0

    def __init__(self, shape: Shape) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, shape.total_bytes, flags=flags)
        flat = np.frombuffer(self._pages, dtype=np.int64)
        self._words = flat.reshape(shape.layers, shape.blocks, shape.block_bytes // 8)
        self.address = self._words.ctypes.data

    def stamp(self, seed: int) -> None:
        self._words[:] = seed
        self._words[:, :, -1] = _marks(seed, *self._words.shape[:2])

    def marks(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        return self._words[:, list(block_ids), -1]

    def copy(self, size: int) -> float:
        source, target = _halves(self._words.reshape(-1), size)
        started = time.monotonic()
        target[:] = source
        return time.monotonic() - started


class CudaMemory:
    """One torch tensor on a CUDA device."""

    mem_type = "VRAM"

    def __init__(self, shape: Shape, device: str) -> None:
        import torch

        self._torch = torch
        size = (shape.layers, shape.blocks, shape.block_bytes // 8)
        self._words: Any = torch.zeros(size, dtype=torch.int64, device=device)
        self.address = int(self._words.data_ptr())
        self.device_id = int(self._words.device.index or 0)

    def stamp(self, seed: int) -> None:
        self._words.fill_(seed)
        marks = _marks(seed, *self._words.shape[:2])
        self._words[:, :, -1] = self._torch.from_numpy(marks).to(self._words.device)
        self._torch.cuda.synchronize()

    def marks(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self._words[:, list(block_ids), -1].cpu().numpy()
        return found

    def copy(self, size: int) -> float:
        source, target = _halves(self._words.view(-1), size)
        self._torch.cuda.synchronize()
        started = time.monotonic()
        target.copy_(source)
        self._torch.cuda.synchronize()
        return time.monotonic() - started


def _halves(flat: Any, size: int) -> tuple[Any, Any]:
    """So many bytes at the beginning, and as many at the end."""
    words = size // 8
    assert 0 < 2 * words <= len(flat), "a copy within itself overlaps"
    return flat[:words], flat[-words:]


def _marks(seed: int, layers: int, blocks: int) -> npt.NDArray[np.int64]:
    return seed * (layers * blocks + 1) + np.arange(layers * blocks).reshape(layers, blocks)


def allocate(shape: Shape, device: str) -> Memory:
    return HostMemory(shape) if device == "cpu" else CudaMemory(shape, device)


def regions(memory: Memory, shape: Shape) -> list[Region]:
    """One per layer, as an engine registers them."""
    return [
        Region(
            f"model.layers.{layer}.self_attn.attn",
            memory.address + layer * shape.layer_bytes,
            shape.block_bytes,
            shape.block_bytes,
            shape.blocks,
            memory.device_id,
            memory.mem_type,
        )
        for layer in range(shape.layers)
    ]
