"""KV memory to move: one contiguous stretch, layer after layer, block after block."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_ext.common.types import Region


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    blocks: int
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.moved_bytes(self.blocks)

    def moved_bytes(self, num_blocks: int) -> int:
        return self.layers * num_blocks * self.block_bytes


class Memory:
    """Pages of ordinary size on the host, or one tensor on a CUDA device (`cuda` or `cuda:N`)."""

    def __init__(self, shape: Shape, device: str) -> None:
        self._shape = shape
        size = (shape.layers, shape.blocks, shape.block_bytes // 8)
        self.device_id = 0
        self._torch: Any = None
        self._words: Any
        if device == "cpu":
            self.mem_type = "DRAM"  # NIXL's name
            pages = mmap.mmap(-1, shape.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._words = np.frombuffer(pages, dtype=np.int64).reshape(size)
            self.address = int(self._words.ctypes.data)
            return
        import torch

        self._torch, self.mem_type = torch, "VRAM"
        self._words = torch.zeros(size, dtype=torch.int64, device=device)
        self.address = int(self._words.data_ptr())
        self.device_id = int(self._words.device.index or 0)

    def stamp(self, seed: int) -> None:
        """Write every block's own mark, so that wrong bytes are seen. Touches every page."""
        layers, blocks = self._words.shape[:2]
        marks = seed * (layers * blocks + 1) + np.arange(layers * blocks).reshape(layers, blocks)
        self._words[:] = seed
        self._words[:, :, -1] = marks if self._torch is None else self._torch.from_numpy(marks)
        self._synchronize()

    def marks(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the marks of these blocks, shape [layers, blocks]."""
        found = self._words[:, list(block_ids), -1]
        marks: npt.NDArray[np.int64] = found if self._torch is None else found.cpu().numpy()
        return marks

    def copy(self, size: int) -> float:
        """Return the seconds in which the device copies `size` bytes, at most half of the memory.

        The end of the memory is overwritten.
        """
        flat = self._words.reshape(-1)
        words = size // 8
        assert 0 < 2 * words <= len(flat), "a copy within itself overlaps"
        self._synchronize()
        started = time.monotonic()
        flat[-words:] = flat[:words]
        self._synchronize()
        return time.monotonic() - started

    def _synchronize(self) -> None:
        if self._torch is not None:
            self._torch.cuda.synchronize()

    def regions(self) -> list[Region]:
        """Return one region per layer, as an engine registers them."""
        shape = self._shape
        return [
            Region(
                f"model.layers.{layer}.self_attn.attn",
                self.address + layer * shape.blocks * shape.block_bytes,
                shape.block_bytes,
                shape.block_bytes,
                shape.blocks,
                self.device_id,
                self.mem_type,
            )
            for layer in range(shape.layers)
        ]
