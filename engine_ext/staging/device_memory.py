"""KV blocks in the memory of a GPU, copied to the host one by one, for their checksums."""

from typing import Any

import torch

from engine_ext.common.types import Region


class DeviceBlocks:
    """`engine_ext.transfer.checksums.Blocks` of one device that torch sees. Raises RuntimeError."""

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
        """Wait for what the engine has begun to compute: a step that was scheduled ahead of the
        request's end still writes into its last block."""
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
