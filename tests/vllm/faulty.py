"""The connector, whose halves raise where a file says so: `kv_connector_module_path` of a server.

The file, $DISAGG_FAULT, holds "before HOOK" or "after HOOK" and is gone when that has happened.
"""

import os
from pathlib import Path
from typing import Any

import torch

from engine_ext.vllm import connector
from tests.vllm.inside.planted import Fault, Planted


def next_fault(hook: str) -> Fault | None:
    path = Path(os.environ["DISAGG_FAULT"])
    if not path.exists():
        return None
    moment, _, name = path.read_text().partition(" ")
    if name != hook:
        return None
    path.unlink()
    return Fault(name, is_after=moment == "after")


class DisaggConnector(connector.DisaggConnector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._scheduler is not None:
            self._scheduler: Any = Planted(self._scheduler, next_fault)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker: Any = Planted(self._worker, next_fault)
