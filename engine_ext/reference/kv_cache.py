"""The memory KV blocks live in: one tensor per layer, as vLLM's CPU backend lays it out."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_ext.common.types import CacheGeometry, Region
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.model_config import ModelConfig
from engine_ext.worker.torch_memory import HostBuffer

NULL_BLOCK = 0
"""Never handed out, always finite: what the padding of a block table points at."""


class KVCache:
    """Per layer `[num_blocks, num_kv_heads, block_size, row_dim]`. A row is K before V; with latent
    attention it is the latent vector before the rotated key."""

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        shape = (num_blocks, config.num_kv_heads, block_size, config.row_dim)
        self._storage = _zeros((config.num_layers, *shape), config.dtype, device)
        self.layers: tuple[Tensor, ...] = self._storage.unbind(0)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device

    def zero(self, block_ids: Sequence[int]) -> None:
        """Attention masks unwritten positions by weight 0, and 0 times a stale NaN is NaN."""
        if block_ids:
            index = torch.tensor(block_ids, device=self.device)
            self._storage.index_fill_(1, index, 0)

    def regions(self) -> list[Region]:
        return [
            Region(
                name=f"model.layers.{i}.self_attn.attn",
                base_addr=layer.data_ptr(),
                block_len=math.prod(layer.shape[1:]) * layer.element_size(),
                block_stride=layer.stride(0) * layer.element_size(),
                num_blocks=self.num_blocks,
                device_id=layer.device.index or 0,
                mem_type="VRAM" if layer.is_cuda else "DRAM",
            )
            for i, layer in enumerate(self.layers)
        ]

    def stage(self, regions: Sequence[Region]) -> HostBuffer:
        """A mirror of these, which are this cache's `regions`."""
        return HostBuffer(regions, [layer.untyped_storage() for layer in self.layers])

    def geometry(self) -> CacheGeometry:
        return CacheGeometry(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_kv_heads=self.layers[0].shape[1],
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU the operating system provides each page at its first use;
    `torch.zeros` would write to all pages at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """Most tokens of one request. Any request of that length fits into the cache when alone.

    Raises ValueError if the configuration promises more than model or cache can hold.
    """
    in_cache = (num_blocks(config, model_config) - 1) * config.block_size
    positions = model_config.max_position_embeddings
    asked = config.max_model_len
    if asked is None:
        return min(positions, in_cache)
    for limit, what in ((positions, "model's {} positions"), (in_cache, "KV cache's {} tokens")):
        if asked > limit:
            raise ValueError(f"max_model_len {asked} is more than the {what.format(limit)}")
    return asked


def num_blocks(config: EngineConfig, model_config: ModelConfig) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    row_bytes = model_config.num_kv_heads * model_config.row_dim * model_config.dtype.itemsize
    block_bytes = model_config.num_layers * row_bytes * config.block_size
    count = config.kv_cache_memory_mib * 2**20 // block_bytes
    if count < 2:
        raise ValueError(
            f"kv_cache_memory_mib {config.kv_cache_memory_mib} is less than two blocks of "
            f"{block_bytes} bytes"
        )
    return count
