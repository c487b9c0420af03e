"""vLLM's MooncakeConnector, for vLLM's CPU build: an engine names this module as its connector's.

It brings what is not installed there (scripts/install_mooncake): Mooncake's wheel, and the RDMA
libraries that the wheel links to. And it answers the one question that vLLM asks an accelerator.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch

site = Path(os.environ["DISAGG_MOONCAKE"])
sys.path.append(str(site))
for name in ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "librdmacm.so.1"):
    (found,) = site.glob(f"debian/**/{name}")
    ctypes.CDLL(str(found), ctypes.RTLD_GLOBAL)
torch.accelerator.current_device_index = lambda: 0

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (  # noqa: E402
    MooncakeConnector,
)

__all__ = ["MooncakeConnector"]
