"""Memory of engines whose tensors are torch's: a mirror of the KV cache in host memory, and blocks
of a GPU copied to the host for their checksums. No other file of the worker imports torch."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine_ext.common.types import SHARED, BlockIds, Region


class HostBuffer:
    """`engine_ext.worker.staging.Staging` over the bytes of each region: `[num_blocks, block_len]`.

    `storages` are the regions' own, in their order. As large as the cache; pinned where that is on
    a GPU. Raises RuntimeError where there is not as much memory.
    """

    def __init__(self, regions: Sequence[Region], storages: Sequence[torch.UntypedStorage]) -> None:
        self._groups = [region.group for region in regions]
        self._cache = [_bytes_of(*pair) for pair in zip(regions, storages, strict=True)]
        self._mirror = [
            torch.zeros(cache.shape, dtype=torch.uint8, pin_memory=cache.is_cuda)
            for cache in self._cache
        ]
        self.regions = tuple(map(_mirrored, regions, self._mirror))

    def save(self, block_ids: BlockIds) -> None:
        self._copy(self._cache, self._mirror, block_ids)

    def load(self, block_ids: BlockIds) -> None:
        self._copy(self._mirror, self._cache, block_ids)

    def _copy(self, source: list[Tensor], target: list[Tensor], block_ids: BlockIds) -> None:
        runs = [list(_runs(ids)) for ids in block_ids]
        everything = list(_runs(set().union(*block_ids)))
        for group, origin, copy in zip(self._groups, source, target, strict=True):
            for first, end in everything if group == SHARED else runs[group]:
                copy[first:end].copy_(origin[first:end], non_blocking=True)
        for cache in self._cache[:1]:
            if cache.is_cuda:
                torch.cuda.current_stream(cache.device).synchronize()


def _bytes_of(region: Region, storage: torch.UntypedStorage) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    offset = region.base_addr - storage.data_ptr()
    shape, strides = (region.num_blocks, region.block_len), (region.block_stride, 1)
    return view.set_(storage, offset, shape, strides)


def _mirrored(region: Region, mirror: Tensor) -> Region:
    return replace(
        region,
        base_addr=mirror.data_ptr(),
        block_stride=region.block_len,
        device_id=0,
        mem_type="DRAM",
    )


def _runs(block_ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ids that follow each other, as [first, end)."""
    ids = sorted(set(block_ids))
    breaks = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1]
    for start, stop in itertools.pairwise([0, *breaks, len(ids)]):
        if start < stop:
            yield ids[start], ids[stop - 1] + 1


class DeviceBlocks:
    """`engine_ext.worker.checksums.BlockMemory` of one GPU. Raises RuntimeError."""

    def __init__(self, device_id: int) -> None:
        self._device = torch.device("cuda", device_id)
        # The engine's own streams go on meanwhile, and are not waited for.
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def read(self, region: Region, block_id: int) -> memoryview:
        address = region.base_addr + block_id * region.block_stride
        with torch.cuda.stream(self._stream):
            block = torch.as_tensor(_Bytes(address, region.block_len), device=self._device)
            return block.cpu().numpy().data

    def settle(self) -> None:
        """Wait for the engine's kernels: a step that was scheduled ahead of the request's end still
        writes into its last block."""
        torch.cuda.synchronize(self._device)


class _Bytes:
    """A stretch of device memory, as torch takes it over without a copy."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
